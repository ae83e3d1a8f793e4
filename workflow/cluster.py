"""What a job may ask of a cluster's scheduler: memory and time from recorded runs, by one stated rule.

``python -m workflow resources --profile smoke`` writes ``tests/baselines/resources.json`` from the runs in ``_build``.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from workflow import BUILD, ROOT, chapters, dependencies, jobs

FILE = ROOT / "tests" / "baselines" / "resources.json"
MEMORY, OVERHEAD_MB = 1.5, 1000  # times the recorded peak, and what Snakemake and papermill need around the kernel
TIME, START_MINUTES = 4, 5  # times the recorded seconds: another machine, other jobs beside; and a cold file system


@cache
def recorded(profile: str) -> dict[str, dict[str, float]]:
    """Seconds and peak memory of each job of a profile; empty where none are recorded."""
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return kept.get(profile, {}).get("jobs", {})


def memory_mb(job: str, profile: str) -> int:
    """Memory to ask for, in MB: 1.5 times the recorded peak and 1000 MB, in steps of 100 MB.

    A job without a record asks as the largest one of its profile does, and 4000 MB where there is none.
    """
    known = recorded(profile)
    peaks = [known[job]["peak_mb"]] if job in known else [entry["peak_mb"] for entry in known.values()]
    return math.ceil((MEMORY * max(peaks) + OVERHEAD_MB) / 100) * 100 if peaks else 4000


def minutes(job: str, profile: str, time_limit: int) -> int:
    """Time to ask for, in minutes: 4 times the recorded seconds, and 5 minutes.

    ``time_limit`` is in seconds; a job ends itself after it. One without a record asks for so long.
    """
    known = recorded(profile)
    seconds = TIME * known[job]["seconds"] if job in known else time_limit
    return math.ceil(min(seconds, time_limit) / 60) + START_MINUTES


def record(profile: str) -> Path:
    """Keep the longest time and the largest peak over the seeds in ``_build`` of every job of a profile.

    A chapter has ``alone_seconds`` too: with its trainings, as where it runs by itself.

    Raises:
        FileNotFoundError: nothing has run in this profile.
    """
    found: dict[str, dict[str, float]] = {}
    hardware: set[str] = set()
    for file in sorted((BUILD / profile).glob("seed-*/*.json")) + sorted(
        (BUILD / profile).glob("seed-*/trainings/*/stats.json")
    ):
        stats: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        entry = found.setdefault(stats.get("chapter") or stats["training"], {"seconds": 0.0, "peak_mb": 0.0})
        for key in ("seconds", "peak_mb"):
            entry[key] = max(entry[key], stats[key])
        hardware.add(str(stats["hardware"]))
    if not found:
        raise FileNotFoundError(f"nothing in _build/{profile}: run `make {profile}` first")
    for name in set(found) & set(chapters()):
        trained = [found[training]["seconds"] for training in dependencies.trainings_of(name) if training in found]
        found[name]["alone_seconds"] = round(found[name]["seconds"] + sum(trained), 2)
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    kept[profile] = {"hardware": sorted(hardware), "jobs": dict(sorted(found.items()))}
    jobs.put(FILE, json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    return FILE
