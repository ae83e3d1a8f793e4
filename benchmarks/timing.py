"""Timing of a pair, the same for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def cpu_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median CPU time of a call."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def interleaved(sides: dict[str, Callable[[], object]], repeats: int = 5) -> dict[str, float]:
    """Median CPU time of each side, run by turns: what else the machine does falls on all of them."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, work in sides.items():
            times[side].append(cpu_seconds(work, repeats=1))
    return {side: statistics.median(values) for side, values in times.items()}
