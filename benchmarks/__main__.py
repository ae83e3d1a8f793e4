"""Run all pairs: ``python -m benchmarks``. Writes ``_build/bench.json`` and prints the table.

A pair is timed by CPU time of one thread, three times a side; the medians are compared. Both sides must agree on a
result that they share.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from nbutils import projection, walks
from nbutils.device import generator

RESULT = Path(__file__).resolve().parent.parent / "_build" / "bench.json"


def cpu_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median CPU time of a call."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


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


def figure_1() -> dict[str, object]:
    """5 sublayers × 50 scales × 101 accuracies × 512 samples. The plain side is one backward pass for each point.

    It is timed over 10 points of each sublayer, spread over scales and accuracies; every point costs the same. The
    projections of those points must agree to 1e-11 of the samples' own size.
    """
    scales, accuracies = np.linspace(1, 50, 50), np.linspace(0, 1, 101)
    nets = [projection.figure1(name, generator=generator(0, "cpu")) for name in projection.SUBLAYERS]
    x = torch.randn(32, 16, 10, generator=generator(1, "cpu"), dtype=torch.float64)
    points = [(int(i), int(j)) for i, j in zip(np.linspace(0, 100, 10), np.linspace(49, 0, 10), strict=True)]

    def ours() -> list[projection.Projection]:
        return [projection.along_ray(net, x, scales, accuracies, generator=generator(2, "cpu")) for net in nets]

    rays = ours()
    labels = [[ray.labels(i, j) for i, j in points] for ray in rays]

    def plain() -> list[list[float]]:
        return [
            [projection.by_autograd(net, x, scales[j], y)[0] for (_, j), y in zip(points, those, strict=True)]
            for net, those in zip(nets, labels, strict=True)
        ]

    for ray, one_by_one in zip(rays, plain(), strict=True):
        for (i, j), value in zip(points, one_by_one, strict=True):
            size = np.abs(ray.right_part[j]).mean() + np.abs(ray.wrong_part[j]).mean()
            error = abs(ray.projection[i, j] - value) / size
            assert error < 1e-11, f"the two sides disagree: {ray.projection[i, j]} and {value}"
    return {
        "what": "θ·∇L, 5 sublayers × 50 scales × 101 accuracies × 512 samples",
        "ours_s": cpu_seconds(ours),
        "plain_s": cpu_seconds(plain) / len(points) * len(scales) * len(accuracies),
        "bound": 10,
    }


PAIRS: tuple[Callable[[], dict[str, object]], ...] = (random_walk, figure_1)


def main() -> int:
    torch.set_num_threads(1)
    rows = []
    for pair in tqdm(PAIRS, desc="pairs"):
        row = pair()
        row["ratio"] = row["plain_s"] / row["ours_s"]
        row["holds"] = bool(row["ratio"] >= row["bound"])
        rows.append(row)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(pd.DataFrame(rows).to_markdown(index=False, floatfmt=".4g"))
    print("CPU seconds; the plain side may be extrapolated from a shorter run. holds: the ratio is at least the bound.")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
