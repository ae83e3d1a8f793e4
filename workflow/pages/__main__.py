"""``python -m workflow.pages``; see ``build``. Where it fails, the last line of ``logs/pages.log`` says why."""

from __future__ import annotations

import argparse
import sys
import traceback

from workflow import Run, book
from workflow.job import die_with
from workflow.pages import build


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workflow.pages", description=build.__doc__)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parent", type=int, default=0, help="process of the run; this job ends with it")
    arguments = parser.parse_args()
    if arguments.parent:
        die_with(arguments.parent)
    run = Run(arguments.profile, arguments.seed, chapters=tuple(book.chapters()))
    log = run.logs / "pages.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    try:
        build.pages(run)
    except Exception as error:
        expected = isinstance(error, ValueError | RuntimeError)
        reason = " ".join(str(error if expected else f"{type(error).__name__}: {error}").split())
        with open(log, "a", encoding="utf-8") as text:
            text.write("" if expected else traceback.format_exc())
            text.write(f"\n{reason}\n")
        print(reason, file=sys.stderr)
        return 1
    log.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
