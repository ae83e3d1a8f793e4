"""Leading parts of values: what is left of them in the limit, next to which lower terms do not count.

Of x + b with a constant b the leading part is x, and that of a softmax of growing scores is 1 at the largest one and 0
at the others. In 1 + w it is w, which is 0 as long as w is a fresh parameter of zeros: the value is then a constant.
Where a leading part is 0 as a whole, its degree is refused. Where some of it is 0, as in some channels of a gain, the
rest decides, unless a later operation takes just these channels. So leading parts are carried along with the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from normgrowth.homogeneity.algebra import EVERY, INFINITE
from normgrowth.homogeneity.measure import is_real_valued

__all__ = ["LINEAR_LIMITS", "PRODUCTS", "SUMS", "TERMS", "LeadingParts", "lower_terms"]

# The terms of operations that add, put side by side, or take the larger or smaller, as places of their factors.
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
    "constant_pad_nd": ((0,), (2,)),
    "where": ((1,), (2,)),
    "masked_fill": ((0,), (2,)),
    "index_put": ((0,), (2,)),
    "scatter": ((0,), (3,)),
    "native_batch_norm": ((0, 1), (2,), (3, 1)),
    "native_layer_norm": ((2,), (3,)),
    "native_group_norm": ((1,), (2,)),
    "clamp": ((0,), (1,), (2,)),
    "clamp_max": ((0,), (1,)),
    "clamp_min": ((0,), (1,)),
    "maximum": ((0,), (1,)),
    "minimum": ((0,), (1,)),
}
SUMS = {"add", "sub", "rsub", "cat", "stack", "where", "masked_fill", "constant_pad_nd", "index_put", "scatter"}
SUMS |= {"index_add", "scatter_add", "clamp", "clamp_max", "clamp_min", "maximum", "minimum"}  # of terms, not products
# Products of two factors, and the place of a bias.
PRODUCTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("mul", "mm", "bmm", "mv", "dot"), ()),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), (0,)),
    "convolution": (2,),
}
# Functions that are linear far from 0 on the positive side, and what they leave there of the leading part.
LINEAR_LIMITS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("elu", "gelu", "hardswish", "mish", "silu", "softplus"), lambda x, *_: x.relu()),
    "glu": lambda x, dim=-1: x.chunk(2, dim)[0] * (x.chunk(2, dim)[1] >= 0),
    "log_softmax": lambda x, dim, *_: x - x.amax(dim, keepdim=True),
    "logsumexp": lambda x, dim, keepdim=False: x.amax(dim, keepdim),
}
ORDERS = {"amax", "amin", "max", "min", "sort", "topk"}  # of which a value that is not known may be any result
ANY = (-math.inf, math.inf)  # degrees of lower terms that are not known
CANCELLED = 64  # roundings of a term, below which a difference of two terms is 0


def _softmax_limit(leading: Tensor, x: Tensor, dim: int, lower_terms_change: Any) -> Tensor:
    """The softmax among the largest scores, of which the leading parts are equal; 0 elsewhere and in masked rows.

    Where these scores differ, lower terms decide. If those change with scale, the largest one in this run counts, and
    the others are NaN, not known, as is a row of which a score is not known.
    """
    largest = leading.amax(dim, keepdim=True)
    left = x.masked_fill(leading != largest, -math.inf)
    limit = left.softmax(dim).nan_to_num()
    is_lower = (leading == largest) & (left < left.amax(dim, keepdim=True))
    limit = limit.masked_fill(is_lower & lower_terms_change, math.nan)
    return limit.masked_fill(largest.isnan(), math.nan)


def _rows_left(leading: Tensor, x: Tensor, axes: int, may_fall: bool) -> Tensor:
    """Leading parts of rows over the last axes, and what is left of a row where that is 0: a norm evens degrees out.

    What may fall with scale is NaN instead, not known, since a norm with an ε would not lift it.
    """
    is_zero = (leading == 0).flatten(-axes).all(-1)
    left = x.masked_fill(x != 0, math.nan) if may_fall else x
    return torch.where(is_zero[(...,) + (None,) * axes], left, leading)


def _without_cancelled(leading: Tensor, term: Any, power: int = 1) -> Tensor:
    """A sum of leading parts, or a power of one, with 0 where they cancel up to rounding."""
    if not leading.is_floating_point():
        return leading
    rounding = CANCELLED * torch.finfo(leading.dtype).eps * torch.as_tensor(term).abs()
    return leading.masked_fill(leading.abs() <= rounding**power, 0)


class LeadingParts:
    """The leading parts of values from which they differ, and the parameters of zeros that make values 0."""

    def __init__(self, degree_of: Callable[[Any], Any]) -> None:
        self.degree_of = degree_of
        # The keys are storages, as in ``Algebra``, and so are the leading parts: all views of a tensor share them.
        self.storages = WeakIdKeyDictionary()
        self.zero_parameters = WeakIdKeyDictionary()
        self.lower_degrees = WeakIdKeyDictionary()

    def of(self, x: Tensor) -> Tensor:
        """The leading part of a value."""
        storage = self.storages.get(x.untyped_storage())
        if storage is None or storage.nbytes() != x.untyped_storage().nbytes():
            return x
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
        leading = empty.set_(storage, x.storage_offset(), x.size(), x.stride())
        return leading.conj() if x.is_conj() else leading

    def keep(self, x: Tensor, leading: Tensor) -> None:
        """Remember the leading part of x, of the same shape."""
        storage = x.untyped_storage()
        if storage not in self.storages:
            if leading is x or torch.equal(leading, x):
                return
            self.storages[storage] = storage.clone()
        self.of(x).copy_(leading)

    def lower(self, x: Any) -> tuple[Any, ...]:
        """The smallest and the largest degree that terms beside the leading one may have; empty if there are none."""
        if not isinstance(x, Tensor) or x.untyped_storage() not in self.storages:
            return ()
        return self.lower_degrees.get(x.untyped_storage(), ANY)

    def keep_lower(self, x: Tensor, degrees: Sequence[Any]) -> None:
        """Remember the degrees that terms beside the leading one may have, those of a whole storage together."""
        if x.untyped_storage() in self.storages:
            degrees = [*degrees, *self.lower_degrees.get(x.untyped_storage(), ())]
            self.lower_degrees[x.untyped_storage()] = (min(degrees), max(degrees)) if degrees else ANY

    def is_zero(self, x: Tensor) -> bool:
        """Whether all of the leading part of a value is 0."""
        return not self.of(x).any()

    def is_unknown(self, x: Tensor) -> bool:
        """Whether the leading part of a value is nowhere known but where it is 0."""
        leading = self.of(x)
        return bool(leading.isnan().any()) and not leading.masked_fill(leading.isnan(), 0).any()

    def add_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Remember a parameter if all its entries are 0."""
        if not parameter.any():
            self.zero_parameters[parameter.untyped_storage()] = name

    def parameter_in(self, values: Any) -> str:
        """Name of the first parameter of zeros that makes one of the values 0; empty if there is none."""
        storages = [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, Tensor)]
        return next((self.zero_parameters[storage] for storage in storages if storage in self.zero_parameters), "")

    def differ(self, values: Any) -> bool:
        """Whether one of the values has another leading part."""
        tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor)]
        return bool(self.storages) and any(x.untyped_storage() in self.storages for x in tensors)

    def result(self, name: str, func: Any, args: Any, kwargs: Any, lower: Sequence[int] = ()) -> list[Any]:
        """The leading parts of the results of an operation that has not run yet.

        Indices and booleans are those of leading parts, too, or of this run where there are not as many of them.

        Args:
            lower: places of arguments in whose place a 0 leaves the leading terms.
        """
        operands = list(args)
        for place in lower:
            x = operands[place]
            operands[place] = x.masked_fill(x.abs() < INFINITE, 0) if isinstance(x, Tensor) else 0
        try:
            results = self._run(name, func, operands, kwargs, self.of)
        except (IndexError, RuntimeError):
            results = self._run(name, func, operands, kwargs, lambda x: self.of(x) if is_real_valued(x) else x)
        if name in ORDERS and isinstance(args[0], Tensor) and self.of(args[0]).isnan().any():
            return [x.fill_(math.nan) if is_real_valued(x) else x for x in results]
        if name in ("add", "sub", "rsub"):
            term = operands[0]
            results = [_without_cancelled(results[0], self.of(term) if isinstance(term, Tensor) else term)]
        elif name in ("std", "var"):
            results = [_without_cancelled(results[0], self.of(args[0]).abs().max(), 2 if name == "var" else 1)]
        return results

    def _run(self, name: str, func: Any, args: Any, kwargs: Any, leading_part: Callable[[Tensor], Tensor]) -> list[Any]:
        operands, kwargs = tree_map_only(Tensor, leading_part, (args, kwargs))
        if func._schema.is_mutable:
            operands[0] = operands[0].clone()  # after ``leading_part``, which knows a tensor by its memory
        if name == "native_layer_norm":
            may_fall = args[4] > 0 and self.degree_of(args[0]) <= 0 and min(self.lower(args[0]), default=0) < 0
            operands[0] = _rows_left(operands[0], args[0], len(args[1]), may_fall)
        return tree_leaves(func(*operands, **kwargs))

    def limit(self, name: str, func: Any, args: Any, kwargs: Any) -> Tensor:
        """What is left of the result where a positive degree takes a function to its limit.

        A bounded function has its value at ±∞ there, and keeps the leading part where it has no bound. Where that is 0,
        it has its value for what is left of the argument, or NaN, not known, if that may change with scale.
        """
        x = args[0]
        leading = self.of(x)
        lower_terms_change = any(k != 0 for k in self.lower(x))
        if name in LINEAR_LIMITS:
            return LINEAR_LIMITS[name](leading, *args[1:])
        if "softmax" in name:
            are_known = max(self.lower(x), default=0) < math.inf
            return _softmax_limit(leading, x, args[1], lower_terms_change & (are_known | (leading == 0)))
        left = x.masked_fill(x != 0, math.nan) if lower_terms_change else x
        far = torch.where(leading == 0, left, leading * math.inf)
        limit = self._run(name, func, [far, *args[1:]], kwargs, self.of)[0]
        return torch.where(limit.isinf(), leading, limit)


def lower_terms(name: str, args: Any, largest: Any, degree_of: Callable[[Any], Any]) -> tuple[list[int], list[Any]]:
    """Of a sum: places of one factor of each term below the largest degree, and the factors of the other terms.

    A term without its first factor is absent. Without another one, such as the gain of a norm, this factor is 1.
    """
    lower: list[int] = []
    leading: list[Any] = []
    for places in TERMS[name]:
        if places[0] >= len(args) or args[places[0]] is None:
            continue
        factors = [args[place] for place in places if place < len(args) and args[place] is not None]
        if EVERY < sum(degree_of(factor) for factor in factors) < largest:
            lower.append(places[0])
        else:
            leading += factors
    return lower, leading
