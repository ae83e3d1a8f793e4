"""Start Snakemake, judge what it made, and say so in the last lines; one run at a time in a checkout."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from nbutils import device as devices
from nbutils import profile as profiles
from workflow import (
    BUILD,
    ROOT,
    alarms,
    chapters,
    html_folder,
    jobs,
    notebooks,
    report,
    retry,
    run_folder,
    stale,
    summaries,
)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def checkout(wait: float = 3.0) -> Iterator[None]:
    """This checkout for one run, whose name stands in it; it is free again when the process ends, however it does.

    Raises:
        RuntimeError: another run has it.
    """
    BUILD.mkdir(exist_ok=True)
    lock = FileLock(BUILD / ".lock")
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        other = jobs.HOLDER.read_text(encoding="utf-8").partition("\n")[0] if jobs.HOLDER.exists() else "a process"
        raise RuntimeError(f"another run is active in this checkout ({other}): wait for it") from None
    try:
        jobs.put(jobs.HOLDER, f"process {os.getpid()} on {platform.node()}\nrun-{uuid.uuid4().hex}\n")
        yield
    finally:
        lock.release()


def check_chapters(names: Sequence[str]) -> list[str]:
    """The chapters to run; all of them where none is named.

    Raises:
        ValueError: a name that is no chapter.
    """
    known = chapters()
    for name in names:
        if name not in known:
            raise ValueError(f"unknown chapter {name!r}: choose from {', '.join(known)}")
    return list(names) or known


def bring_notebooks_in_step() -> None:
    """Write ``book/notebooks/`` from the sources and say which changed: what a chapter depends on is read there.

    Raises:
        ValueError: a chapter cites, or refers to, what is nowhere.
    """
    try:
        for path in notebooks.sync():
            print(f"updated {path.relative_to(ROOT)}")
    except KeyError as error:
        raise ValueError(
            f"a chapter names {error}, which is neither in references.bib nor a label of an equation or a figure"
        ) from None


def snakemake(
    target: str, *, profile: str, seeds: Sequence[int], names: Sequence[str], device: str, options: argparse.Namespace
) -> bool:
    """Run the workflow up to ``target`` (``html`` or ``notebooks``) in this process. True if every job succeeded."""
    from snakemake.cli import main

    bring_notebooks_in_step()
    for seed in seeds:  # a failure told of an earlier run says nothing about this one
        for error in (run_folder(profile, seed) / "logs").glob("*.error.json"):
            error.unlink()
    for path, why in stale.remove_unsound(profile, seeds, names, device):
        if why == "damaged":
            print(f"{path.relative_to(ROOT)} is damaged: it is made anew")
    local = options.executor == "local"
    gpus = devices.cuda_names() if local and device == "cuda" else ["0"]
    settings = {
        "profile": profile,
        "seeds": " ".join(map(str, seeds)),
        "device": device,
        "chapters": " ".join(names),
        "threads": max(1, cores() // options.jobs) if local else 1,
        "time_limit": options.time_limit,
        "run": jobs.holder(),
        "executor": options.executor,
        "gpus": ",".join(gpus),
    }
    arguments = [target]
    if local:
        arguments += ["--cores", str(options.jobs), "--resources", f"gpu={len(gpus)}"]
    else:
        arguments += ["--executor", options.executor, "--jobs", str(options.jobs), "--local-cores", "1"]
    arguments += ["--snakefile", str(ROOT / "Snakefile"), "--directory", str(ROOT)]
    # Our own lock is released when the process dies; Snakemake's is not. Content decides, whatever its size.
    arguments += ["--keep-going", "--nolock", "--rerun-incomplete", "--max-checksum-file-size", "100MB"]
    arguments += [
        "--quiet",
        "host",
        "reason",
        "rules",
        "--config",
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        main([*arguments, *shlex.split(options.executor_args)])
    except SystemExit as end:
        return not end.code
    return True


def where(options: argparse.Namespace, profile: str) -> str:
    """The device of a run. On a cluster only the scheduler knows where the GPUs are, so there nothing is looked for."""
    asked = getattr(options, "device", "") or ("cuda" if profile == "gpu" else "cpu")
    if options.executor != "local" and asked == "cuda":
        return asked
    return devices.resolve(asked)


def no_room(*others: Path) -> str:
    """Why nothing can be written in the folders of the workflow, the most frequent end of one; "" if it can."""
    for folder in (BUILD, ROOT / ".snakemake", *filter(Path.exists, others)):
        probe = folder / f".probe-{os.getpid()}"
        try:
            probe.write_bytes(bytes(1 << 16))
        except OSError as error:
            return f"{error.strerror} ({folder.relative_to(ROOT)})"
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
    return ""


def withdraw(profile: str) -> None:
    """Remove the reports of an earlier run of this profile."""
    summaries.withdraw(BUILD / profile)
    if profile == "book":
        (BUILD / "metrics.json").unlink(missing_ok=True)


STOPPED = "the workflow stopped before its end: see the messages above"


def run(arguments: argparse.Namespace) -> int:
    """Execute the chapters of a profile, check their claims and, unless told otherwise, render the pages."""
    profile = profiles.resolve(arguments.profile)
    device = where(arguments, profile)
    names = check_chapters(arguments.chapters)
    if not 0 <= arguments.seed < 2**31:
        raise ValueError(f"seed {arguments.seed}: a seed is a whole number from 0 to {2**31 - 1}")
    with checkout():
        result, pages = _run(arguments, profile, names, device)
    return conclude(result, pages)


def _run(
    arguments: argparse.Namespace, profile: str, names: Sequence[str], device: str
) -> tuple[report.Report, Path | None]:
    """What a run says, and where its pages are if it made any."""
    seed, whole = arguments.seed, not arguments.chapters
    retry.left_open(profile, seed, names)
    if whole:
        withdraw(profile)
    elif (BUILD / profile / "metrics.json").exists() and not summaries.say_red(BUILD / profile):
        withdraw(profile)  # some chapters alone get no reports, but a green one of all may be wrong from now on
        print("the green reports of all chapters are withdrawn: a run of all writes new ones")
    settings = {"profile": profile, "names": names, "device": device, "options": arguments}
    done = snakemake("notebooks", seeds=[seed], **settings)
    if done:
        look_again([seed], **settings)
    retry.edited(profile, seed, names, device)
    result = report.collect(profile, seed, names)
    if not done:
        result = report.stopped(result, no_room(run_folder(profile, seed)) or ("" if result.problems else STOPPED))
    if whole:
        result = keep(result, profile)
    pages = arguments.html and whole and done
    if pages and not snakemake("html", seeds=[seed], **settings):
        told = jobs.errors(run_folder(profile, seed) / "logs").get("pages", STOPPED)
        result = keep(report.stopped(result, f"no pages: {told}"), profile)
        pages = False
    made_from = {each["chapter"]: each["made_from"] for each in result.stats}
    if old := [name for name in made_from if made_from[name] != stale.sources_of_chapter(name)]:
        result = report.stopped(result, f"edited while the run went on: {', '.join(old)}; run it again")
        result = keep(result, profile) if whole else result
    return result, html_folder(profile) if pages else None


def keep(result: report.Report, profile: str) -> report.Report:
    """Write the reports of a run of all chapters; pages, last line and exit status follow them."""
    try:
        if profile == "book" and len(result.run["chapters"]) == len(chapters()):
            notebooks.write_readme_figure(run_folder(profile, result.run["seed"]))
        summaries.write(result, BUILD / profile)
        if profile == "book":
            jobs.put(BUILD / "metrics.json", (BUILD / profile / "metrics.json").read_text(encoding="utf-8"))
    except OSError as error:
        with contextlib.suppress(OSError):  # what is there by now may say green
            withdraw(profile)
        return report.stopped(result, f"the reports were not written: {error.strerror}")
    return result


def look_again(
    seeds: Iterable[int], *, profile: str, names: Sequence[str], device: str, options: argparse.Namespace
) -> None:
    """Run each chapter in which only derived or empirical checks fail at two further seeds (``report.looked_at``)."""
    for seed in seeds:
        folder = run_folder(profile, seed)
        present = [name for name in names if (folder / f"{name}.ipynb").exists()]
        found = [name for name in present if report.doubtful(report.records_of(folder / f"{name}.ipynb"))]
        if found:
            print(f"looked at again, at two further seeds: {', '.join(found)} (seed {seed})", flush=True)
            further = report.further(seed)
            snakemake("notebooks", profile=profile, seeds=further, names=found, device=device, options=options)


def conclude(result: report.Report, pages: Path | None) -> int:
    """Print the last lines of a run and return its exit status: 0 only if all ran and every claim came out as kept.

    The very last line of a red run names the first cause, for those who see no more than that line.
    """
    if result.problems:
        first = result.problems[0]
        print(report.table(result.problems))
        for chapter in {problem.chapter for problem in result.problems if not problem.claim}:
            logs = run_folder(result.run["profile"], result.run["seed"]) / "logs"
            for log in (logs / f"{chapter}.ipynb", logs / f"{chapter}.log"):
                if log.exists():
                    print(f"What failed, with its traceback: {log.relative_to(ROOT)}")
        cause = " ".join(filter(None, (first.claim, first.what)))
        measured = f" (measured {first.measured}, band {first.band})" if first.measured else ""
        count = f"{len(result.problems)} problem(s) in profile {result.run['profile']}"
        names = sorted({name for problem in result.problems for name in report.shown_by(problem)})
        print(
            f"to run it again: {report.again(result.run['profile'], result.run['seed'], result.run['device'], names)}"
        )
        print(f"RED: {count}; the first: {first.chapter}: {cause}{measured}")
        return 1
    counts = ", ".join(f"{count} {name}" for name, count in sorted(result.run["verdict_counts"].items()))
    hold = sum(record.holds is True for record in result.records)  # one left open does not
    noted = f", {result.run['noted']} noted (failed here, held at two further seeds)" if result.run["noted"] else ""
    print(f"GREEN: {hold} checks hold{noted}; {counts}")
    if pages:
        print(f"The book: {pages.relative_to(ROOT)}/index.html")
    return 0


BLOCK = 1  # seed after seed: Snakemake 9.27 wakes each second for every job it has started, a tenth of a core for 166


def measure_alarms(arguments: argparse.Namespace) -> int:
    """Run what fresh seeds still miss, keep what they say, and tell the share of red runs. May be broken off."""
    profile, names = profiles.resolve(arguments.profile), check_chapters(arguments.chapters)
    if arguments.seeds < 1 or arguments.first < 0:
        raise ValueError(f"--first {arguments.first} --seeds {arguments.seeds}: seeds start at 0, and one is needed")
    device = where(arguments, profile)
    found = alarms.load(profile, device)
    asked = range(arguments.first, arguments.first + arguments.seeds)
    with checkout():  # until all is judged: another run would change the notebooks that are read
        bring_notebooks_in_step()
        for start in range(0, len(asked), BLOCK):
            block = asked[start : start + BLOCK]
            groups: dict[tuple[int, ...], list[str]] = {}
            for name in names:
                groups.setdefault(tuple(alarms.missing(found, name, block)), []).append(name)
            for seeds, group in groups.items():
                if not seeds:
                    continue
                settings = {"profile": profile, "names": group, "device": device, "options": arguments}
                snakemake("notebooks", seeds=seeds, **settings)
                look_again(seeds, **settings)
                for name in group:
                    alarms.add(found, name, seeds)
                alarms.keep(found)
    print(alarms.markdown(found))
    if left := [name for name in names if alarms.missing(found, name, asked)]:
        print(f"RED: {no_room(BUILD) or STOPPED}; not every seed was run in {', '.join(left)}: run it again")
        return 1
    print(alarms.conclusion(found))
    return 0 if alarms.pooled(found).sound else 1
