"""Why an output is not finite: an input, a parameter, or the first operation that overflows or gives no number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves
from torch.utils.module_tracker import ModuleTracker

from normgrowth.homogeneity.algebra import INFINITE, innermost_module

__all__ = ["NotFinite", "finite_output", "has_masked_rows"]

# Operations that overflow where their result is infinite and their operands are not. Others may give +∞ on purpose:
# 1/0, −log 0, a mask, and exp in a sigmoid by hand.
ARITHMETIC = {
    "add", "addcmul", "addmm", "addmv", "avg_pool2d", "baddbmm", "bmm", "cdist_forward", "convolution", "cumsum", "dot",
    "linalg_vector_norm", "mean", "mm", "mul", "mv", "norm", "pow", "square", "std", "std_mean", "sub", "sum", "var",
    "var_mean", "weight_norm_interface",
}  # fmt: skip
ADDS_MASKS = {"add", "sub"}  # two masks of the lowest number add to −∞
# Operations that return x/σ, then 1/σ, in which an overflow of σ is hidden: x/∞ = 0.
SQUARES_INSIDE = {
    "cudnn_batch_norm", "fused_rms_norm", "native_batch_norm", "native_group_norm", "native_layer_norm",
}  # fmt: skip
LARGEST = torch.finfo(torch.float64).max


class NotFinite(ValueError):
    """An output, or a number on the way to it, is not finite."""


def _real_tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def _magnitude(tensors: list[Tensor], positive: bool = False) -> float:
    """The largest magnitude, or the largest ``positive`` entry; NaN if an entry is NaN."""
    largest = 0.0
    for x in tensors:
        low, high = (float(end) for end in x.aminmax())
        largest = max(largest, high if positive else max(-low, high))  # false for a NaN
        if math.isnan(high):
            return math.nan
    return largest


class _Watch(TorchDispatchMode):
    """Keeps, in words, the first operation that overflows, and the first whose result is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.modules = ModuleTracker()
        self.overflow = ""
        self.not_a_number = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__.strip("_")
        results = _real_tensors(outputs)
        if name in SQUARES_INSIDE:
            for inverse_deviation in results[1:][-1:]:  # none where a batch norm uses the statistics of its training
                # a sum of n squares overflows from √(LARGEST/n) on, or later, and 1/σ is then 0
                limit = math.sqrt(LARGEST) if bool((inverse_deviation > 0).all()) else 0.0
                self._overflows(name, results, _real_tensors(args[:1]), limit)
        elif name in ARITHMETIC and not _magnitude(results, positive=name in ADDS_MASKS) <= LARGEST:
            operands = [x for x in _real_tensors((args, kwargs)) if all(x is not result for result in results)]
            self._overflows(name, results, operands, 0.0)
        if not self.not_a_number and any(bool(x.isnan().any()) for x in results):
            self.not_a_number = self._place(name)
        return outputs

    def _overflows(self, name: str, results: list[Tensor], operands: list[Tensor], limit: float) -> None:
        """Keep the operation if it is the first one whose operands are finite, but larger than ``limit``."""
        largest = _magnitude(operands)
        if not self.overflow and limit < largest <= LARGEST:
            self.overflow = f"{self._place(name)}, where an operand has magnitude {largest:.1e}"

    def _place(self, name: str) -> str:
        module = innermost_module(self.modules)
        return f"{name} in module {module!r}" if module else name


def _not_finite_before(module: nn.Module, inputs: Any) -> str:
    """The first input or parameter that is not finite, in words. −∞ in an input is a mask."""
    for path, x in tree_flatten_with_path(inputs)[0]:
        if isinstance(x, Tensor) and bool((x.isnan() | (x == math.inf)).any()):
            name = "".join(str(key) for key in path)
            return f"the input {name} is not finite" if name else "the input is not finite"
    for name, parameter in module.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"parameter {name!r} is not finite"
    return ""


def finite_output(
    module: nn.Module, inputs: Any, output: Callable[[float], Tensor], c: float, beside: float = 1.0
) -> Tensor:
    """``output(c · beside)`` of ``homogeneity.scalable(module, inputs, …)``, on the way to which nothing overflows.

    Raises:
        NotFinite: with the scale c and the reason.
    """
    watch = _Watch()
    with torch.no_grad(), watch.modules, watch:
        value = output(c * beside)
    if value.isfinite().all() and not watch.overflow:
        return value
    what = f"the output has norm {float(value.norm())} at scale {c}"
    reason = _not_finite_before(module, inputs)
    if reason:
        raise NotFinite(f"{what}: {reason}")
    if watch.overflow:
        if value.isfinite().all() and value.any():
            what = f"the output at scale {c} is not that of the model"
        raise NotFinite(f"{what}, since float64 overflows there: {watch.overflow}")
    with torch.no_grad():
        from_the_start = not output(1.0).isfinite().all()
    when = "as at scale 1" if from_the_start else "but not at scale 1"
    place = f"; the first operation that gives no number is {watch.not_a_number}" if watch.not_a_number else ""
    raise NotFinite(f"{what}, {when}{place}")


class _MaskedRows(TorchDispatchMode):
    """Sees whether a mask of large negative numbers is added to a whole row, where nothing of the row remains."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **kwargs or {})
        if func.overloadpacket.__name__.strip("_") in ADDS_MASKS:
            rows = [x for x in _real_tensors(outputs) if x.dim() and x.shape[-1] > 1]
            self.found = self.found or any(bool(((x <= -INFINITE) & (x == x[..., :1])).all(-1).any()) for x in rows)
        return outputs


def has_masked_rows(output: Callable[[float], Tensor], c: float) -> bool:
    """Whether attention has rows at the scale c that are masked whole, as those of padding beyond a window are.

    Sums of scores with the lowest number of a type round the scores away, which torch's derivative does not know.
    """
    masked_rows = _MaskedRows()
    with torch.no_grad(), masked_rows:
        output(c)
    return masked_rows.found
