"""Two runs side by side, and what B has lost against A: two commits, machines or seeds, or a CPU and a GPU.

``python -m workflow report A B``, each a ``metrics.json`` or a folder that has one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nbutils.claims.records import Record, Value, format_band, format_number

VERSION = 1  # of metrics.json: book/_static/metrics.schema.json
MOVED = 15  # rows in the table of checks that moved most
SEEDS = 8  # fresh seeds that give a standard deviation, at least
COSTS = {"time": ("cpu_seconds", 1.5, 10.0), "memory": ("peak_mb", 1.3, 200.0)}  # red factor; below the last: noise
KINDS = ("verdicts", "checks", "lost", *COSTS, "new", "made with")

Metrics = Mapping[str, Any]


class Finding(NamedTuple):
    """One difference; a ``red`` one must not pass, the others are for information."""

    kind: str  # of KINDS
    where: str
    a: str
    b: str
    red: bool


class Move(NamedTuple):
    """One check in two runs; ``distance`` is the difference in units of ``unit``, of the scale of A."""

    a: Record
    b: Record
    distance: float
    unit: str


class Comparison(NamedTuple):
    """What differs between two runs."""

    findings: list[Finding]
    moved: list[Move]  # the farthest first

    def of(self, *kinds: str) -> list[Finding]:
        """The findings of these kinds; ``lost`` and ``new`` are the checks of one run alone."""
        return [found for found in self.findings if found.kind in kinds]

    @property
    def red(self) -> bool:
        return any(found.red for found in self.findings)


def load(place: Path) -> dict[str, Any]:
    """The metrics of a run, from its ``metrics.json`` or a folder with one (``_build/smoke``, ``_build``).

    Raises:
        ValueError: there is no such file, or it is not what a run writes. The message names it.
    """
    file = place / "metrics.json" if place.is_dir() else place
    if not file.is_file():
        raise ValueError(f"no run in {place}: give a metrics.json or a folder that has one, such as _build/smoke")
    try:
        metrics = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if missing := {"run", "records", "verdicts"} - set(metrics if isinstance(metrics, dict) else ()):
        raise ValueError(f"{file} is no run's metrics.json: it has no {', '.join(sorted(missing))}")
    if (version := metrics.get("version")) != VERSION:
        what = f"has version {version}" if version else "is older than its versions"
        raise ValueError(f"{file} {what}; this checkout reads version {VERSION}: compare with one of its releases")
    return metrics


def by_name(run: Metrics) -> dict[tuple[str, str, str], Record]:
    """The checks of a run by chapter, claim and name."""
    return {(record.chapter, *record.key): record for record in map(Record.of, run["records"])}


def compare(a: Metrics, b: Metrics) -> Comparison:
    """What differs between two runs, as ``load`` gives them."""
    of_a, of_b = by_name(a), by_name(b)
    both = [(of_a[key], of_b[key]) for key in of_a if key in of_b]
    findings = [
        *_changed("verdicts", a["verdicts"], b["verdicts"]),
        *(_finding("lost", record, record.measured, "–") for key, record in of_a.items() if key not in of_b),
        *(_finding("checks", x, x.measured, y.measured) for x, y in both if x.fails != y.fails),
        *(found for kind in COSTS for found in _cost(kind, a["run"], b["run"])),
        *(_finding("new", record, "–", record.measured, red=False) for key, record in of_b.items() if key not in of_a),
        *_changed("made with", _made_with(a["run"]), _made_with(b["run"]), red=False),
    ]
    moved = [move for move in (Move(x, y, *_distance(x, y)) for x, y in both) if move.distance > 0]
    return Comparison(findings, sorted(moved, key=lambda move: -move.distance))


def _changed(kind: str, a: Mapping[str, Any], b: Mapping[str, Any], red: bool = True) -> Iterator[Finding]:
    for name in {**a, **b}:
        if (x := a.get(name)) != (y := b.get(name)):
            before, after = ("none" if value is None else str(value) for value in (x, y))
            yield Finding(kind, name, before, after, red)


def _made_with(run: Metrics) -> dict[str, Any]:
    facts = {name: run.get(name) for name in ("commit", "profile", "seed", "device", "hardware")}
    threads = sorted({each.get("threads", 0) for each in run.get("notebooks", ())})
    return {**facts, "threads": ", ".join(map(str, threads)), **run.get("versions", {})}


def _finding(kind: str, record: Record, a: object, b: object, red: bool = True) -> Finding:
    before, after = (format_number(value) if isinstance(value, float) else str(value) for value in (a, b))
    return Finding(kind, f"{record.chapter}: {record.claim}: {record.check}", before, after, red)


def _number(value: Value, none: float = math.nan) -> float:
    return none if value is None else float(value)  # what is not finite is text in JSON


def _ends(record: Record) -> tuple[float, float]:
    low, high = record.band or (None, None)
    return _number(low, -math.inf), _number(high, math.inf)


def _cost(kind: str, a: Metrics, b: Metrics) -> Iterator[Finding]:
    """Chapters that cost more than a factor times as much, and the time of all; red on the same hardware."""
    field, factor, noise = COSTS[kind]
    of_a, of_b = ({each["chapter"]: each.get(field) for each in run.get("notebooks", ())} for run in (a, b))
    pairs = {name: (x, of_b[name]) for name, x in of_a.items() if None not in (x, of_b.get(name))}
    if kind == "time":
        pairs["all chapters"] = math.fsum(x for x, _ in pairs.values()), math.fsum(y for _, y in pairs.values())
    for chapter, (x, y) in pairs.items():
        if y > factor * x and y - x > noise:
            yield Finding(kind, chapter, f"{x:.0f}", f"{y:.0f}", a.get("hardware") == b.get("hardware"))


def _distance(a: Record, b: Record) -> tuple[float, str]:
    """How far a check moved, in steps of its own: its sd over fresh seeds, else half its band, else its room in it.

    The sd of an exact check is rounding alone, and that of fewer than eight seeds is none. Without a step, or where
    only one run has a number, it moved without bound.
    """
    x, y, (low, high) = _number(a.measured), _number(b.measured), _ends(a)
    seeds = a.baseline if a.kind in ("derived", "empirical") else None
    steps = {"sd": seeds["sd"]} if seeds and seeds["n"] >= SEEDS else {}
    steps |= {"half band": (high - low) / 2, "room to the edge": abs(min(x - low, high - x))}
    size, unit = next(((size, unit) for unit, size in steps.items() if math.isfinite(size)), (math.nan, "nothing"))
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0, unit
    return (abs(y - x) / size if math.isfinite(y - x) and size > 0 else math.inf), unit


def table(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; "None." where it has no row."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [heads, ["---"] * len(heads), *cells] if cells else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) or "None."


def markdown(found: Comparison, a: str, b: str) -> str:
    """The comparison as a page; ``a`` and ``b`` name the runs."""
    differences = [(*each[:4], "**red**" if each.red else "") for each in found.findings]
    moves = [
        (x.chapter, *x.key, format_number(x.measured), format_number(y.measured), format_band(x), f"{far:.2g}", unit)
        for x, y, far, unit in found.moved[:MOVED]
    ]
    return f"""## {a} (A) and {b} (B)

{table(["what", "where", "A", "B", ""], differences)}

### Checks that moved most ({len(found.moved)} moved)

{table(["chapter", "claim", "check", "A", "B", "band in A", "moved by", "in units of"], moves)}
"""


def conclusion(found: Comparison) -> str:
    """The last line of the command."""
    counts = {kind: sum(each.red for each in found.of(kind)) for kind in KINDS}
    if found.red:
        return f"RED: {', '.join(f'{kind}: {count}' for kind, count in counts.items() if count)}"
    return f"GREEN: the same verdicts; {len(found.moved)} measured value(s) differ"


def run(a: Path, b: Path) -> int:
    """Print the comparison of two runs; 1 where it is red, else 0."""
    found = compare(load(a), load(b))
    print(markdown(found, str(a), str(b)))
    print(conclusion(found))
    return int(found.red)
