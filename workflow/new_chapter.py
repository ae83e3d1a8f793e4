"""A new chapter from ``book/_template.md``: ``python -m workflow new-chapter 20-name \"Title\"``."""

from __future__ import annotations

import re

from workflow import ROOT, book


def write(name: str, title: str) -> None:
    """Write ``book/<name>.md``, add a claim to ``claims.yml``, and list the chapter in ``_toc.yml``.

    Args:
        name: two digits and words, such as ``27-my-question``; the claim is called ``my-question``.
        title: heading of the chapter.

    Raises:
        ValueError: the name has another form, or its number or its claim is taken.
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
    placeholders = {  # a placeholder that contains another one stands before it
        "CLAIM_end": f"{claim.replace('-', '_')}_end",
        "NUMBER": str(int(number)),
        "TITLE": title,
        "CHAPTER": name,
        "CLAIM": claim,
    }
    for placeholder, value in placeholders.items():
        text = text.replace(placeholder, value)
    book.source(name).write_text(text, encoding="utf-8")
    with open(book.CLAIMS, "a", encoding="utf-8") as file:
        file.write(
            f'\n- id: {claim}\n  chapters: [{name}]\n  source: "§N"\n  statement: >-\n    In your own words.\n'
            "  object: proof\n  expected: confirmed\n  why: Say why.\n"
        )
    contents = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    last_entry = list(re.finditer(r"^( *- file: )\d\d-[\w-]+\n", contents, re.M))[-1]
    contents = f"{contents[: last_entry.end()]}{last_entry[1]}{name}\n{contents[last_entry.end() :]}"
    (ROOT / "_toc.yml").write_text(contents, encoding="utf-8")
    print(
        f"wrote book/{name}.md, with its card at its head; its claim in book/claims.yml; its place in _toc.yml\n"
        f"next: fill in both, look at the page with `make page CHAPTERS={name}`, then `make notebooks`"
    )
