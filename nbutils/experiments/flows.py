"""Gradient flow and descent of homogeneous networks on separable data, over hundreds of decades of time.

On separable data the logistic loss falls like 1/t, and plain gradients underflow long before the norm shows its law.
So everything here is written in ℓ = log L: a change of clock leaves the path of the flow unchanged, and ∇ℓ = ∇L / L
neither underflows nor vanishes. Margins are q_i = y_i f(x_i; θ), and the loss is the mean of log(1 + exp(−q_i)). All
numbers are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.func import functional_call

from nbutils import intervals
from nbutils.experiments.homogeneous import HomogeneousMLP
from nbutils.intervals import Estimate

Array = NDArray[np.float64]
# From flat parameters of several networks, (networks, n), to the margins of their examples, (networks, examples).
Margins = Callable[[Tensor], Tensor]


def _log_loss(q: Tensor) -> Tensor:
    """ℓ = log of the mean of log(1 + exp(−q)) over the last dimension, also where exp(−q) is below every float."""
    large = q > 30  # log(1 + e^−q) = e^−q (1 − e^−q/2 + …)
    # torch's own threshold of 20 leaves out a term of e^−20
    losses = torch.nn.functional.softplus(torch.where(large, 0.0, -q), threshold=40)
    log_losses = torch.where(large, -q, losses.log())
    return torch.logsumexp(log_losses, dim=-1) - math.log(q.shape[-1])


def log_loss_gradient(margins: Margins, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ ``(networks,)``, ∇ℓ ``(networks, n)`` and the margins ``(networks, examples)``.

    Used in ``divergence``.

    >>> theta = torch.zeros(1, 1, dtype=torch.float64)
    >>> ell, grad, _ = log_loss_gradient(lambda theta: theta, theta)  # L = log(1 + e^−θ)
    >>> round(ell.exp().item(), 4), round(grad.item(), 4)  # log 2 and −½ / log 2
    (0.6931, -0.7213)
    """
    theta = theta.detach().requires_grad_()
    q = margins(theta)
    ell = _log_loss(q)
    (grad,) = torch.autograd.grad(ell.sum(), theta)
    return ell.detach(), grad, q.detach()


def mlp_margins(widths: Sequence[int], x: Tensor, y: Tensor) -> Margins:
    """The margins of ``HomogeneousMLP(widths)``, which has one output, as a function of its flat parameters.

    Used in ``divergence``.

    Args:
        x: inputs, ``(examples, n_in)`` for all networks or ``(networks, examples, n_in)``.
        y: labels ±1, ``(examples,)`` or ``(networks, examples)``.

    >>> x, y = torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.tensor([1.0, -1.0])
    >>> mlp_margins((1, 1, 1), x, y)(torch.tensor([[3.0, 5.0]], dtype=torch.float64)).tolist()  # 5 · 3x · y
    [[15.0, -30.0]]
    """
    net = HomogeneousMLP(widths)
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]

    def margins(theta: Tensor) -> Tensor:
        flat_weights = zip(shapes, theta.split(sizes, dim=-1), strict=True)
        weights = {name: flat.unflatten(-1, shapes[name]) for name, flat in flat_weights}
        return y * functional_call(net, weights, (x,)).squeeze(-1)

    return margins


def separable_data(
    networks: int, examples: int, n_in: int, *, gap: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A data set for each network: Gaussian inputs, moved away from a random plane by ``gap``, labelled by their side.

    Used in ``divergence``.

    Returns:
        x ``(networks, examples, n_in)`` and y ``(networks, examples)``, ±1, float64.

    >>> x, y = separable_data(1, 9, 3, gap=0.5, generator=torch.Generator().manual_seed(0))
    >>> x.shape, y.unique().tolist()
    (torch.Size([1, 9, 3]), [-1.0, 1.0])
    """
    normal = torch.randn(networks, 1, n_in, generator=generator, dtype=torch.float64)
    normal = torch.nn.functional.normalize(normal, dim=-1)
    x = torch.randn(networks, examples, n_in, generator=generator, dtype=torch.float64)
    y = (x * normal).sum(-1).sign()
    return x + gap * y[..., None] * normal, y


def separated_start(
    widths: Sequence[int], networks: int, margins: Margins, *, generator: torch.Generator, steps: int = 3000
) -> tuple[Tensor, Tensor]:
    """Random networks, trained until the loss is below log(2)/(2·examples), so that every example is right.

    Used in ``divergence``.

    Returns:
        theta ``(networks, n)``, and whether the network got there ``(networks,)``: gradient descent may get stuck.

    >>> generator = torch.Generator().manual_seed(0)
    >>> x, y = separable_data(3, 4, 2, gap=1.0, generator=generator)
    >>> margins = mlp_margins((2, 8, 1), x, y)
    >>> theta, separated = separated_start((2, 8, 1), 3, margins, generator=generator)
    >>> separated.tolist(), bool((margins(theta)[separated] > 0).all())
    ([True, True, True], True)
    """
    nets = [HomogeneousMLP(widths, generator=generator) for _ in range(networks)]
    theta = torch.stack([torch.cat([w.detach().flatten() for w in net.weights]) for net in nets])
    for _ in range(steps):
        ell, grad, q = log_loss_gradient(margins, theta)
        separated = ell < math.log(math.log(2) / (2 * q.shape[1]))
        if separated.all():
            break
        delta = 0.02 * theta.norm(dim=1, keepdim=True) * torch.nn.functional.normalize(grad, dim=1)
        theta = torch.where(separated[:, None], theta, theta - delta)
    return theta, separated


class Path(NamedTuple):
    """Points on the paths of several networks, float64; arrays are ``(points, networks)`` unless a shape is given.

    Used in ``divergence``.
    """

    log_time: Array
    norm: Array  # ρ
    length: Array  # distance travelled, ∫‖∇L‖dt
    log_inv_loss: Array  # log 1/L
    margin: Array  # the smallest q of the examples
    theta: Array  # (points, networks, n)


def flow(
    margins: Margins, theta: Tensor, targets: ArrayLike, *, tol: float = 1e-4, shortest_step: float = 0.02
) -> Path:
    """Gradient flow dθ/dt = −∇L, which starts from ``theta`` at t = 1, at given values of log 1/L.

    The independent variable is λ = log 1/L: dθ/dλ = −∇ℓ/‖∇ℓ‖² and d(log t)/dλ = exp(λ − log t)/‖∇ℓ‖². Both right-hand
    sides stay moderate however small L is. The method is Bogacki–Shampine 3(2), with a step size for each network.

    Where a path slides along a kink of a ReLU, the steps zigzag, and log 1/L grows by less than the steps in λ. The
    points then lie below their targets; ``log_inv_loss`` is the true value.

    Used in ``divergence``.

    Args:
        margins: of all networks, as from ``mlp_margins``.
        theta: ``(networks, n)``, float64.
        targets: increasing values of log 1/L. A network that starts beyond a target is returned at its start.
        tol: tolerated local error of θ relative to ρ, and of log t.
        shortest_step: smallest step in λ; its error is not controlled.

    >>> path = flow(lambda theta: theta**2, torch.ones(1, 1, dtype=torch.float64), [16.0])
    >>> path.norm.round(2), path.length.round(2)  # log 1/L = 16 where θ² = 16
    (array([[4.]]), array([[3.]]))
    """
    theta = theta.detach().clone()
    n = theta.shape[1]
    lam = -log_loss_gradient(margins, theta)[0]
    log_t_and_length = torch.zeros(len(theta), 2, dtype=theta.dtype)
    state = torch.cat([theta, log_t_and_length], dim=1)

    def derivative(state: Tensor) -> Tensor:
        """d/dλ of θ, log t and the length."""
        ell, grad, _ = log_loss_gradient(margins, state[:, :n])
        log_t = state[:, n : n + 1]
        square = grad.square().sum(1, keepdim=True)
        log_t_rate = torch.exp(-ell[:, None] - log_t) / square
        return torch.cat([-grad / square, log_t_rate, square.rsqrt()], dim=1)

    points = []
    h = torch.full_like(lam, shortest_step)
    k1 = derivative(state)
    for target in np.asarray(targets, dtype=np.float64):
        while bool((lam < target).any()):
            remaining = target - lam
            step = torch.minimum(h, remaining).clamp(min=0)[:, None]
            k2 = derivative(state + step / 2 * k1)
            k3 = derivative(state + 3 / 4 * step * k2)
            proposal = state + step / 9 * (2 * k1 + 3 * k2 + 4 * k3)
            k4 = derivative(proposal)
            error = step / 72 * (-5 * k1 + 6 * k2 + 8 * k3 - 9 * k4)
            error_theta = error[:, :n].norm(dim=1) / state[:, :n].norm(dim=1)
            error_log_t = error[:, n].abs()
            error_ratio = torch.maximum(error_theta, error_log_t) / tol

            accepted = ((error_ratio <= 1) | (h <= shortest_step)) & (remaining > 0)
            state = torch.where(accepted[:, None], proposal, state)
            k1 = torch.where(accepted[:, None], k4, k1)
            arrived = accepted & (h >= remaining)
            lam = torch.where(accepted, lam + step[:, 0], lam)
            lam = torch.where(arrived, torch.full_like(lam, target), lam)

            factor = (0.9 * error_ratio.clamp(min=1e-6) ** (-1 / 3)).clamp(0.2, 2)
            keep = arrived | (remaining <= 0)  # the target cut the last step short, which says nothing of h
            h = torch.where(keep, h, step[:, 0] * factor).clamp(min=shortest_step)
        points.append((state[:, :n], state[:, n], state[:, n + 1]))
    return _path(margins, points)


def descent(margins: Margins, theta: Tensor, steps: Sequence[int], rate: float, *, normalised: bool = False) -> Path:
    """Gradient descent after given numbers of steps (increasing); a step is −η∇L, or if ``normalised`` −η∇L/‖∇L‖.

    The time t is the sum of the factors of −∇L, kept as its logarithm.

    Used in ``divergence``.

    >>> start = torch.ones(1, 1, dtype=torch.float64)
    >>> descent(lambda theta: theta, start, [9], 0.1, normalised=True).norm.round(9)  # nine steps of length η
    array([[1.9]])
    """
    theta = theta.detach().clone()
    points = []
    log_t = torch.full(theta.shape[:1], -math.inf, dtype=theta.dtype)
    length = torch.zeros_like(log_t)
    for step in range(1, max(steps) + 1):
        ell, grad, _ = log_loss_gradient(margins, theta)
        log_factor = -ell - grad.norm(dim=1).log() if normalised else 0 * ell
        log_factor = log_factor + math.log(rate)
        descent_step = torch.exp(log_factor + ell)[:, None] * grad  # ∇L = L∇ℓ
        theta = theta - descent_step
        log_t = torch.logaddexp(log_t, log_factor)
        length = length + descent_step.norm(dim=1)
        if step in steps:
            points.append((theta, log_t, length))
    return _path(margins, points)


def _path(margins: Margins, points: list[tuple[Tensor, Tensor, Tensor]]) -> Path:
    """From θ, log t and length at each point to arrays over all points."""
    rows = []
    for theta, log_t, length in points:
        q = margins(theta)
        rows.append((log_t, theta.norm(dim=1), length, -_log_loss(q), q.amin(1), theta))
    columns = [torch.stack(column).detach().numpy() for column in zip(*rows, strict=True)]
    return Path(*columns)


def fit_loglog(log_t: Array, u: Array, *, level: float = 0.999) -> Estimate:
    """Coefficient p of u = log t + p (log u − 1/u) + const, as a mean over networks with its interval.

    log u is log log t to leading order, and −1/u is the next term of the derived law; with both terms the fit does not
    need t to reach 10^1000. The law holds in the limit only, so the Student interval over the networks is widened by
    the mean distance between the slopes of the first and the second half of the window, or by 2.5 times the distance
    between the means of these slopes if that is larger. A bias like u^(-1/2) is 2.5 times the amount by which it
    changes between the halves of a window of a factor 5.

    Used in ``divergence``.

    Args:
        log_t: ``(points, networks)``, at least 4 points and 2 networks.
        u: in the same shape.
        level: of the interval.

    >>> u = np.linspace(10, 50, 9)[:, None] * np.ones(2)
    >>> round(fit_loglog(u - 1.5 * (np.log(u) - 1 / u), u).value, 6)  # the law itself, with p = 3/2
    1.5
    """

    def slopes(points: slice) -> Array:
        """Least-squares slope of u − log t against log u − 1/u for each network, ``(networks,)``."""
        x = (np.log(u) - 1 / u)[points]
        y = (u - log_t)[points]
        x = x - x.mean(0)
        y = y - y.mean(0)
        return (x * y).sum(0) / (x * x).sum(0)

    half = len(log_t) // 2 + 1
    change = slopes(slice(None, half)) - slopes(slice(-half, None))
    drift = max(abs(change).mean(), 2.5 * abs(change.mean()))
    return intervals.mean(slopes(slice(None)), level, widen=float(drift), min_size=2)
