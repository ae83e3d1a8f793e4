"""Execute what is missing or of older code, by Snakemake: one run at a time in a checkout."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager

from filelock import FileLock, Timeout

from workflow import BUILD, ROOT, Run


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def positive(text: str) -> int:
    """A whole number from 1, for the parser."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number


OPTIONS = argparse.ArgumentParser(add_help=False)  # how jobs are run: on what, how many at once, how long
OPTIONS.add_argument("--device", default="", help="auto, cpu or cuda; cpu unless the profile is gpu")
OPTIONS.add_argument("--jobs", type=positive, default=min(2, cores()), help="notebooks at once")
OPTIONS.add_argument("--time-limit", type=positive, default=3600, help="seconds for one notebook")


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


def chapters(runs: Sequence[Run], options: argparse.Namespace) -> bool:
    """Execute the chapters of runs that differ in their seed, where that is needed. True if every job ended."""
    for run in runs:
        shutil.rmtree(run.logs, ignore_errors=True)  # a failure of an earlier run says nothing about this one
    return _snakemake("notebooks", runs, options)


def pages(run: Run, options: argparse.Namespace) -> bool:
    """Render the pages of a run whose report is written, where that is needed. True if it succeeded."""
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
    # Our own lock is released when the process dies; Snakemake's is not. Content decides, whatever its size.
    arguments += ["--keep-going", "--nolock", "--rerun-incomplete", "--max-checksum-file-size", "100MB"]
    arguments += ["--quiet", "host", "reason", "rules"]
    arguments += ["--config", *(f"{name}={value}" for name, value in settings.items())]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        main(arguments)
    except SystemExit as end:
        return not end.code
    return True
