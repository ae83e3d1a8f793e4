"""Networks whose loss does not depend on the length of the parameters, and step-by-step records of how they grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.optimization import Adafactor

from nbutils.ensembles import Gradients, gradients_of, train_together

Array = NDArray[np.float64]
Loss = Callable[[list[Tensor], Tensor, Tensor], Tensor]  # of weights, x and y; (runs,)


class Problem(NamedTuple):
    """Classification with label noise, for ``runs`` independent runs at once."""

    x: Tensor  # (runs, samples, features)
    y: Tensor  # (runs, samples) class numbers
    weights: list[Tensor]  # first layer (runs, hidden, features), second (runs, classes, hidden): the start


class Steps(NamedTuple):
    """What each step did, for each matrix and run: all of shape ``(steps, matrices, runs)``, in float64."""

    before: Array  # ‖θ‖² before the step
    after: Array  # ‖θ'‖² after it
    step: Array  # ‖δ‖²
    inner: Array  # θ·δ
    projection: Array  # θ·∇L
    gradient: Array  # ‖∇L‖²

    def total(self) -> Steps:
        """Summed over the matrices: each ``(steps, runs)``."""
        return Steps(*(part.sum(axis=1) for part in self))

    def gradient_cos(self) -> Array:
        """cos(θ, ∇L)."""
        return self.projection / np.sqrt(self.before * self.gradient)


def problem(runs: int, *, samples: int = 64, generator: torch.Generator) -> Problem:
    """Gaussian inputs, labels of a random linear teacher, a fifth of them replaced by random classes.

    Each run has its own data, teacher and start, and each matrix starts with norm 1; float64.

    >>> data = problem(2, generator=torch.Generator().manual_seed(0))
    >>> data.x.shape, [w.norm(dim=(1, 2)).round(decimals=6).tolist() for w in data.weights]
    (torch.Size([2, 64, 8]), [[1.0, 1.0], [1.0, 1.0]])
    """
    features, hidden, classes = 8, 16, 4
    at: dict[str, Any] = {"generator": generator, "device": generator.device}
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, **at)  # noqa: E731
    x, teacher = draw(runs, samples, features), draw(runs, features, classes)
    uniform, random = torch.rand(runs, samples, **at), torch.randint(classes, (runs, samples), **at)
    y = torch.where(uniform < 0.2, random, (x @ teacher).argmax(-1))
    weights = [draw(runs, hidden, features), draw(runs, classes, hidden)]
    return Problem(x, y, [w / w.norm(dim=(1, 2), keepdim=True) for w in weights])


def _normalised(x: Tensor, eps: float) -> Tensor:
    """Layer norm without gain and shift; the rounding of ``sublayers.standardise`` would change chaotic runs."""
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def losses(weights: Sequence[Tensor], x: Tensor, y: Tensor, *, eps: float = 0.0) -> Tensor:
    """Cross-entropy of a two-layer network with layer norm after each matrix, shape (runs,).

    With ``eps = 0`` it does not change when either matrix is multiplied by a positive number.

    >>> x, y, (first, second) = problem(1, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(losses([first, 1000 * second], x, y), losses([first, second], x, y))
    True
    """
    first, second = weights
    h = torch.relu(_normalised(x @ first.mT, eps))
    logits = 2 * _normalised(h @ second.mT, eps)  # (runs, samples, classes)
    return torch.nn.functional.cross_entropy(logits.mT, y, reduction="none").mean(-1)


def loss_gradients(
    data: Problem, *, batch: int | None = None, loss: Loss = losses, generator: torch.Generator
) -> Gradients:
    """Puts the gradient of ``loss`` into ``.grad``: over all samples, or over a random batch for each run.

    >>> generator = torch.Generator().manual_seed(0)
    >>> data = problem(1, generator=generator)
    >>> theta = [w.requires_grad_() for w in data.weights]
    >>> loss_gradients(data, batch=8, generator=generator)(theta)
    >>> [round(abs(float((w.detach() * w.grad).sum())), 9) for w in theta]  # θ·∇L = 0, by Euler
    [0.0, 0.0]
    """
    runs, samples = data.y.shape

    def fill(theta: list[Tensor]) -> None:
        x, y = data.x, data.y
        if batch is not None:
            pick = torch.randint(samples, (runs, batch), generator=generator, device=generator.device)
            y, x = y.gather(1, pick), x.gather(1, pick[..., None].expand(-1, -1, x.shape[-1]))
        for w, gradient in zip(theta, torch.autograd.grad(loss(theta, x, y).sum(), theta), strict=True):
            w.grad = gradient

    return fill


def noise_gradients(*, across: bool = False, generator: torch.Generator) -> Gradients:
    """The null model: standard normal gradients that know nothing of θ.

    With ``across`` their part along each matrix is taken out and the rest divided by ‖θ‖, as in a scale-invariant loss:
    these are the gradients of g·θ/‖θ‖ with a fresh normal g at each step.

    >>> w = torch.ones(1, 2, 3, dtype=torch.float64, requires_grad=True)
    >>> noise_gradients(across=True, generator=torch.Generator().manual_seed(0))([w])
    >>> round(abs(float((w.detach() * w.grad).sum())), 9)
    0.0
    """

    def fill(theta: list[Tensor]) -> None:
        for w in theta:
            g = torch.randn(w.shape, generator=generator, dtype=w.dtype, device=generator.device).to(w.device)
            if across:
                rho = w.detach().norm(dim=(1, 2), keepdim=True)
                unit = w.detach() / rho
                g = (g - (g * unit).sum((1, 2), keepdim=True) * unit) / rho
            w.grad = g

    return fill


def unit_steps(gradients: Gradients) -> Gradients:
    """Each matrix's gradient divided by its own length: with SGD, steps of fixed length."""

    def fill(theta: list[Tensor]) -> None:
        gradients(theta)
        for w, gradient in zip(theta, gradients_of(theta), strict=True):
            w.grad = gradient / gradient.norm(dim=(1, 2), keepdim=True)

    return fill


def sized_noise(sizes: Array, *, generator: torch.Generator) -> Gradients:
    """The null model of a training: at its t-th call, gradients of the length ``sizes[t]`` in random directions.

    Args:
        sizes: length of the whole gradient at each step, shape ``(steps, runs)``.

    >>> theta = [torch.ones(2, 3, 4, requires_grad=True) for _ in range(2)]
    >>> sized_noise(np.array([[1.0, 2.0]]), generator=torch.Generator().manual_seed(0))(theta)
    >>> (sum(w.grad.square().sum((1, 2)) for w in theta) ** 0.5).numpy().round(6).tolist()
    [1.0, 2.0]
    """
    rows, normal = iter(torch.as_tensor(sizes)), noise_gradients(generator=generator)

    def fill(theta: list[Tensor]) -> None:
        normal(theta)
        length = sum((g.square().sum((1, 2)) for g in gradients_of(theta)), start=torch.zeros(())) ** 0.5
        scale = next(rows).to(length) / length
        for gradient in gradients_of(theta):
            gradient *= scale[:, None, None]

    return fill


class RunwiseAdafactor(Adafactor):
    """Adafactor of ``transformers`` for runs side by side, each matrix ``(runs, rows, columns)``.

    Its update is scaled by root mean squares of a whole tensor; here by those of each run, so runs do not touch.
    """

    @staticmethod
    def _rms(tensor: Tensor) -> Tensor:
        return tensor.detach().square().mean((1, 2), keepdim=True).sqrt()

    @staticmethod
    def _get_lr(group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        rate = min(1e-2, 1 / state["step"] ** 0.5) if group["relative_step"] else group["lr"]
        return rate * state["RMS"].clamp(min=group["eps"][1])


def train(
    weights: Sequence[Tensor],
    gradients: Gradients,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    steps: int,
    **options: Any,
) -> Steps:
    """Train all runs by ``together.train_together`` from ``weights``, which stay, and record every step.

    Args:
        weights: the start, each ``(runs, rows, columns)``.
        optimizer: for Adafactor take ``RunwiseAdafactor``.
        options: ``rate`` and ``name`` of ``train_together``.

    >>> start = [torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)]
    >>> gradients = unit_steps(noise_gradients(across=True, generator=torch.Generator().manual_seed(0)))
    >>> steps = train(start, gradients, lambda theta: torch.optim.SGD(theta, lr=1.0), 3)
    >>> steps.after[:, 0, 0].round(9)  # steps of length 1 across θ: ρ² = 25 + t
    array([26., 27., 28.])
    """
    rows = []
    dot = lambda a, b: (a * b).sum((1, 2), dtype=torch.float64)  # noqa: E731  (runs,)
    theta = [w.clone() for w in weights]
    for done in train_together(theta, gradients, optimizer, steps, **options):
        row = []
        for old, g, now in zip(done.before, done.gradients, done.after, strict=True):
            delta = now - old
            pairs = ((old, old), (now, now), (delta, delta), (old, delta), (old, g), (g, g))
            row.append(torch.stack([dot(a, b) for a, b in pairs]))
        rows.append(torch.stack(row, dim=1))
    return Steps(*torch.stack(rows, dim=1).cpu().numpy())


def exponents(rho_sq: Array, window: tuple[float, float]) -> Array:
    """Slope of ln ρ against ln t between the two times of ``window``, for ``rho_sq`` of shape ``(steps, runs)``.

    A least-squares line through log-spaced times, one for each run: ``(runs,)``. There is no offset to fit: a free
    a·tᵖ + b gives the offset most of the curvature.

    >>> t = np.arange(1, 1001.0)
    >>> exponents(np.stack([t, 2 * t], axis=1), (10, 1000)).round(6)
    array([0.5, 0.5])
    """
    t = np.unique(np.geomspace(*window, 60).round().astype(int))
    return np.polyfit(np.log(t), np.log(rho_sq[t - 1]) / 2, 1)[0]
