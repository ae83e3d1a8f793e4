"""Confidence intervals from replicates of a law or from a population of trainings, and bounds on rounding errors."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, betaincinv, stdtrit  # scipy.stats takes a second to import

__all__ = ["CONFIDENCE", "FALSE_ALARM", "REPLICATES", "STATISTICS", "Estimate", "mean", "median", "rounding", "share"]

REPLICATES = 8  # the least number for a statement on a population
CONFIDENCE = 0.95  # of an interval for a population
FALSE_ALARM = 1e-3  # two-sided probability that a correct law lies outside its sampling error


class Estimate(NamedTuple):
    """A statistic of a sample and its confidence interval."""

    value: float
    low: float
    high: float
    n: int


def _sample(values: ArrayLike, min_size: int = REPLICATES) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64).ravel()
    if sample.size < min_size:
        raise ValueError(f"{sample.size} replicates: a population needs at least {min_size}; run more, smaller ones")
    return sample


def mean(
    values: ArrayLike, confidence: float = CONFIDENCE, *, widen: float = 0.0, min_size: int = REPLICATES
) -> Estimate:
    """Mean of independent values and Student's interval, which is extended by ``widen`` at both ends.

    If a value is not finite, value and interval are NaN. With ``min_size=1``, the interval of a single value is the
    whole line.

    Raises:
        ValueError: fewer than ``min_size`` values.

    >>> [round(x, 3) for x in mean([1, 2, 3, 4, 5, 6, 7, 8])]
    [4.5, 2.452, 6.548, 8]
    """
    sample = _sample(values, min_size)
    n = sample.size
    if not np.isfinite(sample).all():
        return Estimate(math.nan, math.nan, math.nan, n)
    centre = float(sample.mean())
    half_width = math.inf
    if n > 1:
        quantile = float(stdtrit(n - 1, 0.5 + confidence / 2))
        half_width = quantile * float(sample.std(ddof=1)) / math.sqrt(n) + widen
    return Estimate(centre, centre - half_width, centre + half_width, n)


def median(values: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Median and the interval between two order statistics, which has at least ``confidence`` for any law.

    The interval of 8 values is from the smallest to the largest, of 9 from the second to the eighth, of 12 from the
    third to the tenth. Infinite values are ordered like others; with a NaN, value and interval are NaN.

    Raises:
        ValueError: fewer than 8 values.

    >>> median([5, 1, 9, 2, 8, 3, 7, 4, 6])
    Estimate(value=5.0, low=2.0, high=8.0, n=9)
    """
    sample = np.sort(_sample(values))
    n = sample.size
    if np.isnan(sample).any():
        return Estimate(math.nan, math.nan, math.nan, n)
    rank = max(k for k in range(1, n // 2 + 1) if 2 * bdtr(k - 1, n, 0.5) <= 1 - confidence)
    return Estimate(float(np.median(sample)), float(sample[rank - 1]), float(sample[n - rank]), n)


def share(values: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Share of true values and its exact interval (Clopper and Pearson).

    Raises:
        ValueError: fewer than 8 values, or a value that is neither true nor false.

    >>> [round(x, 3) for x in share([True] * 7 + [False] * 29)]
    [0.194, 0.082, 0.36, 36]
    """
    sample = _sample(values)
    is_boolean = np.isin(sample, (0, 1))
    if not is_boolean.all():
        raise ValueError(f"a share needs values true and false; got {sample[~is_boolean][0]}")
    k = int(sample.sum())
    n = sample.size
    tail = (1 - confidence) / 2
    low = float(betaincinv(k, n - k + 1, tail)) if k else 0.0
    high = float(betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
    return Estimate(k / n, low, high, n)


STATISTICS = {"mean": mean, "median": median, "share": share}


def rounding(terms: int, bits: int = 53) -> float:
    """Bound on the relative rounding error of a sum of ``terms`` products, in any order, on any processor.

    The bound is γ = mu/(1 − mu) with m = ``terms`` and u = 2^−bits (Higham 2002, §3.1): 53 bits for float64, 24 for
    float32. The error is relative to the sum of magnitudes. The bound of a chain of operations is the sum of theirs.

    Raises:
        ValueError: there is no bound for so many terms.

    >>> rounding(1000) < 1.2e-13 and rounding(1000, bits=24) < 6e-5
    True
    """
    mu = terms * 2.0**-bits
    if not 0 < mu < 1:
        raise ValueError(f"{terms} terms of {bits} bits: no bound; at least one term, and fewer than 2^{bits}")
    return mu / (1 - mu)
