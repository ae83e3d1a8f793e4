"""Instruments on the book itself: ``python -m maintenance alarms --help``. See ``maintenance/README.md``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = ("alarms", "platforms", "mutants", "plan", "pretend")


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m maintenance {'|'.join(COMMANDS)} [--help]", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(f"maintenance.{argv[0]}").main(argv[1:])
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
