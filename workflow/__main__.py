"""Command line of the workflow: ``python -m workflow run`` and others (the Makefile calls it)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workflow import ROOT, Run, kept, new_chapter, seeds
from workflow.execute import OPTIONS
from workflow.run import page, requested, run


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workflow", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in (("run", "execute, check, render"), ("page", "one chapter and its page alone")):
        command = commands.add_parser(name, help=does, parents=[OPTIONS])
        command.add_argument("chapters", nargs="*" if name == "run" else "+", help="these chapters")
        command.add_argument("--profile", default="book" if name == "run" else "smoke")
        command.add_argument("--seed", type=int, default=0)
        if name == "run":
            command.add_argument("--seeds", default="", help="several in one run, such as 0-19: a table of all")
            command.add_argument("--html", action="store_true", help="render the pages too; of all chapters only")
    command = commands.add_parser("compare", help="compare two runs: red for what B has lost against A")
    command.add_argument("a", type=Path, help="a metrics.json, or a folder that has one")
    command.add_argument("b", type=Path)
    command = commands.add_parser("pdf", help="the rendered pages as one PDF")
    command.add_argument("--profile", default="book")
    commands.add_parser("notebooks", help="write book/notebooks, with the numbers of the last green run")
    command = commands.add_parser("new-chapter", help="a chapter from the template, with its claim")
    command.add_argument("name", help="such as my-question")
    command.add_argument("title")
    try:
        return _do(parser.parse_args(argv))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _do(options: argparse.Namespace) -> int:
    match options.command:
        case "run" | "page":
            request = requested(options.profile, options.seed, options.chapters, options)
            if options.command == "page":
                return page(request, options)
            numbers = seeds.parse(options.seeds) if options.seeds else [options.seed]
            if options.html and len(numbers) > 1:
                raise ValueError("pages are of one seed: give --seed instead of --seeds, or leave --html out")
            requests = [requested(options.profile, seed, options.chapters, options) for seed in numbers]
            return run(requests, options, options.html)
        case "compare":
            from workflow import compare

            return compare.run(options.a, options.b)
        case "pdf":
            from workflow.pages import pdf

            print(f"wrote {pdf.print_book(Run(options.profile))}")
        case "notebooks":
            for path in kept.write_notebooks():
                print(f"updated {path.relative_to(ROOT)}")
        case _:
            new_chapter.write(options.name, options.title)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
