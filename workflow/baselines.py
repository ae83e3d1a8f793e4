"""Seed baselines: mean and spread of every measured value over seeds, from which bands are made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workflow import ROOT, jobs, report, run_folder


def summarise(runs: Iterable[Sequence[report.Record]]) -> dict[str, dict]:
    """Per ``claim/check`` whose band comes from seeds: mean, standard deviation (ddof 1), number of seeds."""
    values: dict[str, list[float]] = {}
    chapters: dict[str, str] = {}
    for records in runs:
        for record in records:
            if "band_from" in record:
                key = f"{record['claim']}/{record['check']}"
                values.setdefault(key, []).append(float(record["measured"]))
                chapters[key] = record["chapter"]
    return {
        key: {
            "chapter": chapters[key],
            "mean": float(np.mean(found)),
            "sd": float(np.std(found, ddof=1)),
            "n": len(found),
        }
        for key, found in sorted(values.items())
    }


def machines(stats: Iterable[Path]) -> dict[str, Any]:
    """Hardware and versions of the jobs that wrote these statistics: on a cluster, not those of this process.

    Raises:
        ValueError: versions differ between the jobs; the message names the packages.
    """
    found = [json.loads(file.read_text(encoding="utf-8")) for file in stats]
    first = found[0]["versions"]
    differ = {name for each in found for name, version in each["versions"].items() if first.get(name) != version}
    if differ:
        raise ValueError(f"runs with different versions of {', '.join(sorted(differ))}: run all of them again")
    return {"hardware": ", ".join(sorted({each["hardware"] for each in found})), "versions": first}


def write(profile: str, seeds: Iterable[int], chapters: Sequence[str]) -> Path:
    """Write ``tests/baselines/<profile>.json`` from the executed notebooks of these seeds.

    Raises:
        ValueError: the notebooks were run with different versions of the packages.
    """
    seeds = list(seeds)
    runs = [
        [record for chapter in chapters for record in report.records_of(run_folder(profile, seed) / f"{chapter}.ipynb")]
        for seed in seeds
    ]
    target = ROOT / "tests" / "baselines" / f"{profile}.json"
    kept = {
        "profile": profile,
        "seeds": [seeds[0], seeds[-1]],
        **machines(run_folder(profile, seed) / f"{chapter}.json" for seed in seeds for chapter in chapters),
        "checks": summarise(runs),
    }
    jobs.put(target, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return target
