"""The random walk against stepping."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.timing import cpu_seconds
from nbutils import walks
from nbutils.device import generator


def stepwise(n: int, steps: int, count: int, seed: int) -> torch.Tensor:
    """The plain way: every step of every walk. Norms after the last step, shape (count,)."""
    rng, theta = generator(seed, "cpu"), torch.zeros(count, n)
    for _ in range(steps):
        theta += torch.randn(count, n, generator=rng)
    return theta.norm(dim=1)


def random_walk() -> dict[str, object]:
    """n = 10⁵, t = 10⁶, 100 walks. The plain side is timed over 20 steps; its cost is linear in t."""
    shared = walks.walk_norms(
        walks.gaussian, n=1000, times=np.array([1, 300]), walks=200, generator=generator(1, "cpu")
    )[:, -1]
    plain_mean = float(stepwise(1000, 300, 200, 2).mean())
    assert abs(shared.mean() / plain_mean - 1) < 0.02, f"the two sides disagree: {shared.mean()} and {plain_mean}"
    times = walks.log_times(10**6, per_decade=4)

    def ours() -> None:
        walks.walk_norms(walks.gaussian, n=10**5, times=times, walks=100, generator=generator(0, "cpu"))

    plain = cpu_seconds(lambda: stepwise(10**5, 20, 100, 0)) / 20 * 10**6
    return {
        "what": "random walk, n = 10⁵, t = 10⁶, 100 walks",
        "ours_s": cpu_seconds(ours),
        "plain_s": plain,
        "bound": 1000,
    }


PAIRS = (random_walk,)
