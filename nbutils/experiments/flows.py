"""Gradient flow and descent of homogeneous networks on separable data, over hundreds of decades of time.

On separable data the logistic loss falls like 1/t, and plain gradients underflow long before the norm shows its law.
So everything here is written in ℓ = log L: the flow has the same path in every clock, and ∇ℓ = ∇L / L neither
underflows nor vanishes. Margins are q_i = y_i f(x_i; θ), the loss is the mean of log(1 + exp(−q_i)), all in float64.
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
from nbutils.intervals import Estimate
from nbutils.models import HomogeneousMLP

Array = NDArray[np.float64]
# Flat parameters of several networks, (networks, n), to the margins of their examples, (networks, examples).
Margins = Callable[[Tensor], Tensor]


def _log_loss(q: Tensor) -> Tensor:
    """ℓ = log of the mean of log(1 + exp(−q)) over the last dimension, where exp(−q) may be below every float."""
    high = q > 30  # log(1 + e^−q) = e^−q (1 − e^−q/2 + …)
    # torch's own threshold of 20 leaves out a term of e^−20
    logs = torch.where(high, -q, torch.nn.functional.softplus(torch.where(high, 0.0, -q), threshold=40).log())
    return torch.logsumexp(logs, dim=-1) - math.log(q.shape[-1])


def gradient(margins: Margins, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ ``(networks,)``, ∇ℓ ``(networks, n)`` and the margins ``(networks, examples)``.

    >>> ell, grad, _ = gradient(lambda theta: theta, torch.zeros(1, 1, dtype=torch.float64))  # L = log(1 + e^−θ)
    >>> round(ell.exp().item(), 4), round(grad.item(), 4)  # log 2 and −½ / log 2
    (0.6931, -0.7213)
    """
    theta = theta.detach().requires_grad_()
    q = margins(theta)
    ell = _log_loss(q)
    (grad,) = torch.autograd.grad(ell.sum(), theta)
    return ell.detach(), grad, q.detach()


def mlp_margins(widths: Sequence[int], x: Tensor, y: Tensor) -> Margins:
    """Margins of ``HomogeneousMLP(widths)`` with one output.

    Args:
        x: inputs, ``(examples, n_in)`` for all networks or ``(networks, examples, n_in)``.
        y: labels ±1, ``(examples,)`` or ``(networks, examples)``.

    >>> x, y = torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.tensor([1.0, -1.0])
    >>> mlp_margins((1, 1, 1), x, y)(torch.tensor([[3.0, 5.0]], dtype=torch.float64)).tolist()  # 5 · 3x · y
    [[15.0, -30.0]]
    """
    net = HomogeneousMLP(widths)
    shapes = {name: value.shape for name, value in net.named_parameters()}

    def margins(theta: Tensor) -> Tensor:
        parts = theta.split([shape.numel() for shape in shapes.values()], dim=-1)
        state = {name: part.unflatten(-1, shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return y * functional_call(net, state, (x,)).squeeze(-1)

    return margins


def separable(
    networks: int, examples: int, n_in: int, *, gap: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A data set for each network: Gaussian inputs, moved away from a random plane by ``gap``, labelled by their side.

    Returns:
        x ``(networks, examples, n_in)`` and y ``(networks, examples)``, ±1, float64.

    >>> x, y = separable(1, 9, 3, gap=0.5, generator=torch.Generator().manual_seed(0))
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

    Returns:
        theta ``(networks, n)``, and which networks got there ``(networks,)``: gradient descent may get stuck.

    >>> draw = torch.Generator().manual_seed(0)
    >>> margins = mlp_margins((2, 8, 1), *separable(3, 4, 2, gap=1.0, generator=draw))
    >>> theta, done = separated_start((2, 8, 1), 3, margins, generator=draw)
    >>> done.tolist(), bool((margins(theta)[done] > 0).all())
    ([True, True, True], True)
    """
    drawn = [HomogeneousMLP(widths, generator=generator) for _ in range(networks)]
    theta = torch.stack([torch.cat([w.detach().flatten() for w in net.weights]) for net in drawn])
    for _ in range(steps):
        ell, grad, q = gradient(margins, theta)
        done = ell < math.log(math.log(2) / (2 * q.shape[1]))
        if done.all():
            break
        step = 0.02 * theta.norm(dim=1, keepdim=True) * torch.nn.functional.normalize(grad, dim=1)
        theta = torch.where(done[:, None], theta, theta - step)
    return theta, done


class Path(NamedTuple):
    """A flow or descent at some points; arrays ``(points, networks)`` unless said otherwise."""

    log_time: Array
    norm: Array  # ρ
    length: Array  # distance travelled, ∫‖∇L‖dt
    log_inv_loss: Array  # log 1/L
    margin: Array  # the smallest q
    theta: Array  # (points, networks, n)


def flow(margins: Margins, theta: Tensor, targets: ArrayLike, *, tol: float = 1e-4, floor: float = 0.02) -> Path:
    """Gradient flow dθ/dt = −∇L from ``theta``, where the clock shows t = 1, at given values of log 1/L.

    The independent variable is λ = log 1/L: dθ/dλ = −∇ℓ/‖∇ℓ‖² and d(log t)/dλ = exp(λ − log t)/‖∇ℓ‖². Both sides stay
    moderate however small L is. Bogacki–Shampine 3(2), with a step length for each network.

    Where a path slides along a kink of a ReLU the steps zigzag, and log 1/L grows by less than they say. The points
    then lie below their targets; ``log_inv_loss`` is the true value.

    Args:
        theta: ``(networks, n)``, float64.
        targets: increasing values of log 1/L. Of a network that starts past one: where it starts.
        tol: local error of θ relative to ρ, and of log t.

    >>> path = flow(lambda theta: theta**2, torch.ones(1, 1, dtype=torch.float64), [16.0])
    >>> path.norm.round(2), path.length.round(2)  # log 1/L = 16 where θ² = 16
    (array([[4.]]), array([[3.]]))
    """
    theta = theta.detach().clone()
    n = theta.shape[1]
    lam = -gradient(margins, theta)[0]
    state = torch.cat([theta, torch.zeros(len(theta), 2, dtype=theta.dtype)], dim=1)  # θ, log t, length

    def rate(state: Tensor) -> Tensor:
        ell, grad, _ = gradient(margins, state[:, :n])
        square = grad.square().sum(1, keepdim=True)
        clock = torch.exp(-ell[:, None] - state[:, n : n + 1]) / square
        return torch.cat([-grad / square, clock, square.rsqrt()], dim=1)

    points, h, k1 = [], torch.full_like(lam, floor), rate(state)
    for target in np.asarray(targets, dtype=np.float64):
        while bool((lam < target).any()):
            left = target - lam
            step = torch.minimum(h, left).clamp(min=0)[:, None]
            k2 = rate(state + step / 2 * k1)
            k3 = rate(state + 3 / 4 * step * k2)
            new = state + step / 9 * (2 * k1 + 3 * k2 + 4 * k3)
            k4 = rate(new)
            error = step / 72 * (-5 * k1 + 6 * k2 + 8 * k3 - 9 * k4)
            size = error[:, :n].norm(dim=1) / state[:, :n].norm(dim=1)
            size = torch.maximum(size, error[:, n].abs()) / tol
            good = ((size <= 1) | (h <= floor)) & (left > 0)
            state, k1 = torch.where(good[:, None], new, state), torch.where(good[:, None], k4, k1)
            last = good & (h >= left)
            factor = (0.9 * size.clamp(min=1e-6) ** (-1 / 3)).clamp(0.2, 2)
            lam = torch.where(last, torch.full_like(lam, target), torch.where(good, lam + step[:, 0], lam))
            h = torch.where(left <= 0, h, torch.where(last, h, step[:, 0] * factor)).clamp(min=floor)
        points.append((state[:, :n], state[:, n], state[:, n + 1]))
    return _path(margins, points)


def descent(margins: Margins, theta: Tensor, steps: Sequence[int], rate: float, *, normalised: bool = False) -> Path:
    """Gradient descent after given numbers of steps (increasing): −η∇L, or if ``normalised`` −η∇L/‖∇L‖.

    The time is Σ of what multiplies ∇L, kept as its logarithm.

    >>> start = torch.ones(1, 1, dtype=torch.float64)
    >>> descent(lambda theta: theta, start, [9], 0.1, normalised=True).norm.round(9)  # nine steps of length η
    array([[1.9]])
    """
    theta, points = theta.detach().clone(), []
    log_t = torch.full(theta.shape[:1], -math.inf, dtype=theta.dtype)
    length, wanted = torch.zeros_like(log_t), set(steps)
    for i in range(1, max(steps) + 1):
        ell, grad, _ = gradient(margins, theta)
        log_c = -ell - grad.norm(dim=1).log() if normalised else 0 * ell
        log_c = log_c + math.log(rate)
        delta = torch.exp(log_c + ell)[:, None] * grad  # ∇L = L∇ℓ
        theta = theta - delta
        log_t, length = torch.logaddexp(log_t, log_c), length + delta.norm(dim=1)
        if i in wanted:
            points.append((theta, log_t, length))
    return _path(margins, points)


def _path(margins: Margins, points: list[tuple[Tensor, Tensor, Tensor]]) -> Path:
    seen = []
    for theta, log_t, length in points:
        q = margins(theta)
        seen.append((log_t, theta.norm(dim=1), length, -_log_loss(q), q.amin(1), theta))
    return Path(*(torch.stack(part).detach().numpy() for part in zip(*seen, strict=True)))


def fit_loglog(log_t: Array, u: Array, *, level: float = 0.999) -> Estimate:
    """Coefficient p of u = log t + p (log u − 1/u) + const; ``(points, networks)``, at least 4 and 2.

    log u is log log t to leading order, and −1/u is the next term of the derived law, so that the fit needs no t of
    10^1000. The interval is Student's over the networks, widened by the mean distance between the slopes of the first
    and of the second half of the window, or 2.5 times the distance of their means: the law holds in the limit only, and
    a bias like u^(-1/2) is 2.5 times what it changes by between the halves of a window of a factor 5.

    >>> u = np.linspace(10, 50, 9)[:, None] * np.ones(2)
    >>> round(fit_loglog(u - 1.5 * (np.log(u) - 1 / u), u).value, 6)  # the law itself, with p = 3/2
    1.5
    """

    def slopes(part: slice) -> Array:
        a, b = (np.log(u) - 1 / u)[part], (u - log_t)[part]
        a, b = a - a.mean(0), b - b.mean(0)
        return (a * b).sum(0) / (a * a).sum(0)

    each, half = slopes(slice(None)), len(log_t) // 2 + 1
    moved = slopes(slice(None, half)) - slopes(slice(-half, None))
    drift = max(abs(moved).mean(), 2.5 * abs(moved.mean()))
    return intervals.mean(each, level, widen=float(drift), least=2)
