"""A model with every parameter scaled by c, or in evaluation mode, within a ``with`` block that restores it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normgrowth.precision import float64_throughout

PACKED = (torch.uint8, torch.int8, torch.int16, torch.int32)  # in which quantised weights are stored; indices are int64


@contextmanager
def scaled(model: nn.Module, c: float, *, dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
    """Multiply every parameter of a model by ``c`` within a ``with`` block.

    Afterwards, also after an exception, the parameters are restored bit for bit: they are set aside and put back, not
    divided by ``c``. Tied weights are scaled once. Buffers keep their values. What the block itself writes to
    parameters is lost.

    In float64 all of the block is computed in float64, also where the model's own code casts to float32
    (``precision.float64_throughout``), and mixtures of experts run one expert after the other.

    Args:
        dtype: compute in another precision within the block, buffers included; the model's own precision by default.

    Raises:
        ValueError: a parameter is not finite before scaling.
        TypeError: a parameter is not floating point, or weights are packed (a quantised model).
        OverflowError: a scaled parameter is not finite, or the sum of squares of a vector that a norm reads overflows,
            so that the norm would divide it to 0. Names the parameter or the norm, and the largest magnitude. The
            model is restored.

    >>> layer = nn.Linear(2, 2)
    >>> with scaled(layer, 1000.0):
    ...     large = layer.weight.detach().clone()
    >>> bool((large == 1000 * layer.weight).all())
    True
    """
    _refuse_quantised(model)
    replacements: list[tuple[Tensor, Tensor]] = [
        (parameter, _times(c, parameter.detach(), dtype, name)) for name, parameter in model.named_parameters()
    ]
    in_float64 = any(values.dtype == torch.float64 for _, values in replacements)
    if dtype is not None:
        replacements += [(buffer, buffer.to(dtype)) for buffer in model.buffers() if buffer.is_floating_point()]
    originals = [(tensor, tensor.data) for tensor, _ in replacements]  # set aside, never written to
    with _NormInputs(model, torch.float64 if in_float64 else torch.float32) as norm_inputs:
        try:
            for tensor, values in replacements:
                tensor.data = values
            with float64_computation(model) if in_float64 else nullcontext():
                yield model
        except Exception as error:  # whatever the block raises, an overflow is the cause
            norm_inputs.check(c, error)
            raise
        finally:
            for tensor, values in originals:
                tensor.data = values
    norm_inputs.check(c)


def _refuse_quantised(model: nn.Module) -> None:
    """Raise TypeError if weights of a model are not parameters, but packed, or integers as large as a matrix."""
    for name, module in model.named_modules():
        packed = hasattr(module, "_packed_params")  # of torch's quantised modules
        for buffer_name, buffer in module.named_buffers(recurse=False):
            saved = buffer_name not in module._non_persistent_buffers_set
            is_matrix = buffer.ndim > 1 and min(buffer.shape) > 1
            if saved and is_matrix and buffer.dtype in PACKED:
                packed |= bool(buffer.max() > 1)  # a mask has 0 and 1
        if packed:
            kind = type(module).__name__
            raise TypeError(f"{name or 'the model'} is quantised ({kind}): its weights cannot be scaled")


def _times(c: float, parameter: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    """A parameter times c, in ``dtype`` or its own precision. Raises as ``scaled`` does."""
    if not parameter.is_floating_point():
        raise TypeError(f"parameter {name!r} is {parameter.dtype}: only floating-point parameters can be scaled")
    values = parameter.to(dtype or parameter.dtype) * c
    if values.isfinite().all():
        return values
    if not parameter.isfinite().all():
        raise ValueError(f"parameter {name!r} has values that are not finite before any scaling")
    raise OverflowError(
        f"parameter {name!r} overflows {values.dtype}: its largest magnitude {float(parameter.abs().max()):.3g} times "
        f"c = {c:g} is beyond {torch.finfo(values.dtype).max:.3g}. {advice(values.dtype)}"
    )


def advice(dtype: torch.dtype) -> str:
    """What to do after an overflow in a precision."""
    return "Take a smaller c" if dtype == torch.float64 else "Take a smaller c, or dtype=torch.float64"


@contextmanager
def float64_computation(model: nn.Module) -> Iterator[None]:
    """Within a ``with`` block: casts inside the model stay in float64, and experts run one after the other.

    The grouped products of mixtures of experts in ``transformers`` have no float64.
    """
    network: Any = model
    implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if implementation is not None:
        network.set_experts_implementation("eager")
    try:
        with float64_throughout():
            yield
    finally:
        if implementation is not None:
            network.set_experts_implementation(implementation)


class _NormInputs:
    """Watches, within a ``with`` block, the vectors that the norms of a model read, for squares that overflow.

    Any module without matrices and without modules in it may be a norm. It is one if it gives for a vector whose square
    overflows what it gives for 0, or no number.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        """``dtype``: the precision in which norms square, float32 unless all is float64."""
        self.dtype = dtype
        self.candidates = {name: module for name, module in model.named_modules() if _may_be_norm(module)}
        self.first = ""  # the first norm whose input overflows
        self.largest = 0.0  # and the magnitude that it reads

    def __enter__(self) -> _NormInputs:
        self.hooks = [
            module.register_forward_hook(partial(self._watch, name), with_kwargs=True)
            for name, module in self.candidates.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _watch(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        vectors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        if self.first or not vectors or not isinstance(output, Tensor) or output.shape != vectors[0].shape:
            return
        x = vectors[0].detach().to(self.dtype)
        overflows = x.square().sum(-1).isinf() & x.isfinite().all(-1)
        if not overflows.any():
            return
        replaced = [torch.zeros_like(argument) if argument is vectors[0] else argument for argument in args]
        by_name = {key: torch.zeros_like(value) if value is vectors[0] else value for key, value in kwargs.items()}
        of_zero = module.forward(*replaced, **by_name)
        taken_for_zero = (output == of_zero).all(-1) | output.isnan().any(-1)
        if (overflows & taken_for_zero).any():
            self.first = name or type(module).__name__
            self.largest = float(x[overflows].abs().max())

    def check(self, c: float, cause: Exception | None = None) -> None:
        """Raise OverflowError if a norm took a vector for 0, or for no number, because its square is infinite."""
        if self.first:
            raise OverflowError(
                f"at c = {c:g} {self.first} reads a vector whose largest magnitude is {self.largest:.3g}: its square "
                f"overflows {self.dtype}, and the norm divides it to 0. {advice(self.dtype)}"
            ) from cause


def _may_be_norm(module: nn.Module) -> bool:
    """Whether a module has neither modules in it nor a matrix."""
    return not any(True for _ in module.children()) and all(parameter.ndim < 2 for parameter in module.parameters())


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
