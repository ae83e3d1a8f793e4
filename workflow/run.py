"""A run from its command to its last lines: execute, collect, judge, write, render.

The first four are modules of these names; ``workflow.pages`` renders, and ``workflow.seeds`` compares several seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nbutils import devices, profiles
from workflow import Run, book, execute, seeds, write
from workflow.collect import NOT_STARTED, Collected, collect
from workflow.judge import Judgement, judge, stopped, to_rerun
from workflow.processes import last_words

INCOMPLETE = "the workflow stopped before its end: see the messages above"


def requested(profile: str, seed: int, chapters: Sequence[str], options: argparse.Namespace) -> Run:
    """The run that a command line asks for; all chapters where none is named.

    Raises:
        ValueError: an unknown profile, device or chapter, a seed out of range, or a device that is to be found out on
            other machines than this one.
        RuntimeError: CUDA was asked for, and there is none here, where the run is to be.
    """
    profile = profiles.resolve(profile)
    existing = book.chapters()
    device = options.device or ("cuda" if profile == "gpu" else "cpu")
    if not execute.on_other_machines():
        device = devices.resolve(device)
    elif device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r}: SNAKEMAKE_PROFILE runs jobs on other machines, so name it: cpu or cuda")
    if unknown := [name for name in chapters if name not in existing]:
        raise ValueError(f"unknown chapter {unknown[0]!r}: choose from {', '.join(existing)}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed {seed}: a seed is a whole number from 0 to {2**31 - 1}")
    return Run(profile, seed, device, tuple(chapters or existing))


def run(requests: Sequence[Run], options: argparse.Namespace, html: bool = False) -> int:
    """Execute the chapters of a run at each of its seeds, and judge them.

    Unless they are some chapters alone, write reports, and, of one seed, render the pages if asked to.

    Returns:
        0 only if all ran and every claim came out as expected.
    """
    request = requests[0]
    whole = list(request.chapters) == book.chapters()
    with execute.lock_checkout():
        judgements, complete = judged(requests, options)
        if len(requests) > 1:
            return seeds.conclude(requests, judgements)
        judgement = judgements[0]
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
        (judgement,), complete = judged([request], options)
        if complete:
            for name in request.chapters:
                first_page = build.page(request, name, judgement)
    return write.conclude(judgement, first_page)


def judged(requests: Sequence[Run], options: argparse.Namespace) -> tuple[list[Judgement], bool]:
    """The judgement at each seed, and whether every chapter has a result. Reports of an earlier run are withdrawn."""
    for request in requests:
        write.withdraw(request)
    results = measured(requests, options)
    judgements = []
    for result in results:
        judgement = judge(result.collected, result.reruns)
        if not result.ended and not judgement.problems:  # a chapter that failed says more
            judgement = stopped(judgement, INCOMPLETE)
        judgements.append(judgement)
    return judgements, all(result.ended and not result.collected.missing for result in results)


class Measured(NamedTuple):
    """What a run left at one seed."""

    ended: bool  # whether all its jobs did
    collected: Collected
    reruns: list[Collected]  # of chapters that chance may have failed, at two other seeds


def measured(requests: Sequence[Run], options: argparse.Namespace, *, rerun_if_stopped: bool = False) -> list[Measured]:
    """Execute runs that differ in seed, and collect them; then the reruns of chapters that chance may have failed.

    A run in which a job failed is red whatever reruns say, so it has none, unless ``rerun_if_stopped``. A rerun that
    does not end excuses nothing.
    """
    all_ended = execute.chapters(requests, options)
    results = {request: collect(request) for request in requests}
    ended = {request: all_ended or _failed_at_others_alone(request, results) for request in requests}
    others: dict[Run, tuple[Run, Run]] = {}
    for request, collected in results.items():
        doubtful = to_rerun(collected)
        if doubtful and (ended[request] or rerun_if_stopped):
            print(f"rerun at two other seeds: {', '.join(doubtful)} (seed {request.seed})", flush=True)
            others[request] = request.further(doubtful)
    if others:
        execute.chapters([other for pair in others.values() for other in pair], options)
        # Collected once more, now that the reruns are there: seeds of other code excuse nothing, so an edit in between
        # leaves the chapter without a result.
        results = {request: collect(request) for request in requests}
    return [
        Measured(ended[request], results[request], [collect(other) for other in others.get(request, ())])
        for request in requests
    ]


def _failed_at_others_alone(request: Run, results: Mapping[Run, Collected]) -> bool:
    """Whether a run that did not succeed failed at other seeds than this: jobs failed there, and none was left out.

    A job that did not start means that the run as a whole was stopped, as by Ctrl-C.
    """
    reasons = [reason for collected in results.values() for reason in collected.missing.values()]
    return bool(reasons) and NOT_STARTED not in reasons and not results[request].missing
