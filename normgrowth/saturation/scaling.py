"""A model with every parameter scaled by c, or in evaluation mode, within a ``with`` block that restores it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def scaled(model: nn.Module, c: float, *, dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
    """Multiply every parameter of a model by ``c`` within a ``with`` block.

    Afterwards, also after an exception, the parameters are restored bit for bit: they are set aside and put back, not
    divided by ``c``. Tied weights are scaled once. Buffers keep their values. What the block itself writes to
    parameters is lost.

    Args:
        dtype: compute in another precision within the block, buffers included; the model's own precision by default.

    Raises:
        ValueError: a parameter is not finite before scaling.
        TypeError: a parameter is not floating point (a quantised model).
        OverflowError: a scaled parameter is not finite, or the sum of squares of a vector that a norm reads overflows,
            so that the norm would divide it to 0. The model is restored.

    >>> layer = nn.Linear(2, 2)
    >>> with scaled(layer, 1000.0):
    ...     large = layer.weight.detach().clone()
    >>> bool((large == 1000 * layer.weight).all())
    True
    """
    replacements: list[tuple[Tensor, Tensor]] = []
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise TypeError(f"parameter {name!r} is {parameter.dtype}: only floating-point parameters can be scaled")
        original = parameter.detach()
        scaled_values = original.to(dtype or original.dtype) * c
        if not scaled_values.isfinite().all():
            if not original.isfinite().all():
                raise ValueError(f"parameter {name!r} has values that are not finite before any scaling")
            raise OverflowError(
                f"parameter {name!r} overflows {scaled_values.dtype}: its largest magnitude "
                f"{float(original.abs().max()):.3g} times c = {c:g} is beyond "
                f"{torch.finfo(scaled_values.dtype).max:.3g}. Take a smaller c, or dtype=torch.float64"
            )
        replacements.append((parameter, scaled_values))
    if dtype is not None:
        replacements += [(buffer, buffer.to(dtype)) for buffer in model.buffers() if buffer.is_floating_point()]
    originals = [(tensor, tensor.data) for tensor, _ in replacements]  # set aside, never written to
    overflows: list[Tensor] = []

    def watch_norm(_norm: nn.Module, args: tuple[Any, ...]) -> None:
        if args:
            overflows.append(_square_overflows(args[0]))

    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    hooks = [module.register_forward_pre_hook(watch_norm) for module in norms]
    try:
        for tensor, values in replacements:
            tensor.data = values
        yield model
    finally:
        for tensor, values in originals:
            tensor.data = values
        for hook in hooks:
            hook.remove()
    if overflows and torch.stack(overflows).any():
        raise OverflowError(
            f"a norm reads a vector at c = {c:g} whose square overflows, and would take it for 0. "
            "Take a smaller c, or dtype=torch.float64"
        )


def _square_overflows(x: Tensor) -> Tensor:
    """Whether the sum of squares of some row is infinite in the precision of a norm: float32, or float64 if x is."""
    wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
    return wide.square().sum(-1).isinf().any()


@contextmanager
def mode(model: nn.Module, *, dropout: bool = False, seed: int = 0) -> Iterator[None]:
    """Within a ``with`` block: no gradients, and dropout off, or on with draws from ``seed``.

    Afterwards every module has its own mode again, and the state of torch's generators is restored: dropout draws from
    the global generators, so with ``dropout`` they are forked for the block.
    """
    modes = [(module, module.training) for module in model.modules()]
    cuda_devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=sorted(cuda_devices), enabled=dropout):
        if dropout:
            torch.manual_seed(seed)
        try:
            model.train(dropout)
            yield
        finally:
            for module, training in modes:
                module.training = training
