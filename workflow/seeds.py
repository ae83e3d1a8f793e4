"""Several seeds of one run side by side: what was red, what was noted, and how far values spread."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nbutils.claims import OF_CHANCE
from nbutils.claims.records import Record, format_band, format_number
from workflow import ROOT, Run, write, write_atomically
from workflow.compare import number
from workflow.judge import Judgement

SHOWN = 15  # checks of the table that held at all seeds: those nearest to an edge
VERSION = 1  # of seeds.json


def parse(text: str) -> list[int]:
    """The seeds that a command line names: numbers and ranges with both ends.

    >>> parse("0-3,7")
    [0, 1, 2, 3, 7]

    Raises:
        ValueError: the text is not of that form, or names a seed twice.
    """
    numbers: list[int] = []
    for part in text.replace(",", " ").split():
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise ValueError(f"seeds {text!r}: expected numbers and ranges, such as 0-19 or 0,3,7-9")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"seeds {text!r}: expected at least one seed, and none twice or in a range that runs down")
    return numbers


class Spread(NamedTuple):
    """One check at several seeds."""

    records: dict[int, Record]  # by seed

    @property
    def first(self) -> Record:
        return next(iter(self.records.values()))

    @property
    def red(self) -> list[int]:
        """Seeds."""
        return [seed for seed, record in self.records.items() if record.fails]

    @property
    def noted(self) -> list[int]:
        """Seeds."""
        return [seed for seed, record in self.records.items() if record.noted]

    @property
    def finite(self) -> np.ndarray:
        """What was measured where it is a finite number."""
        numbers = [number(record.measured) for record in self.records.values()]
        return np.array([value for value in numbers if math.isfinite(value)])

    @property
    def room(self) -> float:
        """The least distance of a value to an edge of its own band, in standard deviations of the values.

        Infinite where nothing varies, or there is no band; negative outside.
        """
        values = self.finite
        if len(values) < 2 or np.ptp(values) == 0:
            return math.inf
        distances = [
            sign * (number(record.measured) - number(edge))
            for record in self.records.values()
            for sign, edge in zip((1, -1), record.band or (), strict=False)
            if edge is not None
        ]
        finite = [distance for distance in distances if math.isfinite(distance)]
        return float(min(finite) / np.std(values, ddof=1)) if finite else math.inf

    @property
    def band(self) -> str:
        """The band in words; a derived one comes from each run's own sampling error."""
        bands = {format_band(record) for record in self.records.values()}
        return bands.pop() if len(bands) == 1 else f"{format_band(self.first)}, varies"

    @property
    def order(self) -> tuple[int, int, float]:
        """Red ones come first, then noted ones, then what is nearest to an edge."""
        return -len(self.red), -len(self.noted), self.room


def spreads(judgements: Iterable[Judgement]) -> list[Spread]:
    """Every check at all seeds, in the order of ``Spread.order``."""
    by_check: dict[tuple[str, ...], Spread] = {}
    for judgement in judgements:
        seed = judgement.run["seed"]
        for record in judgement.records:
            by_check.setdefault((record.chapter, *record.key), Spread({})).records[seed] = record
    return sorted(by_check.values(), key=lambda spread: spread.order)


def conclude(requests: Sequence[Run], judgements: Sequence[Judgement]) -> int:
    """Write ``metrics.json`` of each seed and one ``seeds.json``, print the table, and return the exit status."""
    for request, judgement in zip(requests, judgements, strict=True):
        request.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(write.metrics(judgement), indent=1, ensure_ascii=False) + "\n"
        write_atomically(request.metrics_of_seed, text)
    checks = spreads(judgements)
    file = requests[0].reports / write.SEEDS
    report = {"version": VERSION, "seeds": [_of_seed(j) for j in judgements], "checks": list(map(_of_check, checks))}
    write_atomically(file, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print("\n".join(lines(checks, judgements)), f"All values: {file.relative_to(ROOT)}", sep="\n")
    red = [judgement for judgement in judgements if judgement.problems]
    held = sum(record.holds is True for judgement in judgements for record in judgement.records)
    noted = sum(judgement.run["noted"] for judgement in judgements)
    if not red:
        print(f"GREEN: {len(judgements)} seeds, {held} checks hold, {noted} noted (held at two further seeds)")
        return 0
    for judgement in red:
        write.print_logs(judgement.run)
    listed = ", ".join(str(judgement.run["seed"]) for judgement in red)
    first = red[0].problems[0]
    chapters = sorted({name for problem in red[0].problems for name in write.shown_by(problem)})
    print(f"to run the first again: {write.rerun_command(red[0].run, chapters)}")
    cause = " ".join(filter(None, (f"{first.chapter}:", first.claim, first.what)))
    print(f"RED: {len(red)} of {len(judgements)} seeds ({listed}); the first: {cause}")
    return 1


def lines(checks: Sequence[Spread], judgements: Sequence[Judgement]) -> list[str]:
    """The table for a terminal: what failed, then what chance brought nearest to an edge; below it other problems."""
    failed = [spread for spread in checks if spread.red or spread.noted]
    held = [spread for spread in checks if not (spread.red or spread.noted) and spread.first.kind in OF_CHANCE]
    near = [spread for spread in held if math.isfinite(spread.room)]
    head = ("check", "red at", "noted at", "least", "median", "largest", "band", "room/sd")
    table = [head, *map(_row, [*failed, *near[:SHOWN]])]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    other = [
        f"seed {judgement.run['seed']}: {problem.chapter}: {' '.join(filter(None, (problem.claim, problem.what)))}"
        for judgement in judgements
        for problem in judgement.problems
        if not problem.measured
    ]
    return shown + other


def _row(spread: Spread) -> tuple[str, ...]:
    values = spread.finite
    numbers = (values.min(), float(np.median(values)), values.max()) if len(values) else (math.nan,) * 3
    record = spread.first
    room = f"{spread.room:.1f}" if math.isfinite(spread.room) else ""
    return (
        f"{record.chapter}: {record.claim}: {record.check}",
        ", ".join(map(str, spread.red)),
        ", ".join(map(str, spread.noted)),
        *(format_number(value) for value in numbers),
        spread.band,
        room,
    )


def _of_seed(judgement: Judgement) -> dict[str, Any]:
    run = judgement.run
    problems = [problem._asdict() for problem in judgement.problems]
    return {"seed": run["seed"], "green": run["green"], "noted": run["noted"], "problems": problems}


def _of_check(spread: Spread) -> dict[str, Any]:
    facts: Mapping[str, Any] = {field: getattr(spread.first, field) for field in ("chapter", "claim", "check", "kind")}
    values = {str(seed): record.measured for seed, record in spread.records.items()}
    bands = {str(seed): record.band for seed, record in spread.records.items()}
    room = spread.room if math.isfinite(spread.room) else None
    return {**facts, "values": values, "bands": bands, "red": spread.red, "noted": spread.noted, "room": room}
