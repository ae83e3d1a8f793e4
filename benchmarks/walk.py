"""The random walk against stepping."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.timing import Row, compare
from nbutils.chapters import walks
from nbutils.device import generator


def stepwise(n: int, steps: int, count: int, seed: int) -> torch.Tensor:
    """The plain way: every step of every walk. Norms after the last step, shape (count,)."""
    rng, theta = generator(seed, "cpu"), torch.zeros(count, n)
    for _ in range(steps):
        theta += torch.randn(count, n, generator=rng)
    return theta.norm(dim=1)


def agree(n: int = 1000, steps: int = 300, count: int = 200) -> None:
    """Norms of both kinds of walk have the same law: means within 5 standard errors, deviations within 30 %."""
    times = np.array([1, steps])
    jumped = walks.walk_norms(walks.gaussian, n=n, times=times, walks=count, generator=generator(1, "cpu"))[:, -1]
    stepped = stepwise(n, steps, count, 2).double().numpy()
    error = np.hypot(jumped.std(ddof=1), stepped.std(ddof=1)) / count**0.5
    gap, spread = abs(jumped.mean() - stepped.mean()), jumped.std(ddof=1) / stepped.std(ddof=1)
    assert gap < 5 * error, f"the two sides disagree: {jumped.mean()} and {stepped.mean()}, standard error {error}"
    assert 0.7 < spread < 1.4, f"the two sides spread differently: {jumped.std()} and {stepped.std()}"


def random_walk(n: int = 10**5, t: int = 10**6, count: int = 100) -> Row:
    """n = 10⁵, t = 10⁶, 100 walks. The plain side is timed over 10 steps; its cost is linear in t."""
    agree()
    times, steps = walks.log_times(t, per_decade=4), 10
    return compare(
        "random walk, n = 10⁵, t = 10⁶, 100 walks",
        lambda: walks.walk_norms(walks.gaussian, n=n, times=times, walks=count, generator=generator(0, "cpu")),
        lambda: stepwise(n, steps, count, 0),
        1000,
        share=steps / t,
        repeats=3,
    )


PAIRS = (random_walk,)
