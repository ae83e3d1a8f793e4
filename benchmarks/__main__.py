"""Run the pairs: ``python -m benchmarks``. Writes ``_build/bench.json`` and prints the table.

A pair is timed by CPU time of one thread, by turns; the ratio is the median over the turns, with its least and largest
value. Both sides must agree on what they share. Whole runs of the book are timed by the clock.

    python -m benchmarks              the pairs, and some chapters against Jupyter Book
    python -m benchmarks walk series  these pairs alone
    python -m benchmarks --book       the whole book alone: cold, nothing changed, one chapter edited
    python -m benchmarks --curves     how cost and memory grow with size; writes _build/bench_curves.json
    python -m benchmarks … --keep     copies what was measured to tests/baselines/bench.json, which the book shows
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from benchmarks import (
    book,
    degrees,
    gpu,
    growth,
    projections,
    representations,
    series,
    startup,
    timing,
    tracking,
    trainings,
    walk,
)
from nbutils import device
from workflow import BUILD, ROOT, jobs

MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (walk, projections, tracking, series, trainings, representations, degrees, startup)
}
KEPT = ROOT / "tests" / "baselines" / "bench.json"


def pairs(names: Sequence[str]) -> list[timing.Row]:
    """Rows of the pairs in these modules."""
    work = [pair for name in names for pair in MODULES[name].PAIRS]
    return [timing.finished(pair()) for pair in tqdm(work, desc="pairs")]


def keep(kind: str, rows: list[timing.Row], file: Path = KEPT) -> None:
    """Put rows in the place of those of the same name, with the hardware and the versions they were measured on."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    measured = {"hardware": device.hardware("cpu"), "versions": device.versions()}
    old = {entry["what"]: entry for entry in kept.get(kind, [])}
    kept[kind] = list((old | {entry["what"]: measured | entry for entry in rows}).values())
    jobs.put(file, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def write(file: Path, rows: list[timing.Row]) -> None:
    file.parent.mkdir(exist_ok=True)
    jobs.put(file, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("pairs", nargs="*", help=f"only these: {', '.join(MODULES)}")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--book", action="store_true", help="the whole book against Jupyter Book")
    kinds.add_argument("--curves", action="store_true", help="how cost and memory grow with size")
    parser.add_argument("--keep", action="store_true", help="keep what was measured for the book's table")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.pairs) - set(MODULES):
        parser.error(f"unknown pair {min(unknown)!r}: choose from {', '.join(MODULES)}")
    torch.set_num_threads(1)
    if arguments.curves:
        kind, rows = "curves", growth.rows()
    elif arguments.book:
        kind, rows = "pairs", book.rows(())
    else:
        kind, rows = "pairs", pairs(arguments.pairs or list(MODULES))
        rows += [] if arguments.pairs else [*book.rows(), *gpu.rows()]
    write(BUILD / ("bench_curves.json" if kind == "curves" else "bench.json"), rows)
    if arguments.keep:
        keep(kind, rows)
    print(pd.DataFrame(rows).drop(columns="points", errors="ignore").to_markdown(index=False, floatfmt=".3g"))
    if kind == "curves":
        print("CPU time of one thread and memory above the start, as powers of the size, with 95 % intervals.")
        return 0
    print(
        "Seconds of CPU time, or of the clock where it says so. holds: the median ratio is at least the bound.\n"
        "load: processes that wanted to run, per core, over the minute before; above 1 the clock says little."
    )
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
