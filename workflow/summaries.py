"""What a run leaves: ``metrics.json`` for machines, and a Markdown summary for a page of CI.

Both name chapter, claim, source in the paper, measured value, band, seed and the command that runs it again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workflow import BUILD, Run, book, write_atomically
from workflow.pages import render
from workflow.report import VERSION, Report, rerun_command, shown_by


def write(report: Report, run: Run) -> None:
    """Write ``summary.md`` and ``metrics.json`` of a run; that of the book in ``_build`` as well."""
    run.reports.mkdir(parents=True, exist_ok=True)
    found = json.dumps(metrics(report), indent=1, ensure_ascii=False) + "\n"
    texts = {"summary.md": markdown(report), "metrics.json": found}
    try:
        for file in _files(run):
            write_atomically(file, texts[file.name])
    except OSError:
        withdraw(run)  # those that were written may say green
        raise


def withdraw(run: Run) -> None:
    """Remove the reports of an earlier run, so that one which does not get to its end leaves none."""
    for file in _files(run):
        file.unlink(missing_ok=True)


def _files(run: Run) -> list[Path]:
    found = [run.reports / name for name in ("summary.md", "metrics.json")]
    return [*found, BUILD / "metrics.json"] if run.profile == "book" else found


def metrics(report: Report) -> dict[str, Any]:
    """All that a run says, as ``book/_static/metrics.schema.json`` describes it.

    A record has its source and command beside what the chapter wrote.
    """
    return {
        "version": VERSION,
        "run": report.run,
        "records": [
            {**each.as_dict(), "source": _source(each.claim), "again": rerun_command(report.run, [each.chapter])}
            for each in report.records
        ],
        "verdicts": report.verdicts,
        "problems": [
            {**each._asdict(), "source": _source(each.claim), "again": rerun_command(report.run, shown_by(each))}
            for each in report.problems
        ],
    }


def markdown(report: Report) -> str:
    """A summary for a page of CI: the problems first, then the verdicts."""
    hold = {claim: [each.holds is True for each in report.records if each.claim == claim] for claim in report.verdicts}
    known = {"hold": hold, "source": _source, "again": rerun_command, "shown_by": shown_by}
    return render("summary.md.j2", **report._asdict(), **known)


def _source(claim: str) -> str:
    found = book.claims().get(claim)
    return book.origin(found) if found else ""
