"""The terms of the growth of ρ² over an interval, and the largest growth that an optimizer allows without drift."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class NormBudget(NamedTuple):
    """Growth of ρ² over each interval of a series, shapes ``(n-1,)``: the sum of its two terms."""

    displacement_sq: NDArray[np.float64]  # ‖Δ‖²
    inner: NDArray[np.float64]  # 2θ·Δ


def norm_budget(rho: ArrayLike, cos: ArrayLike) -> NormBudget:
    """Split Δ(ρ²) of each interval into ‖Δ‖² and 2θ·Δ, from norms and neighbour cosines alone.

    With Δ = θ' − θ, ρ = ‖θ‖ and cos the cosine between θ and θ': 2θ·Δ = 2ρ(ρ' cos − ρ), and ‖Δ‖² is the rest of
    ρ'² − ρ² (Eq. 3 of the paper, for an interval). The budget of an interval is not the budget of a step: correlated
    steps move growth from one term to the other.

    Args:
        rho: parameter norms at n ≥ 2 successive snapshots, shape ``(n,)``.
        cos: cosine between each snapshot and the one before, shape ``(n-1,)``.

    Raises:
        ValueError: shapes that do not match, a negative or non-finite norm, a cosine outside [−1, 1].

    >>> norm_budget([3.0, 5.0], [0.6])
    NormBudget(displacement_sq=array([16.]), inner=array([0.]))
    """
    rho = np.asarray(rho, dtype=np.float64)
    cos = np.asarray(cos, dtype=np.float64)
    if rho.ndim != 1 or cos.shape != (len(rho) - 1,):
        raise ValueError(
            f"n norms, shape (n,), need n - 1 neighbour cosines, shape (n - 1,); got shapes {rho.shape} and {cos.shape}"
        )
    is_norm = np.isfinite(rho) & (rho >= 0)
    if not is_norm.all():
        raise ValueError(f"norms must be finite and not negative; got {rho[~is_norm][0]}")
    is_cosine = np.abs(cos) <= 1  # false for NaN
    if not is_cosine.all():
        raise ValueError(f"cosines must lie in [-1, 1]; got {cos[~is_cosine][0]}")
    before = rho[:-1]
    after = rho[1:]
    # (ρ' − ρ)² + 2ρρ'(1 − cos) has no cancellation where ρ' ≈ ρ and cos ≈ 1
    displacement_sq = (after - before) ** 2 + 2 * before * after * (1 - cos)
    return NormBudget(displacement_sq, 2 * before * (after * cos - before))


def drift_free_cap(steps: ArrayLike, *, warmup: int = 10_000) -> NDArray[np.float64]:
    """Largest growth of ln ρ² between successive ``steps`` that Adafactor allows if θ·δ = 0 at every step.

    Adafactor with relative steps and clipping moves each matrix by at most 1/√max(s, warmup) of its own norm at step s
    (Shazeer and Stern 2018, §6 and §8; the schedule is that of T5). Orthogonal steps then multiply ρ² by at most
    1 + 1/max(s, warmup) each. The bound holds for every matrix whose root mean square is above ε₂, and so for any sum
    of squares over such matrices.

    Args:
        steps: numbers of successive steps, increasing and not negative, shape ``(n,)``.
        warmup: steps during which the relative step size is constant.

    Returns:
        One number an interval, shape ``(n-1,)``; after warm-up it is ln(t'/t).

    Raises:
        ValueError: steps that do not increase, or are negative.

    >>> drift_free_cap([10_000, 20_000, 80_000]).round(4)  # ln 2 and ln 4
    array([0.6931, 1.3863])
    """
    steps = np.asarray(steps, dtype=np.int64)
    if steps[0] < 0 or (np.diff(steps) <= 0).any():
        raise ValueError(f"steps must be increasing and not negative; got {steps}")
    relative = 1 / np.maximum(np.arange(steps[-1]), warmup)
    total = np.concatenate(([0.0], np.cumsum(np.log1p(relative))))
    return np.diff(total[steps])
