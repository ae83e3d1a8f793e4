"""A run from its command to its last lines: execute, collect, judge, write, render.

The first four are modules of these names; ``workflow.pages`` renders.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from nbutils import devices, profiles
from workflow import Run, book, execute, write
from workflow.collect import Collected, collect
from workflow.judge import Judgement, judge, stopped, to_rerun
from workflow.processes import last_words

INCOMPLETE = "the workflow stopped before its end: see the messages above"


def requested(profile: str, seed: int, chapters: Sequence[str], options: argparse.Namespace) -> Run:
    """The run that a command line asks for; all chapters where none is named.

    Raises:
        ValueError: an unknown profile, device or chapter, or a seed out of range.
        RuntimeError: CUDA was asked for, and there is none here.
    """
    profile = profiles.resolve(profile)
    existing = book.chapters()
    device = devices.resolve(options.device or ("cuda" if profile == "gpu" else "cpu"))
    if unknown := [name for name in chapters if name not in existing]:
        raise ValueError(f"unknown chapter {unknown[0]!r}: choose from {', '.join(existing)}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed {seed}: a seed is a whole number from 0 to {2**31 - 1}")
    return Run(profile, seed, device, tuple(chapters or existing))


def run(request: Run, options: argparse.Namespace, html: bool = False) -> int:
    """Execute the chapters of a run, judge them and, unless they are some alone, write reports and render the pages.

    Returns:
        0 only if all ran and every claim came out as expected.
    """
    whole = list(request.chapters) == book.chapters()
    with execute.lock_checkout():
        judgement, complete = judged(request, options)
        if whole:
            write.reports(judgement, request)
        rendered = html and whole and complete
        if rendered and not execute.pages(request, options):
            rendered = False
            judgement = stopped(judgement, f"no pages: {last_words(request.log('pages'))}")
            write.reports(judgement, request)
    return write.conclude(judgement, request.index if rendered else None)


def page(request: Run, options: argparse.Namespace) -> int:
    """Execute chapters where that is needed, judge them, and render the page of each alone."""
    from workflow.pages import build

    first_page = None
    with execute.lock_checkout():
        judgement, complete = judged(request, options)
        if complete:
            for name in request.chapters:
                first_page = build.page(request, name, judgement)
    return write.conclude(judgement, first_page)


def judged(request: Run, options: argparse.Namespace) -> tuple[Judgement, bool]:
    """The judgement on a run, and whether every chapter of it has a result. Reports of an earlier run are withdrawn."""
    write.withdraw(request)
    ended, collected, reruns = measured(request, options)
    judgement = judge(collected, reruns)
    if not ended and not judgement.problems:  # a chapter that failed says more
        judgement = stopped(judgement, INCOMPLETE)
    return judgement, ended and not collected.missing


def measured(
    request: Run, options: argparse.Namespace, *, rerun_if_stopped: bool = False
) -> tuple[bool, Collected, list[Collected]]:
    """Execute a run and collect it; and, of chapters that chance may have failed, the reruns at two other seeds.

    A run in which a job failed is red whatever reruns say, so it has none, unless ``rerun_if_stopped``.

    Returns:
        Whether all jobs of the run ended, what it left, and what the reruns left. A rerun that does not end excuses
        nothing.
    """
    ended = execute.chapters([request], options)
    collected = collect(request)
    doubtful = to_rerun(collected)
    if not doubtful or not (ended or rerun_if_stopped):
        return ended, collected, []
    print(f"rerun at two other seeds: {', '.join(doubtful)} (seed {request.seed})", flush=True)
    others = request.further(doubtful)
    execute.chapters(others, options)
    # Collected once more, now that the reruns are there: seeds of other code excuse nothing, so an edit in between
    # leaves the chapter without a result.
    return ended, collect(request), [collect(other) for other in others]
