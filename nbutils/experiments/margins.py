"""θ·∇L of binary cross-entropy for a homogeneous network: by example, by batch, and where it changes sign on a ray.

The *margin* of an example is m = f for label 1 and −f for label 0: positive where the network is right. The loss is
log(1 + exp(−m)). Homogeneity of degree k makes m = ρ^k m̂, with m̂ the margin at unit norm and ρ = ‖θ‖. Then
θ·∇L = −k m σ(−m), and all of it follows from the margins. ``measured_*`` take none of that: they ask autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import expit, lambertw
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import logsigmoid

from nbutils.ensembles import stacked, train_together
from normgrowth.norms import norm

Array = NDArray[np.float64]
DEEPEST = float(lambertw(np.exp(-1)).real)  # max of |f| σ(−|f|): 0.278…, where |f| = 1 + this; solves x eˣ = 1/e


def equilibrium(unit_margins: ArrayLike, degree: float) -> float:
    """Norm ρ* at which θ·∇L of a batch changes sign on the ray with these margins at unit norm.

    With s = ρ^k the loss is convex, so there is at most one: where the mean of ``σ(s|m̂|)``, weighted by ``|m̂|``, is
    the accuracy with the same weights. It is 0 where that is at most ½ (the norm shrinks everywhere), ``inf`` where
    none is wrong.

    Raises:
        ValueError: no margins, or none that is not 0, or one that is not finite.

    >>> round(equilibrium([2, 2, 2, -2], degree=1), 6)  # logit(¾) / 2
    0.549306
    """
    m = np.asarray(unit_margins, dtype=np.float64).ravel()
    if not np.isfinite(m).all():
        raise ValueError("margins must be finite")
    if not (m != 0).any():
        raise ValueError("at least one margin must differ from 0")
    largest = abs(m).max()
    m = m / largest  # s* scales inversely
    right, wrong = m[m > 0].sum(), -m[m < 0].sum()
    if wrong == 0:
        return float("inf")
    if right <= wrong:
        return 0.0
    weight = abs(m) / (right + wrong)
    low = np.log(right / wrong) / (weight @ abs(m))  # σ is concave for positive margins
    high = 2 * DEEPEST * (m > 0).sum() / wrong  # right ones pull by at most DEEPEST, wrong ones push by |f|/2 or more

    def slope(log_s: float) -> float:  # dL/ds
        return float(-(m @ expit(-np.exp(log_s) * m)))

    log_s = brentq(slope, np.log(low) - 1e-6, np.log(high) + 1e-6, xtol=1e-14, rtol=1e-14)
    return float(np.exp((log_s - np.log(largest)) / degree))


def measured_projection(module: nn.Module, inputs: Tensor, labels: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """f and θ·∇L of each example at its own scale c of all parameters, by reverse-mode autograd: two tensors ``(n,)``.

    Args:
        module: of matrices, one output, broadcasting like ``models.HomogeneousMLP``; its own parameters are at scale 1.
        inputs, labels, scales: ``(n, n_in)``, ``(n,)`` of 0 and 1, ``(n,)``.

    >>> from nbutils.models import HomogeneousMLP
    >>> net, one = HomogeneousMLP((3, 8, 1), generator=torch.Generator().manual_seed(0)), torch.ones(2)
    >>> f, found = measured_projection(net, torch.ones(2, 3, dtype=torch.float64), one, torch.tensor([1.0, 3.0]))
    >>> round(float(f[1] / f[0]), 6), np.allclose(found, -2 * f * expit(-f))  # 3², and autograd agrees: k = 2
    (9.0, True)
    """
    scales = scales.to(inputs.dtype)[:, None, None]  # one copy of the parameters for each example
    theta = [(scales * w.detach()).requires_grad_() for w in module.parameters()]
    margins = _margins(module, theta, inputs[:, None], labels[:, None])[:, 0]
    # not binary_cross_entropy_with_logits: its backward pass is σ(f) − y, which is 0 from f = 37 on for y = 1
    gradients = torch.autograd.grad(-logsigmoid(margins).sum(), theta)
    return _signs(labels, inputs) * margins.detach(), _per_run([w.detach() for w in theta], gradients)


def _signs(labels: Tensor, inputs: Tensor) -> Tensor:
    return 2 * labels.to(inputs.dtype) - 1


def _margins(module: nn.Module, theta: Sequence[Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
    """Margins of a module with other parameters, which may have one more axis in front than its own."""
    names = (name for name, _ in module.named_parameters())
    f = functional_call(module, dict(zip(names, theta, strict=True)), (inputs,)).squeeze(-1)
    return _signs(labels, inputs) * f


def measured_equilibrium(module: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Norm at which autograd's θ·∇L of the batch changes sign, by root finding on the ray through the parameters.

    0 or ``inf`` where it has one sign over four decades of the scale on either side of the module's own norm.

    >>> from nbutils.models import HomogeneousMLP
    >>> net, x = HomogeneousMLP((1, 1)), torch.full((4, 1), 2.0, dtype=torch.float64)
    >>> _ = nn.init.ones_(net.weights[0])
    >>> round(measured_equilibrium(net, x, torch.tensor([1, 1, 1, 0])), 6)  # logit(¾) / 2, as ``equilibrium`` says
    0.549306
    """
    here = [w.detach() for w in module.parameters()]

    def batch(log_c: float) -> float:
        theta = [(np.exp(log_c) * w).requires_grad_() for w in here]
        gradients = torch.autograd.grad(-logsigmoid(_margins(module, theta, inputs, labels)).mean(), theta)
        products = (w.detach() * gradient for w, gradient in zip(theta, gradients, strict=True))
        return float(np.arcsinh(1e3 * float(sum(p.sum() for p in products))))  # compressed: it spans many decades

    end = 4 * np.log(10)
    if batch(-end) >= 0:
        return 0.0
    if batch(end) <= 0:
        return float("inf")
    return norm(module) * float(np.exp(brentq(batch, -end, end, xtol=1e-12)))


class Descent(NamedTuple):
    """What ``descend`` saw at some steps; each array is ``(len(times), runs)``, margins ``(len(times), runs, n)``."""

    norm: Array
    margins: Array

    @property
    def accuracy(self) -> Array:
        """Share of right examples."""
        return (self.margins > 0).mean(-1)

    def equilibria(self, degree: float) -> Array:
        """ρ* of the direction in which each run points at each time."""
        unit = self.margins / self.norm[..., None] ** degree
        return np.array([[equilibrium(m, degree) for m in row] for row in unit])


def descend(
    modules: Sequence[nn.Module], inputs: Tensor, labels: Tensor, *, rate: float, times: Iterable[int]
) -> Descent:
    """Full-batch gradient descent on the mean loss, several networks of one shape at once, to the last of ``times``.

    Args:
        modules: of one output and one shape, and broadcasting like ``models.HomogeneousMLP``; left as they were.
        inputs, labels: ``(n, n_in)`` or ``(runs, n, n_in)``; ``(n,)`` or ``(runs, n)``.
        rate: size of the steps.
        times: numbers of steps done, from 0 on, at which to look.

    >>> from nbutils.models import HomogeneousMLP
    >>> net, x = HomogeneousMLP((1, 1)), torch.full((4, 1), 2.0, dtype=torch.float64)
    >>> descend([net], x, torch.tensor([1, 1, 1, 0]), rate=1.0, times=[99]).norm.round(6)  # logit(¾) / 2
    array([[0.549306]])
    """
    looked, seen = {int(t) for t in times}, []

    def gradients(theta: list[Tensor]) -> None:
        (-logsigmoid(_margins(modules[0], theta, inputs, labels)).mean(-1).sum()).backward()

    run = train_together(stacked(modules), gradients, partial(torch.optim.SGD, lr=rate), max(looked) + 1)
    for t, step in enumerate(run):
        if t in looked:
            margins = _margins(modules[0], step.before, inputs, labels)
            parts = _per_run(step.before, step.before).sqrt(), margins
            seen.append([part.double().cpu().numpy() for part in parts])
    return Descent(*map(np.array, zip(*seen, strict=True)))


def _per_run(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    products = (x.double() * y.double() for x, y in zip(a, b, strict=True))
    return sum((product.flatten(1).sum(1) for product in products), start=torch.zeros(()))
