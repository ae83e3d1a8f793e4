"""The projection sweep of Figure 1 against one backward pass per point."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.timing import Row, compare
from nbutils.chapters import figure1, projection
from nbutils.device import generator


def figure_1() -> Row:
    """5 sublayers × 50 scales × 101 accuracies × 512 samples. The plain side is one backward pass for each point.

    It is timed over 10 points of each sublayer, spread over scales and accuracies; every point costs the same. The
    projections of those points must agree to 1e-11 of the samples' own size.
    """
    scales, accuracies = np.linspace(1, 50, 50), np.linspace(0, 1, 101)
    nets = [figure1.figure1(name, generator=generator(0, "cpu")) for name in figure1.SUBLAYERS]
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
    return compare(
        "θ·∇L, 5 sublayers × 50 scales × 101 accuracies × 512 samples",
        ours,
        plain,
        10,
        aim=40,
        share=len(points) / (len(scales) * len(accuracies)),
        repeats=3,
    )


PAIRS = (figure_1,)
