"""Optimizers of the book by name, and T5's learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

OPTIMIZERS = ("sgd", "adamw", "adafactor")

Schedule = Callable[[int], float]  # number of steps done to learning rate


def optimizer(name: str, params: Iterable[Tensor], lr: float = 1e-3, **options: Any) -> Optimizer:
    """An optimizer over ``params``.

    ==================  ==========================================================================================
    name                update
    ==================  ==========================================================================================
    ``sgd``             torch's; ``momentum``, ``weight_decay``
    ``adamw``           torch's, ``betas``, ``eps``; ``weight_decay`` (0 if not given) acts on every parameter
    ``adafactor``       T5's: relative steps. Each tensor moves by η·max(ε₂, RMS(θ))·u, where u is g over the root of
                        the factored running mean of g² + ε₁, divided by RMS(u) where that exceeds 1
    ==================  ==========================================================================================

    T5's Adafactor (Shazeer and Stern 2018; ``transformers`` has the update): clipping threshold 1, β₂ = 1 − t^−0.8,
    ε₁ = 1e-30, ε₂ = 1e-3, no momentum, no weight decay. Its rate is relative: with
    ``inverse_sqrt(1.0, warmup=10_000)`` it is T5's own. Matrices are factored, vectors are not.

    Raises:
        ValueError: unknown name.

    >>> optimizer("sgd", [torch.zeros(2, requires_grad=True)], 0.1, momentum=0.9).param_groups[0]["momentum"]
    0.9
    """
    match name:
        case "sgd":
            return torch.optim.SGD(params, lr=lr, **options)
        case "adamw":
            params = list(params)
            # the fused kernel on CPU is wrong where a gradient or a moment has other strides than its parameter
            plain = {"weight_decay": 0.0, "fused": all(p.is_contiguous() for p in params)}
            return torch.optim.AdamW(params, lr=lr, **plain | options)
        case "adafactor":
            from transformers.optimization import Adafactor

            t5 = {"clip_threshold": 1.0, "decay_rate": -0.8, "eps": (1e-30, 1e-3)}
            return Adafactor(params, lr=lr, scale_parameter=True, relative_step=False, **t5 | options)
    raise ValueError(f"unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")


class EachAdamW(Optimizer):
    """AdamW of networks that train together, with a learning rate and a decay for each.

    Args:
        params: each ``(networks, …)``.
        lr, weight_decay: one value a network; the decay is decoupled, as in torch.

    >>> p = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    >>> p.grad = torch.zeros_like(p)
    >>> EachAdamW([p], lr=[0.1, 0.1], weight_decay=[0.0, 1.0]).step()
    >>> p[:, 0].tolist()  # without a gradient decay alone moves
    [1.0, 0.9]
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: Sequence[float],
        weight_decay: Sequence[float],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"betas": betas, "eps": eps})
        for p in self.param_groups[0]["params"]:
            rate, decay = (p.new_tensor(x).view(-1, *[1] * (p.ndim - 1)) for x in (lr, weight_decay))
            moments = {"first": torch.zeros_like(p), "second": torch.zeros_like(p)}
            self.state[p] = {"lr": rate, "weight_decay": decay, "t": 0} | moments

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (beta_1, beta_2), eps = group["betas"], group["eps"]
        for p in group["params"]:
            of, lr = self.state[p], self.state[p]["lr"]
            of["t"] += 1
            p *= 1 - lr * of["weight_decay"]
            of["first"].lerp_(p.grad, 1 - beta_1)
            of["second"].mul_(beta_2).addcmul_(p.grad, p.grad, value=1 - beta_2)
            root = (of["second"].sqrt() / (1 - beta_2 ** of["t"]) ** 0.5).add_(eps)
            p -= lr / (1 - beta_1 ** of["t"]) * (of["first"] / root)


def inverse_sqrt(lr: float, *, warmup: int = 0) -> Schedule:
    """T5's learning rate, lr/√max(t, warmup, 1), as a function of the number t of steps done before.

    >>> [round(inverse_sqrt(1.0, warmup=4)(t), 3) for t in (0, 4, 16)]
    [0.5, 0.5, 0.25]
    """
    return lambda t: lr / max(t, warmup, 1) ** 0.5
