"""Intervals from replicates: what a run may say of a law or of a population of trainings, and what rounding may do."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, betaincinv, stdtrit  # scipy.stats takes a second to import

REPLICATES = 8  # fewer say nothing of a population
CONFIDENCE = 0.95  # of an interval on a population
FALSE_ALARM = 1e-3  # two-sided probability that a right law leaves its sampling error


class Estimate(NamedTuple):
    """A statistic of a sample and its confidence interval."""

    value: float
    low: float
    high: float
    n: int


def _replicates(values: ArrayLike, least: int = REPLICATES) -> NDArray[np.float64]:
    found = np.asarray(values, dtype=np.float64).ravel()
    if found.size < least:
        raise ValueError(f"{found.size} replicates: a population needs at least {least}; run more, smaller ones")
    return found


def mean(values: ArrayLike, confidence: float = CONFIDENCE, *, widen: float = 0.0, least: int = REPLICATES) -> Estimate:
    """Mean of independent values and Student's interval, on both sides ``widen`` longer.

    A value that is not finite makes all of it NaN. With ``least=1``, a value alone has the whole line as its interval.

    Raises:
        ValueError: fewer than ``least`` values.

    >>> [round(x, 3) for x in mean([1, 2, 3, 4, 5, 6, 7, 8])]
    [4.5, 2.452, 6.548, 8]
    """
    found = _replicates(values, least)
    if not np.isfinite(found).all():
        return Estimate(math.nan, math.nan, math.nan, found.size)
    centre, half = float(found.mean()), math.inf
    if found.size > 1:
        student = float(stdtrit(found.size - 1, 0.5 + confidence / 2))
        half = student * float(found.std(ddof=1)) / math.sqrt(found.size) + widen
    return Estimate(centre, centre - half, centre + half, found.size)


def median(values: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Median and the interval between two order statistics that has it with at least ``confidence``, for any law.

    Of 8 values that is from the smallest to the largest, of 9 from the second to the eighth, of 12 from the third to
    the tenth. Infinite values are ordered like others; a NaN makes all of it NaN.

    Raises:
        ValueError: fewer than 8 values.

    >>> median([5, 1, 9, 2, 8, 3, 7, 4, 6])
    Estimate(value=5.0, low=2.0, high=8.0, n=9)
    """
    found = np.sort(_replicates(values))
    n = found.size
    if np.isnan(found).any():
        return Estimate(math.nan, math.nan, math.nan, n)
    out = max(k for k in range(1, n // 2 + 1) if 2 * bdtr(k - 1, n, 0.5) <= 1 - confidence)
    return Estimate(float(np.median(found)), float(found[out - 1]), float(found[n - out]), n)


def share(holds: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Share of true values and its exact interval (Clopper and Pearson).

    Raises:
        ValueError: fewer than 8 values, or one that is neither true nor false.

    >>> [round(x, 3) for x in share([True] * 7 + [False] * 29)]
    [0.194, 0.082, 0.36, 36]
    """
    found = _replicates(holds)
    if not np.isin(found, (0, 1)).all():
        raise ValueError(f"a share is of true and false; got {found[~np.isin(found, (0, 1))][0]}")
    k, n, tail = int(found.sum()), found.size, (1 - confidence) / 2
    low = float(betaincinv(k, n - k + 1, tail)) if k else 0.0
    high = float(betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
    return Estimate(k / n, low, high, n)


STATISTICS = {"mean": mean, "median": median, "share": share}


def rounding(terms: int, bits: int = 53) -> float:
    """Bound on the relative rounding error of a sum of ``terms`` products, in any order, on any processor.

    γ = mu/(1 − mu) with m = ``terms`` and u = 2^−bits (Higham 2002, §3.1): 53 bits for float64, 24 for float32. It
    is relative to the sum of magnitudes, and a chain of operations adds the bounds of its links.

    Raises:
        ValueError: so many terms that nothing is bounded.

    >>> rounding(1000) < 1.2e-13 and rounding(1000, bits=24) < 6e-5
    True
    """
    mu = terms * 2.0**-bits
    if not 0 < mu < 1:
        raise ValueError(f"{terms} terms of {bits} bits: no bound; at least one term, and fewer than 2^{bits}")
    return mu / (1 - mu)
