"""The table of all claims: what each says, what we find, its verdict, and where it is checked."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from typing import Any

from workflow.findings import corrected, evidence
from workflow.report import Report

VERDICT_ORDER = ("confirmed", "refined", "refuted", "open", "failed")
COLUMNS = ("verdict", "claim", "where", "our checks that hold")


def badge(verdict: str) -> str:
    """A verdict as a coloured word."""
    return f'<span class="verdict verdict-{verdict}">{verdict}</span>'


def held(claim: str, result: Report) -> str:
    """How many checks of a claim hold, as text; "" for one without a verdict."""
    if claim not in result.verdicts:
        return ""
    if result.verdicts[claim] == "open":
        return "not decided"
    checks = [record for record in result.records if record.claim == claim]
    return f"{sum(bool(record.holds) for record in checks)} of {len(checks)}" if checks else "none"


def origin(claim: Mapping[str, Any]) -> str:
    """Where in the paper a claim stands; a question of ours says so."""
    return "our question" if claim.get("ours") else claim["source"]


def places(claim: str, result: Report, listed: Iterable[str]) -> str:
    """The chapters of a claim by number, each linked to the first check of the claim there."""
    checked = {record.chapter for record in result.records if record.claim == claim}
    shown = []
    for chapter in listed:
        number = int(chapter[:2])
        link = f'<a href="{chapter}.html#claim-{claim}" aria-label="chapter {number}, {claim}">{number}</a>'
        shown.append(link if chapter in checked else str(number))
    return f"chapter{'s' if len(shown) > 1 else ''} {', '.join(shown)}"


def identifier(claim: str, result: Report) -> str:
    """The name of a claim, linked to its first check."""
    name = f"<code>{claim}</code>"
    if claim not in result.verdicts or all(record.claim != claim for record in result.records):
        return name
    page, anchor = evidence(claim, result)
    return f'<a href="{page}#{anchor}">{name}</a>'


def _in_words(text: str) -> str:
    """Plain text for a page; names in backticks are code, as everywhere else."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def told(name: str, claim: Mapping[str, Any], result: Report) -> str:
    """A claim as stated, what we find instead where the run bears it, why it is open where it is, and its name."""
    parts = [f"<div>{_in_words(claim['statement'])}</div>"]
    if finding := corrected(claim, result.verdicts.get(name, "planned"), ""):
        parts.append(f"<div><em>We find:</em> {_in_words(finding)}</div>")
    if result.verdicts.get(name) == "open":
        reasons = [record.reason for record in result.records if record.claim == name and record.role == "open"]
        parts += [f"<div><em>Open:</em> {_in_words(reason)}</div>" for reason in dict.fromkeys(reasons) if reason]
    return "".join([*parts, f'<div class="claim-id">{identifier(name, result)}</div>'])


def row(rank: int, name: str, claim: Mapping[str, Any], result: Report) -> str:
    """One claim. ``rank`` is its place in ``claims.yml``, the order among equals."""
    verdict, chapters = result.verdicts.get(name, "planned"), claim["chapters"]
    checks, order = held(name, result), (*VERDICT_ORDER, "planned").index(verdict)
    cells = (  # what is shown, what it is sorted by
        (badge(verdict), f"{order}-{rank:04d}"),
        (told(name, claim, result), name),
        (
            f"<div>{html.escape(origin(claim))}</div><div>{places(name, result, chapters)}</div>",
            f"{chapters[0]}-{rank:04d}",
        ),
        (checks, checks),
    )
    shown = "".join(
        f'<td role="cell" data-label="{column}" data-sort="{key}">{cell}</td>'
        for column, (cell, key) in zip(COLUMNS, cells, strict=True)
    )
    numbers = " ".join(str(int(chapter[:2])) for chapter in chapters)
    asked = "us" if claim.get("ours") else "the paper"
    return f'<tr role="row" data-verdict="{verdict}" data-asked="{asked}" data-chapters="{numbers}">{shown}</tr>'


def scorecard(result: Report, claims: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of all claims, planned ones included. ``book/_static/scorecard.js`` sorts and filters it.

    Roles are written out, because a browser takes them from a table that a narrow window shows as cards.
    """
    rows = [row(rank, name, claim, result) for rank, (name, claim) in enumerate(claims.items())]
    head = "".join(f'<th role="columnheader" scope="col">{column}</th>' for column in COLUMNS)
    lines = [
        '<div id="all-claims">',
        '<table role="table" class="table claims-table" aria-label="All claims">',
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead>',
        '<tbody role="rowgroup">',
        *rows,
        "</tbody>\n</table>\n</div>",
    ]
    return "\n".join(lines)
