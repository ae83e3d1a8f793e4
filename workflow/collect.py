"""Collect the result of every chapter of a run: its records and stats, or the reason why there are none.

Whether a result is of today's code is asked here, and nowhere else. One that is not is removed: before a run, so that
Snakemake makes it again even if its own records are lost, and after it, because code may be edited meanwhile. Pages of
results that were edited after they were judged are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbutils import shared_runs
from nbutils.claims.check import records_of
from nbutils.claims.records import Record
from workflow import Run, sources
from workflow.processes import last_words

NOT_STARTED = "no result: its job did not start"
EDITED = "it, or a module of it, was edited after it began to run: run it again"


@dataclass(frozen=True)
class Collected:
    """The results of a run by chapter, in the order of the run."""

    run: Run
    records: dict[str, list[Record]] = field(default_factory=dict)  # of the chapters that have a result
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the same chapters: time, memory, versions
    missing: dict[str, str] = field(default_factory=dict)  # reasons, for the chapters without a result


def collect(run: Run) -> Collected:
    """Read the executed notebooks of a run; outdated and damaged results are removed."""
    outdated = discard_outdated(run)
    collected = Collected(run)
    for chapter in run.chapters:
        try:
            stats = json.loads(run.stats(chapter).read_text(encoding="utf-8"))
            records = _records(run, chapter)
        except FileNotFoundError:
            collected.missing[chapter] = _why_missing(run, chapter, outdated)
            run.notebook(chapter).unlink(missing_ok=True)  # or Snakemake would never make the stats that it lacks
        except ValueError as error:
            collected.missing[chapter] = f"its result is damaged ({error}): run it again"
            run.notebook(chapter).unlink()
        else:
            collected.records[chapter] = records
            collected.stats[chapter] = stats
    return collected


def discard_outdated(run: Run) -> set[str]:
    """Remove results of other code or another device, of chapters and trainings, and return the names of these.

    The result of a chapter is removed as well if one of its trainings is.
    """
    today = sources.hashes()
    outdated: set[str] = set()
    for training in shared_runs.names():
        stats = run.training_stats(training)
        if stats.exists() and not _is_current(stats, today[training], run.device):
            outdated.add(training)
            stats.unlink()
    for chapter in run.chapters:
        stats = run.stats(chapter)
        current = _is_current(stats, today[chapter], run.device) and outdated.isdisjoint(sources.trainings_of(chapter))
        if stats.exists() and not current:
            outdated.add(chapter)
            stats.unlink()
            run.notebook(chapter).unlink(missing_ok=True)
    return outdated


def edited(chapters: Iterable[str], stats_of_run: Iterable[Mapping[str, Any]]) -> list[str]:
    """The chapters whose result, by the stats that a judgement keeps, is not of today's code any more."""
    made_from = {stats["chapter"]: stats["made_from"] for stats in stats_of_run}
    today = sources.hashes()
    return [name for name in chapters if made_from.get(name) != today[name]]


def _is_current(stats: Path, made_from: str, device: str) -> bool:
    """Whether a file of stats is of this hash and this device; False if the file is absent or damaged."""
    try:
        stored = json.loads(stats.read_text(encoding="utf-8"))
        return (stored["made_from"], stored["device"]) == (made_from, device)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _records(run: Run, chapter: str) -> list[Record]:
    """The records of a chapter.

    Raises:
        ValueError: a record is of another run, as when a notebook overwrites the parameters that it was given.
        FileNotFoundError: there is no notebook.
    """
    records = records_of(run.notebook(chapter))
    for record in records:
        if (record.chapter, record.profile, record.seed, record.device) != (chapter, run.profile, run.seed, run.device):
            origin = f"{record.chapter}, profile {record.profile}, seed {record.seed} on {record.device}"
            raise ValueError(f"a record of {origin}")
    return records


def _why_missing(run: Run, chapter: str, outdated: set[str]) -> str:
    """Why a chapter has no result: from its failed notebook, or the last line of its log or of its trainings'.

    The log of a chapter whose result is ``outdated`` says nothing: that job ended well.
    """
    log = run.log(chapter)
    if log.exists() and chapter not in outdated:
        reason = last_words(log).removeprefix(f"{chapter}: ")
        raised = reason.startswith("PapermillExecutionError")
        return _failed_cell(run.unfinished(chapter)) if raised else reason
    untrained = {name for name in sources.trainings_of(chapter) if not run.training_stats(name).exists()}
    for family in sources.families():
        log = run.log(family[0])
        if untrained & set(family) and log.exists():
            return f"not run: in the job of its trainings, {last_words(log)}"
    return EDITED if chapter in outdated else NOT_STARTED


def _failed_cell(notebook: Path) -> str:
    """The cell that raised, by its number and first line of code."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = ((cell, output) for cell in cells for output in cell.get("outputs", ()))
    cell, error = next((cell, output) for cell, output in outputs if output["output_type"] == "error")
    code = [line for line in "".join(cell["source"]).splitlines() if line.strip() and not line.startswith("#")]
    reason = f"cell [{cell['execution_count']}] {code[0]} raised {error['ename']}: {error['evalue']}"
    return " ".join(reason.split())[:500]
