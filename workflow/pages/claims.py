"""A page for each claim, which is a link to send, and all of them as one file for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nbformat import NotebookNode

from nbutils.claims import MIME
from workflow import book
from workflow.pages import figures, render
from workflow.pages.verdicts import Claim
from workflow.report import Report

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
    claims: Mapping[str, Claim], shown: Evidence, drawn: Mapping[str, figures.Figure], result: Report, url: str
) -> Iterator[tuple[str, bytes]]:
    """Paths and contents: ``claims/<id>.md`` for each claim, and ``claims.json``."""
    for name, claim in claims.items():
        chapter = claim.listed["chapters"][0]
        figure, code = shown.get(name, ("", ""))
        known = {"claim": claim, "chapter": chapter, "title": book.title(chapter), "code": code, "url": url}
        known["figure"] = drawn.get(figure or book.card(chapter).get("figure", ""))
        yield f"claims/{name}.md", render("claim.md.j2", run=result.run, **known).encode()
    facts = {key: result.run[key] for key in ("profile", "seed", "commit", "hardware")}
    every = {"run": facts, "claims": [_as_dict(claim) for claim in claims.values()]}
    yield "files/claims.json", json.dumps(every, indent=1, ensure_ascii=False).encode()


def _as_dict(claim: Claim) -> dict[str, Any]:
    kept = {"id": claim.name, "verdict": claim.verdict, "answer": claim.word if claim.ours else None}
    kept |= {
        "version": book.version(claim.listed),
        "evidence": claim.evidence,
        "statement": claim.listed["statement"].strip(),
    }
    kept |= {"finding": claim.finding, "where": book.origin(claim.listed), "chapters": claim.listed["chapters"]}
    return kept | {"page": f"claims/{claim.name}.html", "checks": [record.as_dict() for record in claim.records]}
