"""What pages may say of a run: each claim as the run judged it; a sentence only with the verdict that it belongs to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nbutils.claims.records import Record
from workflow import book
from workflow.judge import Judgement

ORDER = ("confirmed", "partly confirmed", "refuted", "open", "failed", "undecided")
ANSWERS = {"confirmed": "yes", "partly confirmed": "in part", "refuted": "no"}
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
    def supported(self) -> bool:
        """Whether the run supports what the book says of it. An author who runs one chapter sees it as expected."""
        return self.verdict in (*self.asserted, UNDECIDED)

    @property
    def unexpected(self) -> bool:
        return self.verdict not in (*self.expected, UNDECIDED)

    @property
    def finding(self) -> str:
        """What we say instead of the paper; nothing where the run does not support it."""
        return self.listed.get("corrected", "").strip() if self.supported else ""

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
    def word(self) -> str:
        """The verdict; a question of ours has an answer instead."""
        return ANSWERS.get(self.verdict, self.verdict) if self.ours else self.verdict

    @property
    def evidence(self) -> str:
        """On what it rests, from its checks; ``evidence`` in ``claims.yml`` names what they do not know."""
        kinds = {record.kind for record in self.records}
        runs = sorted({record.n for record in self.records if record.kind == "empirical" and record.n})
        exact = "computed, without chance" if "exact" in kinds else ""
        law = "derived law, sampled" if "derived" in kinds else ""
        several = " to ".join(map(str, dict.fromkeys(runs[:1] + runs[-1:])))
        return "; ".join(filter(None, [self.listed.get("evidence", exact), law, several and f"{several} runs"]))

    @property
    def reasons(self) -> list[str]:
        """Why it is open."""
        given = [record.reason for record in self.records if record.role == "open" and record.reason]
        return list(dict.fromkeys(given)) if self.verdict == "open" else []


def claims_of(result: Judgement, numbers: Mapping[str, str] | None = None) -> dict[str, Claim]:
    """All claims, in the order of ``claims.yml``, with the verdicts and checks of a run.

    ``numbers`` are those of the prose, by name: ``{name}`` in what a claim rests on stands for one.
    """
    known = defaultdict(lambda: "…", numbers or {})
    found: dict[str, list[Record]] = {}
    for record in result.records:
        found.setdefault(record.claim, []).append(record)
    return {
        name: Claim(
            name, rank, _filled(listed, known), result.verdicts.get(name, UNDECIDED), tuple(found.get(name, ()))
        )
        for rank, (name, listed) in enumerate(book.claims().items())
    }


def _filled(listed: Mapping[str, Any], numbers: Mapping[str, str]) -> dict[str, Any]:
    text = listed.get("evidence")
    return {**listed, "evidence": text.format_map(numbers)} if text else dict(listed)


def counts(claims: Iterable[Claim]) -> dict[str, int]:
    """How many claims have which verdict or answer, in the order of verdicts; those that none has are left out."""
    number = Counter(claim.word for claim in sorted(claims, key=lambda claim: ORDER.index(claim.verdict)))
    return dict(number)


def examples(claims: Iterable[Claim]) -> int:
    """By how many counterexamples claims of the paper fall: several may fall by one."""
    refuted = [claim for claim in claims if claim.verdict == "refuted" and not claim.ours]
    return len({claim.listed.get("falls_with", claim.name) for claim in refuted})
