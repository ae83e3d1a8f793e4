"""Networks whose loss does not depend on the norm of the parameters, and step-by-step records of their growth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.optimization import Adafactor

from nbutils import ensembles
from nbutils.ensembles import GradientSource, stored_gradients

Array = NDArray[np.float64]
Loss = Callable[[list[Tensor], Tensor, Tensor], Tensor]  # from weights, x and y to the losses, (runs,)


class Problem(NamedTuple):
    """Classification with label noise, for ``runs`` independent runs at once.

    Used in ``step-geometry``, ``scale-invariance`` and ``aligned``.
    """

    x: Tensor  # (runs, samples, features)
    y: Tensor  # labels, (runs, samples)
    weights: list[Tensor]  # at the start: first layer (runs, hidden, features), second (runs, classes, hidden)


class Steps(NamedTuple):
    """Squared norms and inner products of every step, each ``(steps, matrices, runs)``, float64.

    Used in ``step-geometry``, ``scale-invariance``, ``aligned`` and ``small-t5``.
    """

    before: Array  # ‖θ‖² before the step
    after: Array  # ‖θ'‖² after it
    step: Array  # ‖δ‖²
    inner: Array  # θ·δ
    projection: Array  # θ·∇L
    gradient: Array  # ‖∇L‖²

    def total(self) -> Steps:
        """Sums over the matrices, each ``(steps, runs)``."""
        return Steps(*(field.sum(axis=1) for field in self))

    def gradient_cos(self) -> Array:
        """cos(θ, ∇L), in the shape of the fields."""
        return self.projection / np.sqrt(self.before * self.gradient)


def problem(runs: int, *, samples: int = 64, generator: torch.Generator) -> Problem:
    """Gaussian inputs with labels of a random linear teacher, of which a fifth are replaced by random classes.

    Every run has its own data, teacher and start, and every matrix starts with norm 1; float64.

    Used in ``scale-invariance`` and ``aligned``.

    >>> data = problem(2, generator=torch.Generator().manual_seed(0))
    >>> data.x.shape, [w.norm(dim=(1, 2)).round(decimals=6).tolist() for w in data.weights]
    (torch.Size([2, 64, 8]), [[1.0, 1.0], [1.0, 1.0]])
    """
    features = 8
    hidden = 16
    classes = 4
    options: dict[str, Any] = {"generator": generator, "device": generator.device}

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, **options)

    x = normal(runs, samples, features)
    teacher = normal(runs, features, classes)
    replaced = torch.rand(runs, samples, **options) < 0.2
    random_labels = torch.randint(classes, (runs, samples), **options)
    y = torch.where(replaced, random_labels, (x @ teacher).argmax(-1))
    weights = [normal(runs, hidden, features), normal(runs, classes, hidden)]
    return Problem(x, y, [w / w.norm(dim=(1, 2), keepdim=True) for w in weights])


def _normalised(x: Tensor, eps: float) -> Tensor:
    """Layer norm without gain and shift; ``sublayers.standardise`` rounds differently, which changes chaotic runs."""
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def losses(weights: Sequence[Tensor], x: Tensor, y: Tensor, *, eps: float = 0.0) -> Tensor:
    """Cross-entropy of a two-layer network with layer norm after each matrix, ``(runs,)``.

    With ``eps = 0`` it does not change when either matrix is multiplied by a positive number.

    Used in ``step-geometry`` and ``scale-invariance``.

    >>> x, y, (first, second) = problem(1, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(losses([first, 1000 * second], x, y), losses([first, second], x, y))
    True
    """
    first, second = weights
    h = torch.relu(_normalised(x @ first.mT, eps))
    logits = 2 * _normalised(h @ second.mT, eps)  # (runs, samples, classes)
    return torch.nn.functional.cross_entropy(logits.mT, y, reduction="none").mean(-1)


def problem_gradients(
    data: Problem, *, batch: int | None = None, loss: Loss = losses, generator: torch.Generator
) -> GradientSource:
    """Gradients of ``loss`` over all samples, or over a random batch for each run.

    Used in ``step-geometry`` and ``scale-invariance``.

    >>> generator = torch.Generator().manual_seed(0)
    >>> data = problem(1, generator=generator)
    >>> theta = [w.requires_grad_() for w in data.weights]
    >>> problem_gradients(data, batch=8, generator=generator)(theta)
    >>> [round(abs(float((w.detach() * w.grad).sum())), 9) for w in theta]  # θ·∇L = 0, by Euler
    [0.0, 0.0]
    """
    runs, samples = data.y.shape

    def write_gradients(theta: list[Tensor]) -> None:
        x = data.x
        y = data.y
        if batch is not None:
            indices = torch.randint(samples, (runs, batch), generator=generator, device=generator.device)
            x = x.gather(1, indices[..., None].expand(-1, -1, x.shape[-1]))
            y = y.gather(1, indices)
        gradients = torch.autograd.grad(loss(theta, x, y).sum(), theta)
        for w, gradient in zip(theta, gradients, strict=True):
            w.grad = gradient

    return write_gradients


def random_gradients(*, orthogonal: bool = False, generator: torch.Generator) -> GradientSource:
    """The null model: standard normal gradients, independent of θ.

    If ``orthogonal``, their component along each matrix is removed and the rest is divided by the norm of the matrix.
    These are the gradients of the scale-invariant loss g·θ/‖θ‖ with a fresh normal g at each step.

    Used in ``step-geometry``, ``scale-invariance``, ``aligned`` and ``small-t5``.

    >>> w = torch.ones(1, 2, 3, dtype=torch.float64, requires_grad=True)
    >>> random_gradients(orthogonal=True, generator=torch.Generator().manual_seed(0))([w])
    >>> round(abs(float((w.detach() * w.grad).sum())), 9)
    0.0
    """

    def write_gradients(theta: list[Tensor]) -> None:
        for w in theta:
            g = torch.randn(w.shape, generator=generator, dtype=w.dtype, device=generator.device).to(w.device)
            if orthogonal:
                rho = w.detach().norm(dim=(1, 2), keepdim=True)
                unit = w.detach() / rho
                g = (g - (g * unit).sum((1, 2), keepdim=True) * unit) / rho
            w.grad = g

    return write_gradients


def unit_gradients(gradients: GradientSource) -> GradientSource:
    """Gradients of which every matrix has length 1: with SGD, steps of fixed length.

    Used in ``scale-invariance``.
    """

    def write_gradients(theta: list[Tensor]) -> None:
        gradients(theta)
        for w, gradient in zip(theta, stored_gradients(theta), strict=True):
            w.grad = gradient / gradient.norm(dim=(1, 2), keepdim=True)

    return write_gradients


def random_gradients_of_length(lengths: Array, *, generator: torch.Generator) -> GradientSource:
    """The null model of a training: at call t, counted from 0, gradients of length ``lengths[t]`` in random directions.

    Used in ``step-geometry`` and ``small-t5``.

    Args:
        lengths: norm of the whole gradient at each step, ``(steps, runs)``.
        generator: of the directions.

    >>> theta = [torch.ones(2, 3, 4, requires_grad=True) for _ in range(2)]
    >>> random_gradients_of_length(np.array([[1.0, 2.0]]), generator=torch.Generator().manual_seed(0))(theta)
    >>> (sum(w.grad.square().sum((1, 2)) for w in theta) ** 0.5).numpy().round(6).tolist()
    [1.0, 2.0]
    """
    remaining_lengths = iter(torch.as_tensor(lengths))
    normal = random_gradients(generator=generator)

    def write_gradients(theta: list[Tensor]) -> None:
        normal(theta)
        squares = sum((g.square().sum((1, 2)) for g in stored_gradients(theta)), start=torch.zeros(()))
        drawn_length = squares**0.5
        factor = next(remaining_lengths).to(drawn_length) / drawn_length
        for gradient in stored_gradients(theta):
            gradient *= factor[:, None, None]

    return write_gradients


class RunwiseAdafactor(Adafactor):
    """Adafactor of ``transformers`` for independent runs side by side, each matrix ``(runs, rows, columns)``.

    Adafactor scales an update by root mean squares of a whole tensor. Here they are taken over the matrix of each run.

    Used in ``step-geometry``, ``aligned`` and ``small-t5``.
    """

    @staticmethod
    def _rms(tensor: Tensor) -> Tensor:
        return tensor.detach().square().mean((1, 2), keepdim=True).sqrt()

    @staticmethod
    def _get_lr(group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        rate = min(1e-2, 1 / state["step"] ** 0.5) if group["relative_step"] else group["lr"]
        return rate * state["RMS"].clamp(min=group["eps"][1])


def record_steps(
    weights: Sequence[Tensor],
    gradients: GradientSource,
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    steps: int,
    **options: Any,
) -> Steps:
    """Train copies of ``weights`` by ``ensembles.train``, all runs at once, and record every step.

    Used in ``step-geometry``, ``scale-invariance``, ``aligned`` and ``small-t5``.

    Args:
        weights: the matrices at the start, each ``(runs, rows, columns)``.
        gradients: of the problem, or random.
        make_optimizer: from the parameters to the optimizer; ``RunwiseAdafactor`` for Adafactor.
        steps: their number.
        options: ``rate`` and ``name`` of ``ensembles.train``.

    >>> start = [torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)]
    >>> gradients = unit_gradients(random_gradients(orthogonal=True, generator=torch.Generator().manual_seed(0)))
    >>> steps = record_steps(start, gradients, lambda theta: torch.optim.SGD(theta, lr=1.0), 3)
    >>> steps.after[:, 0, 0].round(9)  # steps of length 1 orthogonal to θ: ρ² = 25 + t
    array([26., 27., 28.])
    """

    def inner(a: Tensor, b: Tensor) -> Tensor:
        """Inner product for each run, ``(runs,)``."""
        return (a * b).sum((1, 2), dtype=torch.float64)

    theta = [w.clone() for w in weights]
    records = []
    for step in ensembles.train(theta, gradients, make_optimizer, steps, **options):
        matrices = []
        for before, gradient, after in zip(step.before, step.gradients, step.after, strict=True):
            delta = after - before
            fields = [  # those of Steps, in their order
                inner(before, before),
                inner(after, after),
                inner(delta, delta),
                inner(before, delta),
                inner(before, gradient),
                inner(gradient, gradient),
            ]
            matrices.append(torch.stack(fields))
        records.append(torch.stack(matrices, dim=1))
    all_records = torch.stack(records, dim=1)  # (fields, steps, matrices, runs)
    return Steps(*all_records.cpu().numpy())


def exponents(rho_sq: Array, window: tuple[float, float]) -> Array:
    """Slopes of ln ρ against ln t between the two times of ``window``, ``(runs,)``, from ρ², ``(steps, runs)``.

    They are least-squares lines through log-spaced times, without an offset: in a·tᵖ + b a free offset would take most
    of the curvature.

    Used in ``scale-invariance``, ``aligned`` and ``small-t5``.

    >>> t = np.arange(1, 1001.0)
    >>> exponents(np.stack([t, 2 * t], axis=1), (10, 1000)).round(6)
    array([0.5, 0.5])
    """
    t = np.unique(np.geomspace(*window, 60).round().astype(int))
    return np.polyfit(np.log(t), np.log(rho_sq[t - 1]) / 2, 1)[0]
