"""Timing of a pair, the same for all: CPU time of both sides, by turns."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]
Work = Callable[[], object]


def cpu_seconds(work: Work) -> float:
    """CPU time of a call, without garbage collection: a pass takes 0.3 s, on whichever side it falls."""
    return timeit.timeit(work, timer=time.process_time, number=1)  # which turns it off


def compare(what: str, ours: Work, plain: Work, bound: float, *, share: float = 1.0, repeats: int = 5) -> Row:
    """Time both sides by turns, so that what else the machine does falls on both.

    ``plain`` does this ``share`` of the work, so its time is divided by it.
    """
    turns = [(cpu_seconds(ours), cpu_seconds(plain) / share) for _ in range(repeats)]
    return row(what, [turn[0] for turn in turns], [turn[1] for turn in turns], bound)


def row(what: str, ours: Sequence[float], plain: Sequence[float], bound: float) -> Row:
    """A row of the table: the median over the turns of plain over ours, with its quartiles.

    >>> made = row("a pair", [1.0, 2.0, 1.0], [8.0, 12.0, 10.0], bound=5)
    >>> made["low"], made["ratio"], made["high"], made["holds"]
    (7.0, 8.0, 9.0, True)
    """
    low, ratio, high = (float(x) for x in np.quantile(np.divide(plain, ours), [0.25, 0.5, 0.75]))
    seconds = {"ours_s": float(np.median(ours)), "plain_s": float(np.median(plain))}
    return {"what": what, **seconds, "ratio": ratio, "low": low, "high": high, "bound": bound, "holds": ratio >= bound}
