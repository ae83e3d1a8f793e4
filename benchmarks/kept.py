"""The rows that are kept of the benchmarks, and their table. A row is shown only for the code that it measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nbutils import devices
from workflow import sources, write_atomically

FILE = Path(__file__).with_name("kept.json")
RATIOS = ("ratio", "low", "high")
NONE = "No measurement of today's code is kept: `make -C maintenance bench` makes one."


def stamped(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the hash of the modules they measure, the hardware and the versions."""
    here = {"hardware": devices.hardware("cpu"), "versions": devices.versions()}
    return [row | {"made_from": sources.of_modules(row["modules"])} | here for row in rows]


def load(file: Path = FILE) -> list[dict[str, Any]]:
    """The kept rows of today's code; those of another, or of a module that is gone, are left out."""
    rows, modules = json.loads(file.read_text(encoding="utf-8"))["pairs"], set(sources.modules())
    there = [row for row in rows if modules.issuperset(row["modules"])]
    return [row for row in there if row["made_from"] == sources.of_modules(row["modules"])]


def keep(rows: Iterable[dict[str, Any]], file: Path = FILE) -> None:
    """Put stamped rows in the place of those of the same name; kept rows of other code go."""
    found = {row["what"]: row for row in [*load(file), *rows]}
    write_atomically(file, json.dumps({"pairs": list(found.values())}, indent=1, ensure_ascii=False) + "\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Ours against the plain way as Markdown: how many times less time, the bound, and whether it holds."""
    if not rows:
        return NONE
    lines = ["| what | times faster | quartiles | at least | |", "|---|---:|---|---:|---|"]
    for row in rows:
        ratio, low, high = (f"{row[name]:,.0f}" if row[name] >= 100 else f"{row[name]:.3g}" for name in RATIOS)
        verdict = ("holds" if row["holds"] else "**does not hold**") + (", and slower" if row["ratio"] < 1 else "")
        lines.append(f"| {row['what']} | {ratio} | {low} to {high} | {row['bound']} | {verdict} |")
    places = {f"{row['hardware']}, torch {row['versions']['torch']}": None for row in rows}
    return "\n".join([*lines, "", f"Measured on {'; and on '.join(places)}."])
