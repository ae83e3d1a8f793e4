"""Run the pairs, the plain way and ours by turns, print the table, and keep it with ``--keep``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from tqdm import tqdm

from benchmarks import kept, loops, mathematics, representations, series, timing

FILES = {"mathematics": mathematics, "series": series, "loops": loops, "representations": representations}


def pairs(names: Sequence[str]) -> list[timing.Row]:
    """Rows of the pairs in these files, with the modules of nbutils that each measures."""
    work = {pair: modules for name in names for pair, modules in FILES[name].PAIRS.items()}
    return [pair() | {"modules": modules} for pair, modules in tqdm(work.items(), desc="pairs")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("files", nargs="*", help=f"only the pairs of these: {', '.join(FILES)}")
    parser.add_argument("--keep", action="store_true", help="in benchmarks/kept.json, for the book")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.files) - set(FILES):
        parser.error(f"unknown file {min(unknown)!r}: choose from {', '.join(FILES)}")
    torch.set_num_threads(1)
    measured = kept.stamped(pairs(arguments.files or list(FILES)))
    if arguments.keep:
        kept.keep(measured)
    print(kept.table(measured))
    return 0 if all(row["holds"] for row in measured) else 1


if __name__ == "__main__":
    raise SystemExit(main())
