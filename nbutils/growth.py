"""What the growth of a recorded training is made of: lengths of steps, and their drift along the parameters."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

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


def path(snapshots: Mapping[int, Mapping[str, Tensor]], *, without: str = "shared.") -> tuple[NDArray[np.int64], Array]:
    """Steps ``(n,)`` and points ``(n, n)`` with the lengths and angles of a run's n snapshots.

    n points and the origin span at most n dimensions, so the inner products say all, and those are summed tensor by
    tensor in float64: memory is n times the largest tensor. Names that begin with ``without`` are left out. Distances
    are right to about 1e-7 of the largest norm.

    >>> import torch
    >>> runs = {step: {"shared.weight": torch.ones(9), "w": torch.tensor([3.0, 4.0]) * step} for step in (20, 10)}
    >>> steps, points = path(runs)
    >>> steps.tolist(), np.linalg.norm(points, axis=1).round(6).tolist()
    ([10, 20], [50.0, 100.0])
    """
    steps = sorted(snapshots)
    inner = np.zeros((len(steps), len(steps)))
    for name in (name for name in snapshots[steps[0]] if not name.startswith(without)):
        rows = np.stack([snapshots[step][name].double().numpy().ravel() for step in steps])
        inner += rows @ rows.T
    sizes, axes = np.linalg.eigh(inner)
    return np.array(steps), axes * np.sqrt(np.maximum(sizes, 0))


@contextmanager
def saved_series(snapshots: Mapping[int, Mapping[str, Tensor]]) -> Iterator[Path]:
    """A folder of snapshots as checkpoints in the Hub's layout, ``step40/model.safetensors``; deleted afterwards.

    >>> import torch
    >>> with saved_series({40: {"w": torch.ones(2)}}) as folder:
    ...     [file.relative_to(folder).as_posix() for file in folder.glob("*/*")]
    ['step40/model.safetensors']
    """
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        for step, parameters in snapshots.items():
            place = Path(folder) / f"step{step}"
            place.mkdir()
            save_file({name: x.contiguous() for name, x in parameters.items()}, place / "model.safetensors")
        yield Path(folder)
