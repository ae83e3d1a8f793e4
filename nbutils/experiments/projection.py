"""θ·∇L along a ray cθ, at every scale and accuracy at once, and the norm at which it changes sign.

With logits z and their derivative ż along the ray, dz/d ln c, softmax cross-entropy with label y has
θ·∇L = Σ_j p_j ż_j − ż_y. So one forward-mode pass per scale gives θ·∇L for every label, and with it every accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize.elementwise import find_root
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from normgrowth.norms import norm

Array = NDArray[np.float64]
Classes = NDArray[np.int64]

AT_ONCE = 8  # scales in one forward pass: more take more memory


class Projection(NamedTuple):
    """θ·∇L of a batch on the ray cθ, and what made it. Wrong samples stay wrong at all lower accuracies."""

    scales: Array  # c, (n_scales,)
    norm: Array  # c‖θ‖ of all parameters, (n_scales,)
    projection: Array  # mean over samples, (n_accuracies, n_scales)
    predicted: Classes  # argmax of the logits, (n_scales, samples)
    wrong: Classes  # number of samples with a wrong label, (n_accuracies,)
    right_part: Array  # θ·∇L of each sample if its label is right, (n_scales, samples)
    wrong_part: Array  # and if it is wrong
    order: Classes  # the order in which samples turn wrong, (samples,)
    other: Classes  # their wrong labels, (n_scales, samples)
    at: Callable[[ArrayLike], Array]  # projection at other scales, (n_accuracies, n_scales)

    def labels(self, accuracy: int, scale: int) -> Classes:
        """Labels at an accuracy and a scale, given by their places in what ``along_ray`` got: ``(samples,)``."""
        y = self.predicted[scale].copy()
        turned = self.order[: self.wrong[accuracy]]
        y[turned] = self.other[scale, turned]
        return y


def along_ray(
    module: nn.Module,
    inputs: Tensor,
    scales: ArrayLike,
    accuracies: ArrayLike,
    *,
    scale_inputs: bool = True,
    mirror: bool = False,
    generator: torch.Generator,
) -> Projection:
    """θ·∇L of softmax cross-entropy where all parameters of ``module`` are multiplied by each scale.

    The labels are those of §4.2. They are set at every scale, from the prediction there: a right label is
    argmax z, a wrong one another class. The generator draws once, for all scales: the order in which samples turn
    wrong, and each sample's wrong class relative to its prediction. At accuracy a the first round((1 − a)·samples) in
    that order are wrong.

    Args:
        module: gives logits ``(..., classes)``; every leading index is a sample. All its parameters are θ, frozen ones
            too; its buffers are not. It must work under ``torch.func`` (no in-place changes, no dropout).
        inputs: its one argument.
        scales: c > 0, ``(n_scales,)``.
        accuracies: in [0, 1], ``(n_accuracies,)``.
        scale_inputs: multiply the input by c, too, as the released code does for an input of degree 1. θ·∇L is over
            the parameters in any case: the input is scaled, not differentiated.
        mirror: a wrong label is the class C − 1 − argmax of the released code, which needs an even number of classes,
            in place of one of the others at random.

    Raises:
        ValueError: an accuracy outside [0, 1], an odd number of classes with ``mirror``, logits that are not finite.

    >>> net = nn.Linear(3, 4, bias=False)
    >>> ray = along_ray(net, torch.randn(8, 3), [1, 2], [0.5, 1], generator=torch.Generator())
    >>> ray.projection.shape, ray.predicted.shape, bool((ray.projection[1] < 0).all())
    ((2, 2), (2, 8), True)
    """
    scales, accuracies = (np.atleast_1d(np.asarray(part, dtype=np.float64)) for part in (scales, accuracies))
    if not ((accuracies >= 0) & (accuracies <= 1)).all():
        raise ValueError(f"accuracies {accuracies}: a fraction of right samples lies in [0, 1]")
    with torch.no_grad():
        *batch, classes = module(inputs).shape
    samples = math.prod(batch)
    if mirror and classes % 2:
        raise ValueError(f"{classes} classes: the mirror label C − 1 − argmax needs an even number, or it may be right")
    order = torch.randperm(samples, generator=generator, device=generator.device).cpu().numpy()
    shift = torch.randint(1, classes, (samples,), generator=generator, device=generator.device).cpu()
    counts = np.rint((1 - accuracies) * samples).astype(np.int64)

    def parts(c: Array) -> tuple[Array, Array, Classes, Classes]:
        """θ·∇L of each sample, right and wrong, and both labels; each ``(len(c), samples)``."""
        pair = logits_along_ray(module, inputs, c, scale_inputs=scale_inputs)
        z, dz = (part.double().cpu().flatten(1, -2) for part in pair)
        if not (z.isfinite().all() and dz.isfinite().all()):
            raise ValueError(f"logits or their derivatives are not finite at scales up to {c.max():g}")
        best = z.argmax(-1)
        other = classes - 1 - best if mirror else (best + shift) % classes
        p = z.softmax(-1)  # Σ_j p_j (ż_j − ż_y): differences first, so that nothing large cancels
        right, false = ((p * (dz - dz.gather(-1, y[..., None]))).sum(-1).numpy() for y in (best, other))
        return right, false, best.numpy(), other.numpy()

    def mean(right: Array, false: Array) -> Array:
        """The first ``counts`` samples of the order wrong, the others right: ``(n_accuracies, scales)``."""
        right, false = (np.pad(part, ((0, 0), (1, 0))) for part in (right[:, order[::-1]], false[:, order]))
        return (false.cumsum(1)[:, counts] + right.cumsum(1)[:, samples - counts]).T / samples

    def at(c: ArrayLike) -> Array:
        return mean(*parts(np.atleast_1d(np.asarray(c, dtype=np.float64)))[:2])

    right, false, best, other = parts(scales)
    rho, table = norm(module), mean(right, false)
    return Projection(scales, scales * rho, table, best, counts, right, false, order, other, at)


def logits_along_ray(
    module: nn.Module, inputs: Tensor, scales: ArrayLike, *, scale_inputs: bool = True
) -> tuple[Tensor, Tensor]:
    """Logits z at each scale and dz/d ln c over the parameters alone: twice ``(n_scales, ..., classes)``.

    >>> z, dz = logits_along_ray(nn.Linear(3, 4, bias=False), torch.randn(8, 3), [1.0, 2.0])
    >>> torch.allclose(z, dz)  # degree 1 in the parameters
    True
    """
    theta = {name: value.detach() for name, value in module.named_parameters()}
    dtype = next(iter(theta.values()), inputs).dtype  # inputs may be whole numbers, such as tokens
    c = torch.as_tensor(np.asarray(scales), dtype=dtype, device=inputs.device)

    def one(c: Tensor) -> tuple[Tensor, Tensor]:
        point = {name: c * value for name, value in theta.items()}
        x = c * inputs if scale_inputs else inputs
        z, dz = jvp(lambda at: functional_call(module, at, (x,)), (point,), (point,))[:2]
        return z, dz

    with torch.no_grad():
        return vmap(one, chunk_size=AT_ONCE)(c)


class Plain(NamedTuple):
    """A point on the ray by one backward pass."""

    total: float  # θ·∇L
    cosine: float  # θ·∇L / (‖θ‖‖∇L‖)


def by_autograd(module: nn.Module, inputs: Tensor, c: float, labels: ArrayLike, *, scale_inputs: bool = True) -> Plain:
    """The plain way, one point by one backward pass, at the scale c.

    >>> net = nn.Linear(1, 2, bias=False)
    >>> net.weight.data = torch.tensor([[3.0], [1.0]]).log()  # logits ln 3 and 0, so p = (3/4, 1/4)
    >>> [round(value, 4) for value in by_autograd(net, torch.ones(1, 1), 1.0, [0])]  # −(ln 3)/4 and −1/√2
    [-0.2747, -0.7071]
    """
    theta = {name: (c * value.detach()).requires_grad_() for name, value in module.named_parameters()}
    logits = functional_call(module, theta, (c * inputs if scale_inputs else inputs,)).flatten(0, -2)
    loss = nn.functional.cross_entropy(logits, torch.as_tensor(labels, device=logits.device))
    gradients = torch.autograd.grad(loss, list(theta.values()), materialize_grads=True)
    pairs = zip(theta.values(), gradients, strict=True)
    total = sum(float((p.detach().double() * g.double()).sum()) for p, g in pairs)
    return Plain(total, total / (norm(theta) * norm(gradients)))


def equilibrium(ray: Projection, *, rtol: float = 1e-9) -> Array:
    """First norm at which θ·∇L turns from negative to positive, one for each accuracy, ``(n_accuracies,)``.

    The first two neighbouring scales between which it does so, then a search on the ray itself. Where the
    grid has none, the search goes on outside it by factors of two: above it if θ·∇L is negative at its end, below it if
    it is positive from the start. A prediction that changes with the scale makes θ·∇L jump: the crossing may be such
    a jump. Two crossings between neighbouring scales go unseen.

    Infinite where no sample is wrong, accuracy 1 (but for rounding to whole samples), or where there is no crossing
    up to a million times the largest scale; 0 where it stays positive down to a millionth of the smallest.

    >>> net = nn.Linear(1, 2, bias=False)
    >>> net.weight.data = torch.tensor([[1.0], [0.0]])  # logits ρ and 0
    >>> ray = along_ray(net, torch.ones(4, 1), [1, 2], [0.75], scale_inputs=False, generator=torch.Generator())
    >>> equilibrium(ray).round(4)  # at ρ = ln 3 the confidence e^ρ/(1 + e^ρ) is the accuracy 3/4
    array([1.0986])
    """
    unit = ray.norm[0] / ray.scales[0]
    order = np.argsort(ray.scales)
    grid, values = ray.scales[order], ray.projection[:, order]
    low, high = np.full((2, len(values)), np.nan)  # brackets; NaN where there is none
    up = (values[:, :-1] <= 0) & (values[:, 1:] > 0)
    some_wrong, from_start = ray.wrong > 0, values[:, 0] > 0
    seen = some_wrong & ~from_start & up.any(1)
    low[seen], high[seen] = grid[up.argmax(1)[seen]], grid[up.argmax(1)[seen] + 1]
    doubled = 2.0 ** np.arange(20)
    for rows, nears, factor in ((from_start, grid[0] / doubled, 0.5), (~from_start, grid[-1] * doubled, 2.0)):
        for near in nears:
            if not (left := some_wrong & rows & np.isnan(low)).any():
                break
            found = left & ((ray.at(factor * near)[:, 0] > 0) != from_start)
            low[found], high[found] = sorted((near, factor * near))
    out = np.where(some_wrong & from_start, 0.0, np.inf)
    inside = np.flatnonzero(np.isfinite(low))
    if len(inside):
        found = find_root(
            lambda c, row: ray.at(c)[row, np.arange(len(row))],
            (low[inside], high[inside]),
            args=(inside,),
            tolerances={"xatol": 0, "xrtol": rtol, "fatol": 0, "frtol": 0},
        )
        out[inside] = unit * found.x
    return out
