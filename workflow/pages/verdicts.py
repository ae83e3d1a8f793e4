"""What pages may say of a run: each claim as the run judged it; a sentence only with the verdict that it belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nbutils.claims.records import Record
from workflow import book
from workflow.report import Report

ORDER = ("confirmed", "refined", "refuted", "open", "failed", "undecided")
UNDECIDED = "undecided"  # not all of its chapters were run


@dataclass(frozen=True)
class Claim:
    """A claim of ``claims.yml`` as one run judged it."""

    name: str
    rank: int  # its place in the list
    listed: dict[str, Any]  # as there
    verdict: str
    records: tuple[Record, ...]

    @property
    def expected(self) -> list[str]:
        """The verdicts that ``claims.yml`` expects: ``open or …`` where something may not be had."""
        return self.listed["expected"].split(" or ")

    @property
    def asserted(self) -> list[str]:
        """The verdicts that sentences on it are about: those expected, without "open" where something else is."""
        return [each for each in self.expected if each != "open"] or ["open"]

    @property
    def borne(self) -> bool:
        """Whether the run bears what the book says of it. An author who runs one chapter sees it as expected."""
        return self.verdict in (*self.asserted, UNDECIDED)

    @property
    def surprising(self) -> bool:
        return self.verdict not in (*self.expected, UNDECIDED)

    @property
    def finding(self) -> str:
        """What we say instead of the paper; nothing where the run does not bear it."""
        return self.listed.get("corrected", "").strip() if self.borne else ""

    @property
    def ours(self) -> bool:
        return bool(self.listed.get("ours"))

    @property
    def href(self) -> str:
        """Where its first check stands; its first chapter where no check decides it."""
        return self.href_in(self.records[0].chapter) if self.records else f"{self.listed['chapters'][0]}.html"

    def href_in(self, chapter: str) -> str:
        """Where its first check in a chapter stands; empty where the chapter has none."""
        checked = any(record.chapter == chapter for record in self.records)
        return f"{chapter}.html#claim-{self.name}" if checked else ""

    @property
    def held(self) -> str:
        """How many of its checks hold, in words."""
        if self.verdict in ("open", UNDECIDED):
            return "not decided"
        hold = sum(bool(record.holds) for record in self.records)
        return f"{hold} of {len(self.records)}" if self.records else "none"

    @property
    def reasons(self) -> list[str]:
        """Why it is open."""
        given = [record.reason for record in self.records if record.role == "open" and record.reason]
        return list(dict.fromkeys(given)) if self.verdict == "open" else []


def judged(result: Report) -> dict[str, Claim]:
    """All claims, in the order of ``claims.yml``, with the verdicts and checks of a run."""
    found: dict[str, list[Record]] = {}
    for record in result.records:
        found.setdefault(record.claim, []).append(record)
    return {
        name: Claim(name, rank, listed, result.verdicts.get(name, UNDECIDED), tuple(found.get(name, ())))
        for rank, (name, listed) in enumerate(book.claims().items())
    }


def counts(claims: Iterable[Claim]) -> dict[str, int]:
    """How many claims have which verdict, in the order of verdicts; those that none has are left out."""
    number = Counter(claim.verdict for claim in claims)
    return {verdict: number[verdict] for verdict in ORDER if number[verdict]}
