"""The command line: ``nbutils check NOTEBOOK …`` judges chapters that plain papermill ran."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nbutils import __version__
from nbutils.claims import junit
from nbutils.claims.check import judge


def parser() -> argparse.ArgumentParser:
    """The parser of the command and its options."""
    top = argparse.ArgumentParser(prog="nbutils", description="The chapters' module of the book on norm growth.")
    top.add_argument("--version", action="version", version=f"nbutils {__version__}, of norm-growth")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "Judge chapters that papermill ran. The exit status is 1 if a chapter is incomplete or a check fails."
    check = commands.add_parser("check", help=text, description=text)
    check.add_argument("notebook", nargs="+", type=Path, metavar="NOTEBOOK", help="a notebook that papermill wrote")
    check.add_argument("--strict", action="store_true", help="what is left open counts as failed")
    check.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML, for a page of CI")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the notebooks. Returns 0 if all are sound, 1 if a notebook is not, and 2 after an error."""
    options = parser().parse_args(arguments)
    try:
        judgements = [judge(notebook) for notebook in options.notebook]
        if options.junit:
            junit.write(options.junit, judgements, strict=options.strict)
    except (ValueError, OSError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"nbutils check: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("nbutils check: stopped", file=sys.stderr)
        return 130
    for judgement in judgements:
        print(*judgement.lines(options.strict), sep="\n")
    return 0 if all(judgement.is_sound(options.strict) for judgement in judgements) else 1


if __name__ == "__main__":
    raise SystemExit(main())
