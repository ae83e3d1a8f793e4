"""Timing of a pair, the same for all."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Row = dict[str, Any]


def cpu_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median CPU time of a call."""
    return statistics.median(_once(work) for _ in range(repeats))


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection within, as in ``timeit``: with torch and transformers loaded one pass takes 0.3 s, and it
    falls on whichever side comes to the threshold."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _once(work: Callable[[], object]) -> float:
    with no_collection():
        start = time.process_time()
        work()
        return time.process_time() - start


def interleaved(sides: dict[str, Callable[[], object]], repeats: int = 5) -> dict[str, list[float]]:
    """CPU times of each side, run by turns: what else the machine does falls on all of them."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, work in sides.items():
            times[side].append(_once(work))
    return times


def compare(
    what: str,
    ours: Callable[[], object],
    plain: Callable[[], object],
    bound: float,
    *,
    aim: float | None = None,
    share: float = 1.0,
    repeats: int = 5,
) -> Row:
    """Time both sides by turns; ``plain`` does this ``share`` of the work, so its time is divided by it."""
    seconds = interleaved({"ours": ours, "plain": plain}, repeats)
    return row(what, seconds["ours"], [value / share for value in seconds["plain"]], bound, aim=aim)


def row(what: str, ours: list[float], plain: list[float], bound: float, *, aim: float | None = None) -> Row:
    """A row of the table: medians over the turns, and the ratio with its least and largest value in a turn.

    ``load`` is the number of processes that wanted to run over the last minute, per core, this one included.

    >>> row("a pair", [1.0, 2.0, 1.0], [8.0, 12.0, 10.0], bound=5)["ratio"]
    8.0
    """
    ratios = [theirs / mine for mine, theirs in zip(ours, plain, strict=True)]
    made = {
        "what": what,
        "ours_s": statistics.median(ours),
        "plain_s": statistics.median(plain),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "turns": len(ratios),
        "bound": bound,
        "holds": statistics.median(ratios) >= bound,
        "load": load(),
    }
    return made if aim is None else made | {"aim": aim}


def finished(measured: Row) -> Row:
    """A row with ``ratio``, ``holds`` and ``load``, for pairs that measure their two sides themselves."""
    ratio = measured["plain_s"] / measured["ours_s"]
    return {"ratio": ratio, "load": load(), **measured, "holds": measured.get("ratio", ratio) >= measured["bound"]}


def load() -> float:
    """Runnable processes of the last minute per core; NaN where the system does not say."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return round(os.getloadavg()[0] / cores, 2) if hasattr(os, "getloadavg") else float("nan")
