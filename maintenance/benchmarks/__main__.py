"""Run the pairs, the plain way and ours by turns, and print the table: how many times less time ours takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pandas as pd
import torch
from tqdm import tqdm

from maintenance.benchmarks import loops, mathematics, representations, series
from nbutils import devices

FILES = {"mathematics": mathematics, "series": series, "loops": loops, "representations": representations}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m maintenance.benchmarks", description=__doc__)
    parser.add_argument("files", nargs="*", help=f"only the pairs of these: {', '.join(FILES)}")
    files = parser.parse_args(argv).files
    if unknown := set(files) - set(FILES):
        parser.error(f"unknown file {min(unknown)!r}: choose from {', '.join(FILES)}")
    torch.set_num_threads(1)
    pairs = [pair for name in files or FILES for pair in FILES[name].PAIRS]
    table = pd.DataFrame([pair() for pair in tqdm(pairs, desc="pairs")])
    print(table.to_markdown(index=False, floatfmt=".3g"))
    print(f"\nMeasured on {devices.hardware('cpu')}, torch {torch.__version__}.")
    return 0 if table["holds"].all() else 1


if __name__ == "__main__":
    raise SystemExit(main())
