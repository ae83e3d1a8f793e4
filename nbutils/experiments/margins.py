"""θ·∇L of binary cross-entropy for a homogeneous network, of examples and batches, and its change of sign on a ray.

The *margin* of an example is m = f for label 1 and −f for label 0: positive where the network is right. The loss is
log(1 + exp(−m)). Homogeneity of degree k makes m = ρ^k m̂, where m̂ is the margin at unit norm and ρ = ‖θ‖. Then
θ·∇L = −k m σ(−m), so θ·∇L follows from the margins. The functions ``measured_*`` do not use this formula but autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import expit, lambertw
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import logsigmoid

from nbutils import ensembles
from normgrowth.norms import norm

Array = NDArray[np.float64]
# The maximum of |f| σ(−|f|), 0.278…, which solves x eˣ = 1/e; it is attained at |f| = 1 + x.
LARGEST_PULL = float(lambertw(np.exp(-1)).real)


def equilibrium(unit_margins: ArrayLike, degree: float) -> float:
    """Norm ρ* at which θ·∇L of a batch changes sign on the ray with the margins ``unit_margins``, ``(n,)``, at norm 1.

    The loss is convex in s = ρ^k, so there is at most one such norm: the one at which the mean of ``σ(s|m̂|)``, weighted
    by ``|m̂|``, equals the accuracy with the same weights. The norm ρ* is 0 if this accuracy is at most ½ (a step then
    shrinks the parameters at every norm), and ``inf`` if no example is wrong.

    Used in ``right-pulls`` and ``training-turns``.

    Raises:
        ValueError: all margins are 0, there are no margins, or a margin is not finite.

    >>> round(equilibrium([2, 2, 2, -2], degree=1), 6)  # logit(¾) / 2
    0.549306
    """
    m = np.asarray(unit_margins, dtype=np.float64).ravel()
    if not np.isfinite(m).all():
        raise ValueError("margins must be finite")
    if not (m != 0).any():
        raise ValueError("at least one margin must differ from 0")
    largest = abs(m).max()
    m = m / largest  # s* of the scaled margins is ``largest`` times that of the given ones
    right = m[m > 0].sum()
    wrong = -m[m < 0].sum()
    if wrong == 0:
        return float("inf")
    if right <= wrong:
        return 0.0
    weight = abs(m) / (right + wrong)
    low = np.log(right / wrong) / (weight @ abs(m))  # a lower bound on s*, by Jensen
    # an upper bound on s*: a right example pulls by at most LARGEST_PULL, a wrong one pushes by |f|/2 or more
    high = 2 * LARGEST_PULL * (m > 0).sum() / wrong

    def slope(log_s: float) -> float:  # dL/ds
        return float(-(m @ expit(-np.exp(log_s) * m)))

    log_s = brentq(slope, np.log(low) - 1e-6, np.log(high) + 1e-6, xtol=1e-14, rtol=1e-14)
    return float(np.exp((log_s - np.log(largest)) / degree))


def measured_projection(module: nn.Module, inputs: Tensor, labels: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """f and θ·∇L of each example at its own scale c of all parameters, by reverse-mode autograd: two tensors ``(n,)``.

    Used in ``right-pulls``.

    Args:
        module: has one output and only matrices as parameters, which broadcast as in ``HomogeneousMLP``. Scale 1
            means these parameters.
        inputs: ``(n, n_in)``.
        labels: 0 or 1, ``(n,)``.
        scales: c, ``(n,)``.

    >>> from nbutils.experiments.homogeneous import HomogeneousMLP
    >>> net = HomogeneousMLP((3, 8, 1), generator=torch.Generator().manual_seed(0))
    >>> x = torch.ones(2, 3, dtype=torch.float64)
    >>> f, projection = measured_projection(net, x, torch.ones(2), torch.tensor([1.0, 3.0]))
    >>> round(float(f[1] / f[0]), 6)  # degree 2: 3²
    9.0
    >>> np.allclose(projection, -2 * f * expit(-f))
    True
    """
    scales = scales.to(inputs.dtype)[:, None, None]  # (n, 1, 1): a copy of the parameters for every example
    theta = [(scales * w.detach()).requires_grad_() for w in module.parameters()]
    margins = _margins(module, theta, inputs[:, None], labels[:, None])[:, 0]
    # not binary_cross_entropy_with_logits: its backward pass is σ(f) − y, which is 0 from f = 37 on for y = 1
    gradients = torch.autograd.grad(-logsigmoid(margins).sum(), theta)
    f = _signs(labels, inputs) * margins.detach()
    projection = _inner_products([w.detach() for w in theta], gradients)
    return f, projection


def _signs(labels: Tensor, inputs: Tensor) -> Tensor:
    """1 for label 1 and −1 for label 0, in the type of ``inputs`` and the shape of ``labels``."""
    return 2 * labels.to(inputs.dtype) - 1


def _margins(module: nn.Module, theta: Sequence[Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
    """Margins of a module with ``theta`` as its parameters, ``(n,)``.

    A leading axis ``runs`` of all parameters is kept: ``(runs, n)``.
    """
    names = [name for name, _ in module.named_parameters()]
    parameters = dict(zip(names, theta, strict=True))
    f = functional_call(module, parameters, (inputs,)).squeeze(-1)
    return _signs(labels, inputs) * f


def measured_equilibrium(module: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Norm at which autograd's θ·∇L of the batch changes sign, by root finding on the ray through the parameters.

    The scale is searched over four decades on either side of the module's own norm. If θ·∇L is positive at the lower
    end, the result is 0; if it is negative at the upper end, the result is ``inf``.

    Args:
        module: has one output.
        inputs: ``(n, n_in)``.
        labels: 0 or 1, ``(n,)``.

    Used in ``right-pulls``.

    >>> from nbutils.experiments.homogeneous import HomogeneousMLP
    >>> net = HomogeneousMLP((1, 1))
    >>> x = torch.full((4, 1), 2.0, dtype=torch.float64)
    >>> _ = nn.init.ones_(net.weights[0])
    >>> round(measured_equilibrium(net, x, torch.tensor([1, 1, 1, 0])), 6)  # logit(¾) / 2, as ``equilibrium`` says
    0.549306
    """
    weights = [w.detach() for w in module.parameters()]

    def compressed_projection(log_c: float) -> float:
        """arcsinh(1000 θ·∇L) at the scale c: it has the sign of θ·∇L, whose own values span many decades."""
        theta = [(np.exp(log_c) * w).requires_grad_() for w in weights]
        loss = -logsigmoid(_margins(module, theta, inputs, labels)).mean()
        gradients = torch.autograd.grad(loss, theta)
        pairs = zip(theta, gradients, strict=True)
        projection = sum((w.detach() * gradient).sum() for w, gradient in pairs)
        return float(np.arcsinh(1e3 * float(projection)))

    end = 4 * np.log(10)
    if compressed_projection(-end) >= 0:
        return 0.0
    if compressed_projection(end) <= 0:
        return float("inf")
    log_c = brentq(compressed_projection, -end, end, xtol=1e-12)
    return norm(module) * float(np.exp(log_c))


class Descent(NamedTuple):
    """Norms and margins of several runs of gradient descent, at the recorded times.

    Used in ``training-turns``.
    """

    norm: Array  # (times, runs)
    margins: Array  # (times, runs, n)

    @property
    def accuracy(self) -> Array:
        """Share of right examples, ``(times, runs)``."""
        return (self.margins > 0).mean(-1)

    def equilibria(self, degree: float) -> Array:
        """ρ* of ``equilibrium`` on the ray through the parameters of every run at every time, ``(times, runs)``."""
        unit_margins = self.margins / self.norm[..., None] ** degree
        return np.apply_along_axis(equilibrium, -1, unit_margins, degree)


def descend(
    modules: Sequence[nn.Module], inputs: Tensor, labels: Tensor, *, rate: float, times: Iterable[int]
) -> Descent:
    """Train several networks of one shape at once by full-batch gradient descent on the mean loss, up to the last time.

    Used in ``training-turns``.

    Args:
        modules: have the same shape, one output, and parameters that broadcast as in ``HomogeneousMLP``. They
            are left unchanged.
        inputs: ``(n, n_in)`` for all runs or ``(runs, n, n_in)``.
        labels: 0 or 1, ``(n,)`` for all runs or ``(runs, n)``.
        rate: learning rate.
        times: numbers of steps, from 0 on, after which norm and margins are recorded.

    >>> from nbutils.experiments.homogeneous import HomogeneousMLP
    >>> net = HomogeneousMLP((1, 1))
    >>> x = torch.full((4, 1), 2.0, dtype=torch.float64)
    >>> descend([net], x, torch.tensor([1, 1, 1, 0]), rate=1.0, times=[99]).norm.round(6)  # logit(¾) / 2
    array([[0.549306]])
    """
    recorded = {int(t) for t in times}
    norms = []
    margins = []
    theta = [w.requires_grad_() for w in ensembles.stack(modules)]
    for t in range(max(recorded) + 1):
        m = _margins(modules[0], theta, inputs, labels)
        if t in recorded:
            norms.append(_inner_products(theta, theta).sqrt().detach())
            margins.append(m.detach())
        gradients = torch.autograd.grad(-logsigmoid(m).mean(-1).sum(), theta)
        with torch.no_grad():
            for w, gradient in zip(theta, gradients, strict=True):
                w.sub_(gradient, alpha=rate)
    return Descent(
        norm=torch.stack(norms).double().cpu().numpy(),
        margins=torch.stack(margins).double().cpu().numpy(),
    )


def _inner_products(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Inner product of two lists of tensors ``(runs, …)`` for every run: ``(runs,)``, float64."""
    products = (x.double() * y.double() for x, y in zip(a, b, strict=True))
    return sum((product.flatten(1).sum(1) for product in products), start=torch.zeros(()))
