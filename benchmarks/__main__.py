"""Run all pairs: ``python -m benchmarks``. Writes ``_build/bench.json`` and prints the table.

A pair is timed by CPU time of one thread, several times a side; the medians are compared. Both sides must agree on a
result that they share.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from benchmarks import projections, representations, series, tracking, trainings, walk

RESULT = Path(__file__).resolve().parent.parent / "_build" / "bench.json"
MODULES = (walk, projections, tracking, series, trainings, representations)
PAIRS = tuple(pair for module in MODULES for pair in module.PAIRS)


def main() -> int:
    torch.set_num_threads(1)
    rows = []
    for pair in tqdm(PAIRS, desc="pairs"):
        row = pair()
        row["ratio"] = row["plain_s"] / row["ours_s"]
        row["holds"] = bool(row["ratio"] >= row["bound"])
        rows.append(row)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(pd.DataFrame(rows).to_markdown(index=False, floatfmt=".4g"))
    print("CPU seconds; the plain side may be extrapolated from a shorter run. holds: the ratio is at least the bound.")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
