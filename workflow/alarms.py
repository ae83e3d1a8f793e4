"""False alarms: how often a right result is called wrong, over fresh seeds that made no band.

A check that does not hold on such a seed is a false alarm, because the code is the one whose bands these are. A chapter
without a result is red, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nbutils import claims
from workflow import ROOT, jobs, kept, report
from workflow import chapters as all_chapters
from workflow.summaries import rows

KEPT = report.alarms_file("smoke")
RATE = 0.005  # of all checks over all seeds; below this, and no check twice, is green


def measure(profile: str, seeds: Sequence[int], chapters: Sequence[str], build: Path) -> dict[str, Any]:
    """Judge every check of the executed notebooks ``build/<profile>/seed-<n>/``.

    Returns:
        As ``tests/baselines/alarms.json`` keeps it: the profile, and for each chapter its seeds, a digest of what it
        was made from, counts, the checks that failed with their seeds, the seeds without a notebook, mean and spread of
        every measured value, hardware and versions of the runs.

    Raises:
        ValueError: none of the notebooks is there, those of a chapter have different sources, or a seed made the
            bands itself.
    """
    found = {chapter: _measure_one(chapter, seeds, build / profile) for chapter in chapters}
    if not any(entry["evaluated"] for entry in found.values()):
        raise ValueError(f"no executed notebook in {build}/{profile}/seed-{seeds[0]} and the {len(seeds) - 1} after it")
    return {"profile": profile, "chapters": found}


def _measure_one(chapter: str, seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    evaluated, left_open, names = 0, 0, set()
    failed: dict[tuple[str, str], list[dict[str, Any]]] = {}
    values: dict[str, list[float]] = {}
    missing, machines, versions = [], set(), {}
    sources: dict[str, int] = {}  # the first seed of each digest
    for seed in seeds:
        notebook = folder / f"seed-{seed}" / f"{chapter}.ipynb"
        if not notebook.exists() or not notebook.with_suffix(".json").exists():
            missing.append(seed)
            continue
        stats = json.loads(notebook.with_suffix(".json").read_text(encoding="utf-8"))
        machines.add(stats["hardware"])
        versions = stats["versions"]
        sources.setdefault(stats["made_from"], seed)
        for record in report.records_of(notebook):
            key, held = (record["claim"], record["check"]), record["holds"]
            names.add(key)
            values.setdefault("/".join(key), []).append(math.nan if held is None else float(record["measured"]))
            evaluated += held is not None
            left_open += held is None
            if held is False:
                failed.setdefault(key, []).append({"seed": seed, "measured": record["measured"]})
    if len(sources) > 1:
        first, second, *_ = sources.values()
        raise ValueError(
            f"the notebooks of {chapter} have different sources, those of seeds {first} and {second} for example: "
            "run all seeds again with today's text"
        )
    return {
        "seeds": [seeds[0], seeds[-1]],
        "made_from": next(iter(sources), None),
        "hardware": sorted(machines),
        "versions": versions,
        "distinct": len(names),
        "evaluated": evaluated,
        "left_open": left_open,
        "failed": [{"claim": claim, "check": check, "at": at} for (claim, check), at in sorted(failed.items())],
        "missing": missing,
        "measured": {name: spread for name, found in sorted(values.items()) if (spread := _spread(found))},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (ddof 1) and number of the finite values; nothing where there are not two."""
    finite = np.asarray(values)[np.isfinite(values)]
    if finite.size < 2:
        return {}
    return {"mean": float(finite.mean()), "sd": float(finite.std(ddof=1)), "n": finite.size}


def merge(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """``new`` of its chapters and the ``old`` of all others: after an edit a chapter alone needs other fresh seeds.

    Raises:
        ValueError: as ``check_merge``.
    """
    check_merge(old, new["profile"], new["chapters"])
    if old is None:
        return dict(new)
    return {**new, "chapters": dict(sorted({**old["chapters"], **new["chapters"]}.items()))}


def check_merge(old: Mapping[str, Any] | None, profile: str, chapters: Mapping[str, Mapping[str, Any]]) -> None:
    """May these ``chapters``, of which each names its seeds and what it is ``made_from``, replace those kept?

    A chapter that has not changed keeps its result: who may draw other seeds again and again gets green ones at last.
    More seeds with the old ones among them are welcome.

    Raises:
        ValueError: the two are of different profiles, or a chapter that has not changed has other seeds.
    """
    if old is None:
        return
    if old["profile"] != profile:
        raise ValueError(
            f"what is kept is of {old['profile']}, this of {profile}: "
            f"if it may go, remove {KEPT.relative_to(ROOT)} first"
        )
    for chapter, entry in chapters.items():
        before = old["chapters"].get(chapter, {})
        if not entry["made_from"] or before.get("made_from") != entry["made_from"]:
            continue
        (first, last), (new_first, new_last) = before["seeds"], entry["seeds"]
        if not new_first <= first <= last <= new_last:
            raise ValueError(
                f"{chapter} has not changed since seeds {first} to {last} were judged: its result stands; "
                f"seeds {new_first} to {new_last} may replace it only if they contain these"
            )


class Pooled(NamedTuple):
    """All chapters together."""

    evaluated: int  # checks judged, over all seeds
    failures: int
    twice: list[str]  # checks that failed at two seeds or more
    missing: list[str]  # notebooks without a result

    @property
    def rate(self) -> float:
        return self.failures / self.evaluated

    @property
    def green(self) -> bool:
        return self.rate < RATE and not self.twice and not self.missing


def pooled(found: Mapping[str, Any]) -> Pooled:
    """Counts over all chapters of a result."""
    entries = found["chapters"].items()
    failed = [(chapter, check) for chapter, entry in entries for check in entry["failed"]]
    return Pooled(
        sum(entry["evaluated"] for _, entry in entries),
        sum(len(check["at"]) for _, check in failed),
        [f"{chapter} / {check['claim']} / {check['check']}" for chapter, check in failed if len(check["at"]) > 1],
        [f"{chapter}, seed {seed}" for chapter, entry in entries for seed in entry["missing"]],
    )


def _seeds_of_baseline(profile: str) -> set[int]:
    file = ROOT / "tests" / "baselines" / f"{profile}.json"
    if not file.exists():
        return set()
    first, last = json.loads(file.read_text(encoding="utf-8"))["seeds"]
    return set(range(first, last + 1))


def keep(found: Mapping[str, Any], file: Path = KEPT) -> Path:
    """Write the result beside the baselines, for the pages and the history."""
    jobs.put(file, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return file


def load(file: Path = KEPT) -> dict[str, Any] | None:
    """The kept result; None before the first."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def markdown(found: Mapping[str, Any] | None) -> str:
    """The result as a table for the page on bands."""
    if found is None:
        return "Not measured yet: `make alarms`."
    counts, entries = pooled(found), found["chapters"]
    varying = sum(map(_varying, entries.values()))
    share = f"{100 * counts.failures / varying:.3f} %" if varying else "none varies"
    facts = [
        ("seeds", _seeds(entries)),
        ("profile", f"`{found['profile']}`"),
        ("checks of one seed", sum(entry["distinct"] for entry in entries.values())),
        ("checks judged, all seeds", f"{counts.evaluated:,}"),
        ("that did not hold", counts.failures),
        ("rate", f"{100 * counts.rate:.3f} %"),
        ("the same over those whose value varies with the seed", share),
        ("checks that failed at two seeds or more", len(counts.twice)),
        ("notebooks without a result", len(counts.missing)),
        ("chapters that have changed since", ", ".join(changed(found)) or "none"),
        ("hardware", ", ".join(sorted({machine for entry in entries.values() for machine in entry["hardware"]}))),
    ]
    return "\n".join([*rows(["false alarms", ""], facts), *_failed(entries)])


def _varying(entry: Mapping[str, Any]) -> int:
    """How many of a chapter's judged checks could have come out otherwise: their values differ by more than rounding.

    >>> spreads = {"a": {"mean": 1.0, "sd": 1e-17, "n": 50}, "b": {"mean": 0.0, "sd": 0.1, "n": 50}}
    >>> _varying({"measured": spreads})
    50
    """
    spreads = entry["measured"].values()
    return sum(spread["n"] for spread in spreads if spread["sd"] > 1e-12 * max(1.0, abs(spread["mean"])))


def _seeds(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Which seeds: the range of most chapters, and the chapters that have others."""
    of_range: dict[tuple[int, ...], list[str]] = {}
    for chapter, entry in entries.items():
        of_range.setdefault(tuple(entry["seeds"]), []).append(chapter)
    (common, _), *others = sorted(of_range.items(), key=lambda item: -len(item[1]))
    told = [f"{seeds[0]} to {seeds[-1]} in {', '.join(names)}" for seeds, names in others]
    return "; ".join([f"{common[0]} to {common[-1]}", *told])


def changed(found: Mapping[str, Any]) -> list[str]:
    """The chapters whose text, modules or versions are not those with which they were measured, or that are gone."""
    known = all_chapters()
    return [
        name
        for name, entry in found["chapters"].items()
        if name not in known or entry["made_from"] != kept.sources_of_chapter(name)
    ]


def _failed(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    cells = [
        (
            chapter,
            f"`{failed['claim']}`",
            failed["check"],
            ", ".join(f"{claims.format_number(at['measured'])} (seed {at['seed']})" for at in failed["at"]),
        )
        for chapter, entry in entries.items()
        for failed in entry["failed"]
    ]
    return ["", *rows(["chapter", "claim", "check", "measured"], cells)] if cells else []


def conclusion(found: Mapping[str, Any]) -> str:
    """The last line of the command."""
    counts, since = pooled(found), changed(found)
    said = (
        f"{counts.failures} of {counts.evaluated:,} checks did not hold ({100 * counts.rate:.3f} %), "
        f"{len(counts.twice)} at two seeds or more, {len(counts.missing)} notebook(s) without a result"
        + (f"; changed since: {', '.join(since)}" if since else "")
    )
    return (
        f"GREEN: {said}" if counts.green else f"RED: {said}; green is below {100 * RATE:g} %, none twice, none missing"
    )
