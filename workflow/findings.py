"""What a page may say of a run: a sentence that states a finding is shown with the verdict that it belongs to."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from workflow import report
from workflow.notebooks import FINDING


def evidence(claim: str, result: report.Report) -> tuple[str, str]:
    """Page and anchor of the first check of a claim."""
    first = next((record for record in result.records if record.claim == claim), None)
    if first is None:  # listed, and not checked: the run is red for it
        return f"{report.load_claims()[claim]['chapters'][0]}.html", ""
    return f"{first.chapter}.html", f"claim-{claim}"


FAILED = (
    "*Failed* is no verdict on the paper: a check of the claim did not hold in this run, so the run says nothing about "
    "the claim, and sentences that rest on it are left out."
)


def corrected(claim: Mapping[str, Any], verdict: str, between: str = " *We find:* ") -> str:
    """What we say instead of the paper; nothing where the run does not bear it: a verdict that is not the one kept."""
    name = claim.get("id", "")
    borne = verdict in _expected(name).split(" or ") if name in report.load_verdicts() else verdict != "failed"
    return f"{between}{claim['corrected']}" if claim.get("corrected") and borne else ""


def surprises(chapter: str, result: report.Report) -> str:
    """In words which claims of a chapter have another verdict than the one that its text is about; "" for none."""
    found = [
        f"the verdict on `{name}` is *{result.verdicts[name]}*."
        for name, claim in report.load_claims().items()
        if chapter in claim["chapters"] and name in result.verdicts
        if result.verdicts[name] not in report.load_verdicts().get(name, "").split(" or ")
    ]
    return " ".join(found)


def banner(result: report.Report) -> str:
    """The box at the top of every page of a red run, with a link to each check that failed; "" for a green one."""
    if result.run["green"]:
        return ""
    lines = ["```{danger} This run is red", "", f"{len(result.problems)} problem(s). {FAILED}", ""]
    for record in result.records:
        if record.fails:
            place = f"{record.chapter}.html#{record.anchor or 'claim-' + record.claim}"
            shown = html.escape(f"{record.chapter}: {record.claim}: {record.check}")
            lines.append(f'- <a href="{place}">{shown}</a>')
    lines += [
        f"- {html.escape(each.chapter)}: {html.escape(each.what)}" for each in result.problems if not each.measured
    ]
    return "\n".join([*lines, "```"])


def below_title(text: str, *boxes: str) -> str:
    """A page with boxes below its title.

    Raises:
        ValueError: it does not begin with a title.
    """
    title, _, rest = text.partition("\n")
    if not title.startswith("# "):
        raise ValueError(f"a page begins with its title; got {title[:60]!r}")
    return "\n\n".join([title, *filter(None, boxes), rest.lstrip("\n")])


def bind(text: str, result: report.Report) -> str:
    """Show each ``:::{finding} claim …`` only if the claims have the verdicts that its sentences are about.

    That is the one kept in ``verdicts.yml``, or the one named by ``claim=verdict``. What does not come true is left
    out: with a word in its place, unless another block stands for the other verdict.

    Raises:
        ValueError: a claim without a verdict in this run.
    """
    text = FINDING.sub(lambda match: _bound(match, result), text)
    return re.sub(r"^\|.*\{\{ ([\w-]+) \}\}.*\|$", lambda match: _row(match, result), text, flags=re.MULTILINE)


def _expected(claim: str) -> str:
    """The verdict that sentences on a claim are about: the one kept, where it is not "open or …"."""
    kept = report.load_verdicts().get(claim, "none")
    return " or ".join(each for each in kept.split(" or ") if each != "open") or kept


def _row(match: re.Match[str], result: report.Report) -> str:
    """A row of a table that shows a claim's badge: its last cell says what we find, so it goes with the verdict."""
    found = result.verdicts.get(match[1])
    if found is None or found in _expected(match[1]).split(" or "):
        return match[0]
    return "|".join([*match[0].split("|")[:-2], " *left out: this run does not bear it* |"])


def _bound(match: re.Match[str], result: report.Report) -> str:
    for word in match[1].split():
        claim, _, asked = word.partition("=")
        if claim not in result.verdicts:
            raise ValueError(f":::{{finding}} {match[1]}: no claim {claim!r} in this run")
        wanted = asked or _expected(claim)
        found = result.verdicts[claim]
        if found not in wanted.split(" or "):
            if asked:
                return ""
            page, anchor = evidence(claim, result)
            return (
                f"```{{admonition}} Left out\n:class: warning\n\n"
                f"In this run the verdict on `{claim}` is *{found}*, not *{wanted}*: "
                f'sentences that rest on it are left out. See <a href="{page}#{anchor}">its checks</a>.\n```\n'
            )
    return match[2]
