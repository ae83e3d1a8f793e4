"""Degrees carried along with one forward pass, and what such a pass cannot see, refused.

``Forward`` sees each operation that the pass runs (those of ATen, torch's C++ library), finds its rule in ``RULES`` and
keeps the degree of what comes out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from normgrowth.homogeneity.algebra import EVERY, INFINITE, ZERO, Algebra, Degree, empty, kind, known, leading
from normgrowth.homogeneity.measure import arguments, first_output, numbers, plain
from normgrowth.homogeneity.rules import MASK_READERS, PLACES, RULES

__all__ = ["Forward", "carry"]

TAKES_OUT = (
    "numpy", "tolist", "__array__", "__dlpack__", "to_dlpack", "_to_dlpack", "data_ptr", "apply_", "map_", "map2_",
    "tensor", "as_tensor", "asarray", "new_tensor",
)  # fmt: skip
FACTORIES = ("empty", "zeros", "ones", "full", "new_")
UNMASKED = "the lowest number of a type stands for −∞ before a softmax only"


class Forward(Algebra, TorchDispatchMode):
    """The algebra, applied to each operation while it is active."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        library, name = func.namespace, func.overloadpacket.__name__.strip("_")
        name = name if library == "aten" else f"{library}::{name}"
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.begin(name)
            self.fail("is random: call eval()")
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        followed = [x for x in operands if not self.constant_(x)]
        written = _written(func._schema.arguments, args, kwargs)
        if not followed or name.startswith(FACTORIES):
            out = func(*args, **kwargs)
            for x in written:
                self.blank.pop(x.untyped_storage(), None)
            if "empty" in name or "zeros" in name:  # a kernel that no operation shows would write there
                out.zero_()
                self.blank[out.untyped_storage()] = True
            return out
        row = self.begin(func.overloadpacket.__name__, map(self.of, operands))
        if any(x.untyped_storage() in self.parameters for x in written):
            self.fail("changes a parameter in place", *written)
        k = self._by_rule(name, row, followed, args, kwargs)
        before = {id(x): self.of(_whole(x)) for x in written}
        out = func(*args, **kwargs)
        self._keep(name, row, k, out, followed, before)
        return out

    def _by_rule(self, name: str, row: dict[str, Any], followed: list[Tensor], args: Any, kwargs: Any) -> Any:
        """The degree by the rule of an operation. Without a rule what does not change with scale goes on so."""
        row["leading"] = any(map(leading, row["in"]))
        if "masked" in map(kind, row["in"]):
            if name not in MASK_READERS:
                self.fail(UNMASKED)
            row["kind"] = "" if "softmax" in name else "masked"
        if name not in RULES:
            if all(k in (ZERO, EVERY) for k in row["in"]) and not (row["leading"] and any(map(numbers, followed))):
                return ZERO
            example = f"normgrowth.homogeneity.RULES[{name!r}] = lambda algebra, x: algebra.constant(x)"
            self.fail(f"there is no rule for it; if it needs degree 0, say {example}")
        try:
            return RULES[name](self, *args, **kwargs)
        except TypeError as error:
            return self.fail(f"its rule does not know these arguments: {error}")

    def _keep(self, name: str, row: dict[str, Any], k: Any, out: Any, followed: list[Tensor], before: Any) -> None:
        """Keep the degrees of what came out, and refuse what a forward pass cannot follow."""
        results, scaling = tree_leaves(out), [x for x in followed if numbers(x)]
        if (scaling or row["leading"]) and not all(isinstance(x, Tensor | None) for x in results):
            self.fail("Python reads a value that is made of parameters or inputs, for a branch or a number")
        changes = [x for x in scaling if self.of(x) not in (ZERO, EVERY) or leading(self.of(x))]
        ks = k if isinstance(k, tuple) else (k,) * len(results)
        for x, degree in zip(results, ks, strict=True):
            if not isinstance(x, Tensor):
                continue
            if not numbers(x):
                if changes and x.dtype != torch.bool and name not in PLACES:
                    self.fail("rounds to whole numbers", *changes)
                degree = ZERO
            what = row["kind"] or kind(degree)
            if (old := before.get(id(x))) is not None:
                if old != EVERY and degree not in (old, EVERY):
                    self.fail("changes the degree of a value in place; write it out of place", old, degree)
                degree = old if degree == EVERY else degree
                what = what if what == "masked" else ""  # there may be more in this memory
            self.enter(x, known(degree, what, row["leading"]))
        row["out"] = k


def _written(declared: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes into."""
    values = dict(zip((arg.name for arg in declared), args, strict=False)) | kwargs
    names = [arg.name for arg in declared if arg.alias_info is not None and arg.alias_info.is_write]
    return [values[name] for name in names if isinstance(values.get(name), Tensor)]


def _whole(x: Tensor) -> Tensor:
    """All of the memory that a constant is a part of: what it holds elsewhere does not scale."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


class _Python(TorchFunctionMode):
    """Refuses what takes values out of the pass, to NumPy or a list."""

    def __init__(self, algebra: Algebra):
        super().__init__()
        self.algebra = algebra

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        for x in tree_leaves((args, kwargs)) if name in TAKES_OUT else ():
            if isinstance(x, Tensor) and not self.algebra.constant_(x):
                self.algebra.begin(name, [self.algebra.of(x)])
                self.algebra.fail("takes a value out of torch that is made of parameters or inputs", x)
        return func(*args, **kwargs or {})


def carry(module: nn.Module, inputs: Any, k_in: Any, algebra: Forward) -> Any:
    """Carry degrees through a forward pass of a copy of the module, to its first output."""

    def entered(x: Tensor) -> Tensor:
        x = x.detach().clone()
        if numbers(x) and not empty(x, INFINITE):
            algebra.enter(x, Degree(k_in))
        return x

    with plain(module, experts="batched_mm") as copied, torch.no_grad():
        for parameter in filter(numbers, copied.parameters()):
            algebra.enter(parameter, Degree(1))
            algebra.parameters[parameter.untyped_storage()] = True
        args, kwargs = tree_map_only(Tensor, entered, arguments(inputs))
        try:
            with algebra.tracker, _Python(algebra), algebra:
                out = first_output(copied(*args, **kwargs))
                if kind(k := algebra.of(out)) == "masked":
                    algebra.fail(UNMASKED)
        except Exception:
            if algebra.error is None:
                raise
        if algebra.error is not None:  # also where the module has caught it
            raise algebra.error
        return k
