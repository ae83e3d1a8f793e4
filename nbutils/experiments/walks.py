"""Random walks in parameter space: null models of norm growth.

A walk is sampled at a few times only. The sum of m independent steps is drawn directly from its own law, so the cost
depends on the number of sampled times and not on the number of steps between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

# From a number of steps, a shape (walks, n) and a generator to the sum of that many independent steps of each walk.
Increment = Callable[[int, tuple[int, int], torch.Generator], torch.Tensor]


def log_times(t_max: int, per_decade: int = 4) -> NDArray[np.int64]:
    """Whole numbers from 1 to ``t_max``, evenly spaced in log t.

    Used in ``random-walk``.

    >>> log_times(1000, per_decade=1)
    array([   1,   10,  100, 1000])
    """
    count = max(2, round(per_decade * math.log10(t_max)) + 1)
    return np.unique(np.rint(np.geomspace(1, t_max, count)).astype(np.int64))


def gaussian(steps: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Sum of ``steps`` standard Gaussian steps: √steps · N(0, I).

    Used in ``random-walk``.

    >>> sums = gaussian(10_000, (1, 100_000), torch.Generator().manual_seed(0))
    >>> round(float(sums.square().mean()) / 10_000, 1)
    1.0
    """
    return math.sqrt(steps) * torch.randn(shape, generator=generator, device=generator.device)


def signs(steps: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Sum of ``steps`` steps with independent ±1 coordinates: 2·Binomial(steps, ½) − steps.

    Used in ``random-walk``.

    >>> signs(3, (1, 1000), torch.Generator().manual_seed(0)).unique().tolist()
    [-3.0, -1.0, 1.0, 3.0]
    """
    trials = torch.full(shape, float(steps), dtype=torch.float64, device=generator.device)
    return 2 * torch.binomial(trials, torch.full_like(trials, 0.5), generator=generator) - steps


def bursts(p: float) -> Increment:
    """Steps that are Gaussian with probability ``p`` and zero otherwise, all coordinates at once.

    The sum of m steps is Gaussian with a binomial number of terms. The step length has E‖δ‖² / (E‖δ‖)² ∝ 1/p: a finite
    but heavy spread of lengths, in any dimension.

    Used in ``random-walk``.

    Raises:
        ValueError: ``p`` is outside (0, 1].

    >>> steps = bursts(0.5)(1, (10_000, 3), torch.Generator().manual_seed(0))
    >>> moved = (steps != 0).all(1)
    >>> round(float(moved.double().mean()), 1), bool((steps[~moved] == 0).all())
    (0.5, True)
    """
    if not 0 < p <= 1:
        raise ValueError(f"p = {p}: the probability of a step must lie in (0, 1]")

    def increment(steps: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
        trials = torch.full((shape[0], 1), float(steps), dtype=torch.float64, device=generator.device)
        count = torch.binomial(trials, torch.full_like(trials, p), generator=generator)
        return count.sqrt() * torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)

    return increment


def stable(alpha: float) -> Increment:
    """Steps with symmetric α-stable coordinates: for α < 2 their variance is infinite.

    The sum of m steps has the law of m^{1/α} times a single step.

    Used in ``random-walk``.

    Raises:
        ValueError: ``alpha`` is outside (0, 2).

    >>> single = stable(0.5)(1, (1, 3), torch.Generator().manual_seed(0))
    >>> sum_of_ten = stable(0.5)(10, (1, 3), torch.Generator().manual_seed(0))
    >>> (sum_of_ten / single).round(decimals=6).tolist()  # 10²
    [[100.0, 100.0, 100.0]]
    """
    if not 0 < alpha < 2:
        raise ValueError(f"alpha = {alpha}: the index of a stable law with infinite variance must lie in (0, 2)")

    def increment(steps: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
        seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
        rng = np.random.default_rng(seed)
        angle = rng.uniform(size=shape) * np.pi - np.pi / 2  # Chambers, Mallows and Stuck (1976)
        sample = np.cos((1 - alpha) * angle) / rng.standard_exponential(shape)
        sample **= (1 - alpha) / alpha
        sample *= np.sin(alpha * angle) / np.cos(angle) ** (1 / alpha)
        return torch.as_tensor(steps ** (1 / alpha) * sample, device=generator.device)

    return increment


def walk_norms(
    increment: Increment, *, n: int, times: NDArray[np.int64], walks: int, generator: torch.Generator
) -> NDArray[np.float64]:
    """Norms ‖θ_t‖ of independent walks from θ = 0, shape ``(walks, len(times))``, float64.

    Times are whole numbers of at least 1, in increasing order; at these times the law of θ_t is exact. Walks run in
    batches of at most four million coordinates, so memory grows neither with t nor with the number of walks. Sums of
    squares are accumulated in float64.

    Used in ``random-walk``.

    >>> from nbutils.devices import generator
    >>> walk_norms(gaussian, n=3, times=log_times(100, 1), walks=5, generator=generator(0, "cpu")).shape
    (5, 3)
    """
    steps_between = [int(steps) for steps in np.diff(times, prepend=0)]
    norms = np.empty((walks, len(times)))
    batch = max(1, 4_000_000 // n)
    for start in range(0, walks, batch):
        shape = (min(batch, walks - start), n)
        theta = torch.zeros(shape, device=generator.device)
        for column, steps in enumerate(steps_between):
            theta = theta + increment(steps, shape, generator)
            rho = torch.linalg.vector_norm(theta, dim=1, dtype=torch.float64)
            norms[start : start + batch, column] = rho.cpu().numpy()
    return norms
