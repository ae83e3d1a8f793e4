"""Computed results against simulated ones: the random walk, the projections of Figure 1, the degree of an encoder."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from maintenance.benchmarks.timing import Row, compare
from nbutils.devices import generator
from nbutils.experiments import figure1, projection, walks
from normgrowth import homogeneity


def stepwise_norms(n: int, steps: int, count: int, seed: int) -> torch.Tensor:
    """Norms of ``count`` walks in n dimensions after the last step, ``(count,)``, by making every step."""
    rng = generator(seed, "cpu")
    theta = torch.zeros(count, n)
    for _ in range(steps):
        theta += torch.randn(count, n, generator=rng)
    return theta.norm(dim=1)


def check_walks(n: int = 1000, steps: int = 300, count: int = 200) -> None:
    """Assert that norms of both kinds of walk have the same law: means to 5 standard errors, deviations to 30 %."""
    times = np.array([1, steps])
    jumped = walks.walk_norms(walks.gaussian, n=n, times=times, walks=count, generator=generator(1, "cpu"))[:, -1]
    stepped = stepwise_norms(n, steps, count, 2).double().numpy()
    error = np.hypot(jumped.std(ddof=1), stepped.std(ddof=1)) / count**0.5
    assert abs(jumped.mean() - stepped.mean()) < 5 * error, f"they disagree: {jumped.mean()} and {stepped.mean()}"
    assert 0.7 < jumped.std() / stepped.std() < 1.4, f"they disagree: spread {jumped.std()} and {stepped.std()}"


def random_walk(n: int = 10**5, t: int = 10**6, count: int = 100, steps: int = 10) -> Row:
    """``walks.walk_norms`` against making every step, which is timed over ``steps`` steps: its cost is linear in t."""
    check_walks()
    times = walks.log_times(t, per_decade=4)

    def ours() -> np.ndarray:
        return walks.walk_norms(walks.gaussian, n=n, times=times, walks=count, generator=generator(0, "cpu"))

    what = "random walk, n = 10⁵, t = 10⁶, 100 walks"
    return compare(what, ours, lambda: stepwise_norms(n, steps, count, 0), 1000, share=steps / t, repeats=3)


def figure_1(timed: int = 10) -> Row:
    """``projection.along_ray`` against one backward pass for each point of the figure.

    The backward passes are timed at ``timed`` points spread over scales and accuracies. Both projections of a point
    must agree to 1e-11 of the mean size of the samples' contributions.
    """
    scales = np.linspace(1, 50, 50)
    accuracies = np.linspace(0, 1, 101)
    nets = [figure1.figure1(name, generator=generator(0, "cpu")) for name in figure1.SUBLAYERS]
    x = torch.randn(32, 16, 10, generator=generator(1, "cpu"), dtype=torch.float64)
    points = [(int(i), int(j)) for i, j in zip(np.linspace(0, 100, timed), np.linspace(49, 0, timed), strict=True)]

    def ours() -> list[projection.Projection]:
        return [projection.along_ray(net, x, scales, accuracies, generator=generator(2, "cpu")) for net in nets]

    rays = ours()
    work = [(net, ray, i, j, ray.labels(i, j)) for net, ray in zip(nets, rays, strict=True) for i, j in points]

    def plain() -> list[float]:
        return [projection.by_autograd(net, x, scales[j], labels)[0] for net, _, _, j, labels in work]

    for (_, ray, i, j, _), value in zip(work, plain(), strict=True):
        size = np.abs(ray.right_part[j]).mean() + np.abs(ray.wrong_part[j]).mean()
        assert abs(ray.projection[i, j] - value) < 1e-11 * size, f"they disagree: {ray.projection[i, j]} and {value}"
    what = "θ·∇L, 5 sublayers × 50 scales × 101 accuracies × 512 samples"
    return compare(what, ours, plain, 10, share=timed / (len(scales) * len(accuracies)), repeats=3)


def degree(depth: int = 12, d: int = 768, input_degree: int = 3) -> Row:
    """The degree of an encoder of the size of BERT-base by algebra, against running it at two scales.

    The input has the degree 3 of a pre-norm sublayer without biases, which has a gain and two matrices.
    Two scales are the fewest that give a log-ratio. They are 1000 and 2000, since attention is homogeneous only in the
    limit.
    """
    layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True, bias=False)
    net = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False).eval()
    rng = generator(0, "cpu")
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=rng)
    x = torch.randn(1, 16, d, generator=rng)
    with homogeneity.scalable(net, x, input_degree) as output, torch.no_grad():

        def ours() -> float:
            return float(homogeneity.degree(net, x, input_degree, approximate=True))

        def plain() -> float:
            return float((output(2000.0).norm() / output(1000.0).norm()).log2())

        assert abs(plain() - ours()) < 1e-6, f"they disagree: {ours()} and {plain()}"
        what = "degree of a 12-layer encoder of width 768 by algebra, against running it at two scales"
        return compare(what, ours, plain, 20, repeats=3)


PAIRS = (random_walk, figure_1, degree)
