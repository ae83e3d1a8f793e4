"""Execute, by Snakemake, chapters whose result is missing or of older code: one run at a time in a checkout.

Where jobs run, a profile of Snakemake's may say: ``SNAKEMAKE_PROFILE=slurm`` makes each a job of that cluster.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from uuid import uuid4

from filelock import FileLock, Timeout

from workflow import BUILD, ROOT, TOKEN, Run, costs, gpus, in_words, processes, write_atomically
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


ELSEWHERE = "elsewhere"  # begins the name of a run whose jobs are on other machines, and outlive it
OPTIONS = argparse.ArgumentParser(add_help=False)  # for every command that executes chapters
OPTIONS.add_argument("--device", default="", help="auto, cpu or cuda; cpu unless the profile is gpu")
OPTIONS.add_argument("--jobs", type=positive_int, help="notebooks at once; 2 on this machine, or one for each GPU")
OPTIONS.add_argument("--gpus", type=positive_int, help="GPUs at once; all that this machine shows")
OPTIONS.add_argument("--time-limit", type=positive_int, default=3600, help="seconds for one notebook")


def on_other_machines() -> bool:
    """Whether a profile of Snakemake's says where jobs run. What this machine has says nothing of those then."""
    return os.environ.get("SNAKEMAKE_PROFILE", "none") not in ("", "none")


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
    """Execute chapters with a missing or outdated result, in runs that differ in seed. True if all succeeded."""
    for run in runs:
        shutil.rmtree(run.logs, ignore_errors=True)  # or failures of an earlier run would count as failures of this one
        discard_outdated(run)
    succeeded = _snakemake("notebooks", runs, options)
    costs.remember(runs)
    return succeeded


def pages(run: Run, options: argparse.Namespace) -> bool:
    """Render the pages of a run if they are outdated. Reports must be written before. True if it succeeded."""
    return _snakemake("html", [run], options)


def _snakemake(target: str, runs: Sequence[Run], options: argparse.Namespace) -> bool:
    """Run the workflow up to ``target`` in this process. True if every job succeeded."""
    from snakemake.cli import main

    limits, threads = _placed_by_profile(options) if on_other_machines() else _placed_here(options, runs[0].device)
    settings = {
        "profile": runs[0].profile,
        "device": runs[0].device,
        "runs": in_words(runs),
        "threads": threads,
        "time_limit": options.time_limit,
        "token": f"{ELSEWHERE if on_other_machines() else 'here'}-{uuid4().hex}",
    }
    arguments = [target, "--snakefile", str(ROOT / "Snakefile"), "--directory", str(ROOT), *limits]
    # No lock of Snakemake's, since it outlives a killed process, unlike ours. A checksum for files of any usual size,
    # since otherwise Snakemake compares the dates of large ones.
    arguments += ["--keep-going", "--nolock", "--rerun-incomplete", "--max-checksum-file-size", "100MB"]
    # A job moves whole results into place itself: what Snakemake would remove of one that fails is another's.
    arguments += ["--keep-incomplete"]
    arguments += ["--quiet", "host", "reason", "rules"]
    arguments += ["--config", *(f"{name}={value}" for name, value in settings.items())]
    with _announced(str(settings["token"])):
        try:
            main(arguments)
        except SystemExit as exit_request:
            return not exit_request.code
    return True


@contextmanager
def _announced(name: str) -> Iterator[None]:
    """Let jobs of an earlier run know that another has begun; those on other machines get time to see it.

    A run that was killed did not take its name back.
    """
    was_killed = TOKEN.exists() and TOKEN.read_text(encoding="utf-8").startswith(ELSEWHERE)
    write_atomically(TOKEN, name)
    if was_killed:
        seconds = 2 * processes.POLL
        print(f"the last run here was killed: {seconds:.0f} s for its jobs to end", flush=True)
        time.sleep(seconds)
    yield
    TOKEN.unlink(missing_ok=True)


def _placed_here(options: argparse.Namespace, device: str) -> tuple[list[str], int]:
    """Arguments of Snakemake's that limit what runs at once on this machine, and the threads of each job."""
    on_gpu = device == "cuda"
    gpu_count = (options.gpus or len(gpus.visible())) if on_gpu else 0
    jobs = options.jobs or max(1, gpu_count if on_gpu else min(2, cores()))
    threads = max(1, cores() // jobs)
    return ["--cores", str(jobs * threads), "--resources", f"gpu={gpu_count}"], threads


def _placed_by_profile(options: argparse.Namespace) -> tuple[list[str], int]:
    """The same where a profile says it: limits are those that were asked for. Threads may be set by the profile."""
    limits = ["--jobs", str(options.jobs)] if options.jobs else []
    if options.gpus:
        limits += ["--resources", f"gpu={options.gpus}"]
    return limits, 1
