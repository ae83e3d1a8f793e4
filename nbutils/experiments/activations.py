"""How far softmax moves when its input is scaled by c ≥ 1, and what the bounds on it depend on.

Everything is in natural logarithms, so that errors far below the smallest float64 keep their digits, and written
without cancellation. A log error of −inf is an error of 0.

With scores x of shape ``(..., n)``: the *depth* of an entry is d = max − x, the m entries of depth 0 are the maxima, S
is the sum of exp(−d) over the others, and the *gap* is the smallest positive depth (inf if there is none).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp

Array = NDArray[np.float64]


class Gaps(NamedTuple):
    """What the bounds depend on, shapes ``(...)``."""

    ties: NDArray[np.int64]  # m, the number of maxima
    gap: Array  # from the maximum to the next distinct value; inf if all entries are equal
    log_rest: Array  # ln S; −inf if all entries are equal


def gaps(x: ArrayLike) -> Gaps:
    """Number of maxima, gap to the next distinct value, and ln S of scores ``x``, shape ``(..., n)``.

    Entries may be −inf (masked), but not all of them. Ties are exact ties.

    >>> gaps([3.0, 3.0, 1.0])
    Gaps(ties=array(2), gap=array(2.), log_rest=array(-2.))
    """
    depth = _depth(x)
    below = depth > 0
    rest = _log_sum(np.where(below, -depth, -np.inf))
    return Gaps(np.asarray((~below).sum(-1)), np.asarray(np.where(below, depth, np.inf).min(-1)), np.asarray(rest))


def log_softmax_error(x: ArrayLike, c: ArrayLike) -> Array:
    """``ln |softmax(c·x)_i − softmax(x)_i|`` for every entry i, shape ``(..., n)``; ``c = inf`` is the limit.

    With W(c) = Σ_j exp(−c d_j) the difference is exp(−d_i) ((W(1) − W(c)) − W(1) (1 − exp(−(c−1) d_i))) / (W(1) W(c)).
    Each of the two terms is a sum of positive numbers.

    Scales ``c`` of at least 1 are broadcast against the leading shape of ``x``.

    >>> np.exp(log_softmax_error([1.0, 0.0], np.inf)).round(4)  # softmax is (0.7311, 0.2689), its limit (1, 0)
    array([0.2689, 0.2689])
    """
    depth = _depth(x)
    c = np.asarray(c, dtype=np.float64)[..., None]
    with np.errstate(invalid="ignore", over="ignore"):
        further = np.where((depth == 0) | (c == 1), 0.0, (c - 1) * depth)  # how much deeper the entry gets
    depth = np.broadcast_to(depth, further.shape)
    before, after = _log_sum(-depth)[..., None], _log_sum(-depth - further)[..., None]
    lost = _log_sum(-depth + _log_one_minus_exp(further))[..., None]  # ln(W(1) − W(c))
    own = before + _log_one_minus_exp(further)
    high, low = np.maximum(lost, own), np.minimum(lost, own)
    with np.errstate(invalid="ignore"):
        apart = np.where(np.isneginf(low), np.inf, high - low)
    return np.where(np.isneginf(high), -np.inf, high + _log_one_minus_exp(apart)) - depth - before - after


def _depth(x: ArrayLike) -> Array:
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(over="ignore"):
        return x.max(-1, keepdims=True) - x


def _log_sum(logs: Array) -> Array:
    return np.asarray(logsumexp(logs, axis=-1))


def _log_one_minus_exp(y: Array) -> Array:
    """ln(1 − exp(−y)) for y ≥ 0 without cancellation (Mächler 2012)."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(y < np.log(2), np.log(-np.expm1(-y)), np.log1p(-np.exp(-y)))
