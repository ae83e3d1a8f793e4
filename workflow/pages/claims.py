"""A page for each claim, which is a link to send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nbformat import NotebookNode

from nbutils.claims import MIME
from workflow import book
from workflow.pages import figures, render
from workflow.pages.verdicts import Claim

Evidence = dict[str, tuple[str, str]]  # by claim: the name of a figure, and code


def evidence(cells: list[NotebookNode]) -> Evidence:
    """For each claim of an executed chapter, the last figure before its first check, and the cell that checks it."""
    found, drawn = Evidence(), ""
    for cell in cells:
        drawn = cell.metadata.get("mystnb", {}).get("figure", {}).get("name", drawn)
        for output in cell.get("outputs", ()):
            if check := output.get("data", {}).get(MIME):
                found.setdefault(check["claim"], (drawn, cell.source))
    return found


def pages(
    claims: Mapping[str, Claim], shown: Evidence, drawn: Mapping[str, figures.Figure], url: str
) -> Iterator[tuple[str, bytes]]:
    """Path and content of the page of each claim."""
    for name, claim in claims.items():
        chapter = claim.listed["chapters"][0]
        figure, code = shown.get(name, ("", ""))
        known = {"claim": claim, "chapter": chapter, "title": book.title(chapter), "code": code, "url": url}
        known["figure"] = drawn.get(figure or book.card(chapter).get("figure", ""))
        yield f"claims/{name}.md", render("claim.md.j2", **known).encode()
