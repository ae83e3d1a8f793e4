"""The optimizers of the book, by name, and T5's learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["OPTIMIZERS", "Schedule", "inverse_sqrt", "optimizer"]

OPTIMIZERS = ("sgd", "adamw", "adafactor")

Schedule = Callable[[int], float]  # from the number of steps done to the learning rate


def optimizer(name: str, params: Iterable[Tensor], lr: float = 1e-3, **options: Any) -> Optimizer:
    """An optimizer over ``params``.

    ==================  ==========================================================================================
    name                update
    ==================  ==========================================================================================
    ``sgd``             torch's; options ``momentum``, ``weight_decay``
    ``adamw``           torch's; options ``betas``, ``eps``, ``weight_decay`` (0 by default; acts on every parameter)
    ``adafactor``       T5's, with relative steps. A tensor moves by η·max(ε₂, RMS(θ))·u, where u is g over the root
                        of the factored running mean of g² + ε₁, divided by RMS(u) if that exceeds 1
    ==================  ==========================================================================================

    T5's Adafactor (Shazeer and Stern 2018; the update is that of ``transformers``) has clipping threshold 1,
    β₂ = 1 − t^−0.8, ε₁ = 1e-30, ε₂ = 1e-3, no momentum and no weight decay. Its rate is relative; T5's own is
    ``inverse_sqrt(1.0, warmup=10_000)``. Matrices are factored, vectors are not.

    Raises:
        ValueError: unknown name.

    >>> optimizer("sgd", [torch.zeros(2, requires_grad=True)], 0.1, momentum=0.9).param_groups[0]["momentum"]
    0.9
    """
    defaults: dict[str, Any]
    match name:
        case "sgd":
            return torch.optim.SGD(params, lr=lr, **options)
        case "adamw":
            params = list(params)
            # the fused kernel on CPU is wrong if a gradient or a moment has other strides than its parameter
            defaults = {"weight_decay": 0.0, "fused": all(p.is_contiguous() for p in params)}
            return torch.optim.AdamW(params, lr=lr, **defaults | options)
        case "adafactor":
            from transformers.optimization import Adafactor

            defaults = {"clip_threshold": 1.0, "decay_rate": -0.8, "eps": (1e-30, 1e-3)}
            return Adafactor(params, lr=lr, scale_parameter=True, relative_step=False, **defaults | options)
    raise ValueError(f"unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")


def inverse_sqrt(lr: float, *, warmup: int = 0) -> Schedule:
    """T5's learning rate, lr/√max(t, warmup, 1), as a function of the number t of steps done.

    >>> [round(inverse_sqrt(1.0, warmup=4)(t), 3) for t in (0, 4, 16)]
    [0.5, 0.5, 0.25]
    """
    return lambda t: lr / max(t, warmup, 1) ** 0.5
