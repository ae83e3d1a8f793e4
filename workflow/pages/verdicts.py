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
        return [verdict for verdict in self.expected if verdict != "open"] or ["open"]

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
    def objects(self) -> dict[str, str]:
        """On what it is judged, with the details of each object: see ``book.objects``."""
        return book.objects(self.listed)

    @property
    def evidence(self) -> str:
        """Its objects as ``claims.yml`` names them, and how many replicates its checks had."""
        kinds = {record.kind for record in self.records}
        sizes = sorted({record.n for record in self.records if record.kind == "empirical" and record.n})
        rests_on = [f"{kind}: {detail}" if detail else kind for kind, detail in self.objects.items()]
        if "derived" in kinds:
            rests_on.append("derived law, sampled")
        if sizes:
            smallest_and_largest = dict.fromkeys((sizes[0], sizes[-1]))
            counted = _replicates(self.objects)
            rests_on.append(f"{' to '.join(map(str, smallest_and_largest))} {counted}")
        return "; ".join(rests_on)

    @property
    def scale(self) -> str:
        """How large the effect is, where a verdict alone would be read as more."""
        return self.listed.get("scale", "").strip() if self.supported else ""

    @property
    def reasons(self) -> list[str]:
        """Why it is open."""
        reasons = [record.reason for record in self.records if record.role == "open" and record.reason]
        return list(dict.fromkeys(reasons)) if self.verdict == "open" else []


def _replicates(objects: Iterable[str]) -> str:
    """What the replicates of empirical checks are, by the objects: of a trained model, texts and controls as well."""
    objects = set(objects)
    if "pretrained" in objects:
        return "replicates (texts, draws or trainings)" if "trained here" in objects else "replicates (texts or draws)"
    return "trainings" if "trained here" in objects else "draws"


def claims_of(judgement: Judgement, numbers: Mapping[str, str] | None = None) -> dict[str, Claim]:
    """All claims, in the order of ``claims.yml``, with the verdicts and checks of a run.

    ``numbers`` are those of the prose, by name: ``{name}`` in what a claim rests on stands for one.
    """
    numbers_or_dots = defaultdict(lambda: "…", numbers or {})
    records: dict[str, list[Record]] = defaultdict(list)
    for record in judgement.records:
        records[record.claim].append(record)
    claims = {}
    for rank, (name, listed) in enumerate(book.claims().items()):
        verdict = judgement.verdicts.get(name, UNDECIDED)
        claims[name] = Claim(name, rank, _filled(listed, numbers_or_dots), verdict, tuple(records[name]))
    return claims


def _filled(listed: Mapping[str, Any], numbers: Mapping[str, str]) -> dict[str, Any]:
    """A claim as listed, with the numbers of the run in the texts that name some."""
    filled = dict(listed)
    details = book.objects(listed)
    filled["object"] = [f"{kind}: {detail.format_map(numbers)}" for kind, detail in details.items()]
    if "scale" in listed:
        filled["scale"] = listed["scale"].format_map(numbers)
    return filled


def by_object(claims: Iterable[Claim]) -> dict[str, dict[str, int]]:
    """How many claims have which verdict, for each object; a claim of two objects counts in both."""
    table = {}
    decided = list(claims)
    for kind in book.OBJECTS:
        table[kind] = dict(Counter(claim.verdict for claim in decided if kind in claim.objects))
    return table


def counts(claims: Iterable[Claim]) -> dict[str, int]:
    """How many claims have which verdict or answer, in the order of verdicts; those that none has are left out."""
    in_order = sorted(claims, key=lambda claim: ORDER.index(claim.verdict))
    return dict(Counter(claim.word for claim in in_order))
