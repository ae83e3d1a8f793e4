"""A model with every parameter times c, and its mode, within a ``with`` block; both come back as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def scaled(model: nn.Module, c: float, *, dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
    """Multiply every parameter of a model by ``c`` within a ``with`` block.

    The parameters come back bit for bit, also after an exception, because they are exchanged and not divided. Tied
    weights are scaled once. Buffers keep their values. What the block itself writes to parameters is lost.

    Args:
        dtype: compute in another precision within the block, buffers included; that of the model if not given.

    Raises:
        ValueError: a parameter is not finite before scaling.
        TypeError: a parameter is not floating point (a quantised model).
        OverflowError: a scaled parameter is not finite, or a norm read a vector whose square is not, and so took it
            for 0. The model is left as it was.

    >>> layer = nn.Linear(2, 2)
    >>> with scaled(layer, 1000.0):
    ...     large = layer.weight.detach().clone()
    >>> bool((large == 1000 * layer.weight).all())
    True
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise TypeError(f"parameter {name!r} is {parameter.dtype}: only floating-point parameters can be scaled")
        before = parameter.detach()
        after = before.to(dtype or before.dtype) * c
        if not after.isfinite().all():
            if not before.isfinite().all():
                raise ValueError(f"parameter {name!r} has values that are not finite before any scaling")
            raise OverflowError(
                f"parameter {name!r} overflows {after.dtype}: its largest magnitude {float(before.abs().max()):.3g} "
                f"times c = {c:g} is beyond {torch.finfo(after.dtype).max:.3g}. "
                "Take a smaller c, or dtype=torch.float64"
            )
        pairs.append((parameter, after))
    if dtype is not None:
        pairs += [(buffer, buffer.to(dtype)) for buffer in model.buffers() if buffer.is_floating_point()]
    kept = [(tensor, tensor.data) for tensor, _ in pairs]  # set aside, never written to
    overflowed: list[Tensor] = []
    hooks = [
        part.register_forward_pre_hook(lambda _, args: overflowed.extend(map(_squares_overflow, args[:1])))
        for part in model.modules()
        if "Norm" in type(part).__name__
    ]
    try:
        for tensor, other in pairs:
            tensor.data = other
        yield model
    finally:
        for tensor, old in kept:
            tensor.data = old
        for hook in hooks:
            hook.remove()
    if overflowed and torch.stack(overflowed).any():
        why = f"a norm reads a vector at c = {c:g} whose square overflows, and would take it for 0"
        raise OverflowError(f"{why}. Take a smaller c, or dtype=torch.float64")


def _squares_overflow(x: Tensor) -> Tensor:
    """Whether a row's sum of squares is infinite in the precision of a norm: float32 at least."""
    wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
    return wide.square().sum(-1).isinf().any()


@contextmanager
def mode(model: nn.Module, *, dropout: bool = False, seed: int = 0) -> Iterator[None]:
    """No gradients, dropout off (or on, with draws from ``seed``); each module's mode and torch's generators come back.

    Torch's dropout knows only the global generators: with ``dropout`` they are forked for the block.
    """
    modes = [(module, module.training) for module in model.modules()]
    used = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=sorted(used), enabled=dropout):
        if dropout:
            torch.manual_seed(seed)
        try:
            model.train(dropout)
            yield
        finally:
            for module, training in modes:
                module.training = training
