"""A new chapter from ``book/_template.md``: ``python -m workflow new-chapter 20-name \"Title\"``."""

from __future__ import annotations

import re

from workflow import ROOT, book


def write(name: str, title: str) -> None:
    """Write ``book/<name>.md``, list a claim of its name in ``claims.yml``, and put the chapter into ``_toc.yml``.

    Raises:
        ValueError: the name is not one of a chapter, or is taken.
    """
    if not re.fullmatch(r"\d\d-[a-z][a-z0-9-]*", name):
        raise ValueError(f"{name!r}: a chapter is named by two digits and words, such as 27-my-question")
    number = name[:2]
    claim = name[3:]
    for other in book.chapters():
        if other.startswith(number):
            raise ValueError(f"{name}: the number {number} is taken by {other}; choose another name")
    if claim in book.claims():
        raise ValueError(f"{name}: there is a claim {claim!r}; choose another name")
    text = (ROOT / "book" / "_template.md").read_text(encoding="utf-8")
    placeholders = {  # the longer ones first
        "CLAIM_end": f"{claim.replace('-', '_')}_end",
        "NUMBER": str(int(number)),
        "TITLE": title,
        "CHAPTER": name,
        "CLAIM": claim,
    }
    for placeholder, value in placeholders.items():
        text = text.replace(placeholder, value)
    book.source(name).write_text(text, encoding="utf-8")
    with open(book.CLAIMS, "a", encoding="utf-8") as lines:
        lines.write(
            f'\n- id: {claim}\n  chapters: [{name}]\n  source: "§N"\n  statement: >-\n    In your own words.\n'
            "  expected: confirmed\n  why: Say why.\n"
        )
    contents = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    last = list(re.finditer(r"^( *- file: )\d\d-[\w-]+\n", contents, re.M))[-1]
    contents = f"{contents[: last.end()]}{last[1]}{name}\n{contents[last.end() :]}"
    (ROOT / "_toc.yml").write_text(contents, encoding="utf-8")
    print(
        f"wrote book/{name}.md, with its card at its head; its claim in book/claims.yml; its place in _toc.yml\n"
        f"next: fill in both, look at the page with `make page CHAPTERS={name}`, then `make notebooks`"
    )
