"""``python -m workflow.pages``; see ``build``. The last line of its log says why it failed, if it did."""

from __future__ import annotations

import argparse
import sys
import traceback

from workflow import Run, book
from workflow.pages import build


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workflow.pages", description=build.__doc__)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", choices=book.chapters(), metavar="CHAPTER", help="this page alone")
    arguments = parser.parse_args()
    chapters = (arguments.page,) if arguments.page else tuple(book.chapters())
    run = Run(arguments.profile, arguments.seed, chapters=chapters)
    run.logs.mkdir(parents=True, exist_ok=True)
    log = run.logs / "pages.log"
    log.unlink(missing_ok=True)
    try:
        print(build.make(run, log, arguments.page))
    except Exception as error:
        expected = isinstance(error, ValueError | RuntimeError)
        reason = " ".join(str(error if expected else f"{type(error).__name__}: {error}").split())
        with open(log, "a", encoding="utf-8") as text:
            text.write("\n" + ("" if expected else traceback.format_exc()) + reason + "\n")
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
