"""Execute, by Snakemake, chapters whose result is missing or of older code: one run at a time in a checkout."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager

from filelock import FileLock, Timeout

from workflow import BUILD, ROOT, Run
from workflow.collect import discard_outdated


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def positive_int(text: str) -> int:
    """The type of an option that is a whole number of at least 1.

    Raises:
        ValueError: the text is not a whole number.
        argparse.ArgumentTypeError: the number is below 1.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number


OPTIONS = argparse.ArgumentParser(add_help=False)  # for every command that executes chapters
OPTIONS.add_argument("--device", default="", help="auto, cpu or cuda; cpu unless the profile is gpu")
OPTIONS.add_argument("--jobs", type=positive_int, default=min(2, cores()), help="notebooks at once")
OPTIONS.add_argument("--time-limit", type=positive_int, default=3600, help="seconds for one notebook")


def lock_checkout() -> AbstractContextManager[object]:
    """Reserve this checkout for one run. The lock is released when the process ends, even if it is killed.

    Raises:
        RuntimeError: another run holds the lock.
    """
    BUILD.mkdir(exist_ok=True)
    try:
        return FileLock(BUILD / ".lock").acquire(timeout=3)
    except Timeout:
        raise RuntimeError("another run is active in this checkout: wait for it") from None


def chapters(runs: Sequence[Run], options: argparse.Namespace) -> bool:
    """Execute chapters with a missing or outdated result, in runs that differ only in seed. True if all succeeded."""
    for run in runs:
        shutil.rmtree(run.logs, ignore_errors=True)  # or failures of an earlier run would count as failures of this one
        discard_outdated(run)
    return _snakemake("notebooks", runs, options)


def pages(run: Run, options: argparse.Namespace) -> bool:
    """Render the pages of a run if they are outdated. Reports must be written before. True if it succeeded."""
    return _snakemake("html", [run], options)


def _snakemake(target: str, runs: Sequence[Run], options: argparse.Namespace) -> bool:
    """Run the workflow up to ``target`` in this process. True if every job succeeded."""
    from snakemake.cli import main

    first = runs[0]
    settings = {
        "profile": first.profile,
        "seeds": " ".join(str(run.seed) for run in runs),
        "device": first.device,
        "chapters": " ".join(first.chapters),
        "threads": max(1, cores() // options.jobs),
        "time_limit": options.time_limit,
    }
    arguments = [target, "--snakefile", str(ROOT / "Snakefile"), "--directory", str(ROOT)]
    arguments += ["--cores", str(options.jobs), "--resources", "gpu=1"]
    # No lock of Snakemake's, since it outlives a killed process, unlike ours. A checksum for files of any usual size,
    # since otherwise Snakemake compares the dates of large ones.
    arguments += ["--keep-going", "--nolock", "--rerun-incomplete", "--max-checksum-file-size", "100MB"]
    arguments += ["--quiet", "host", "reason", "rules"]
    arguments += ["--config", *(f"{name}={value}" for name, value in settings.items())]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        main(arguments)
    except SystemExit as exit_request:
        return not exit_request.code
    return True
