"""The nearest wrong value of every check, and whether the check would pass it: ``python -m maintenance.sharpness RUN``.

RUN is the ``metrics.json`` of a run, or its folder. ``alternatives/`` says, chapter by chapter, what would be measured
if a claim were false in the nearest way. Some checks need no entry, because their form says it: an exact check whose
band is rounding, and an exact bound, which any violation breaks. ``--plant N`` draws N checks by lot, puts the wrong
value in place of the measured one, and judges the run again: each must turn it red.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from nbutils.claims.records import Record, format_band
from workflow import book, write
from workflow.judge import Problem, audit

ALTERNATIVES = Path(__file__).with_name("alternatives")
ROUNDING = 1e-6  # relative width of a band that leaves room for rounding only
KINDS_OF_FORM = ("exact",)  # the kind of check that may need no entry


class Alternative(NamedTuple):
    """What a check would measure if its claim were false."""

    check: str
    wrong: str  # in words
    values: tuple[float, ...]


class Row(NamedTuple):
    """A check, with what is known of its sharpness."""

    record: Record
    state: str  # "by form", "sharp", "passes" (a wrong value) or "no entry"
    alternative: Alternative | None


@cache
def alternatives(chapter: str) -> dict[tuple[str, str], Alternative]:
    """The nearest wrong values of a chapter's checks, by claim and name; empty if there is no file.

    A ``*`` in a name stands for any text: one entry for checks that differ in a number.

    Raises:
        ValueError: an entry lacks ``wrong`` or ``value``, or has something else.
    """
    file = ALTERNATIVES / f"{chapter}.yml"
    if not file.exists():
        return {}
    listed: dict[tuple[str, str], Alternative] = {}
    for claim, checks in (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).items():
        for check, entry in checks.items():
            if not isinstance(entry, dict) or set(entry) != {"wrong", "value"}:
                raise ValueError(f"{file.name}: {claim}: {check!r}: give `wrong` and `value`; got {entry!r}")
            values = entry["value"] if isinstance(entry["value"], list) else [entry["value"]]
            listed[claim, check] = Alternative(check, str(entry["wrong"]), tuple(float(value) for value in values))
    return listed


def alternative_to(record: Record) -> Alternative | None:
    """The nearest wrong value of a check; an entry with its very name comes before one with a ``*``."""
    listed = alternatives(record.chapter)
    if record.key in listed:
        return listed[record.key]
    of_claim = {name: entry for (claim, name), entry in listed.items() if claim == record.claim}
    return next((entry for name, entry in of_claim.items() if matches(name, record.check)), None)


def matches(pattern: str, name: str) -> bool:
    """Whether a name is that of the pattern, in which ``*`` stands for any text.

    >>> matches("mean norm, n = *", "mean norm, n = 10"), matches("mean norm", "mean norm, n = 10")
    (True, False)
    """
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def sharp_by_form(record: Record) -> bool:
    """Whether a check needs no entry: an exact bound, or an exact value to rounding."""
    if record.kind not in KINDS_OF_FORM or record.band is None:
        return False
    low, high = record.band
    if low is None:
        return high is not None and abs(high) <= ROUNDING
    if high is None:
        return abs(low) <= ROUNDING
    return high - low <= ROUNDING * max(1.0, abs(low), abs(high))


def with_value(record: Record, value: float) -> Record:
    """The record as it would be, had the check measured ``value``; a population keeps the width of its interval."""
    low, high = record.band or (None, None)
    wrong = replace(record, measured=value, noted=False, further=())
    ends = [value]
    if record.interval is not None:
        ends = [value + float(end or 0.0) - float(record.measured or 0.0) for end in record.interval]
        wrong = replace(wrong, interval=(ends[0], ends[1]))
    holds = all((low is None or end >= low) and (high is None or end <= high) for end in ends)
    return replace(wrong, holds=holds)


def sharpness(record: Record) -> Row:
    """Whether a check would pass the nearest wrong value."""
    alternative = alternative_to(record)
    if alternative is None:
        return Row(record, "by form" if sharp_by_form(record) else "no entry", None)
    passes = any(with_value(record, value).holds for value in alternative.values)
    return Row(record, "passes" if passes else "sharp", alternative)


def unused(records: Iterable[Record], chapters: Iterable[str]) -> list[tuple[str, str, str]]:
    """Entries of checks that the run does not have, with their chapters."""
    entries = [(chapter, claim, name) for chapter in chapters for claim, name in alternatives(chapter)]
    of_checks = [(record.chapter, record.claim, record.check) for record in records]

    def has_check(chapter: str, claim: str, name: str) -> bool:
        return any(of[:2] == (chapter, claim) and matches(name, of[2]) for of in of_checks)

    return [entry for entry in entries if not has_check(*entry)]


# ---- planted wrong values ----


def plant(records: Sequence[Record], number: int, lot: random.Random) -> list[tuple[Record, list[Problem]]]:
    """Draw checks by lot and judge the run with a wrong value in place of each: the planted record and the problems."""
    candidates = [row for row in map(sharpness, records) if row.alternative is not None]
    chapters = sorted({record.chapter for record in records})
    outcomes = []
    for row in lot.sample(candidates, min(number, len(candidates))):
        assert row.alternative is not None
        wrong = with_value(row.record, lot.choice(row.alternative.values))
        judged = [wrong if record is row.record else record for record in records]
        _, problems = audit(book.claims(), judged, chapters, book.chapters())
        outcomes.append((wrong, problems))
    return outcomes


# ---- report ----


def table(rows: Sequence[Row]) -> Mapping[str, Counter[str]]:
    """How many checks of each chapter are in which state."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row.record.chapter, Counter())[row.state] += 1
    return counts


def line(row: Row) -> str:
    """A check that is not sharp, in a line."""
    record = row.record
    text = f"{record.chapter}: {record.claim}: {record.check}: {row.state}; band {format_band(record)}"
    if row.alternative is not None:
        text += f"; {row.alternative.wrong}: {', '.join(map(str, row.alternative.values))}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--plant", type=int, default=0, metavar="N", help="plant N wrong values, drawn by lot")
    parser.add_argument("--lot", type=int, default=0, help="seed of the lot")
    options = parser.parse_args(arguments)
    judgement = write.load(options.run)
    records = [record for record in judgement.records if record.band is not None]
    rows = [sharpness(record) for record in records]
    for chapter, counts in table(rows).items():
        print(f"{chapter:24}" + ", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    blunt = [row for row in rows if row.state in ("passes", "no entry")]
    for row in blunt:
        print(line(row))
    lost = unused(records, judgement.run["chapters"])
    for chapter, claim, check in lost:
        print(f"{chapter}: {claim}: {check}: in alternatives/, but the run has no such check")
    missed = 0
    for record, problems in plant(records, options.plant, random.Random(options.lot)):
        named = [problem for problem in problems if problem.claim == record.claim]
        missed += not named
        print(f"{'red' if named else 'NOT RED'}: {record.claim}: {record.check}: {record.measured:g} planted")
    return 1 if blunt or lost or missed else 0


if __name__ == "__main__":
    sys.exit(main())
