"""A new chapter from ``workflow/chapter.md``: ``python -m workflow new-chapter 15-name \"Title\"``."""

from __future__ import annotations

import re

from workflow import ROOT, report


def new_chapter(name: str, title: str) -> int:
    """Write ``book/<name>.md`` from the template, with a claim of its name that is listed and expected."""
    if not re.fullmatch(r"\d\d-[a-z][a-z-]*", name):
        raise ValueError(f"{name!r}: a chapter is named by two digits and words, such as 20-my-question")
    target, claim = ROOT / "book" / f"{name}.md", name[3:]
    if target.exists() or claim in report.load_claims():
        raise ValueError(f"{name}: there is such a chapter, or a claim {claim!r}; choose another name")
    if taken := sorted((ROOT / "book").glob(f"{name[:2]}-*.md")):
        raise ValueError(f"{name}: the number {name[:2]} is taken by {taken[0].stem}; choose another")
    text = (ROOT / "workflow" / "chapter.md").read_text(encoding="utf-8")
    for word, value in (("NUMBER", str(int(name[:2]))), ("TITLE", title), ("CHAPTER", name), ("CLAIM", claim)):
        text = text.replace(word, value)
    text = text.replace(f"{claim}_end", f"{claim.replace('-', '_')}_end")
    target.write_text(text, encoding="utf-8")
    listed = f'\n- id: {claim}\n  chapters: [{name}]\n  source: "§N"\n  statement: >-\n    In your own words.\n'
    expected = f"{claim}:\n  verdict: confirmed\n  reason: Say why.\n"
    card = (
        f"\n{name}:\n  asks: Your question, in one sentence.\n  claims: [{claim}]\n"
        "  found: What the run says, in one sentence.\n"
        "  remember: What to remember, in one sentence.\n"
        "  because: Why one should believe it, with a number of the run.\n"
        f"  figure: fig-{claim}\n  preprint: §N\n"
    )
    files = {"book/claims.yml": listed, "tests/baselines/verdicts.yml": expected, "book/glance.yml": card}
    for file, more in files.items():
        with open(ROOT / file, "a", encoding="utf-8") as lines:
            lines.write(more)
    print(
        f"wrote book/{name}.md, its claim in book/claims.yml, its verdict in tests/baselines/verdicts.yml,"
        " its card in book/glance.yml"
    )
    print(
        "next, in this order:\n"
        "  book/claims.yml: source and statement of the claim\n"
        "  tests/baselines/verdicts.yml: the verdict that you expect, and the reason\n"
        "  book/glance.yml: what stands on the card at the head of its page\n"
        "  _toc.yml and the table of book/running.md: the chapter\n"
        "  make notebooks\n"
        f"  make smoke CHAPTERS={name}"
    )
    return 0
