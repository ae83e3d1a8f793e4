"""What moved between runs before and after a change that may move nothing, to the bit.

``--a`` and ``--b`` name as many runs, pair by pair. ``--stamp`` hands on what ``alarms`` has measured of a chapter to
its code of today, where no check of it moved in any pair: a refactoring voids no hours of measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workflow import compare, report, sources, write_atomically

FACTS = ("kind", "role", "measured", "band", "holds")
Metrics = Mapping[str, Any]


def moved(a: Metrics, b: Metrics) -> Iterator[tuple[str, ...]]:
    """Chapter, claim, check and what differs, of each check, and of each verdict; a check that only one run has too."""
    of_a, of_b = ({(r["chapter"], r["claim"], r["check"]): r for r in run["records"]} for run in (a, b))
    for key in {**of_a, **of_b}:
        x, y = of_a.get(key), of_b.get(key)
        if x is None or y is None:
            yield *key, f"only in {'B' if x is None else 'A'}"
        else:
            yield from ((*key, f"{f}: {x.get(f)} -> {y.get(f)}") for f in FACTS if x.get(f) != y.get(f))
    for claim in {**a["verdicts"], **b["verdicts"]}:
        if (x := a["verdicts"].get(claim)) != (y := b["verdicts"].get(claim)):
            yield "", claim, "verdict", f"{x} -> {y}"


def stamp(pairs: Sequence[tuple[Metrics, Metrics]], differ: set[str]) -> list[str]:
    """Hand on what was measured of chapters whose checks are all the same; which, by profile.

    Only what was measured of the code that A ran, to the code that B ran, if that is today's.
    """
    today, done = sources.hashes(), []
    for profile, device in sorted({(b["run"]["profile"], b["run"]["device"]) for _, b in pairs}):
        file = report.alarms_file(profile, device)
        found = json.loads(file.read_text(encoding="utf-8"))
        mine = [pair for pair in pairs if (pair[1]["run"]["profile"], pair[1]["run"]["device"]) == (profile, device)]
        for chapter, entry in found["chapters"].items():
            ran = [[_made_from(run, chapter) for run in pair] for pair in mine]
            if chapter not in differ and all(each == [entry["made_from"], today.get(chapter)] for each in ran):
                entry["made_from"] = today[chapter]
                done.append(f"{profile}: {chapter}")
        write_atomically(file, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return done


def _made_from(run: Metrics, chapter: str) -> str | None:
    return next((each["made_from"] for each in run["run"]["notebooks"] if each["chapter"] == chapter), None)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m maintenance same", description=__doc__)
    parser.add_argument("--a", type=Path, nargs="+", required=True, help="runs before: of each a metrics.json")
    parser.add_argument("--b", type=Path, nargs="+", required=True, help="the same runs after")
    parser.add_argument("--stamp", action="store_true", help="set made_from in maintenance/alarms-*.json")
    options = parser.parse_args(argv)
    pairs = [(compare.load(a), compare.load(b)) for a, b in zip(options.a, options.b, strict=True)]
    rows = [(str(file), *row) for file, pair in zip(options.b, pairs, strict=True) for row in moved(*pair)]
    print(compare.table(["run", "chapter", "claim", "check", "what moved"], rows))
    if options.stamp:
        print("stamped:", ", ".join(stamp(pairs, {row[1] for row in rows})) or "nothing")
    print(f"{'RED' if rows else 'GREEN'}: {len(rows)} differences in {len(pairs)} pairs of runs")
    return int(bool(rows))
