"""Two runs side by side: two commits, two machines, CPU and GPU.

``python -m workflow report A B``, each a ``metrics.json`` or a folder that has one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nbutils.claims.records import Record, format_band, format_number
from nbutils.samples import REPLICATES
from workflow import gate
from workflow.gate import Finding
from workflow.summaries import rows

MOVED = 15  # rows in the table of checks that moved most


class Move(NamedTuple):
    """One check in two runs; ``distance`` is the difference in units of ``unit``."""

    key: tuple[str, str, str]
    a: Record
    b: Record
    distance: float
    unit: str


class Comparison(NamedTuple):
    """What differs between two runs. ``red``: in a verdict, in what holds, or by what B has lost; or one alone is red.

    Two runs that are red alike have nothing new.
    """

    red_alone: list[str]  # A, B: two runs that are wrong alike do not differ
    problems: list[tuple[str, ...]]  # of each, after its name
    verdicts: list[tuple[str, str, str]]
    failed_in_one: list[Move]
    moved: list[Move]
    only_a: list[Record]
    only_b: list[Record]
    settings: list[tuple[str, str, str]]
    lost: list[Finding]
    silent: bool  # a run does not say whether it is green

    @property
    def differ(self) -> bool:
        return bool(self.verdicts or self.failed_in_one)

    @property
    def alike(self) -> bool:
        """Whether both are red, for the same reasons, and each says so."""
        of_a, of_b = ({row[1:4] for row in self.problems if row[0] == name} for name in "AB")  # measured may differ
        return self.red_alone == ["A", "B"] and not self.silent and not self.differ and of_a == of_b

    @property
    def red(self) -> bool:
        return self.differ or any(found.red for found in self.lost) or bool(self.red_alone and not self.alike)

    def findings(self) -> list[Finding]:
        """All that differs, of each kind that the gate watches."""
        verdicts = [Finding("verdicts", claim, a, b, True) for claim, a, b in self.verdicts]
        values = [(move, format_number(move.a.measured), format_number(move.b.measured)) for move in self.failed_in_one]
        return [*verdicts, *(Finding("checks", gate.where(move.b), a, b, True) for move, a, b in values), *self.lost]


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
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if missing := {"run", "records", "verdicts"} - set(metrics if isinstance(metrics, dict) else ()):
        raise ValueError(f"{file} is no run's metrics.json: it has no {', '.join(sorted(missing))}")
    return metrics


def compare(a: Mapping[str, Any], b: Mapping[str, Any], **factors: float) -> Comparison:
    """What differs between two runs, as ``load`` gives them; ``factors`` as in ``gate.findings``."""
    of_a, of_b = ({gate.key(record): record for record in map(Record.of, run["records"])} for run in (a, b))
    both = [_move(key, of_a[key], of_b[key]) for key in of_a if key in of_b]
    names = dict.fromkeys([*a["verdicts"], *b["verdicts"]])
    verdicts = [(name, a["verdicts"].get(name, "none"), b["verdicts"].get(name, "none")) for name in names]
    named = {"A": a, "B": b}
    return Comparison(
        red_alone=[name for name, run in named.items() if not run["run"].get("green")],
        problems=[(name, *_problem(each)) for name, run in named.items() for each in run.get("problems", ())],
        verdicts=[row for row in verdicts if row[1] != row[2]],
        failed_in_one=[move for move in both if (move.a.holds is False) != (move.b.holds is False)],
        moved=sorted((move for move in both if move.distance > 0), key=lambda move: -move.distance),
        only_a=[record for key, record in of_a.items() if key not in of_b],
        only_b=[record for key, record in of_b.items() if key not in of_a],
        settings=_settings(a["run"], b["run"]),
        lost=gate.findings(a, b, **factors),
        silent=any("green" not in run["run"] for run in (a, b)),
    )


def _problem(problem: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(problem.get(field, "") for field in ("chapter", "claim", "what", "measured", "band"))


def _move(key: tuple[str, str, str], a: Record, b: Record) -> Move:
    """How far a check moved. What is no number in one run only has moved without bound."""
    x, y = (_number(record.measured) for record in (a, b))
    size, unit = scale(a)
    if x == y or (math.isnan(x) and math.isnan(y)):
        return Move(key, a, b, 0.0, unit)
    gap = abs(y - x)
    return Move(key, a, b, gap / size if math.isfinite(gap) and size > 0 else math.inf, unit)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)  # the ledger keeps what is not finite as text


def scale(record: Record) -> tuple[float, str]:
    """One step of a check's scale: its sd over fresh seeds, else half of the band, else the room to its one edge.

    The sd of an exact check is rounding alone, which is no scale; nor is that of fewer than eight seeds.

    >>> sd = {"mean": 2.0, "sd": 1e-16, "n": 50}
    >>> scale(Record("c", "a", "stated", kind="exact", measured=2.5, band=(1.0, 3.0), baseline=sd))
    (1.0, 'half band')
    """
    if record.kind in ("derived", "empirical") and record.baseline and record.baseline["n"] >= REPLICATES:
        return record.baseline["sd"], "sd"
    low, high = (_number(edge) for edge in record.band or (None, None))
    if math.isfinite(low) and math.isfinite(high):
        return (high - low) / 2, "half band"
    room = abs(_number(record.measured) - (low if math.isfinite(low) else high))
    return (room if math.isfinite(room) else 0.0), "room to the edge"


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Profile, seed, commit, hardware and versions where they differ."""

    def flat(run: Mapping[str, Any]) -> dict[str, str]:
        plain = {name: run.get(name) for name in ("commit", "profile", "seed", "device", "hardware")}
        threads = sorted({stats.get("threads") for stats in run.get("notebooks", ())} - {None})
        plain["threads"] = ", ".join(map(str, threads)) or None
        return {name: str(value) for name, value in {**plain, **run.get("versions", {})}.items()}

    x, y = flat(a), flat(b)
    return [(n, x.get(n, "none"), y.get(n, "none")) for n in {**x, **y} if x.get(n) != y.get(n)]


def markdown(found: Comparison, a: str, b: str) -> str:
    """The comparison as a page; ``a`` and ``b`` name the runs."""
    lines = [f"## {a} (A) and {b} (B): {'they differ' if found.differ else 'the same verdicts'}{_alone(found)}", ""]
    if found.red_alone:
        heads = ["run", "chapter", "claim", "problem", "measured", "band"]
        lines += ["### Problems of a run by itself", ""]
        lines += rows(heads, found.problems) if found.problems else ["None is told."]
        lines.append("")
    lines += ["### Versions and hardware", ""]
    lines += rows(["", "A", "B"], found.settings) if found.settings else ["No difference."]
    lines += ["", "### Verdicts that differ", ""]
    lines += rows(["claim", "A", "B"], found.verdicts) if found.verdicts else ["None."]
    lines += ["", "### Checks that hold in one run only", ""]
    heads = ["chapter", "claim", "check", "A", "B", "band in A", "band in B", "moved by", "in units of"]
    lines += rows(heads, map(_row, found.failed_in_one)) if found.failed_in_one else ["None."]
    heads_of_lost = ["what", "where", "A", "B", ""]
    lines += ["", "### Lost from A to B: checks, bands, samples, room, time, memory", ""]
    cells = [(each.kind, each.where, each.a, each.b, "**red**" if each.red else "told") for each in found.lost]
    lines += rows(heads_of_lost, cells) if cells else ["Nothing."]
    lines += ["", f"### Checks that moved most ({len(found.moved)} moved)", ""]
    lines += rows(heads, map(_row, found.moved[:MOVED])) if found.moved else ["None: every measured value is the same."]
    for name, records in (("A", found.only_a), ("B", found.only_b)):
        lines += ["", f"### Checks in {name} only", ""]
        cells = ((r.chapter, r.claim, r.check, format_number(r.measured)) for r in records)
        lines += rows(["chapter", "claim", "check", "measured"], cells) if records else ["None."]
    return "\n".join(lines) + "\n"


def _alone(found: Comparison) -> str:
    return f"; red by itself: {' and '.join(found.red_alone)}" if found.red_alone else ""


def _row(move: Move) -> tuple[str, ...]:
    values = (format_number(move.a.measured), format_number(move.b.measured))
    return (*move.key, *values, format_band(move.a), format_band(move.b), f"{move.distance:.2g}", move.unit)


def run(a: Path, b: Path, *, as_json: Path | None = None, junit: Path | None = None, **factors: float) -> int:
    """Print the comparison of two runs, and write it where asked; 1 where it is red, else 0."""
    found = compare(load(a), load(b), **factors)
    print(markdown(found, str(a), str(b)))
    if as_json:
        told = {"a": str(a), "b": str(b), "red": found.red, "findings": [x._asdict() for x in found.findings()]}
        as_json.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if junit:
        junit.write_text(gate.junit(found.findings(), f"{a} and {b}"), encoding="utf-8")
    print(conclusion(found))
    return int(found.red)


def conclusion(found: Comparison) -> str:
    """The last line of the command."""
    if not found.red:
        nothing = "nothing new, both are red alike" if found.alike else "the same verdicts"
        return f"GREEN: {nothing}; {len(found.moved)} measured value(s) differ"
    said = [f"{len(found.verdicts)} verdict(s) differ", f"{len(found.failed_in_one)} check(s) hold in one run only"]
    counts = {kind: sum(each.red and each.kind == kind for each in found.lost) for kind in gate.WATCHED}
    said += [f"{kind}: {count}" for kind, count in counts.items() if count]
    return f"RED: {', '.join(said)}{_alone(found)}"
