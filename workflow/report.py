"""From the records in executed notebooks to verdicts and problems: what a run says, and what makes it red.

``workflow.summaries`` writes it down.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nbutils.claims import verdict
from nbutils.claims.check import records_of as records_of
from nbutils.claims.records import Record, format_band, format_number
from workflow import Run, book, commit, sources
from workflow.job import STOPPED

VERSION = 1  # of metrics.json: book/_static/metrics.schema.json
KILLED = "its job was killed before its end: by hand, or for want of memory"


class Problem(NamedTuple):
    """One reason why a run is red."""

    chapter: str
    claim: str
    what: str
    measured: str = ""
    band: str = ""


class Report(NamedTuple):
    """All that a run says."""

    run: dict[str, Any]
    records: list[Record]
    verdicts: dict[str, str]
    problems: list[Problem]


def audit(
    claims: Mapping[str, Mapping[str, Any]],
    records: Sequence[Record],
    chapters: Iterable[str],
    existing: Iterable[str] = (),
) -> tuple[dict[str, str], list[Problem]]:
    """Verdicts on the claims of ``chapters`` (those that ran to their end), and everything that makes the run red.

    A claim that another of the ``existing`` chapters decides too has no verdict until that one has run as well.
    """
    ran, problems = set(chapters), [_failed(record) for record in records if record.fails]
    by_claim: dict[str, list[Record]] = {}
    for record in records:
        by_claim.setdefault(record.claim, []).append(record)
    for name, found in by_claim.items():
        if name not in claims:
            problems.append(Problem(found[0].chapter, name, "checked, but not listed in claims.yml"))
            continue
        for chapter in {record.chapter for record in found} - set(claims[name]["chapters"]):
            problems.append(Problem(chapter, name, "checked in a chapter that claims.yml does not name for it"))
    verdicts = {}
    for name, claim in claims.items():
        here = ran & set(claim["chapters"])
        if not claim["chapters"] or set(claim["chapters"]) - set(existing):
            problems.append(Problem("claims.yml", name, "names no chapter, or one that is not there"))
        for chapter in sorted(here - {record.chapter for record in by_claim.get(name, ())}):
            problems.append(Problem(chapter, name, "listed in claims.yml, but the chapter does not check it"))
        fails = any(record.fails for record in by_claim.get(name, ()))
        if not here or (set(claim["chapters"]) & set(existing) - ran and not fails):
            continue
        verdicts[name] = verdict(by_claim.get(name, ()))
        if verdicts[name] not in claim["expected"].split(" or "):
            what = f"verdict {verdicts[name]}, but claims.yml expects {claim['expected']}"
            problems.append(Problem(sorted(here)[0], name, what))
    return verdicts, problems


def _failed(record: Record) -> Problem:
    again = ", ".join(f"{format_number(each['measured'])} at seed {each['seed']}" for each in record.further)
    what = f"{record.role} check does not hold: {record.check}" + (f" (looked at again: {again})" if again else "")
    measured, band = format_number(record.measured), format_band(record)
    return Problem(record.chapter, record.claim, what, measured, band)


def collect(run: Run) -> Report:
    """Read what the executed notebooks of one run say. A chapter without a result is a problem that names its cell.

    A result that is not of today's code is removed and refused: the next run makes it again.
    """
    edited = sources.discard_older(run)
    records, stats, ran, failed = [], [], [], []
    for chapter in run.chapters:
        try:
            found = json.loads(run.stats(chapter).read_text(encoding="utf-8"))
            records += judged(run, chapter)
        except FileNotFoundError:
            meanwhile = "it, or a module of it, changed while the run went on: run it again"
            failed.append(Problem(chapter, "", meanwhile if chapter in edited else why_not(run, chapter)))
        except ValueError as error:
            failed.append(Problem(chapter, "", f"its result is damaged ({error}): run it again"))
            run.notebook(chapter).unlink()
        else:
            ran.append(chapter)
            stats.append({"chapter": chapter, **found})
    verdicts, problems = audit(book.claims(), records, ran, book.chapters())
    facts = {
        "profile": run.profile,
        "seed": run.seed,
        "commit": commit(),
        "device": run.device,
        "hardware": stats[0]["hardware"] if stats else None,
        "versions": stats[0]["versions"] if stats else {},
        "chapters": ran,
        "notebooks": stats,
        "verdict_counts": dict(Counter(verdicts.values())),
        "kinds": dict(Counter(record.kind for record in records if record.kind)),
        "noted": sum(record.noted for record in records),
        "green": not (failed or problems),
    }
    return Report(facts, records, verdicts, failed + problems)


def why_not(run: Run, chapter: str) -> str:
    """Why a chapter has no result: from its failed notebook, or the last line of its log or of its trainings'."""
    if (log := run.logs / f"{chapter}.log").exists():
        words = last_words(log).removeprefix(f"{chapter}: ")
        return _failed_cell(run.logs / f"{chapter}.ipynb") if words.startswith("PapermillExecutionError") else words
    needed = set(sources.trainings_of(chapter))
    for family in sources.families():
        if needed & set(family) and (log := run.logs / f"{family[0]}.log").exists():
            return f"not run: in the job of its trainings, {last_words(log)}"
    return "no result: its job did not start"


def last_words(log: Path) -> str:
    """Why a job stopped, from the last line of its log that says so: a library may have more to say as it ends."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix(STOPPED) for line in reversed(lines) if line.startswith(STOPPED)), KILLED)


def _failed_cell(notebook: Path) -> str:
    """The cell that raised, by its number and first line of code."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    found = ((cell, output) for cell in cells for output in cell.get("outputs", ()) if output["output_type"] == "error")
    cell, error = next(found)
    lines = [line for line in "".join(cell["source"]).splitlines() if line.strip() and line[0] != "#"]
    what = f"cell [{cell['execution_count']}] {lines[0]} raised {error['ename']}: {error['evalue']}"
    return " ".join(what.split())[:500]


def may_be_chance(records: Iterable[Record]) -> bool:
    """Whether a chapter is to be judged at further seeds: only checks fail in it that chance may have failed."""
    failed = [record for record in records if record.holds is False]
    return bool(failed) and all(record.kind != "exact" for record in failed)


def judged(run: Run, chapter: str) -> list[Record]:
    """The records of a chapter. One that failed by chance, perhaps, has what ``run.further`` says, if that was run.

    It is ``noted``, and counts as held, if it holds at both: of three seeds one failed. A check that held here and
    fails at both further seeds, or is exact and fails at one, is added: it is as red as any.
    """
    runs = (run, *run.further())
    records = _records(run, chapter)
    if not may_be_chance(records) or not all(each.notebook(chapter).exists() for each in runs):
        return records
    if len({json.loads(each.stats(chapter).read_text(encoding="utf-8"))["made_from"] for each in runs}) > 1:
        return records  # not of the same code: nothing is excused
    others = [{record.key: record for record in _records(each, chapter)} for each in runs[1:]]
    found = [record if record.holds is not False else _with(record, others) for record in records]
    failed = {record.key for record in records if record.holds is False}
    for key in [key for key in others[0] if key in others[1] and key not in failed]:
        wrong = [other[key] for other in others if other[key].holds is False]
        if len(wrong) == len(others) or (wrong and wrong[0].kind == "exact"):
            seeds = ", ".join(str(each.seed) for each in wrong)
            found.append(replace(wrong[0], check=f"{wrong[0].check} (at seed {seeds})", anchor=None))
    return found


def _records(run: Run, chapter: str) -> list[Record]:
    """The records of a chapter, which must be of this run: a notebook may overwrite the parameters it was given."""
    records = records_of(run.notebook(chapter))
    for each in records:
        if (each.chapter, each.profile, each.seed, each.device) != (chapter, run.profile, run.seed, run.device):
            raise ValueError(f"a record of {each.chapter}, profile {each.profile}, seed {each.seed} on {each.device}")
    return records


def _with(record: Record, others: Sequence[Mapping[tuple[str, str], Record]]) -> Record:
    """A check that fails, with what the runs at further seeds measured: noted if it holds in all of them."""
    found = [other[record.key] for other in others if record.key in other]
    further = tuple({"seed": each.seed, "measured": each.measured, "holds": each.holds} for each in found)
    return replace(record, further=further, noted=sum(each.holds is True for each in found) == len(others))


def load(place: Path) -> Report:
    """The report of a run as its ``metrics.json`` keeps it: pages, last line and exit status say the same.

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
    records = [Record.of(record) for record in kept["records"]]
    return Report(kept["run"], records, kept["verdicts"], problems)


def stopped(report: Report, why: str) -> Report:
    """The report of a run whose workflow did not reach its end; red, whatever the notebooks say."""
    more = [Problem("workflow", "", why)] if why else []
    return report._replace(problems=more + report.problems, run={**report.run, "green": False})


def table(problems: Sequence[Problem]) -> str:
    """The problems as an aligned table for a terminal; the last lines of a red run."""
    rows = [("chapter", "claim", "problem", "measured", "band"), *(problem[:5] for problem in problems)]
    widths = [max(len(str(row[column])) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def shown_by(problem: Problem) -> list[str]:
    """Chapters that show a problem again: its own and, as a verdict needs them all, those that decide its claim too."""
    decide = book.claims().get(problem.claim, {}).get("chapters", ())
    return sorted({problem.chapter} | set(decide) & set(book.chapters()))


def rerun_command(run: Mapping[str, Any], chapters: Iterable[str]) -> str:
    """The command that runs these chapters again as they were run. What is no chapter takes the whole run.

    >>> rerun_command({"profile": "smoke", "seed": 7, "device": "cpu"}, ["05-t5"])
    'make smoke SEED=7 CHAPTERS=05-t5'
    >>> rerun_command({"profile": "book", "seed": 0, "device": "cuda"}, ["workflow"])
    'make book SEED=0 DEVICE=cuda'
    >>> rerun_command({"profile": "gpu", "seed": 1, "device": "cuda"}, ["01-a", "02-b"])
    "make gpu SEED=1 CHAPTERS='01-a 02-b'"
    """
    names = list(chapters)
    words = [f"make {run['profile']} SEED={run['seed']}"]
    if run.get("device") and run["device"] != ("cuda" if run["profile"] == "gpu" else "cpu"):
        words.append(f"DEVICE={run['device']}")
    if all(name[:2].isdigit() for name in names):
        words.append(f"CHAPTERS={shlex.quote(' '.join(names))}")
    return " ".join(words)
