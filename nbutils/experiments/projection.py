"""θ·∇L along a ray cθ, at every scale and accuracy at once, and the norm at which it changes sign.

With logits z and their derivative along the ray, ż = dz/d ln c, softmax cross-entropy with label y has
θ·∇L = Σ_j p_j ż_j − ż_y. So one forward-mode pass per scale gives θ·∇L for every label, hence for every accuracy.
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

SCALES_PER_PASS = 4  # more scales in one forward pass take more memory


class Projection(NamedTuple):
    """θ·∇L of a batch on the ray cθ, by sample and on average. Samples that are wrong stay wrong at lower accuracies.

    Used in ``right-pulls`` and ``figure-1``.
    """

    scales: Array  # c, (n_scales,)
    norm: Array  # c‖θ‖ of all parameters, (n_scales,)
    projection: Array  # mean of θ·∇L over samples, (n_accuracies, n_scales)
    predicted: Classes  # argmax of the logits, (n_scales, samples)
    wrong_counts: Classes  # number of samples with a wrong label, (n_accuracies,)
    right_part: Array  # θ·∇L of each sample if its label is right, (n_scales, samples)
    wrong_part: Array  # θ·∇L of each sample if its label is wrong, (n_scales, samples)
    order: Classes  # the order in which samples turn wrong, (samples,)
    wrong_labels: Classes  # the label of each sample if it is wrong, (n_scales, samples)
    projection_at: Callable[[ArrayLike], Array]  # from other scales to the projection, (n_accuracies, n_scales)

    def labels(self, accuracy: int, scale: int) -> Classes:
        """Labels ``(samples,)`` at an accuracy and a scale, given by their indices in what ``along_ray`` got."""
        y = self.predicted[scale].copy()
        wrong = self.order[: self.wrong_counts[accuracy]]
        y[wrong] = self.wrong_labels[scale, wrong]
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

    The labels are those of §4.2. They are set at every scale from the prediction there: a right label is argmax z, and
    a wrong label is another class. The random numbers are drawn once and serve all scales: the order in which samples
    turn wrong, and each sample's wrong class relative to its prediction. At accuracy a the first round((1 − a)·samples)
    samples in that order are wrong.

    Used in ``right-pulls`` and ``figure-1``.

    Args:
        module: returns logits ``(..., classes)``; every leading index is a sample. θ is all of its parameters, frozen
            ones included, without its buffers. It must work under ``torch.func`` (no in-place changes, no dropout).
        inputs: the only argument of the module.
        scales: c > 0, ``(n_scales,)``.
        accuracies: in [0, 1], ``(n_accuracies,)``.
        scale_inputs: multiply the input by c, too, as the released code does for an input of degree 1. θ·∇L is over
            the parameters in any case: the input is scaled, not differentiated.
        mirror: use the released code's wrong label, C − 1 − argmax, which needs an even number of classes, instead of
            a random class.
        generator: of the order and of the wrong classes.

    Raises:
        ValueError: an accuracy outside [0, 1], an odd number of classes with ``mirror``, logits that are not finite.

    >>> net = nn.Linear(3, 4, bias=False)
    >>> ray = along_ray(net, torch.randn(8, 3), [1, 2], [0.5, 1], generator=torch.Generator())
    >>> ray.projection.shape, ray.predicted.shape, bool((ray.projection[1] < 0).all())
    ((2, 2), (2, 8), True)
    """
    scales = np.atleast_1d(np.asarray(scales, dtype=np.float64))
    accuracies = np.atleast_1d(np.asarray(accuracies, dtype=np.float64))
    if not ((accuracies >= 0) & (accuracies <= 1)).all():
        raise ValueError(f"accuracies {accuracies}: a fraction of right samples lies in [0, 1]")
    with torch.no_grad():
        *batch, classes = module(inputs).shape
    samples = math.prod(batch)
    if mirror and classes % 2:
        raise ValueError(f"{classes} classes: the mirror label C − 1 − argmax needs an even number, or it may be right")
    order = torch.randperm(samples, generator=generator, device=generator.device).cpu().numpy()
    shift = torch.randint(1, classes, (samples,), generator=generator, device=generator.device).cpu()
    wrong_counts = np.rint((1 - accuracies) * samples).astype(np.int64)

    def by_sample(c: Array) -> tuple[Array, Array, Classes, Classes]:
        """θ·∇L of each sample if right and if wrong, and both labels; each ``(len(c), samples)``."""
        z, dz = logits_along_ray(module, inputs, c, scale_inputs=scale_inputs)
        z = z.double().cpu().flatten(1, -2)
        dz = dz.double().cpu().flatten(1, -2)
        if not (z.isfinite().all() and dz.isfinite().all()):
            raise ValueError(f"logits or their derivatives are not finite at scales up to {c.max():g}")
        p = z.softmax(-1)
        right_labels = z.argmax(-1)
        wrong_labels = classes - 1 - right_labels if mirror else (right_labels + shift) % classes

        def projection(y: Tensor) -> Array:
            """Σ_j p_j (ż_j − ż_y): differences first, so that large terms do not cancel."""
            return (p * (dz - dz.gather(-1, y[..., None]))).sum(-1).numpy()

        return projection(right_labels), projection(wrong_labels), right_labels.numpy(), wrong_labels.numpy()

    def mean(right: Array, wrong: Array) -> Array:
        """Mean over samples, of which the first ``wrong_counts`` in the order are wrong: ``(n_accuracies, scales)``."""
        # sums over the first 0, 1, …, samples
        wrong_sums = np.pad(wrong[:, order], ((0, 0), (1, 0))).cumsum(1)
        right_sums = np.pad(right[:, order[::-1]], ((0, 0), (1, 0))).cumsum(1)
        return (wrong_sums[:, wrong_counts] + right_sums[:, samples - wrong_counts]).T / samples

    def projection_at(c: ArrayLike) -> Array:
        right, wrong, _, _ = by_sample(np.atleast_1d(np.asarray(c, dtype=np.float64)))
        return mean(right, wrong)

    right, wrong, right_labels, wrong_labels = by_sample(scales)
    rho = norm(module)
    return Projection(
        scales=scales,
        norm=scales * rho,
        projection=mean(right, wrong),
        predicted=right_labels,
        wrong_counts=wrong_counts,
        right_part=right,
        wrong_part=wrong,
        order=order,
        wrong_labels=wrong_labels,
        projection_at=projection_at,
    )


def logits_along_ray(
    module: nn.Module, inputs: Tensor, scales: ArrayLike, *, scale_inputs: bool = True
) -> tuple[Tensor, Tensor]:
    """Logits z at each scale, and dz/d ln c over the parameters alone, both ``(n_scales, ..., classes)``.

    Used in ``right-pulls`` and ``figure-1``.

    >>> z, dz = logits_along_ray(nn.Linear(3, 4, bias=False), torch.randn(8, 3), [1.0, 2.0])
    >>> torch.allclose(z, dz)  # degree 1 in the parameters
    True
    """
    theta = {name: parameter.detach() for name, parameter in module.named_parameters()}
    dtype = next(iter(theta.values()), inputs).dtype  # inputs may be whole numbers, such as tokens
    c = torch.as_tensor(np.asarray(scales), dtype=dtype, device=inputs.device)

    def logits_at(c: Tensor) -> tuple[Tensor, Tensor]:
        scaled_theta = {name: c * parameter for name, parameter in theta.items()}
        x = c * inputs if scale_inputs else inputs

        def logits(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(module, parameters, (x,))

        # d/d ln c moves the point cθ along itself
        z, dz = jvp(logits, (scaled_theta,), (scaled_theta,))[:2]
        return z, dz

    with torch.no_grad():
        return vmap(logits_at, chunk_size=SCALES_PER_PASS)(c)


class PointProjection(NamedTuple):
    """θ·∇L at a single point, by reverse mode.

    Used in ``right-pulls`` and ``figure-1``.
    """

    total: float  # θ·∇L
    cosine: float  # θ·∇L / (‖θ‖‖∇L‖)


def by_autograd(
    module: nn.Module, inputs: Tensor, c: float, labels: ArrayLike, *, scale_inputs: bool = True
) -> PointProjection:
    """θ·∇L at the scale ``c`` of all parameters, for given labels ``(samples,)``, by a plain backward pass.

    Used in ``right-pulls`` and ``figure-1``.

    >>> net = nn.Linear(1, 2, bias=False)
    >>> net.weight.data = torch.tensor([[3.0], [1.0]]).log()  # logits ln 3 and 0, so p = (3/4, 1/4)
    >>> [round(value, 4) for value in by_autograd(net, torch.ones(1, 1), 1.0, [0])]  # −(ln 3)/4 and −1/√2
    [-0.2747, -0.7071]
    """
    theta = {name: (c * parameter.detach()).requires_grad_() for name, parameter in module.named_parameters()}
    x = c * inputs if scale_inputs else inputs
    logits = functional_call(module, theta, (x,)).flatten(0, -2)
    loss = nn.functional.cross_entropy(logits, torch.as_tensor(labels, device=logits.device))
    gradients = torch.autograd.grad(loss, list(theta.values()), materialize_grads=True)
    pairs = zip(theta.values(), gradients, strict=True)
    total = sum(float((w.detach().double() * g.double()).sum()) for w, g in pairs)
    return PointProjection(total=total, cosine=total / (norm(theta) * norm(gradients)))


def equilibrium(ray: Projection, *, rtol: float = 1e-9) -> Array:
    """First norm at which θ·∇L turns from negative to positive, for each accuracy, ``(n_accuracies,)``.

    The crossing is bracketed by the first two neighbouring scales between which the sign changes, and then found by a
    search on the ray itself. If the sign does not change on the grid, the bracket is sought outside by factors of two:
    below the grid if θ·∇L is positive at its smallest scale, otherwise above. A prediction that changes with the scale
    makes θ·∇L jump, and the crossing may be such a jump. Two crossings between neighbouring scales are missed.

    The norm is infinite if no sample is wrong (accuracy 1, up to rounding to whole samples), or if there is no crossing
    up to a million times the largest scale. It is 0 if θ·∇L stays positive down to a millionth of the smallest scale.

    Used in ``figure-1``.

    Args:
        ray: as from ``along_ray``.
        rtol: relative tolerance of the norm.

    >>> net = nn.Linear(1, 2, bias=False)
    >>> net.weight.data = torch.tensor([[1.0], [0.0]])  # logits ρ and 0
    >>> ray = along_ray(net, torch.ones(4, 1), [1, 2], [0.75], scale_inputs=False, generator=torch.Generator())
    >>> equilibrium(ray).round(4)  # at ρ = ln 3 the confidence e^ρ/(1 + e^ρ) is the accuracy 3/4
    array([1.0986])
    """
    unit = ray.norm[0] / ray.scales[0]
    order = np.argsort(ray.scales)
    grid = ray.scales[order]
    values = ray.projection[:, order]
    some_wrong = ray.wrong_counts > 0
    starts_positive = values[:, 0] > 0
    low = np.full(len(values), np.nan)  # brackets in c; NaN as long as there is none
    high = np.full(len(values), np.nan)

    rises = (values[:, :-1] <= 0) & (values[:, 1:] > 0)
    on_grid = some_wrong & ~starts_positive & rises.any(1)
    first_rise = rises.argmax(1)[on_grid]
    low[on_grid] = grid[first_rise]
    high[on_grid] = grid[first_rise + 1]

    def search_outside(rows: NDArray[np.bool_], near: float, factor: float) -> None:
        """Bracket the other ``rows`` from the end ``near`` of the grid outwards, a million times as far at most."""
        for _ in range(20):
            open_rows = some_wrong & rows & np.isnan(low)
            if not open_rows.any():
                return
            far = factor * near
            crossing = open_rows & ((ray.projection_at(far)[:, 0] > 0) != starts_positive)
            low[crossing] = min(near, far)
            high[crossing] = max(near, far)
            near = far

    search_outside(starts_positive, grid[0], 0.5)
    search_outside(~starts_positive, grid[-1], 2.0)
    rho = np.where(some_wrong & starts_positive, 0.0, np.inf)
    bracketed = np.flatnonzero(np.isfinite(low))
    if len(bracketed):
        roots = find_root(
            lambda c, row: ray.projection_at(c)[row, np.arange(len(row))],
            (low[bracketed], high[bracketed]),
            args=(bracketed,),
            tolerances={"xatol": 0, "xrtol": rtol, "fatol": 0, "frtol": 0},
        )
        rho[bracketed] = unit * roots.x
    return rho
