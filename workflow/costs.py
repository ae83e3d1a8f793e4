"""What a job may need: memory and minutes, by what it took the last time, for whoever places jobs on machines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
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
    def of(cls, profile: str) -> Costs:
        """Of the last run of a profile here; what did not run here, as profile ``book`` took it where that was kept."""
        kept = _read(KEPT.read_text(encoding="utf-8")) if KEPT.exists() and profile != "gpu" else {}
        here = BUILD / profile / "costs.json"
        return cls(kept | (_read(here.read_text(encoding="utf-8")) if here.exists() else {}))

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


def remember(runs: Iterable[Run]) -> None:
    """Keep what the jobs of runs took, beside their results: an edit removes a result, and not what it had cost."""
    for run in runs:
        file = run.reports / "costs.json"
        taken = _read(file.read_text(encoding="utf-8")) if file.exists() else {}
        stats = {name: run.stats(name) for name in run.chapters}
        stats |= {name: run.training_stats(name) for name in shared_runs.names()}
        for name, path in stats.items():
            if path.exists():
                taken[name] = _cost(json.loads(path.read_text(encoding="utf-8")))
        if taken:
            write_atomically(file, _text(taken))


def keep() -> None:
    """Keep in the checkout what the last run of profile ``book`` took here."""
    here = BUILD / "book" / "costs.json"
    if here.exists():
        taken = _read(here.read_text(encoding="utf-8"))
        existing = {*book.chapters(), *shared_runs.names()}
        write_atomically(KEPT, _text({name: cost for name, cost in taken.items() if name in existing}))


def _cost(entry: Mapping[str, float]) -> Cost:
    return Cost(round(entry["seconds"], 1), round(entry["peak_mb"]))


def _read(text: str) -> dict[str, Cost]:
    return {name: _cost(entry) for name, entry in json.loads(text).items()}


def _text(taken: Mapping[str, Cost]) -> str:
    entries = (f" {json.dumps(name)}: {json.dumps(cost._asdict())}" for name, cost in sorted(taken.items()))
    return "{\n" + ",\n".join(entries) + "\n}\n"
