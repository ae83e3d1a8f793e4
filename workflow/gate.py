"""What a run may not lose against another one: checks, narrow bands, samples, room in its bands, time and memory.

A comparison of verdicts alone lets all of these pass. ``python -m workflow report A B`` is red for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from xml.etree import ElementTree

from nbutils.claims.records import Record, format_band, format_number

EDGE = 0.05  # of the room to the nearest end of its band that a value had: less is left where it moved to the edge
EDGES = 0.05  # share of the checks that may move there; between seeds it is less than one in a hundred
FLOOR = {"cpu_seconds": 10.0, "peak_mb": 200.0}  # below, cost is noise
WATCHED = ("verdicts", "checks", "lost", "bands", "samples", "edges", "time", "memory")


class Finding(NamedTuple):
    """One difference; ``red`` if it must not pass, else it is told."""

    kind: str  # of WATCHED
    where: str
    a: str
    b: str
    red: bool


def findings(a: Mapping[str, Any], b: Mapping[str, Any], *, time: float = 1.5, memory: float = 1.3) -> list[Finding]:
    """What run B has lost against run A, as ``compare.load`` gives them.

    Args:
        time, memory: factors on CPU seconds and peak memory of a chapter, and of the whole, that turn it red, on the
            same hardware; on another they are told.
    """
    of_a, of_b = ({key(record): record for record in map(Record.of, run["records"])} for run in (a, b))
    both = [(of_a[name], of_b[name]) for name in of_a if name in of_b]
    return [
        *(Finding("lost", where(record), format_number(record.measured), "–", True)
          for name, record in of_a.items() if name not in of_b),
        *(found for x, y in both if (found := _band(x, y))),
        *(found for x, y in both for found in _samples(x, y)),
        *_edges(both),
        *_cost(a["run"], b["run"], {"cpu_seconds": time, "peak_mb": memory}),
    ]  # fmt: skip


def key(record: Record) -> tuple[str, str, str]:
    return record.chapter, record.claim, record.check


def where(record: Record) -> str:
    return f"{record.chapter}: {record.claim}: {record.check}"


def _ends(record: Record) -> tuple[float, float]:
    low, high = record.band or (None, None)
    return (-math.inf if low is None else float(low)), (math.inf if high is None else float(high))


def _band(a: Record, b: Record) -> Finding | None:
    """A band that lets more pass is red. That of a mean follows its data; it has a ``resolution`` in its place."""
    if a.resolution is not None or b.resolution is not None:
        if a.resolution == b.resolution:
            return None
        wider = b.resolution is None or (a.resolution is not None and b.resolution > a.resolution)
        return Finding("bands", where(a), f"resolution {a.resolution}", f"resolution {b.resolution}", wider)
    if a.form == "exponent" or a.band == b.band:
        return None
    (low_a, high_a), (low_b, high_b) = _ends(a), _ends(b)
    return Finding("bands", where(a), format_band(a), format_band(b), not (low_b >= low_a and high_b <= high_a))


def _samples(a: Record, b: Record) -> Iterator[Finding]:
    for name in ("n", "samples"):
        x, y = getattr(a, name), getattr(b, name)
        if x is not None and (y is None or y < x):
            yield Finding("samples", where(a), f"{name} = {x}", f"{name} = {y}", True)


def _room(record: Record) -> float:
    """From the measured value to the nearest end of its band; below 0 outside of it, NaN for what is no number."""
    value = math.nan if record.measured is None else float(record.measured)
    low, high = _ends(record)
    return min(value - low, high - value)


def _edges(both: list[tuple[Record, Record]]) -> list[Finding]:
    """Values that still hold and have used up their room. Some always do, by chance; many at once do not."""
    moved = [(a, b) for a, b in both if a.holds and b.holds and 0 <= _room(b) < EDGE * _room(a) and _room(a) < math.inf]
    red = len(moved) > EDGES * len(both)
    return [Finding("edges", where(b), format_number(a.measured), format_number(b.measured), red) for a, b in moved]


def _cost(a: Mapping[str, Any], b: Mapping[str, Any], factors: Mapping[str, float]) -> Iterator[Finding]:
    same = a.get("hardware") == b.get("hardware")
    of_a, of_b = ({each["chapter"]: each for each in run.get("notebooks", ()) if "chapter" in each} for run in (a, b))
    shared = [name for name in of_a if name in of_b]
    for name, unit, kind in (("cpu_seconds", "s", "time"), ("peak_mb", "MB", "memory")):
        pairs = {chapter: (of_a[chapter].get(name), of_b[chapter].get(name)) for chapter in shared}
        pairs = {chapter: pair for chapter, pair in pairs.items() if None not in pair}
        if name == "cpu_seconds" and pairs:
            pairs["all chapters"] = tuple(map(math.fsum, zip(*pairs.values(), strict=True)))
        for chapter, (x, y) in pairs.items():
            if y > factors[name] * x and y - x > FLOOR[name]:
                yield Finding(kind, chapter, f"{x:.0f} {unit}", f"{y:.0f} {unit}", same)


def junit(found: list[Finding], name: str) -> str:
    """The findings as JUnit XML: a test for each kind, which fails where one of it is red."""
    suite = ElementTree.Element("testsuite", name=name, tests=str(len(WATCHED)))
    failed = 0
    for kind in WATCHED:
        case = ElementTree.SubElement(suite, "testcase", classname="compare", name=kind, time="0")
        lines = [f"{each.where}: {each.a} -> {each.b}" for each in found if each.kind == kind and each.red]
        if lines:
            failed += 1
            failure = ElementTree.SubElement(case, "failure", message=f"{len(lines)} of {kind}, such as {lines[0]}")
            failure.text = "\n".join(lines)
    suite.set("failures", str(failed))
    suite.set("errors", "0")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
