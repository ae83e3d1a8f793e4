"""Seed baselines: mean and spread of every measured value over seeds, from which bands are made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

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


def write(profile: str, seeds: Iterable[int], chapters: Sequence[str]) -> Path:
    """Write ``tests/baselines/<profile>.json`` from the executed notebooks of these seeds."""
    seeds = list(seeds)
    runs = [
        [record for chapter in chapters for record in report.records_of(run_folder(profile, seed) / f"{chapter}.ipynb")]
        for seed in seeds
    ]
    target = ROOT / "tests" / "baselines" / f"{profile}.json"
    ran = json.loads((run_folder(profile, seeds[0]) / f"{chapters[0]}.json").read_text(encoding="utf-8"))
    kept = {
        "profile": profile,
        "seeds": [seeds[0], seeds[-1]],
        "hardware": ran["hardware"],  # where it ran; on a cluster that is not here
        "versions": ran["versions"],
        "checks": summarise(runs),
    }
    jobs.put(target, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return target
