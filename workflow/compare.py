"""Two runs side by side: what B has lost against A, and which checks moved most.

``python -m workflow report A B``, of two commits, machines or seeds, or of a CPU and a GPU.
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
    """One check in two runs, and how far it moved: in halves of its band, or in its room to the one edge of that."""

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
    of_a, of_b = ({(record.chapter, *record.key): record for record in run.records} for run in (a, b))
    both = [Move(x, of_b[key], _distance(x, of_b[key])) for key, x in of_a.items() if key in of_b]
    return Comparison(
        verdicts=[name for name in {**a.verdicts, **b.verdicts} if a.verdicts.get(name) != b.verdicts.get(name)],
        failing=[move for move in both if move.b.fails and not move.a.fails],
        lost=[record for key, record in of_a.items() if key not in of_b],
        moved=sorted((move for move in both if move.distance > 0), key=lambda move: -move.distance),
    )


def _distance(a: Record, b: Record) -> float:
    """How far a check moved; infinite where it has no scale, or where one run alone has a number."""
    x, y = _number(a.measured), _number(b.measured)
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    low, high = a.band or (None, None)
    if low is None or high is None:
        step = abs(x - _number(high if low is None else low))
    else:
        step = (_number(high) - _number(low)) / 2
    return abs(y - x) / step if math.isfinite(y - x) and step > 0 else math.inf


def _number(value: Value) -> float:
    return math.nan if value is None else float(value)  # what is not finite is text in JSON


def run(place_a: Path, place_b: Path) -> int:
    """Print the comparison of two runs; 1 where it is red, else 0."""
    a, b = write.load(place_a), write.load(place_b)
    found = compare(a, b)
    for name in found.verdicts:
        print(f"- verdict on {name}: {a.verdicts.get(name, 'none')} in A, {b.verdicts.get(name, 'none')} in B")
    for record in found.lost:
        print(f"- not in B: {_name(record)}")
    for what, moves in (("fails in B", found.failing), ("moved", found.moved[:MOVED])):
        for x, y, distance in moves:
            values = f"{format_number(x.measured)} in A, {format_number(y.measured)} in B, band {format_band(x)}"
            print(f"- {what}: {_name(x)}: {values}, moved by {distance:.2g}")
    moved = f"{len(found.moved)} measured value(s) differ"
    if found.verdicts or found.lost or found.failing:
        checks = f"{len(found.failing)} check(s) fail in B alone, {len(found.lost)} are not there"
        print(f"RED: {len(found.verdicts)} verdict(s) differ, {checks}; {moved}")
        return 1
    print(f"GREEN: the same verdicts; {moved}")
    return 0


def _name(record: Record) -> str:
    return f"{record.chapter}: {record.claim}: {record.check}"
