"""What a job may ask of a cluster's scheduler: memory and time from recorded runs, by one stated rule.

``python -m workflow resources --profile smoke`` writes ``tests/baselines/resources.json`` from the runs in ``_build``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from nbutils import trainings
from workflow import BUILD, ROOT, chapters, dependencies, jobs

FILE = ROOT / "tests" / "baselines" / "resources.json"
MEMORY, OVERHEAD_MB = 1.5, 1000  # times the recorded peak, and what Snakemake and papermill need around the kernel
TOGETHER = 60  # recorded seconds of the trainings that share a job
TIME, START_MINUTES = 4, 5  # times the recorded seconds: another machine, other jobs beside; and a cold file system


@cache
def recorded(profile: str) -> dict[str, dict[str, float]]:
    """Seconds and peak memory of each job of a profile; empty where none are recorded."""
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return kept.get(profile, {}).get("jobs", {})


def batches(profile: str) -> list[list[str]]:
    """The shared trainings by the job that makes them: neighbours of one module, recorded with a minute or less in all.

    To start Python and import torch takes as long as a training of smoke. One without a record has a job of its own.
    """
    known, made = recorded(profile), []
    room, before = 0.0, []
    for name in trainings.names():
        seconds = known[name]["seconds"] if name in known else math.inf
        if seconds > room or dependencies.of_training(name) != before:
            made.append([])
            room, before = TOGETHER, dependencies.of_training(name)
        made[-1].append(name)
        room -= seconds
    return made


def trained_for(chapter: str, profile: str) -> set[str]:
    """The trainings that must succeed before a chapter can run: those it loads, and those made in one job with them."""
    loaded = set(dependencies.trainings_of(chapter))
    return {name for batch in batches(profile) if loaded.intersection(batch) for name in batch}


def memory_mb(names: Sequence[str], profile: str) -> int:
    """Memory to ask for a job that makes these, in MB: 1.5 times the recorded peak and 1000 MB, in steps of 100 MB.

    One without a record asks as the largest of its profile does, and 4000 MB where there is none.
    """
    known = recorded(profile)
    peaks = [known[name]["peak_mb"] for name in (names if set(names) <= set(known) else known)]
    return math.ceil((MEMORY * max(peaks) + OVERHEAD_MB) / 100) * 100 if peaks else 4000


def minutes(names: Sequence[str], profile: str, time_limit: int) -> int:
    """Time to ask for a job that makes these, in minutes: 4 times the recorded seconds, and 5 minutes.

    ``time_limit`` is in seconds; each ends itself after it. One without a record asks for so long.
    """
    known = recorded(profile)
    seconds = [min(TIME * known[name]["seconds"], time_limit) if name in known else time_limit for name in names]
    return math.ceil(sum(seconds) / 60) + START_MINUTES


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
    before = kept.get(profile, {"hardware": [], "jobs": {}})
    known = {*chapters(), *trainings.RECIPES}  # what is no longer in the book goes; what did not run here stays
    stays = {name: entry for name, entry in before["jobs"].items() if name in known - set(found)}
    machines = {*hardware, *(before["hardware"] if stays else ())}
    kept[profile] = {"hardware": sorted(machines), "jobs": dict(sorted({**stays, **found}.items()))}
    jobs.put(FILE, json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    return FILE
