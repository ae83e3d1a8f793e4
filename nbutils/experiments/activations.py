"""The error of softmax when its input is scaled by c ≥ 1, and the quantities on which bounds on this error depend.

Errors are returned as natural logarithms, so that errors far below the smallest float64 keep their digits, and are
computed without cancellation. An error of 0 has the logarithm −inf.

Scores x have shape ``(..., n)``. The *depth* of an entry is d = max − x. The m entries of depth 0 are the maxima, S is
the sum of exp(−d) over all other entries, and the *gap* is the smallest positive depth (inf if all depths are 0).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp

Array = NDArray[np.float64]


class Gaps(NamedTuple):
    """The quantities on which the bounds depend, each of shape ``(...)``.

    Used in ``softmax-gap``.
    """

    ties: NDArray[np.int64]  # m, the number of maxima
    gap: Array  # from the maximum to the next distinct value; inf if all entries are equal
    log_rest: Array  # ln S; −inf if all entries are equal


def gaps(x: ArrayLike) -> Gaps:
    """Number of maxima, gap to the next distinct value, and ln S of scores ``x``, shape ``(..., n)``.

    Entries may be −inf (masked), but not all of them. Only equal floats count as tied.

    Used in ``softmax-gap``.

    >>> gaps([3.0, 3.0, 1.0])
    Gaps(ties=array(2), gap=array(2.), log_rest=array(-2.))
    """
    depth = _depth(x)
    below = depth > 0
    ties = (~below).sum(-1)
    gap = np.where(below, depth, np.inf).min(-1)
    log_rest = _log_sum(np.where(below, -depth, -np.inf))
    return Gaps(np.asarray(ties), np.asarray(gap), np.asarray(log_rest))


def log_softmax_error(x: ArrayLike, c: ArrayLike) -> Array:
    """``ln |softmax(c·x)_i − softmax(x)_i|`` for every entry i, shape ``(..., n)``; ``c = inf`` is the limit.

    With W(c) = Σ_j exp(−c d_j) the difference is exp(−d_i) ((W(1) − W(c)) − W(1) (1 − exp(−(c−1) d_i))) / (W(1) W(c)).
    Each of the two terms in the outer parentheses is a sum of positive numbers, so neither has cancellation.

    Args:
        x: scores, ``(..., n)``; −inf masks an entry, but not all entries may be masked.
        c: scales of at least 1, broadcast against the shape ``(...)``.

    Used in ``softmax-gap``.

    >>> np.exp(log_softmax_error([1.0, 0.0], np.inf)).round(4)  # softmax is (0.7311, 0.2689), its limit (1, 0)
    array([0.2689, 0.2689])
    """
    depth = _depth(x)
    c = np.asarray(c, dtype=np.float64)[..., None]
    with np.errstate(invalid="ignore", over="ignore"):
        added_depth = np.where((depth == 0) | (c == 1), 0.0, (c - 1) * depth)
    depth = np.broadcast_to(depth, added_depth.shape)
    log_w_before = _log_sum(-depth)[..., None]  # ln W(1)
    log_w_after = _log_sum(-depth - added_depth)[..., None]  # ln W(c)
    log_total_loss = _log_sum(-depth + _log_one_minus_exp(added_depth))[..., None]  # ln(W(1) − W(c))
    log_own_loss = log_w_before + _log_one_minus_exp(added_depth)
    larger = np.maximum(log_total_loss, log_own_loss)
    smaller = np.minimum(log_total_loss, log_own_loss)
    with np.errstate(invalid="ignore"):
        distance = np.where(np.isneginf(smaller), np.inf, larger - smaller)
    log_difference = np.where(np.isneginf(larger), -np.inf, larger + _log_one_minus_exp(distance))
    return log_difference - depth - log_w_before - log_w_after


def _depth(x: ArrayLike) -> Array:
    """max − x, ``(..., n)``; inf at masked entries."""
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(over="ignore"):
        return x.max(-1, keepdims=True) - x


def _log_sum(logs: Array) -> Array:
    """ln of the sum of exp(``logs``) over the last axis, ``(...)``."""
    return np.asarray(logsumexp(logs, axis=-1))


def _log_one_minus_exp(y: Array) -> Array:
    """ln(1 − exp(−y)) for y ≥ 0 without cancellation (Mächler 2012)."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(y < np.log(2), np.log(-np.expm1(-y)), np.log1p(-np.exp(-y)))
