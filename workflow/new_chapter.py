"""A new chapter from ``book/_template.md``: ``python -m workflow new-chapter name \"Title\"``."""

from __future__ import annotations

import re

from workflow import ROOT, book


def write(name: str, title: str) -> None:
    """Write ``book/<name>.md``, add a claim to ``claims.yml``, and list the chapter in ``_toc.yml``.

    Args:
        name: words, such as ``my-question``; the claim is called so too.
        title: heading of the chapter.

    Raises:
        ValueError: the name has another form, or is taken by a page or a claim.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"{name!r}: a chapter is named by small letters, digits and hyphens, such as my-question")
    if book.source(name).exists():
        raise ValueError(f"{name}: there is a page of this name; choose another name")
    if name in book.claims():
        raise ValueError(f"{name}: there is a claim {name!r}; choose another name")
    text = (ROOT / "book" / "_template.md").read_text(encoding="utf-8")
    placeholders = {  # a placeholder that contains another one stands before it
        "CLAIM_end": f"{name.replace('-', '_')}_end",
        "TITLE": title,
        "CHAPTER": name,
        "CLAIM": name,
    }
    for placeholder, value in placeholders.items():
        text = text.replace(placeholder, value)
    book.source(name).write_text(text, encoding="utf-8")
    with open(book.CLAIMS, "a", encoding="utf-8") as file:
        file.write(
            f'\n- id: {name}\n  chapters: [{name}]\n  source: "§N"\n  statement: >-\n    In your own words.\n'
            "  object: proof\n  expected: confirmed\n  why: Say why.\n"
        )
    contents = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    last = book.chapters()[-1]
    contents = re.sub(rf"^( *- file: ){last}\n", rf"\g<0>\g<1>{name}\n", contents, flags=re.M)
    (ROOT / "_toc.yml").write_text(contents, encoding="utf-8")
    print(
        f"wrote book/{name}.md, with its card at its head; its claim in book/claims.yml; its place in _toc.yml\n"
        f"next: fill in both, look at the page with `make page CHAPTERS={name}`, then `make notebooks`"
    )
