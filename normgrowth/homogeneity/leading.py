"""Leading parts of values: where the leading term of a sum is 0, the sum has the degree of its other terms.

In 1 + w the leading term w is 0 as long as w is a fresh parameter of zeros: the value is then a constant. Where a
leading part is 0 as a whole, its degree is refused. Where some of it is 0, as in some channels of a gain, the rest
decides, unless a later operation takes just these channels; so they are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from normgrowth.homogeneity.algebra import EVERY, INFINITE

__all__ = ["KEEP_ZEROS", "KEEP_ZEROS_OF_DEGREE_0", "LIMITS", "TERMS", "LeadingParts", "divisor_of", "lower_terms"]

# The terms of operations that add, or take the larger or smaller, as places of their factors in the arguments.
TERMS: dict[str, tuple[tuple[int, ...], ...]] = {
    "add": ((0,), (1,)),
    "sub": ((0,), (1,)),
    "rsub": ((0,), (1,)),
    "addmm": ((0,), (1, 2)),
    "addmv": ((0,), (1, 2)),
    "baddbmm": ((0,), (1, 2)),
    "convolution": ((0, 1), (2,)),
    "index_add": ((0,), (3,)),
    "scatter_add": ((0,), (3,)),
    "native_batch_norm": ((0, 1), (2,), (3, 1)),
    "clamp": ((0,), (1,), (2,)),
    "clamp_max": ((0,), (1,)),
    "clamp_min": ((0,), (1,)),
    "maximum": ((0,), (1,)),
    "minimum": ((0,), (1,)),
}
# Operations that make the leading part of a result of the leading parts of operands.
KEEP_ZEROS = {
    "abs", "adaptive_avg_pool2d", "amax", "avg_pool2d", "bmm", "cat", "clone", "constant_pad_nd", "contiguous", "copy",
    "cumsum", "div", "dot", "elu", "embedding", "expand", "flip", "gather", "gelu", "hardswish", "index",
    "fft_c2c", "fft_r2c", "im2col", "index_put", "norm", "scatter", "upsample_bilinear2d", "upsample_nearest1d",
    "upsample_nearest2d", "vdot",
    "index_select", "leaky_relu", "linalg_vector_norm", "masked_fill", "max", "max_pool2d_with_indices", "mean", "min",
    "mm", "mul", "mv", "neg", "permute", "pow", "prelu_kernel", "relu", "repeat", "reshape", "roll", "silu", "sort",
    "sqrt", "square", "stack", "std", "sum", "to_copy", "topk", "tril", "triu", "var", "where", *TERMS,
}  # fmt: skip
# Functions with a positive degree in the limit of large arguments, and what is 0 where the limit is.
LIMITS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("elu", "gelu", "hardswish", "mish", "silu", "softplus"), lambda x, *_: x.relu()),
    "sigmoid": lambda x: (x >= 0).to(x.dtype),
    "glu": lambda x, dim=-1: x.chunk(2, dim)[0] * (x.chunk(2, dim)[1] >= 0),
    "log_softmax": lambda x, dim, *_: x - x.amax(dim, keepdim=True),
    "logsumexp": lambda x, dim, keepdim=False: x.amax(dim, keepdim),
}


# Those that keep them only where nothing grows: of a larger argument they are a limit.
KEEP_ZEROS_OF_DEGREE_0 = {"tanh", "erf", "native_layer_norm", "native_group_norm", *LIMITS}


def divisor_of(name: str, args: Sequence[Any]) -> Tensor | None:
    """What an operation divides by, if that is a tensor; None where it does not divide."""
    divides_by_first = name in ("rsqrt", "reciprocal") or (
        name == "pow" and isinstance(args[1], int | float) and args[1] < 0
    )
    divisor = args[1] if name == "div" else args[0] if divides_by_first else None
    return divisor if isinstance(divisor, Tensor) else None


class LeadingParts:
    """Where the leading part of a value is 0 although the value may not be, and the parameter of zeros in it."""

    def __init__(self) -> None:
        # The keys are storages, as in ``Algebra``. A mask has an entry for each entry of the storage.
        self.masks = WeakIdKeyDictionary()
        self.zero_parameters = WeakIdKeyDictionary()

    def of(self, x: Tensor) -> Tensor:
        """A value with zeros where its leading part is 0."""
        if x.is_complex() and not x.is_conj():
            return torch.view_as_complex(self.of(torch.view_as_real(x)).contiguous())
        mask = self.masks.get(x.untyped_storage())
        if mask is None or mask.numel() != _entries(x):
            return x
        return x.masked_fill(mask.as_strided(x.size(), x.stride(), x.storage_offset()), 0)

    def keep(self, x: Tensor, leading: Tensor) -> None:
        """Remember where the leading part of x, of the same shape, is 0."""
        if x.is_complex() and not x.is_conj():
            self.keep(torch.view_as_real(x), torch.view_as_real(leading.resolve_conj()))
            return
        zero = leading == 0
        storage = x.untyped_storage()
        if storage not in self.masks:
            if not zero.any():
                return
            self.masks[storage] = torch.zeros(_entries(x), dtype=torch.bool, device=x.device)
        self.masks[storage].as_strided(x.size(), x.stride(), x.storage_offset()).copy_(zero)

    def is_zero(self, x: Tensor) -> bool:
        """Whether all of the leading part of a value is 0."""
        return not self.of(x).any()

    def add_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Remember a parameter if all its entries are 0."""
        if not parameter.any():
            self.zero_parameters[parameter.untyped_storage()] = name

    def parameter_in(self, values: Any) -> str:
        """Name of the first parameter of zeros that makes one of the values 0; empty if there is none."""
        storages = [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, Tensor)]
        return next((self.zero_parameters[storage] for storage in storages if storage in self.zero_parameters), "")

    def has_mask(self, values: Any) -> bool:
        """Whether the leading part of one of the values is 0 where the value may not be."""
        tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor)]
        return bool(self.masks) and any(x.untyped_storage() in self.masks for x in tensors)

    def result(self, name: str, func: Any, args: Any, kwargs: Any, lower: list[int], has_limit: bool = False) -> Tensor:
        """The leading part of the first result of an operation that has not run yet.

        ``lower``: places of arguments in whose place a 0 leaves the leading terms.
        """
        operands = list(args)
        for place in lower:
            x = operands[place]
            operands[place] = x.masked_fill(x.abs() < INFINITE, 0) if isinstance(x, Tensor) else 0
        if name in LIMITS and has_limit:
            return LIMITS[name](self.of(operands[0]), *operands[1:])
        operands, kwargs = tree_map_only(Tensor, self.of, (operands, kwargs))
        if func._schema.is_mutable:
            operands[0] = operands[0].clone()  # after ``of``, which knows a tensor by its memory
        return tree_leaves(func(*operands, **kwargs))[0]


def lower_terms(name: str, args: Any, largest: Any, degree_of: Callable[[Any], Any]) -> tuple[list[int], list[Any]]:
    """Of a sum: places of one factor of each term below the largest degree, and the factors of the other terms."""
    lower: list[int] = []
    leading: list[Any] = []
    for factors in TERMS[name]:
        if factors[-1] >= len(args):
            continue
        if EVERY < sum(degree_of(args[place]) for place in factors) < largest:
            lower.append(factors[0])
        else:
            leading += [args[place] for place in factors]
    return lower, leading


def _entries(x: Tensor) -> int:
    """How many entries the storage of x has."""
    return x.untyped_storage().nbytes() // x.element_size()
