"""Seed baselines: mean and spread of every measured value over seeds, from which bands are made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workflow import ROOT, jobs, kept, report, run_folder


def summarise(runs: Mapping[int, Sequence[report.Record]]) -> dict[str, dict]:
    """Per ``claim/check`` whose band comes from seeds: mean, standard deviation (ddof 1), number of seeds.

    Args:
        runs: the records of each seed.

    Raises:
        ValueError: two chapters have the same check of a claim, which would mix their values; a check that is not
            there at every seed, or a measured value that is no finite number. The message names check and seeds.
    """
    values: dict[str, dict[int, float]] = {}
    chapters: dict[str, str] = {}
    for seed, records in runs.items():
        for record in records:
            if "band_from" in record:
                key = f"{record['claim']}/{record['check']}"
                values.setdefault(key, {})[seed] = float(record["measured"])
                if chapters.setdefault(key, record["chapter"]) != record["chapter"]:
                    raise ValueError(
                        f"{key} is checked in {chapters[key]} and in {record['chapter']}: give it two names"
                    )
    for key, found in values.items():
        if missing := sorted(set(runs) - set(found)):
            raise ValueError(
                f"{key} in {chapters[key]} is not checked at seeds {missing}: a spread needs it at each of {[*runs]}"
            )
        if wrong := {seed: value for seed, value in found.items() if not np.isfinite(value)}:
            raise ValueError(
                f"{key} in {chapters[key]} measured {wrong} (seed: value): a band is made of finite numbers alone"
            )
    return {
        key: {
            "chapter": chapters[key],
            "mean": float(np.mean([*found.values()])),
            "sd": float(np.std([*found.values()], ddof=1)),
            "n": len(found),
        }
        for key, found in sorted(values.items())
    }


def machines(stats: Iterable[Path], profile: str) -> dict[str, Any]:
    """Hardware and versions of the jobs that wrote these statistics: on a cluster, not those of this process.

    Raises:
        ValueError: versions or devices differ between the jobs, or a chapter was run with another text or module than
            today's: a spread over two programs is none over seeds. The message names which.
    """
    found = [json.loads(file.read_text(encoding="utf-8")) for file in stats]
    names = sorted({each["chapter"] for each in found})
    today = {name: kept.sources_of_chapter(name, profile) for name in names}
    if older := sorted({each["chapter"] for each in found if each["made_from"] != today[each["chapter"]]}):
        raise ValueError(f"{', '.join(older)} changed while the seeds ran: run them again with today's text")
    if len(devices := sorted({each["device"] for each in found})) > 1:
        raise ValueError(f"runs on different devices, {' and '.join(devices)}: run all of them on one")
    first = found[0]["versions"]
    differ = {name for each in found for name, version in each["versions"].items() if first.get(name) != version}
    if differ:
        raise ValueError(f"runs with different versions of {', '.join(sorted(differ))}: run all of them again")
    return {"hardware": ", ".join(sorted({each["hardware"] for each in found})), "versions": first}


def path(profile: str) -> Path:
    """File of the baselines of a profile."""
    return ROOT / "tests" / "baselines" / f"{profile}.json"


def load(profile: str) -> dict[str, Any] | None:
    """The baselines that are kept for a profile; None if there are none yet."""
    file = path(profile)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def check_same(old: Mapping[str, Any] | None, seeds: Sequence[int], versions: Mapping[str, str]) -> None:
    """One file has one range of seeds and one set of versions: some chapters alone are measured with these.

    Raises:
        ValueError: the kept baselines ``old`` have others.
    """
    if old is None:
        return
    first, last = old["seeds"]
    if [first, last] != [seeds[0], seeds[-1]]:
        raise ValueError(
            f"the kept baselines are from seeds {first} to {last}, these from {seeds[0]} to {seeds[-1]}: "
            f"take SEEDS={last}, or measure all chapters"
        )
    names = sorted({*old["versions"], *versions})
    if differ := [name for name in names if old["versions"].get(name) != versions.get(name)]:
        raise ValueError(f"the kept baselines have other versions of {', '.join(differ)}: measure all chapters")


def merge(old: Mapping[str, Any], new: Mapping[str, Any], chapters: Sequence[str]) -> dict[str, Any]:
    """``new`` baselines of these chapters, and the ``old`` ones of all others.

    Raises:
        ValueError: the two have different seeds or versions, or two chapters the same check of a claim.
    """
    check_same(old, new["seeds"], new["versions"])
    others = {key: found for key, found in old["checks"].items() if found["chapter"] not in chapters}
    for key in sorted(others.keys() & new["checks"].keys()):
        where = others[key]["chapter"], new["checks"][key]["chapter"]
        raise ValueError(f"{key} is checked in {' and in '.join(where)}: give it two names")
    hardware = sorted({*old["hardware"].split(", "), *new["hardware"].split(", ")})
    return {**new, "hardware": ", ".join(hardware), "checks": dict(sorted({**others, **new["checks"]}.items()))}


def write(profile: str, seeds: Iterable[int], chapters: Sequence[str], *, some: bool = False) -> Path:
    """Write ``tests/baselines/<profile>.json`` from the executed notebooks of these seeds.

    Args:
        some: the chapters are not all there are; what the file has of the others stays.

    Raises:
        ValueError: the notebooks were run with different versions of the packages, or with other seeds or versions
            than those that stay; a check has not a finite value at every seed.
    """
    seeds = list(seeds)
    runs = {
        seed: [
            record
            for chapter in chapters
            for record in report.records_of(run_folder(profile, seed) / f"{chapter}.ipynb")
        ]
        for seed in seeds
    }
    made = {
        "profile": profile,
        "seeds": [seeds[0], seeds[-1]],
        **machines([run_folder(profile, seed) / f"{name}.json" for seed in seeds for name in chapters], profile),
        "checks": summarise(runs),
    }
    old = load(profile) if some else None
    whole = merge(old, made, chapters) if old else made
    jobs.put(path(profile), json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    return path(profile)
