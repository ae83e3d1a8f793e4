"""Execute, judge, keep, render: one run at a time in a checkout, and what it says in its last lines."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from nbutils import devices, profiles
from workflow import BUILD, ROOT, Run, book, report, sources, summaries

STOPPED = "the workflow stopped before its end: see the messages above"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def positive(text: str) -> int:
    """A whole number from 1, for the parser."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number


OPTIONS = argparse.ArgumentParser(add_help=False)  # how jobs are run: on what, how many at once, how long
OPTIONS.add_argument("--device", default="", help="auto, cpu or cuda; cpu unless the profile is gpu")
OPTIONS.add_argument("--jobs", type=positive, default=min(2, cores()), help="notebooks at once")
OPTIONS.add_argument("--time-limit", type=positive, default=3600, help="seconds for one notebook")


def asked(profile: str, seed: int, chapters: Sequence[str], options: argparse.Namespace) -> Run:
    """The run that a command line asks for; all chapters where none is named.

    Raises:
        ValueError: a profile, device, seed or chapter that is none.
        RuntimeError: CUDA was asked for, and there is none here.
    """
    profile, known = profiles.resolve(profile), book.chapters()
    device = devices.resolve(options.device or ("cuda" if profile == "gpu" else "cpu"))
    if unknown := [name for name in chapters if name not in known]:
        raise ValueError(f"unknown chapter {unknown[0]!r}: choose from {', '.join(known)}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed {seed}: a seed is a whole number from 0 to {2**31 - 1}")
    return Run(profile, seed, device, tuple(chapters or known))


def checkout() -> AbstractContextManager[object]:
    """This checkout for one run; it is free again when the process ends, however it does.

    Raises:
        RuntimeError: another run has it.
    """
    BUILD.mkdir(exist_ok=True)
    try:
        return FileLock(BUILD / ".lock").acquire(timeout=3)
    except Timeout:
        raise RuntimeError("another run is active in this checkout: wait for it") from None


def run(asked_for: Run, options: argparse.Namespace, html: bool = False) -> int:
    """Execute the chapters of a run, judge them and, unless they are some alone, keep reports and render the pages.

    Returns:
        0 only if all ran and every claim came out as expected.
    """
    whole = list(asked_for.chapters) == book.chapters()
    with checkout():
        result, done = _judged(asked_for, options)
        if whole:
            summaries.write(result, asked_for)
        html = html and whole and done
        if html and not snakemake("html", [asked_for], options):
            why = report.last_words(asked_for.logs / "pages.log")
            result, html = report.stopped(result, f"no pages: {why}"), False
            summaries.write(result, asked_for)
    return conclude(result, asked_for.html / "index.html" if html else None)


def page(asked_for: Run, options: argparse.Namespace) -> int:
    """Execute one chapter where that is needed, judge it, and render its page alone."""
    from workflow.pages import build

    with checkout():
        result, done = _judged(asked_for, options)
        made = [build.page(asked_for, name) for name in asked_for.chapters] if done else [None]
    return conclude(result, made[-1])


def _judged(asked_for: Run, options: argparse.Namespace) -> tuple[report.Report, bool]:
    """What a run says, and whether all of its jobs ended. Reports of an earlier run of all chapters go before it."""
    summaries.withdraw(asked_for)
    done = execute([asked_for], options)
    result = report.collect(asked_for)
    if done and rejudge(asked_for, options):
        result = report.collect(asked_for)
    if not done:
        result = report.stopped(result, "" if result.problems else STOPPED)
    return result, done


def execute(runs: Sequence[Run], options: argparse.Namespace) -> bool:
    """Execute what is not there, or is of an older text, of runs that differ in their seed. True if every job ended."""
    for each in runs:
        shutil.rmtree(each.logs, ignore_errors=True)  # a failure of an earlier run says nothing about this one
        sources.discard_older(each)
    return snakemake("notebooks", runs, options)


def rejudge(first: Run, options: argparse.Namespace) -> bool:
    """Run each chapter in which only checks fail that chance may have failed at two further seeds.

    Returns:
        Whether there was one. What does not end there excuses nothing.
    """
    there = [name for name in first.chapters if first.notebook(name).exists()]
    failed = tuple(name for name in there if report.may_be_chance(report.records_of(first.notebook(name))))
    if failed:
        print(f"looked at again, at two further seeds: {', '.join(failed)} (seed {first.seed})", flush=True)
        execute(first.further(failed), options)
    return bool(failed)


def snakemake(target: str, runs: Sequence[Run], options: argparse.Namespace) -> bool:
    """Run the workflow up to ``target`` (``html`` or ``notebooks``) in this process. True if every job succeeded."""
    from snakemake.cli import main

    first = runs[0]
    settings = {
        "profile": first.profile,
        "seeds": " ".join(str(each.seed) for each in runs),
        "device": first.device,
        "chapters": " ".join(first.chapters),
        "threads": max(1, cores() // options.jobs),
        "time_limit": options.time_limit,
    }
    arguments = [target, "--snakefile", str(ROOT / "Snakefile"), "--directory", str(ROOT)]
    arguments += ["--cores", str(options.jobs), "--resources", "gpu=1"]
    # Our own lock is released when the process dies; Snakemake's is not. Content decides, whatever its size.
    arguments += ["--keep-going", "--nolock", "--rerun-incomplete", "--max-checksum-file-size", "100MB"]
    arguments += ["--quiet", "host", "reason", "rules", "--config", *(f"{x}={y}" for x, y in settings.items())]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        main(arguments)
    except SystemExit as end:
        return not end.code
    return True


def conclude(result: report.Report, first_page: Path | None) -> int:
    """Print the last lines of a run and return its exit status.

    The very last line of a red run names the first cause, for those who see no more than that line.
    """
    run, read = result.run, [f"To read: {first_page.relative_to(ROOT)}"] if first_page else []
    if not result.problems:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(run["verdict_counts"].items()))
        hold = sum(record.holds is True for record in result.records)  # one left open does not
        noted = f", {run['noted']} noted (failed here, held at two further seeds)" if run["noted"] else ""
        print(f"GREEN: {hold} checks hold{noted}; {counts}", *read, sep="\n")
        return 0
    first = result.problems[0]
    print(report.table(result.problems))
    for log in sorted(Run(run["profile"], run["seed"]).logs.glob("*")):
        if log.stat().st_size:
            print(f"What failed, with its traceback: {log.relative_to(ROOT)}")
    names = sorted({name for problem in result.problems for name in report.shown_by(problem)})
    cause = " ".join(filter(None, (first.claim, first.what)))
    measured = f" (measured {first.measured}, band {first.band})" if first.measured else ""
    print(*read, f"to run it again: {report.rerun_command(run, names)}", sep="\n")
    count = f"{len(result.problems)} problem(s) in profile {run['profile']}"
    print(f"RED: {count}; the first: {first.chapter}: {cause}{measured}")
    return 1
