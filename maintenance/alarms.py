"""How often a run is red although nothing is wrong: whole runs at fresh seeds, judged as any other run.

What is kept of a chapter hangs on the chapter alone, its code, modules, trainings and versions: an edit of the workflow
or of prose leaves it, an edit of the chapter's code voids it. More seeds may be added at any time; none is ever
dropped or drawn again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betaincinv

from nbutils.claims import KINDS
from nbutils.claims.records import Record, format_number
from nbutils.samples import CONFIDENCE
from workflow import chapters as all_chapters
from workflow import cluster, jobs, report, run_folder, stale
from workflow.report import alarms_file
from workflow.summaries import rows

SHARE = 0.01  # of red runs, at most
WANTED = {"smoke": 100, "book": 20}  # runs that decide


def load(profile: str, device: str = "cpu") -> dict[str, Any]:
    """What is kept of a profile, in ``tests/baselines/alarms-<profile>.json``: by chapter, nothing before the first."""
    file = alarms_file(profile, device)
    empty = {"profile": profile, "device": device, "chapters": {}}
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else empty


def keep(found: Mapping[str, Any]) -> Path:
    """Write the result beside the baselines, for the pages and the history."""
    file = alarms_file(found["profile"], found["device"])
    jobs.put(file, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return file


def missing(found: Mapping[str, Any], chapter: str, seeds: Iterable[int]) -> list[int]:
    """The seeds at which a chapter, as it is today, has not been run yet."""
    entry = found["chapters"].get(chapter)
    if entry is None or entry["made_from"] != stale.code_of_chapter(chapter):
        return list(seeds)
    return [seed for seed in seeds if str(seed) not in entry["runs"]]


def add(found: dict[str, Any], chapter: str, seeds: Iterable[int]) -> None:
    """Judge a chapter's executed notebooks of these seeds and add them to what is kept.

    An entry has ``made_from``, ``hardware`` and ``versions`` of the runs, ``kinds``, how many checks of each kind,
    ``runs``: by seed the checks that did not hold, each with the values at two further seeds and whether it is ``red``;
    and ``measured``: mean, standard deviation (ddof 1) and number of seeds of every finite value.
    """
    profile, made_from = found["profile"], stale.code_of_chapter(chapter)
    entry = found["chapters"].get(chapter)
    if entry is None or entry["made_from"] != made_from:
        entry = {"made_from": made_from, "hardware": [], "versions": {}, "kinds": {}, "runs": {}, "measured": {}}
    values: dict[str, list[float]] = {}
    for seed in missing({"chapters": {chapter: entry}}, chapter, seeds):
        notebook = run_folder(profile, seed) / f"{chapter}.ipynb"
        if not notebook.exists():
            if why := failure(profile, seed, chapter):  # what was killed, or never began, says nothing
                entry["runs"][str(seed)] = [{"claim": "", "check": why, "red": True}]
            continue
        stats = json.loads(notebook.with_suffix(".json").read_text(encoding="utf-8"))
        if stats["made_from"] != stale.sources_of_chapter(chapter) or stats["device"] != found["device"]:
            continue
        if report.doubtful(report.records_of(notebook)) and not _looked_at(profile, seed, chapter):
            continue  # broken off before it was judged: another time
        entry["hardware"] = sorted({*entry["hardware"], stats["hardware"]})
        entry["versions"] = stats["versions"]
        records = report.looked_at(profile, seed, chapter)
        entry["kinds"] = {kind: sum(record.kind == kind for record in records) for kind in KINDS}
        entry["runs"][str(seed)] = [_failed(record) for record in records if record.holds is False]
        for record in records:
            if record.measured is not None and math.isfinite(float(record.measured)):
                values.setdefault(f"{record.claim}/{record.check}", []).append(float(record.measured))
    for name, seen in values.items():
        entry["measured"][name] = pool(entry["measured"].get(name), seen)
    entry["runs"] = dict(sorted(entry["runs"].items(), key=lambda item: int(item[0])))
    if entry["runs"]:
        found["chapters"] = dict(sorted({**found["chapters"], chapter: entry}.items()))


def failure(profile: str, seed: int, chapter: str) -> str:
    """Why a chapter has no notebook, if a cell of its own or one of its trainings raised; "" for all other reasons.

    What was killed, had no room or no time, or was edited meanwhile says nothing of the chapter.
    """
    told = jobs.errors(run_folder(profile, seed) / "logs")
    own = {chapter, *cluster.trained_for(chapter, profile)}
    raised = re.compile(r"(cell \[\d+\]|training) raised (?!TimeoutError|OSError)(?!.*changed while it ran)")
    return next((f"{job}: {what}" for job, what in told.items() if job in own and raised.match(what)), "")


def _looked_at(profile: str, seed: int, chapter: str) -> bool:
    """Whether both further runs of a chapter came to an end, well or not."""
    return all(
        (run_folder(profile, other) / f"{chapter}.ipynb").exists() or failure(profile, other, chapter)
        for other in report.further(seed)
    )


def _failed(record: Record) -> dict[str, Any]:
    facts = {name: getattr(record, name) for name in ("claim", "check", "kind", "measured", "band", "further")}
    return {**facts, "red": not record.noted}


def pool(old: Mapping[str, float] | None, values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation and number of old and new values together (Chan, Golub and LeVeque 1983).

    >>> pool(pool(None, [1.0, 2.0]), [3.0])
    {'mean': 2.0, 'sd': 1.0, 'n': 3}
    """
    new = np.asarray(values, dtype=np.float64)
    n, mean = new.size, float(new.mean())
    squares = float(((new - mean) ** 2).sum())
    if old is not None:
        gap, both = mean - old["mean"], n + old["n"]
        squares += old["sd"] ** 2 * (old["n"] - 1) + gap**2 * n * old["n"] / both
        n, mean = both, old["mean"] + gap * n / both
    return {"mean": mean, "sd": math.sqrt(squares / (n - 1)) if n > 1 else 0.0, "n": n}


class Pooled(NamedTuple):
    """All chapters together: a run is red if one of its chapters is."""

    runs: int  # of the chapter that has fewest
    share: float  # of red runs: 1 − Π (1 − red runs of a chapter / its runs)
    red: int  # runs of single chapters
    noted: int  # runs of single chapters that noted a check and were green
    absent: list[str]  # chapters without a run of today's text
    failed: list[tuple[str, str, dict[str, Any]]]  # chapter, seed, check

    @property
    def sound(self) -> bool:
        return self.runs > 0 and self.share <= SHARE + 1e-9  # 1 − 0.99 is not 0.01

    @property
    def upper(self) -> float:
        """The share of red runs that is not exceeded with 95 % confidence (Clopper and Pearson, one-sided)."""
        red = self.share * self.runs
        return float(betaincinv(red + 1, self.runs - red, CONFIDENCE)) if red < self.runs else 1.0


def pooled(found: Mapping[str, Any]) -> Pooled:
    """Counts over all chapters of a result, every kept seed of each. A chapter that changed since counts as absent."""
    today = {
        name: entry["runs"]
        for name, entry in found["chapters"].items()
        if name in all_chapters() and entry["made_from"] == stale.code_of_chapter(name)
    }
    red = {name: sum(any(check["red"] for check in run) for run in runs.values()) for name, runs in today.items()}
    return Pooled(
        min(map(len, today.values()), default=0),
        1 - math.prod(1 - red[name] / len(runs) for name, runs in today.items()),
        sum(red.values()),
        sum(bool(run) and not any(check["red"] for check in run) for runs in today.values() for run in runs.values()),
        [name for name in all_chapters() if name not in today],
        [(name, seed, check) for name, runs in today.items() for seed, run in runs.items() for check in run],
    )


def markdown(found: Mapping[str, Any]) -> str:
    """The result as a table for the page on how the book is run."""
    counts, entries = pooled(found), found["chapters"]
    if not entries:
        return f"Not measured yet: `make alarms PROFILE={found['profile']}`."
    sure = f"with 95 % confidence at most {100 * counts.upper:.1f} %"
    kinds = {kind: sum(entry["kinds"].get(kind, 0) for entry in entries.values()) for kind in KINDS}
    facts = [
        ("fresh seeds of the measured chapter that has fewest", f"{counts.runs} of {WANTED.get(found['profile'], 20)}"),
        ("share of red runs", f"{100 * counts.share:.1f} % ({sure})" if counts.runs else "not measured"),
        ("runs of a chapter that were red", counts.red),
        ("runs of a chapter that noted a check", counts.noted),
        ("seeds", _seeds(entries)),
        ("checks of a run", ", ".join(f"{number} {kind}" for kind, number in kinds.items())),
        ("chapters not measured since they changed", ", ".join(counts.absent) or "none"),
        ("hardware", ", ".join(sorted({machine for entry in entries.values() for machine in entry["hardware"]}))),
    ]
    cells = [
        (chapter, seed, f"`{check['claim']}`", check["check"], format_number(check.get("measured")), _others(check))
        for chapter, seed, check in counts.failed
    ]
    heads = ["chapter", "seed", "claim", "check", "measured", "at two further seeds"]
    lines = rows([f"profile `{found['profile']}`", ""], facts)
    return "\n".join([*lines, "", *rows(heads, cells)] if cells else lines)


def _others(check: Mapping[str, Any]) -> str:
    values = ", ".join(format_number(each["measured"]) for each in check.get("further", ()))
    return f"{values or 'not run'}: {'**red**' if check['red'] else 'noted'}"


def _seeds(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Which seeds: those of most chapters, and the chapters that have others."""
    of_range: dict[str, list[str]] = {}
    for chapter, entry in entries.items():
        seeds = sorted(map(int, entry["runs"]))
        whole = seeds == list(range(seeds[0], seeds[-1] + 1))
        of_range.setdefault(f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds)), []).append(chapter)
    (common, _), *others = sorted(of_range.items(), key=lambda item: -len(item[1]))
    return "; ".join([common, *(f"{seeds} in {', '.join(names)}" for seeds, names in others)])


def conclusion(found: Mapping[str, Any]) -> str:
    """The last line of the command; GREEN once as many runs of all chapters are measured as decide."""
    counts, wanted = pooled(found), WANTED.get(found["profile"], 20)
    said = (
        f"{100 * counts.share:.1f} % of {found['profile']} runs red (95 %: at most {100 * counts.upper:.1f} %), "
        f"{counts.runs} of {wanted} runs, {counts.noted} noted"
        + (f"; not measured since they changed: {', '.join(counts.absent)}" if counts.absent else "")
    )
    if not counts.sound:
        return f"RED: {said}; sound is at most {100 * SHARE:g} % red"
    whole = counts.runs >= wanted and not counts.absent
    return f"GREEN: {said}" if whole else f"SO FAR GREEN: {said}"
