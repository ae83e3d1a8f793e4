"""Inner products of long arrays, each in one reading, with float64 sums. Compiled by numba at the first call."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Real = NDArray[np.float32] | NDArray[np.float64]
# vector instructions need sums in another order and fused multiply-adds; NaN and infinity stay what they are
_compiled = numba.njit(nogil=True, fastmath={"reassoc", "contract"})


@_compiled
def dot(a: Real, b: Real) -> float:
    """a·b of two flat arrays of one length."""
    total = 0.0
    for i in range(a.size):
        total += np.float64(a[i]) * np.float64(b[i])
    return total


@_compiled
def advance(now: Real, old: Real, kept: Real) -> tuple[float, float, float]:
    """θ·δ and ‖δ‖² for θ in ``old`` and δ = ``now`` − θ, exact differences, and ``now``·``kept`` (0 if that is empty).

    ``old`` becomes ``now`` on the way.
    """
    inner, square, beside = 0.0, 0.0, 0.0
    for i in range(now.size):
        theta, after = np.float64(old[i]), np.float64(now[i])
        delta = after - theta
        inner += theta * delta
        square += delta * delta
        if kept.size:
            beside += after * np.float64(kept[i])
        old[i] = now[i]
    return inner, square, beside
