"""What the growth of a recorded training is made of: lengths of steps, and their drift along the parameters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class ExponentParts(NamedTuple):
    """Local exponent d ln ρ / d ln t of each window, shapes ``(windows,)``: ``exponent = length + drift``."""

    exponent: Array
    length: Array  # what the lengths of the steps give: all of it, were every step orthogonal to the parameters
    drift: Array  # what θ·δ adds, or takes away


class StepConstants(NamedTuple):
    """Mean geometry of the relative steps in a window."""

    u: float  # root mean square of ‖δ‖/(α_t ρ)
    kappa: float  # mean of √t·cos(θ, δ)


def total(layers: pd.DataFrame) -> pd.DataFrame:
    """The layers of a table as one: squares of norms and inner products add over layers.

    Args:
        layers: rows of ``training.Run.layers``, such as all but the embedding's.

    Returns:
        A table with a row for each step, ``step, norm, step_norm, inner, alignment, projection, grad_norm`` as in a
        run's history, and ``gradient_cos`` = cos(θ, ∇L), at the parameters before the step. Row 0 is the start.

    >>> both = total(pd.DataFrame({"step": [0, 0], "layer": ["a", "b"], "norm": [3.0, 4.0]} | dict.fromkeys(
    ...     ("step_norm", "inner", "projection", "grad_norm"), np.nan)))
    >>> float(both["norm"][0])
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


def exponent_parts(table: pd.DataFrame, edges: ArrayLike) -> ExponentParts:
    """Split the local exponent between successive ``edges`` into step length and drift, exactly.

    From ρ'² = ρ²(1 + s² + 2sκ), with s = ‖δ‖/ρ and κ = cos(θ, δ): the growth of ln ρ is Σ ½ ln(1 + s²), and the rest
    is drift.

    Args:
        table: every step of a run, as ``total`` gives it.
        edges: numbers of steps, from 1 on, increasing.

    Raises:
        ValueError: steps are missing, or edges outside of the run.

    >>> table = pd.DataFrame({"step": range(8), "norm": np.sqrt(np.arange(1, 9)), "step_norm": 1.0})
    >>> exponent, length, drift = exponent_parts(table, [1, 7])  # ρ² = t + 1: unit steps, each orthogonal
    >>> np.allclose(exponent, length), abs(drift).round(12)
    (True, array([0.]))
    """
    edges = np.asarray(edges, dtype=np.int64)
    if not np.array_equal(table["step"], np.arange(len(table))):
        raise ValueError("the split needs every step from 0 on: record with every=1")
    if len(edges) < 2 or edges[0] < 1 or edges[-1] >= len(table) or (np.diff(edges) <= 0).any():
        raise ValueError(f"edges {edges} must increase, within 1 … {len(table) - 1}")
    rho, delta = table["norm"].to_numpy(), table["step_norm"].to_numpy()
    gained = np.concatenate(([0.0], np.cumsum(np.log1p((delta[1:] / rho[:-1]) ** 2) / 2)))
    octaves = np.diff(np.log(edges))
    exponent, length = np.diff(np.log(rho[edges])) / octaves, np.diff(gained[edges]) / octaves
    return ExponentParts(exponent, length, exponent - length)


def step_constants(table: pd.DataFrame, rate: ArrayLike, low: int, high: int) -> StepConstants:
    """u and κ of the steps ``low`` + 1 … ``high``: relative steps ‖δ‖ = α_t u ρ with cos(θ, δ) = κ/√t.

    Means are over ln t, since an exponent is a slope in ln t.

    Args:
        table: every step of a run, as ``total`` gives it.
        rate: α_t of each row, as the ``lr`` of a run's history; that of row 0 is not used.

    >>> t = np.arange(100)
    >>> table = pd.DataFrame({"step": t, "norm": 1.0, "step_norm": 0.02, "alignment": 0.3 / np.sqrt(t + (t == 0))})
    >>> [round(value, 6) for value in step_constants(table, np.full(100, 0.01), 10, 99)]
    [2.0, 0.3]
    """
    t, rho = table["step"].to_numpy()[low + 1 : high + 1], table["norm"].to_numpy()[low:high]
    inside = table.iloc[low + 1 : high + 1]
    alpha = np.asarray(rate, dtype=np.float64)[low + 1 : high + 1]
    u = inside["step_norm"].to_numpy() / (alpha * rho)
    weights = 1 / t
    kappa = inside["alignment"].to_numpy() * np.sqrt(t)
    return StepConstants(float(np.sqrt(np.average(u**2, weights=weights))), float(np.average(kappa, weights=weights)))


def relative_exponent(alpha: float, u: float, kappa: float) -> float:
    """Exponent of ρ for relative steps of rate α/√t: ρ² ∝ t^(α²u² + 2ακu), so α²u²/2 + ακu.

    >>> relative_exponent(1.0, 1.0, 0.0)
    0.5
    """
    return alpha**2 * u**2 / 2 + alpha * u * kappa


def replayed_steps(lengths: ArrayLike) -> Array:
    """Root mean square of each Adafactor update, from the lengths of a tensor's gradients alone: ``(steps,)``.

    The running mean of the squared gradient, with β₂ = 1 − t^−0.8, as if only the gradient's length changed: the update
    is ‖g_t‖/√v_t, clipped at 1. It is 1 where the length is constant, below 1 after a burst.

    >>> replayed_steps([1, 10, 1]).round(2)
    array([1.  , 1.  , 0.17])
    """
    steps, mean = [], 0.0
    for t, length in enumerate(np.asarray(lengths, dtype=np.float64), 1):
        mean += t**-0.8 * (length**2 - mean)
        steps.append(min(1.0, float(length / mean**0.5)) if mean > 0 else 0.0)
    return np.array(steps)


class OrthogonalWalk(NamedTuple):
    """Walks whose every step is orthogonal to θ."""

    theta: NDArray[np.float64]  # every point, (walks, steps + 1, n)
    worst_alignment: float  # largest |cos(θ, δ)| over all steps: zero up to rounding
    squares: NDArray[np.float64]  # Σ‖δ‖² over all steps of each walk


def orthogonal_walk(
    *,
    n: int,
    steps: int,
    lr: float,
    pull: float,
    turn: float,
    walks: int,
    generator: torch.Generator,
) -> OrthogonalWalk:
    """SGD on a scale-invariant toy loss, float64: every step has θ·δ = 0, whatever its direction on the sphere.

    The loss is −pull · θ₁/‖θ‖ with unit Gaussian noise on its gradient; ``turn`` adds a unit force that circles in the
    planes (θ₁, θ₂), (θ₃, θ₄), … The step is δ = lr · P g / ρ with g = pull·e₁ + turn·Jθ/ρ + noise, J the quarter turn
    in those planes and P the projection orthogonal to θ. Starts at θ = e₂ with ρ = 1; ``walks`` are independent.

    Raises:
        ValueError: ``n`` is odd, or less than 2.

    >>> generator = torch.Generator().manual_seed(0)
    >>> walk = orthogonal_walk(n=4, steps=100, lr=0.1, pull=1.0, turn=1.0, walks=2, generator=generator)
    >>> rho_sq = (walk.theta**2).sum(2)
    >>> bool(np.allclose(rho_sq[:, -1] - rho_sq[:, 0], walk.squares))  # Pythagoras, step by step
    True
    """
    if n < 2 or n % 2:
        raise ValueError(f"n = {n}: the planes of the turn need an even dimension of at least 2")
    theta = torch.zeros(walks, n, dtype=torch.float64)
    theta[:, 1] = 1.0
    points = torch.empty(walks, steps + 1, n, dtype=torch.float64)
    points[:, 0] = theta
    worst, total = 0.0, torch.zeros(walks, dtype=torch.float64)
    for t in range(steps):
        rho = theta.norm(dim=1, keepdim=True)
        unit = theta / rho
        g = torch.randn(walks, n, dtype=torch.float64, generator=generator)
        g[:, 0] += pull
        g += turn * torch.stack([-unit[:, 1::2], unit[:, 0::2]], dim=2).flatten(1)
        delta = g - (g * unit).sum(1, keepdim=True) * unit
        delta -= (delta * unit).sum(1, keepdim=True) * unit  # takes the rounding error of the first projection
        delta *= lr / rho
        length = delta.norm(dim=1)
        worst = max(worst, float(((delta * unit).sum(1).abs() / length).max()))
        total += length**2
        theta = theta + delta
        points[:, t + 1] = theta
    return OrthogonalWalk(points.numpy(), worst, total.numpy())


def interval_shares(theta: NDArray[np.float64], spans: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of ‖Δ‖² in the growth of ρ² when a path is looked at every ``span`` steps, shape ``(len(spans),)``.

    Args:
        theta: every point of the path, shape ``(steps + 1, n)``.
        spans: lengths of the intervals; what is left over at the end of the path is dropped.

    >>> interval_shares(np.arange(5.0)[:, None], np.array([1, 2, 4]))  # a straight line from 0, at constant speed
    array([0.25, 0.5 , 1.  ])
    """
    shares = []
    for span in spans:
        seen = theta[::span]
        growth = (seen[-1] ** 2).sum() - (seen[0] ** 2).sum()
        shares.append((np.diff(seen, axis=0) ** 2).sum() / growth)
    return np.array(shares)
