"""From the records in executed notebooks to verdicts and problems: what a run says, and what makes it red.

``workflow.summaries`` writes it down.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nbutils.claims import MIME, VERDICTS, verdict
from nbutils.claims.records import Record, format_band, format_number
from workflow import ROOT, cluster, git, jobs, run_folder
from workflow import chapters as all_chapters

FIELDS = {"id", "chapters", "source", "statement", "corrected", "ours", "planned"}


def alarms_file(profile: str, device: str = "cpu") -> Path:
    """What ``make alarms`` keeps of a profile, for each device apart."""
    return ROOT / "tests" / "baselines" / f"alarms-{profile}{'' if device == 'cpu' else f'-{device}'}.json"


class Problem(NamedTuple):
    """One reason why a run is red."""

    chapter: str
    claim: str
    what: str
    measured: str = ""
    band: str = ""
    baseline: str = ""


class Report(NamedTuple):
    """All that a run says."""

    run: dict[str, Any]
    records: list[Record]
    verdicts: dict[str, str]
    problems: list[Problem]
    stats: list[dict[str, Any]]


@cache
def load_claims(file: Path = ROOT / "book" / "claims.yml") -> dict[str, dict[str, Any]]:
    """The listed claims by id, in order.

    Raises:
        ValueError: a duplicated id, an unknown or missing field; the message names the claim.
    """
    claims: dict[str, dict[str, Any]] = {}
    for entry in _entries(file, list):
        name = entry.get("id") if isinstance(entry, dict) else None
        if not name:
            raise ValueError(f"{file.name}: an entry has no id: {entry}")
        if name in claims:
            raise ValueError(f"{file.name}: claim {name!r} is listed twice")
        unknown, missing = set(entry) - FIELDS, {"chapters", "source", "statement"} - set(entry)
        if unknown or missing:
            wrong = [f"unknown field {field!r}" for field in sorted(unknown)] + [
                f"missing field {field!r}" for field in sorted(missing)
            ]
            raise ValueError(f"{file.name}: claim {name!r}: {', '.join(wrong)}")
        claims[name] = entry
    return claims


def _entries(file: Path, kind: type) -> Any:
    """What a YAML file lists; an empty one lists nothing.

    Raises:
        ValueError: it is no YAML, or neither a list nor a mapping as ``kind`` wants.
    """
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8")) or kind()
    except yaml.YAMLError as error:
        raise ValueError(f"{file.name}: {' '.join(str(error).split())}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{file.name}: a {kind.__name__} of entries is expected; got {str(found)[:80]}")
    return found


@cache
def load_verdicts(file: Path = ROOT / "tests" / "baselines" / "verdicts.yml") -> dict[str, str]:
    """The expected verdict of each claim; ``open or refined`` where it is open only if something cannot be had.

    Raises:
        ValueError: a verdict that is none of the four, or that gives no reason.
    """
    kept = _entries(file, dict)
    for claim, entry in kept.items():
        said = entry if isinstance(entry, dict) else {}
        if not {*str(said.get("verdict")).split(" or ")} <= {*VERDICTS} or not said.get("reason"):
            raise ValueError(
                f"{file.name}: {claim!r} needs a verdict ({', '.join(VERDICTS)}) and a reason; got {entry}"
            )
    return {claim: entry["verdict"] for claim, entry in kept.items()}


def records_of(notebook: Path) -> list[Record]:
    """The records of the checks in an executed notebook, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]  # nbformat would check each cell, 15 ms a chapter
    outputs = (output for cell in cells for output in cell.get("outputs", ()))
    return [Record.of(output["data"][MIME]) for output in outputs if MIME in output.get("data", {})]


def audit(
    claims: dict[str, dict[str, Any]],
    expected: dict[str, str],
    records: Sequence[Record],
    chapters: Iterable[str],
    existing: Iterable[str] = (),
) -> tuple[dict[str, str], list[Problem]]:
    """Verdicts on the claims of ``chapters`` (those that ran to their end), and everything that makes the run red.

    A claim that another of the ``existing`` chapters decides too has no verdict until that one has run as well.
    """
    ran, problems = set(chapters), []
    by_claim: dict[str, list[Record]] = {}
    for record in records:
        by_claim.setdefault(record.claim, []).append(record)
        if record.fails:
            what = f"{record.role} check does not hold: {record.check}{_again_text(record)}"
            problems.append(
                Problem(
                    record.chapter,
                    record.claim,
                    what,
                    format_number(record.measured),
                    format_band(record),
                    format_baseline(record),
                )
            )
    for name, found in by_claim.items():
        where = found[0].chapter
        if name not in claims:
            problems.append(Problem(where, name, "checked, but not listed in claims.yml"))
        elif claims[name].get("planned"):
            problems.append(Problem(where, name, "checked, but marked as planned in claims.yml"))
        else:
            for chapter in {record.chapter for record in found} - set(claims[name]["chapters"]):
                problems.append(Problem(chapter, name, "checked in a chapter that claims.yml does not name for it"))
    verdicts = {}
    for name, claim in claims.items():
        here = ran & set(claim["chapters"])
        if claim.get("planned") or not here:
            continue
        for chapter in sorted(here - {record.chapter for record in by_claim.get(name, ())}):
            problems.append(Problem(chapter, name, "listed in claims.yml, but the chapter does not check it"))
        if set(claim["chapters"]) & set(existing) - ran:
            continue
        verdicts[name] = verdict(by_claim.get(name, ()))
        if name not in expected:
            problems.append(Problem(sorted(here)[0], name, f"verdict {verdicts[name]} has no entry in verdicts.yml"))
        elif verdicts[name] not in expected[name].split(" or "):
            what = f"verdict {verdicts[name]}, but verdicts.yml has {expected[name]}"
            problems.append(Problem(sorted(here)[0], name, what))
    return verdicts, problems


def collect(profile: str, seed: int, chapters: Sequence[str]) -> Report:
    """Read what the executed notebooks of one run say. A chapter without a result is a problem that names its cell.

    Where a chapter was looked at again, its notebooks at ``further(seed)`` are read too.
    """
    folder = run_folder(profile, seed)
    records, stats, ran, failed = [], [], [], []
    said = jobs.errors(folder / "logs")
    failed += [Problem(job, "", what) for job, what in said.items() if job not in all_chapters()]  # shared trainings
    for chapter in chapters:
        notebook, missing = folder / f"{chapter}.ipynb", sorted(set(said) & cluster.trained_for(chapter, profile))
        if chapter in said:
            failed.append(Problem(chapter, "", said[chapter]))
        elif missing:
            failed.append(Problem(chapter, "", f"not run: the training {missing[0]} failed"))
        elif notebook.exists():
            ran.append(chapter)
            records += map(with_baseline, looked_at(profile, seed, chapter))
            stats.append(json.loads((folder / f"{chapter}.json").read_text(encoding="utf-8")))
        else:
            failed.append(Problem(chapter, "", "no result: its job did not start, or left no word"))
    verdicts, problems = audit(load_claims(), load_verdicts(), records, ran, all_chapters())
    run = {
        "profile": profile,
        "seed": seed,
        "commit": commit(),
        "device": stats[0]["device"] if stats else None,
        "hardware": stats[0]["hardware"] if stats else None,
        "versions": stats[0]["versions"] if stats else {},
        "chapters": ran,
        "notebooks": stats,
        "verdict_counts": dict(Counter(verdicts.values())),
        "kinds": dict(Counter(record.kind for record in records if record.kind)),
        "noted": sum(record.noted for record in records),
        "green": not (failed or problems),
    }
    return Report(run, records, verdicts, failed + problems, stats)


def further(seed: int) -> list[int]:
    """The two seeds at which a chapter is looked at again, far from any that a person would name.

    >>> further(0)
    [1000003, 2000006]
    """
    return [(seed + step) % 2**31 for step in (1_000_003, 2_000_006)]


def doubtful(records: Iterable[Record]) -> bool:
    """Whether a chapter is to be looked at again: only checks fail in it that chance may have failed."""
    failed = [record for record in records if record.holds is False]
    return bool(failed) and all(record.kind != "exact" for record in failed)


def looked_at(profile: str, seed: int, chapter: str) -> list[Record]:
    """The records of a chapter. One that failed by chance, perhaps, has what ``further`` seeds say, if they were run.

    It is ``noted``, and counts as held, if it holds at both: of three seeds one failed. A check that held here and
    fails at both further seeds, or is exact and fails at one, is added: it is as red as any.
    """
    records = records_of(run_folder(profile, seed) / f"{chapter}.ipynb")
    if not doubtful(records):
        return records
    runs = [run_folder(profile, each) for each in (seed, *further(seed))]
    if not all((run / f"{chapter}.ipynb").exists() for run in runs) or len(_texts(runs, chapter)) > 1:
        return records  # not looked at, or not the same text: nothing is excused
    others = [{r.key: r for r in records_of(run / f"{chapter}.ipynb")} for run in runs[1:]]
    judged = [record if record.holds is not False else _with(record, others) for record in records]
    failed = {record.key for record in records if record.holds is False}
    for key in [key for key in others[0] if key in others[1] and key not in failed]:
        found = [other[key] for other in others if other[key].holds is False]
        if len(found) == len(others) or (found and found[0].kind == "exact"):
            told = ", ".join(str(each.seed) for each in found)
            judged.append(replace(found[0], check=f"{found[0].check} (at seed {told})", anchor=None))
    return judged


def _with(record: Record, others: Sequence[Mapping[tuple[str, str], Record]]) -> Record:
    """A check that fails, with what the runs at further seeds measured: noted if it holds in all of them."""
    found = [other[record.key] for other in others if record.key in other]
    further = tuple({"seed": each.seed, "measured": each.measured, "holds": each.holds} for each in found)
    return replace(record, further=further, noted=sum(each.holds is True for each in found) == len(others))


def _texts(runs: Iterable[Path], chapter: str) -> set[str]:
    """What the executed notebooks of a chapter were made from."""
    return {json.loads((run / f"{chapter}.json").read_text(encoding="utf-8"))["made_from"] for run in runs}


def _again_text(record: Record) -> str:
    """What further seeds said of a check that stays red, for its problem."""
    values = [f"{format_number(each['measured'])} at seed {each['seed']}" for each in record.further]
    return f" (looked at again: {', '.join(values)})" if values else ""


def load(folder: Path) -> Report:
    """The report of a run as its ``metrics.json`` keeps it: pages, last line and exit status say the same.

    Raises:
        ValueError: none is there.
    """
    file = folder / "metrics.json"
    if not file.exists():
        raise ValueError(f"{file} is not there: run all chapters first, `make {folder.name}`")
    kept = json.loads(file.read_text(encoding="utf-8"))
    problems = [Problem(*(problem[field] for field in Problem._fields)) for problem in kept["problems"]]
    records = [Record.of(record) for record in kept["records"]]
    return Report(kept["run"], records, kept["verdicts"], problems, kept["run"]["notebooks"])


def stopped(report: Report, why: str) -> Report:
    """The report of a run whose workflow did not reach its end; red, whatever the notebooks say."""
    told = [Problem("workflow", "", why)] if why else []
    return report._replace(problems=told + report.problems, run={**report.run, "green": False})


def table(problems: Sequence[Problem]) -> str:
    """The problems as an aligned table for a terminal; the last lines of a red run."""
    rows = [("chapter", "claim", "problem", "measured", "band"), *(problem[:5] for problem in problems)]
    widths = [max(len(str(row[column])) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def format_baseline(record: Record) -> str:
    """What a check measured over fresh seeds, as text; empty where these were not run.

    >>> format_baseline(Record("c", "a", "stated", baseline={"mean": 2.0, "sd": 0.5, "n": 30}))
    '2 ± 0.5 (sd), n = 30'
    """
    found = record.baseline
    return f"{found['mean']:.5g} ± {found['sd']:.2g} (sd), n = {found['n']}" if found else ""


def with_baseline(record: Record) -> Record:
    found = _over_fresh_seeds(record.profile).get(record.chapter, {})
    return replace(record, baseline=found.get(f"{record.claim}/{record.check}"))


@cache
def _over_fresh_seeds(profile: str) -> dict[str, dict[str, dict[str, float]]]:
    """Of each chapter: mean, sd and number of seeds by ``claim/check``, where ``make alarms`` measured this profile."""
    file = alarms_file(profile)
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"chapters": {}}
    return {chapter: entry["measured"] for chapter, entry in found["chapters"].items()}


def shown_by(problem: Problem) -> list[str]:
    """Chapters that show a problem again: its own and, as a verdict needs them all, those that decide its claim too."""
    decide = load_claims().get(problem.claim, {}).get("chapters", ())
    return sorted({problem.chapter} | set(decide) & set(all_chapters()))


def again(profile: str, seed: int, device: str | None, chapters: Iterable[str]) -> str:
    """The command that runs these chapters again as they were run. What is no chapter, a training, takes the whole run.

    >>> again("smoke", 7, "cpu", ["04-t5"]), again("book", 0, "cuda", ["t5-null"])
    ('make smoke SEED=7 CHAPTERS=04-t5', 'make book SEED=0 DEVICE=cuda')
    """
    names = list(chapters)
    words = [f"make {profile} SEED={seed}"]
    if device and device != ("cuda" if profile == "gpu" else "cpu"):
        words.append(f"DEVICE={device}")
    if all(name[:2].isdigit() for name in names):
        words.append(f"CHAPTERS={shlex.quote(' '.join(names))}")
    return " ".join(words)


def commit() -> str | None:
    """The commit of this checkout, with ``-dirty`` where files differ from it; None outside of a git checkout."""
    return git("describe", "--always", "--dirty")
