"""The kept benchmarks as tables of a page: ratios and exponents, not seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workflow import ROOT

KEPT = ROOT / "tests" / "baselines" / "bench.json"
NONE = "No measurement has been kept yet: `.venv/bin/python -m benchmarks --keep` writes one."
LOADED = 1.5  # runnable processes per core, the benchmark's own included, above which the clock says little


def number(x: float) -> str:
    """Three digits, no exponent.

    >>> [number(x) for x in (12345.6, 28.06, 0.83333)]
    ['12,300', '28.1', '0.833']
    """
    return f"{float(f'{x:.3g}'):,.0f}" if x >= 100 else f"{x:.3g}"


def kept(kind: str, file: Path = KEPT) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8")).get(kind, []) if file.exists() else []


def where(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the rows were measured on, each machine once."""
    seen = dict.fromkeys(
        f"{row['hardware']}, Python {row['versions']['python']}, torch {row['versions'].get('torch', '–')}"
        for row in rows
    )
    return f"Measured on {'; and on '.join(seen)}."


def ratios(rows: Sequence[Mapping[str, Any]]) -> str:
    """Ours against the plain way: how many times less time, with the bound and whether it holds."""
    if not rows:
        return NONE
    lines = ["| what | times faster | at least | |", "|---|---:|---:|---|"]
    for row in rows:
        spread = f" ({number(row['ratio_min'])}–{number(row['ratio_max'])})" if row.get("turns", 1) > 1 else ""
        bound = number(row["bound"]) + (f" (aim {number(row['aim'])})" if "aim" in row else "")
        said = ("holds" if row["holds"] else "**does not hold**") + (", and slower" if row["ratio"] < 1 else "")
        if row.get("clock") == "wall" and row["load"] > LOADED:
            said += f"; by the clock of a busy machine, load {row['load']:.1f} a core"
        what = row["what"] + (f"; {row['also']}" if "also" in row else "")
        lines.append(f"| {what} | {number(row['ratio'])}{spread} | {bound} | {said} |")
    return "\n".join([*lines, "", where(rows)])


def exponents(rows: Sequence[Mapping[str, Any]]) -> str:
    """How time and memory grow with size."""
    if not rows:
        return NONE
    heads = ["what", "with", "from … to", "exponent of time", "memory (MB)", "its exponent"]
    lines = [f"| {' | '.join(heads)} |", "|---|---|---:|---:|---:|---:|"]
    for row in rows:
        p = f"{row['exponent']:.2f} [{row['low']:.2f}, {row['high']:.2f}]".replace("-", "−")
        sizes = f"{number(row['from'])} … {number(row['to'])}"
        memory = f"{row['peak_mb_first']:.0f} … {row['peak_mb']:.0f}"
        grows = f"{row['memory_exponent']:.2f}".replace("-", "−") if "memory_exponent" in row else "–"
        lines.append(f"| {row['what']} | {row['variable']} | {sizes} | {p} | {memory} | {grows} |")
    return "\n".join([*lines, "", where(rows)])
