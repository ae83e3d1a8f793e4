"""Command line of the workflow: ``python -m workflow run|sync|baselines|times|new-chapter`` (the Makefile calls it)."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from nbutils import device as devices
from nbutils import profile as profiles
from workflow import BUILD, ROOT, baselines, chapters, html_folder, notebooks, report, run_folder


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lock(wait: float = 3.0) -> TextIO:
    """Take the one lock of this checkout. It goes with the process, however it ends.

    Raises:
        RuntimeError: another run holds it.
    """
    BUILD.mkdir(exist_ok=True)
    held = open(BUILD / ".lock", "a+")  # noqa: SIM115  kept open on purpose
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                held.seek(0)
                raise RuntimeError(
                    f"another run is active in this checkout ({held.read().strip()}): wait for it"
                ) from None
            time.sleep(0.1)
    held.truncate(0)
    held.write(f"process {os.getpid()}")
    held.flush()
    return held


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


def snakemake(
    target: str, *, profile: str, seeds: Sequence[int], device: str, names: Sequence[str], jobs: int, time_limit: int
) -> bool:
    """Run the workflow up to ``target`` (``html`` or ``notebooks``) in this process. True if every job succeeded."""
    from snakemake.cli import main

    for seed in seeds:  # a failure told of an earlier run says nothing about this one
        for error in (run_folder(profile, seed) / "logs").glob("*.error.json"):
            error.unlink()
    settings = {
        "profile": profile,
        "seeds": " ".join(map(str, seeds)),
        "device": device,
        "chapters": " ".join(names),
        "threads": max(1, cores() // jobs),
        "time_limit": time_limit,
    }
    gpus = devices.cuda_count() if device == "cuda" else 1
    arguments = [target, "--cores", str(jobs), "--resources", f"gpu={gpus}"]
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
        main(arguments)
    except SystemExit as end:
        return not end.code
    return True


def run(arguments: argparse.Namespace) -> int:
    """Execute the chapters of a profile, check their claims and, unless told otherwise, render the pages."""
    profile = profiles.resolve(arguments.profile)
    device = devices.resolve(arguments.device or ("cuda" if profile == "gpu" else "cpu"))
    names = check_chapters(arguments.chapters)
    if not 0 <= arguments.seed < 2**31:
        raise ValueError(f"seed {arguments.seed}: a seed is a whole number from 0 to {2**31 - 1}")
    held = lock()
    for path in notebooks.sync():
        print(f"updated {path.relative_to(ROOT)}")
    pages = arguments.html and not arguments.chapters
    done = snakemake(
        "html" if pages else "notebooks",
        profile=profile,
        seeds=[arguments.seed],
        device=device,
        names=names,
        jobs=arguments.jobs,
        time_limit=arguments.time_limit,
    )
    result = report.collect(profile, arguments.seed, names)
    if not arguments.chapters:
        report.write(result, BUILD / profile)
        if done and profile == "book":
            notebooks.write_readme_figure(run_folder(profile, arguments.seed))
        if profile == "book":
            shutil.copy(BUILD / profile / "metrics.json", BUILD / "metrics.json")
    held.close()
    return conclude(result, done, html_folder(profile) if pages else None)


def conclude(result: report.Report, done: bool, pages: Path | None) -> int:
    """Print the last lines of a run and return its exit status: 0 only if all ran and every claim came out as kept."""
    if result.problems:
        print(report.table(result.problems))
        print(f"RED: {len(result.problems)} problem(s) in profile {result.run['profile']}")
        for chapter in {problem.chapter for problem in result.problems if not problem.claim}:
            logs = run_folder(result.run["profile"], result.run["seed"]) / "logs"
            for log in (logs / f"{chapter}.ipynb", logs / f"{chapter}.log"):
                if log.exists():
                    print(f"What failed, with its traceback: {log.relative_to(ROOT)}")
        return 1
    if not done:
        print("RED: every claim holds, but the pages were not rendered; see the messages above")
        return 1
    counts = ", ".join(f"{count} {name}" for name, count in sorted(result.run["verdict_counts"].items()))
    print(f"GREEN: {len(result.records)} checks hold; {counts}")
    if pages:
        print(f"The book: {pages.relative_to(ROOT)}/index.html")
    return 0


def make_baselines(arguments: argparse.Namespace) -> int:
    """Run every chapter over seeds 1 … N and keep mean and spread of each measured value."""
    profile = profiles.resolve(arguments.profile)
    device = devices.resolve("cuda" if profile == "gpu" else "cpu")
    seeds, names = range(1, arguments.seeds + 1), chapters()
    held = lock()
    done = snakemake(
        "notebooks",
        profile=profile,
        seeds=seeds,
        device=device,
        names=names,
        jobs=arguments.jobs,
        time_limit=arguments.time_limit,
    )
    if not done:
        print("RED: not every notebook ran to its end; the baselines are as they were")
        return 1
    path = baselines.write(profile, seeds, names)
    held.close()
    print(f"wrote {path.relative_to(ROOT)} from {len(seeds)} seeds")
    return 0


def keep_times(profile: str) -> int:
    """Keep how long each chapter of the last run took, for the line that a chapter prints where it runs alone."""
    file = ROOT / "tests" / "baselines" / "times.json"
    times = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    folder = run_folder(profile, 0)
    found = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in chapters()
        if (folder / f"{name}.json").exists()
    }
    if not found:
        raise ValueError(f"no chapter of profile {profile} has been run with seed 0 here")
    kept = {name: {"seconds": round(of["seconds"]), "hardware": of["hardware"]} for name, of in found.items()}
    times[profile] = times.get(profile, {}) | kept
    file.write_text(json.dumps(times, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {len(kept)} times to {file.relative_to(ROOT)}")
    return 0


def new_chapter(name: str, title: str) -> int:
    """Write ``book/<name>.md`` from the template, with a claim of its name that is listed and expected."""
    if not re.fullmatch(r"\d\d-[a-z][a-z-]*", name):
        raise ValueError(f"{name!r}: a chapter is named by two digits and words, such as 15-my-question")
    target, claim = ROOT / "book" / f"{name}.md", name[3:]
    if target.exists() or claim in report.load_claims():
        raise ValueError(f"{name}: there is such a chapter, or a claim {claim!r}; choose another name")
    text = (ROOT / "workflow" / "chapter.md").read_text(encoding="utf-8")
    for word, value in (("NUMBER", str(int(name[:2]))), ("TITLE", title), ("CHAPTER", name), ("CLAIM", claim)):
        text = text.replace(word, value)
    text = text.replace(f"{claim}_end", f"{claim.replace('-', '_')}_end")
    target.write_text(text, encoding="utf-8")
    listed = f'\n- id: {claim}\n  chapters: [{name}]\n  source: "§N"\n  statement: >-\n    In your own words.\n'
    expected = f"{claim}:\n  verdict: confirmed\n  reason: Say why.\n"
    for file, more in (("book/claims.yml", listed), ("tests/baselines/verdicts.yml", expected)):
        with open(ROOT / file, "a", encoding="utf-8") as lines:
            lines.write(more)
    print(f"wrote book/{name}.md, its claim in book/claims.yml and the verdict in tests/baselines/verdicts.yml")
    print(f"next: add it to _toc.yml and the README, then `make smoke CHAPTERS={name}`")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workflow", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="execute, check, render")
    run_parser.add_argument("chapters", nargs="*", help="only these chapters, without rendering")
    run_parser.add_argument("--profile", default="book")
    run_parser.add_argument("--device", default="", help="auto, cpu or cuda; cpu unless the profile is gpu")
    run_parser.add_argument("--seed", type=int, default=0)
    run_parser.add_argument("--html", action="store_true", help="render the pages too")
    seeds_parser = commands.add_parser("baselines", help="run over seeds and write tests/baselines/<profile>.json")
    seeds_parser.add_argument("--profile", default="smoke")
    seeds_parser.add_argument("--seeds", type=int, default=20)
    for each in (run_parser, seeds_parser):
        each.add_argument("--jobs", type=int, default=min(2, cores()), help="notebooks at once")
        each.add_argument("--time-limit", type=int, default=3600, help="seconds for one notebook")
    commands.add_parser("sync", help="write book/notebooks from the sources")
    new_parser = commands.add_parser("new-chapter", help="a chapter from the template, with its claim")
    new_parser.add_argument("name", help="such as 15-my-question")
    new_parser.add_argument("title")
    times_parser = commands.add_parser("times", help="keep the last run's times in tests/baselines/times.json")
    times_parser.add_argument("--profile", default="book")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "sync":
            for path in notebooks.sync():
                print(f"updated {path.relative_to(ROOT)}")
            return 0
        if arguments.command == "new-chapter":
            return new_chapter(arguments.name, arguments.title)
        if arguments.command == "times":
            return keep_times(arguments.profile)
        return run(arguments) if arguments.command == "run" else make_baselines(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
