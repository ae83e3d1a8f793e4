"""What the growth of ρ² over an interval is made of, and what an optimizer allows without drift."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class NormBudget(NamedTuple):
    """Growth of ρ² over each interval of a series, shapes ``(n-1,)``: ``total = displacement_sq + inner``."""

    displacement_sq: NDArray[np.float64]  # ‖Δ‖²
    inner: NDArray[np.float64]  # 2θ·Δ
    total: NDArray[np.float64]  # ρ'² − ρ²


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
    NormBudget(displacement_sq=array([16.]), inner=array([0.]), total=array([16.]))
    """
    rho, cos = np.asarray(rho, dtype=np.float64), np.asarray(cos, dtype=np.float64)
    if rho.ndim != 1 or len(rho) < 2:
        raise ValueError(f"rho has shape {rho.shape}: give at least two norms, shape (n,)")
    if cos.shape != (len(rho) - 1,):
        raise ValueError(
            f"{len(rho)} norms need {len(rho) - 1} neighbour cosines, shape ({len(rho) - 1},); got {cos.shape}"
        )
    if not (np.isfinite(rho).all() and (rho >= 0).all()):
        raise ValueError(f"norms must be finite and not negative; got {rho[~(np.isfinite(rho) & (rho >= 0))][0]}")
    outside = ~(np.abs(cos) <= 1)  # catches NaN too
    if outside.any():
        raise ValueError(f"cosines must lie in [-1, 1]; got {cos[outside][0]} at position {int(np.argmax(outside))}")
    before, after = rho[:-1], rho[1:]
    # (ρ' − ρ)² + 2ρρ'(1 − cos) has no cancellation where ρ' ≈ ρ and cos ≈ 1
    displacement_sq = (after - before) ** 2 + 2 * before * after * (1 - cos)
    inner = 2 * before * (after * cos - before)
    total = (after - before) * (after + before)
    return NormBudget(displacement_sq, inner, total)


def drift_free_cap(steps: ArrayLike, *, warmup: int = 10_000, alpha: float = 1.0) -> NDArray[np.float64]:
    """Largest growth of ln ρ² between successive ``steps`` that Adafactor allows if θ·δ = 0 at every step.

    Adafactor with relative steps and clipping moves each matrix by at most ``alpha``/√max(s, warmup) of its own norm at
    step s (Shazeer and Stern 2018, §6 and §8; the schedule is that of T5). Orthogonal steps then multiply ρ² by at most
    1 + alpha²/max(s, warmup) each. It holds for every matrix above ε₂, so for any sum of squares over them.

    Returns:
        One number an interval, shape ``(n-1,)``; after warm-up and for alpha = 1 it is ln(t'/t).

    >>> drift_free_cap([10_000, 20_000, 80_000]).round(4)  # ln 2 and ln 4
    array([0.6931, 1.3863])
    """
    steps = np.asarray(steps, dtype=np.int64)
    if steps.ndim != 1 or len(steps) < 2 or steps[0] < 0 or (np.diff(steps) <= 0).any():
        raise ValueError(f"steps must be at least two, not negative and increasing; got {steps}")
    relative = alpha**2 / np.maximum(np.arange(steps[-1]), warmup)
    total = np.concatenate(([0.0], np.cumsum(np.log1p(relative))))
    return np.diff(total[steps])
