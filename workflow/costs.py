"""What a job may need: memory and minutes, by what it took the last time, for whoever places jobs on machines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nbutils import shared_runs
from workflow import BUILD, ROOT, Run, book, write_atomically

KEPT = ROOT / "workflow" / "costs.json"  # of profile book on two cores: for machines on which nothing ran yet


class Cost(NamedTuple):
    """What a job took."""

    seconds: float
    peak_mb: float


UNKNOWN = Cost(seconds=1200, peak_mb=4000)


class Costs(NamedTuple):
    """What each job of a profile took: chapters and shared trainings, by name."""

    taken: Mapping[str, Cost]

    @classmethod
    def of(cls, profile: str, device: str) -> Costs:
        """Of the last run of a profile on a device here; what did not run here, as profile ``book`` took it."""
        kept = _read(KEPT) if profile != "gpu" else {}
        return cls(kept | _read(_file(profile, device)))

    def mem_mb(self, names: Iterable[str], attempt: int = 1) -> int:
        """Megabytes for one job that makes ``names``: half more than the largest took; at each attempt twice that.

        >>> Costs({"t5": Cost(seconds=60, peak_mb=1000)}).mem_mb(["t5"], attempt=2)
        4000
        """
        largest = max(self.taken.get(name, UNKNOWN).peak_mb for name in names)
        return math.ceil(1.5 * largest + 500) * 2 ** (attempt - 1)

    def minutes(self, names: Iterable[str], attempt: int = 1) -> int:
        """Minutes for one job that makes ``names``: three times what they took, and five; at each attempt twice that.

        >>> Costs({"t5": Cost(seconds=60, peak_mb=1000)}).minutes(["t5"])
        8
        """
        seconds = sum(self.taken.get(name, UNKNOWN).seconds for name in names)
        return math.ceil(3 * seconds / 60 + 5) * 2 ** (attempt - 1)


def remember(runs: Sequence[Run]) -> None:
    """Keep the most that each job of runs took: an edit removes a result, and not what it had cost."""
    taken: dict[str, Cost] = {}
    for run in runs:
        stats = {name: run.stats(name) for name in run.chapters}
        stats |= {name: run.training_stats(name) for name in shared_runs.names()}
        for name, path in stats.items():
            if path.exists():
                cost = _cost(json.loads(path.read_text(encoding="utf-8")))
                before = taken.get(name, cost)
                taken[name] = Cost(max(cost.seconds, before.seconds), max(cost.peak_mb, before.peak_mb))
    if taken:
        file = _file(runs[0].profile, runs[0].device)
        write_atomically(file, _text(_read(file) | taken))


def keep() -> None:
    """Keep in the checkout what the last run of profile ``book`` took here, where what was kept no longer serves.

    The same job takes longer on a busy machine, and then a file of the checkout would change with nothing else.
    """
    kept = _read(KEPT)
    taken = _read(_file("book", "cpu"))
    new = {name: cost for name, cost in taken.items() if name not in kept or not _serves(kept[name], cost)}
    existing = {*book.chapters(), *shared_runs.names()}
    costs = {name: cost for name, cost in (kept | new).items() if name in existing}
    if taken and costs != kept:
        write_atomically(KEPT, _text(costs))


def _serves(kept: Cost, taken: Cost) -> bool:
    """Whether a job gets what it takes, and at most three times as much again, if ``kept`` says what it needs."""
    asked = Costs({"job": kept})
    enough = taken.seconds <= 60 * asked.minutes(["job"]) and taken.peak_mb <= asked.mem_mb(["job"])
    return enough and kept.seconds <= 3 * taken.seconds and kept.peak_mb <= 3 * taken.peak_mb


def _file(profile: str, device: str) -> Path:
    return BUILD / profile / f"costs-{device}.json"


def _cost(entry: Mapping[str, float]) -> Cost:
    return Cost(round(entry["seconds"], 1), round(entry["peak_mb"]))


def _read(file: Path) -> dict[str, Cost]:
    """What a file keeps; nothing where there is none."""
    entries = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {name: _cost(entry) for name, entry in entries.items()}


def _text(taken: Mapping[str, Cost]) -> str:
    entries = (f" {json.dumps(name)}: {json.dumps(cost._asdict())}" for name, cost in sorted(taken.items()))
    return "{\n" + ",\n".join(entries) + "\n}\n"
