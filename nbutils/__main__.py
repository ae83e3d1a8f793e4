"""The command line: ``nbutils check NOTEBOOK …`` judges chapters that plain papermill ran."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nbutils import __version__
from nbutils.claims.check import judge

MOVED = ("norms", "report", "saturation", "heads", "degree")  # commands of normgrowth


def parser() -> argparse.ArgumentParser:
    """The command and its options."""
    top = argparse.ArgumentParser(prog="nbutils", description="The chapters' module of the book on norm growth.")
    top.add_argument("--version", action="version", version=f"nbutils {__version__}, of norm-growth")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    does = "Judge chapters that papermill ran. Ends with 1 if one did not run to its end, or a check of it fails."
    check = commands.add_parser("check", help=does, description=does)
    check.add_argument("notebook", nargs="+", type=Path, metavar="NOTEBOOK", help="what papermill wrote")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the notebooks. Returns 0; 1 if one is not sound; 2 and says why, if nothing can be done."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in MOVED:
        print(f"nbutils {given[0]}: this is `normgrowth {given[0]}` now, with the same options", file=sys.stderr)
        return 2
    options = parser().parse_args(given)
    try:
        judged = [judge(notebook) for notebook in options.notebook]
    except (ValueError, OSError) as error:
        print(f"nbutils check: {error}", file=sys.stderr)
        return 2
    for _, lines in judged:
        print(*lines, sep="\n")
    return 0 if all(sound for sound, _ in judged) else 1


if __name__ == "__main__":
    raise SystemExit(main())
