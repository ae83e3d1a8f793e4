"""Command line of the workflow: ``python -m workflow run`` and others (the Makefile calls it)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nbutils import profile as profiles
from workflow import ROOT, cluster, compare, notebooks, pdf, template, trend
from workflow.launch import cores, measure_alarms, run


def positive(text: str) -> int:
    """A whole number from 1, for the parser."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workflow", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="execute, check, render")
    run_parser.add_argument("chapters", nargs="*", help="only these chapters, without pages and reports")
    run_parser.add_argument("--profile", default="book")
    run_parser.add_argument("--seed", type=int, default=0)
    run_parser.add_argument("--html", action="store_true", help="render the pages too")
    alarms_parser = commands.add_parser("alarms", help="the share of red runs, at fresh seeds")
    alarms_parser.add_argument("chapters", nargs="*", help="only these chapters")
    alarms_parser.add_argument("--profile", default="smoke")
    alarms_parser.add_argument("--first", type=int, default=9000, help="the first seed")
    alarms_parser.add_argument("--seeds", type=int, default=100)
    compare_parser = commands.add_parser("report", help="compare two runs: red for what B has lost against A")
    compare_parser.add_argument("a", type=Path, help="a metrics.json, or a folder that has one")
    compare_parser.add_argument("b", type=Path)
    compare_parser.add_argument("--json", type=Path, metavar="FILE", help="write what differs as JSON, too")
    compare_parser.add_argument("--junit", type=Path, metavar="FILE", help="and as JUnit XML")
    compare_parser.add_argument("--time", type=float, default=1.5, help="factor on CPU seconds that is red")
    compare_parser.add_argument("--memory", type=float, default=1.3, help="factor on peak memory that is red")
    trend_parser = commands.add_parser("trend", help="any number of runs as a page with a figure")
    trend_parser.add_argument("runs", type=Path, nargs="+", help="of each a metrics.json, or a folder that has one")
    trend_parser.add_argument("--out", type=Path, default=ROOT / "_build" / "trend.html")
    for each in (run_parser, alarms_parser):
        each.add_argument("--device", default="", help="auto, cpu or cuda; cpu unless the profile is gpu")
        each.add_argument("--jobs", type=positive, default=min(2, cores()), help="notebooks at once")
        each.add_argument("--executor", default="local", help="a Snakemake executor plugin, such as slurm")
        each.add_argument("--executor-args", default="", help="more arguments for Snakemake, as on its command line")
        each.add_argument("--time-limit", type=positive, default=3600, help="seconds for one notebook")
    pdf_parser = commands.add_parser("pdf", help="the rendered pages as one PDF")
    pdf_parser.add_argument("--profile", default="book")
    pdf_parser.add_argument("--check", action="store_true", help="only look for the browser that prints")
    commands.add_parser(
        "sync", help="write book/notebooks from the sources, with the numbers of the last green book run"
    )
    new_parser = commands.add_parser("new-chapter", help="a chapter from the template, with its claim")
    new_parser.add_argument("name", help="such as 20-my-question")
    new_parser.add_argument("title")
    record_parser = commands.add_parser("resources", help="keep time and memory of the jobs in _build")
    record_parser.add_argument("--profile", default="smoke")
    arguments = parser.parse_args(argv)
    try:
        match arguments.command:
            case "sync":
                notebooks.keep_numbers()
                for path in notebooks.sync():
                    print(f"updated {path.relative_to(ROOT)}")
                return 0
            case "new-chapter":
                return template.new_chapter(arguments.name, arguments.title)
            case "resources":
                print(f"wrote {cluster.record(profiles.resolve(arguments.profile)).relative_to(ROOT)}")
                return 0
            case "pdf" if arguments.check:
                print(f"to print with: {pdf.browser()}")
                return 0
            case "pdf":
                print(f"wrote {pdf.make(profiles.resolve(arguments.profile)).relative_to(ROOT)}")
                return 0
            case "report":
                factors = {"time": arguments.time, "memory": arguments.memory}
                return compare.run(arguments.a, arguments.b, as_json=arguments.json, junit=arguments.junit, **factors)
            case "trend":
                print(f"wrote {trend.write(arguments.runs, arguments.out)}")
                return 0
            case "alarms":
                return measure_alarms(arguments)
            case _:
                return run(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
