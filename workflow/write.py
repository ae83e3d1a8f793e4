"""What a run leaves in words: ``metrics.json`` for machines, a Markdown summary for a page of CI, its last lines.

All name chapter, claim, source in the paper, measured value, band, seed and the command that runs it again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbutils.claims.records import Record
from workflow import BUILD, ROOT, Run, book, write_atomically
from workflow.judge import Judgement, Problem
from workflow.pages.rendering import render

VERSION = 1  # of metrics.json: book/_static/metrics.schema.json
SEEDS = "seeds.json"  # of several seeds that ran together


def reports(judgement: Judgement, run: Run) -> None:
    """Write ``summary.md`` and ``metrics.json`` of a run of all chapters; that of the book in ``_build`` as well."""
    run.reports.mkdir(parents=True, exist_ok=True)
    for_machines = json.dumps(metrics(judgement), indent=1, ensure_ascii=False) + "\n"
    texts = {"summary.md": markdown(judgement), "metrics.json": for_machines}
    try:
        for file in _files(run):
            write_atomically(file, texts[file.name])
    except OSError:
        withdraw(run)  # those that were written may say green
        raise


def withdraw(run: Run) -> None:
    """Remove the reports of an earlier run, so that one which does not get to its end leaves none."""
    for file in [*_files(run), run.metrics_of_seed, run.reports / SEEDS]:
        file.unlink(missing_ok=True)


def _files(run: Run) -> list[Path]:
    files = [run.reports / "summary.md", run.metrics]
    return [*files, BUILD / "metrics.json"] if run.profile == "book" else files


def metrics(judgement: Judgement) -> dict[str, Any]:
    """All that a run says, as ``book/_static/metrics.schema.json`` describes it.

    A record has its source and command beside what the chapter wrote.
    """
    run = judgement.run
    records = [
        {**record.as_dict(), "source": _source(record.claim), "again": rerun_command(run, [record.chapter])}
        for record in judgement.records
    ]
    problems = [
        {**problem._asdict(), "source": _source(problem.claim), "again": rerun_command(run, shown_by(problem))}
        for problem in judgement.problems
    ]
    return {
        "version": VERSION,
        "run": run,
        "records": records,
        "verdicts": judgement.verdicts,
        "problems": problems,
    }


def load(place: Path) -> Judgement:
    """The judgement on a run as its ``metrics.json`` keeps it: pages, last line and exit status say the same.

    ``place`` is that file or the folder that has it.

    Raises:
        ValueError: there is none, or one of another version.
    """
    file = place / "metrics.json" if place.is_dir() else place
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        version = kept["version"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"no run in {place}: give a metrics.json or its folder, _build/smoke after a whole `make smoke`"
        ) from None
    if version != VERSION:
        raise ValueError(f"{file} has version {version}; this checkout reads version {VERSION}")
    problems = [Problem(*(problem[field] for field in Problem._fields)) for problem in kept["problems"]]
    records = [Record.from_dict(record) for record in kept["records"]]
    return Judgement(kept["run"], records, kept["verdicts"], problems)


def markdown(judgement: Judgement) -> str:
    """A summary for a page of CI: the problems first, then the verdicts."""
    holds = {
        claim: [record.holds is True for record in judgement.records if record.claim == claim]
        for claim in judgement.verdicts
    }
    functions = {"source": _source, "again": rerun_command, "shown_by": shown_by}
    return render("summary.md.j2", **judgement._asdict(), **functions, hold=holds)


def _source(claim: str) -> str:
    listed = book.claims().get(claim)
    return book.origin(listed) if listed else ""


# ---- last lines ----


def conclude(judgement: Judgement, first_page: Path | None) -> int:
    """Print the last lines of a run and return its exit status.

    The very last line of a red run names the first cause, for those who see no more than that line.
    """
    run = judgement.run
    to_read = [f"To read: {first_page.relative_to(ROOT)}"] if first_page else []
    if not judgement.problems:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(run["verdict_counts"].items()))
        hold = sum(record.holds is True for record in judgement.records)  # one left open does not
        noted = f", {run['noted']} noted (failed here, held at two further seeds)" if run["noted"] else ""
        print(f"GREEN: {hold} checks hold{noted}; {counts}", *to_read, sep="\n")
        return 0
    print(table(judgement.problems))
    print_logs(run)
    chapters = sorted({name for problem in judgement.problems for name in shown_by(problem)})
    print(*to_read, f"to run it again: {rerun_command(run, chapters)}", sep="\n")
    first = judgement.problems[0]
    cause = " ".join(filter(None, (first.claim, first.what)))
    measured = f" (measured {first.measured}, band {first.band})" if first.measured else ""
    count = f"{len(judgement.problems)} problem(s) in profile {run['profile']}"
    print(f"RED: {count}; the first: {first.chapter}: {cause}{measured}")
    return 1


def print_logs(run: Mapping[str, Any]) -> None:
    """Where the jobs of a run that failed left notebook and traceback."""
    for log in sorted(Run(run["profile"], run["seed"]).logs.glob("*")):
        if log.stat().st_size:
            print(f"What failed, with its traceback: {log.relative_to(ROOT)}")


def table(problems: Sequence[Problem]) -> str:
    """The problems as an aligned table for a terminal; the last lines of a red run."""
    rows = [("chapter", "claim", "problem", "measured", "band"), *problems]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def shown_by(problem: Problem) -> list[str]:
    """Chapters that show a problem again: its own and, as a verdict needs them all, those that decide its claim too."""
    deciding = set(book.claims().get(problem.claim, {}).get("chapters", ()))
    return sorted({problem.chapter} | deciding & set(book.chapters()))


def rerun_command(run: Mapping[str, Any], chapters: Iterable[str]) -> str:
    """The command that runs these chapters again as they were run. What is no chapter takes the whole run.

    >>> rerun_command({"profile": "smoke", "seed": 7, "device": "cpu"}, ["t5"])
    'make smoke SEED=7 CHAPTERS=t5'
    >>> rerun_command({"profile": "book", "seed": 0, "device": "cuda"}, ["workflow"])
    'make book SEED=0 DEVICE=cuda'
    >>> rerun_command({"profile": "gpu", "seed": 1, "device": "cuda"}, ["t5", "mask"])
    "make gpu SEED=1 CHAPTERS='t5 mask'"
    """
    names = list(chapters)
    words = [f"make {run['profile']} SEED={run['seed']}"]
    default_device = "cuda" if run["profile"] == "gpu" else "cpu"
    if run.get("device") and run["device"] != default_device:
        words.append(f"DEVICE={run['device']}")
    if set(names) <= set(book.chapters()):
        words.append(f"CHAPTERS={shlex.quote(' '.join(names))}")
    return " ".join(words)
