"""Step lengths and alignments of recorded trainings, and walks whose steps are orthogonal to the parameters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class StepConstants(NamedTuple):
    """Mean length and alignment of the relative steps in a window.

    Used in ``small-t5``.
    """

    u: float  # root mean square of ‖δ‖/(α_t ρ)
    kappa: float  # mean of √t·cos(θ, δ)


def total(layers: pd.DataFrame) -> pd.DataFrame:
    """Join the layers of a table into one, such as all of ``training.TrainingRun.layers`` except the embedding.

    Squares of norms and inner products add over layers. Columns ``step, norm, step_norm, grad_norm, inner, projection,
    alignment`` are as in a run's history; ``gradient_cos`` is cos(θ, ∇L), at the parameters before the step.

    Used in ``small-t5``.

    >>> layers = pd.DataFrame({"step": [0, 0], "layer": ["a", "b"], "norm": [3.0, 4.0]})
    >>> layers[["step_norm", "inner", "projection", "grad_norm"]] = np.nan
    >>> float(total(layers)["norm"][0])
    5.0
    """
    squares = ["norm", "step_norm", "grad_norm"]
    table = layers[["step", *squares, "inner", "projection"]].copy()
    table[squares] **= 2
    table = table.groupby("step", as_index=False).sum(min_count=1)
    table[squares] **= 0.5
    before = table["norm"].shift()
    table["alignment"] = table["inner"] / (before * table["step_norm"])
    table["gradient_cos"] = table["projection"] / (before * table["grad_norm"])
    return table


def step_constants(table: pd.DataFrame, rate: ArrayLike, low: int, high: int) -> StepConstants:
    """u and κ of the steps ``low`` + 1 … ``high``: relative steps ‖δ‖ = α_t u ρ with cos(θ, δ) = κ/√t.

    Means are over ln t, since an exponent is a slope in ln t.

    Used in ``small-t5``.

    Args:
        table: every step of a run, as ``total`` returns it.
        rate: α_t of each row, as in the column ``lr`` of a run's history; row 0 is not used.

    >>> t = np.arange(100)
    >>> table = pd.DataFrame({"step": t, "norm": 1.0, "step_norm": 0.02, "alignment": 0.3 / np.sqrt(t + (t == 0))})
    >>> [round(value, 6) for value in step_constants(table, np.full(100, 0.01), 10, 99)]
    [2.0, 0.3]
    """
    window = table.iloc[low + 1 : high + 1]
    t = window["step"].to_numpy()
    rho = table["norm"].to_numpy()[low:high]  # before the step
    alpha = np.asarray(rate, dtype=np.float64)[low + 1 : high + 1]
    u = window["step_norm"].to_numpy() / (alpha * rho)
    kappa = window["alignment"].to_numpy() * np.sqrt(t)
    weights = 1 / t
    mean_square = np.average(u**2, weights=weights)
    mean_kappa = np.average(kappa, weights=weights)
    return StepConstants(u=float(np.sqrt(mean_square)), kappa=float(mean_kappa))


class OrthogonalWalk(NamedTuple):
    """Walks whose every step is orthogonal to θ.

    Used in ``small-t5``.
    """

    theta: Array  # all points of the walks, (walks, steps + 1, n)
    worst_alignment: float  # largest |cos(θ, δ)| over all steps: zero up to rounding


def orthogonal_walk(
    *, n: int, steps: int, lr: float, pull: float, turn: float, walks: int, generator: torch.Generator
) -> OrthogonalWalk:
    """SGD on a scale-invariant toy loss, float64: every step has θ·δ = 0, whatever its direction on the sphere.

    The loss is −pull · θ₁/‖θ‖, and its gradient has unit Gaussian noise; ``turn`` is the strength of a force that
    circles in the planes (θ₁, θ₂), (θ₃, θ₄), … The step is δ = lr · P g / ρ with g = pull·e₁ + turn·Jθ/ρ + noise, where
    J is the quarter turn in those planes and P the projection orthogonal to θ. Each of the independent ``walks`` starts
    at θ = e₂ with ρ = 1; the dimension ``n`` is even.

    Used in ``small-t5``.

    >>> generator = torch.Generator().manual_seed(0)
    >>> walk = orthogonal_walk(n=4, steps=100, lr=0.1, pull=1.0, turn=1.0, walks=2, generator=generator)
    >>> rho_sq = (walk.theta**2).sum(2)
    >>> step_sq = (np.diff(walk.theta, axis=1) ** 2).sum(2)
    >>> bool(np.allclose(np.diff(rho_sq), step_sq))  # Pythagoras, step by step
    True
    """
    theta = torch.zeros(walks, n, dtype=torch.float64)
    theta[:, 1] = 1.0
    points = torch.empty(walks, steps + 1, n, dtype=torch.float64)
    points[:, 0] = theta
    worst = 0.0
    for t in range(steps):
        rho = theta.norm(dim=1, keepdim=True)
        unit = theta / rho
        g = torch.randn(walks, n, dtype=torch.float64, generator=generator)
        g[:, 0] += pull
        g += turn * torch.stack([-unit[:, 1::2], unit[:, 0::2]], dim=2).flatten(1)
        delta = g - (g * unit).sum(1, keepdim=True) * unit
        delta -= (delta * unit).sum(1, keepdim=True) * unit  # removes the rounding error of the first projection
        delta *= lr / rho
        alignment = (delta * unit).sum(1).abs() / delta.norm(dim=1)
        worst = max(worst, float(alignment.max()))
        theta = theta + delta
        points[:, t + 1] = theta
    return OrthogonalWalk(points.numpy(), worst)
