"""Two runs side by side: what B has lost against A, and which checks moved most.

``python -m workflow compare A B``, of two commits, machines or seeds, or of a CPU and a GPU.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from nbutils.claims.records import Record, Value, format_band, format_number
from workflow import write
from workflow.judge import Judgement

MOVED = 15  # checks that are shown, of those that moved most


class Move(NamedTuple):
    """One check in two runs, and how far it moved: in halves of its band, or in its distance to the only edge."""

    a: Record
    b: Record
    distance: float


class Comparison(NamedTuple):
    """What differs between two runs; all but a move is red."""

    verdicts: list[str]  # claims
    failing: list[Move]  # checks that fail in B alone
    lost: list[Record]  # checks of A alone
    moved: list[Move]  # the farthest first


def compare(a: Judgement, b: Judgement) -> Comparison:
    """What differs between two runs."""
    records_of_a = {(record.chapter, *record.key): record for record in a.records}
    records_of_b = {(record.chapter, *record.key): record for record in b.records}
    moves = [
        Move(record, records_of_b[key], _distance(record, records_of_b[key]))
        for key, record in records_of_a.items()
        if key in records_of_b
    ]
    return Comparison(
        verdicts=[name for name in {**a.verdicts, **b.verdicts} if a.verdicts.get(name) != b.verdicts.get(name)],
        failing=[move for move in moves if move.b.fails and not move.a.fails],
        lost=[record for key, record in records_of_a.items() if key not in records_of_b],
        moved=sorted((move for move in moves if move.distance > 0), key=lambda move: -move.distance),
    )


def _distance(a: Record, b: Record) -> float:
    """How far a check moved; infinite where it has no scale, or where one run alone has a number."""
    before = number(a.measured)
    after = number(b.measured)
    if before == after or (math.isnan(before) and math.isnan(after)):
        return 0.0
    low, high = a.band or (None, None)
    if low is None or high is None:
        scale = abs(before - number(high if low is None else low))
    else:
        scale = (number(high) - number(low)) / 2
    return abs(after - before) / scale if math.isfinite(after - before) and scale > 0 else math.inf


def number(value: Value) -> float:
    """A measured value, or an edge, as a number; NaN where there is none."""
    return math.nan if value is None else float(value)  # what is not finite is text in JSON


def run(place_a: Path, place_b: Path) -> int:
    """Print the comparison of two runs; 1 where it is red, else 0."""
    a = write.load(place_a)
    b = write.load(place_b)
    comparison = compare(a, b)
    for name in comparison.verdicts:
        print(f"- verdict on {name}: {a.verdicts.get(name, 'none')} in A, {b.verdicts.get(name, 'none')} in B")
    for record in comparison.lost:
        print(f"- not in B: {_name(record)}")
    for move in comparison.failing:
        print(f"- fails in B: {_in_words(move)}")
    for move in comparison.moved[:MOVED]:
        print(f"- moved: {_in_words(move)}")
    moved = f"{len(comparison.moved)} measured value(s) differ"
    if comparison.verdicts or comparison.lost or comparison.failing:
        checks = f"{len(comparison.failing)} check(s) fail in B alone, {len(comparison.lost)} are not there"
        print(f"RED: {len(comparison.verdicts)} verdict(s) differ, {checks}; {moved}")
        return 1
    print(f"GREEN: the same verdicts; {moved}")
    return 0


def _in_words(move: Move) -> str:
    before = format_number(move.a.measured)
    after = format_number(move.b.measured)
    band = format_band(move.a)
    return f"{_name(move.a)}: {before} in A, {after} in B, band {band}, moved by {move.distance:.2g}"


def _name(record: Record) -> str:
    return f"{record.chapter}: {record.claim}: {record.check}"
