"""Degrees carried along with one forward pass, and what such a pass cannot see, refused.

``Forward`` sees each operation that the pass runs (those of ATen, torch's C++ library), finds its rule in ``RULES`` and
keeps the degree of what comes out.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nbutils.homogeneity.algebra import (
    CHOICES,
    EVERY,
    MASK_READERS,
    MEASURE,
    RULES,
    ZERO,
    Algebra,
    Degree,
    NoRule,
    place,
)
from nbutils.homogeneity.measure import first_output, given, plain

__all__ = ["Forward", "carry", "watch"]

TAKES_OUT = (
    "numpy", "tolist", "__array__", "__dlpack__", "to_dlpack", "_to_dlpack", "data_ptr", "apply_", "map_", "map2_",
    "tensor", "as_tensor", "asarray", "new_tensor",
)  # fmt: skip
FACTORIES = ("empty", "zeros", "ones", "full", "eye", "arange", "scalar_tensor", "new_")


class Forward(Algebra, TorchDispatchMode):
    """The algebra, applied to each operation while it is active."""

    def __init__(self, approximate: bool = False):
        TorchDispatchMode.__init__(self)
        Algebra.__init__(self, approximate)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        library, name = func.namespace, func.overloadpacket.__name__.strip("_")
        name = name if library == "aten" else f"{library}::{name}"
        written = [
            x
            for arg, x in [*zip(func._schema.arguments, args, strict=False)]
            + [(arg, kwargs.get(arg.name)) for arg in func._schema.arguments]
            if arg.alias_info is not None and arg.alias_info.is_write and isinstance(x, Tensor)
        ]
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.begin(name)
            self.fail("is random: call eval()")
        followed = [x for x in operands if not self.constant_(x)]
        if not followed or name.startswith(FACTORIES):
            out = func(*args, **kwargs)
            self._constants(name, out, written)
            return out
        row = self.begin(func.overloadpacket.__name__, map(self.of, operands))
        if any(x.untyped_storage() in self.parameters for x in written):
            self.fail("changes a parameter in place", *written)
        k = self._apply(name, row, followed, args, kwargs)
        before = [(x, self.of(_whole(x) if self.constant_(x) else x)) for x in written]
        out = func(*args, **kwargs)
        self._keep(name, row, k, out, followed, before)
        return out

    def _constants(self, name: str, out: Any, written: list[Tensor]) -> None:
        """Watch what is blank: a kernel that no operation shows would write there."""
        for x in written:
            self.blank.pop(x.untyped_storage(), None)
        if "empty" in name or "zeros" in name:
            out.zero_()  # it may hold anything
            self.blank[out.untyped_storage()] = True

    def _apply(self, name: str, row: dict[str, Any], followed: list[Tensor], args: Any, kwargs: Any) -> Any:
        """The degree by the rule of an operation. Without a rule what does not change with scale goes on so."""
        row["leading"] = any(getattr(k, "leading", False) for k in row["in"])
        if any(getattr(k, "kind", "") == "masked" for k in row["in"]):
            if name not in MASK_READERS:
                self.fail("the lowest number of a type stands for −∞ before a softmax only")
            row["kind"] = "" if "softmax" in name else "masked"
        found, floating = RULES.get(name), any(x.is_floating_point() or x.is_complex() for x in followed)
        fixed = all(k in (ZERO, EVERY) for k in row["in"])
        if found is None and fixed and not (floating and row["leading"]):
            return ZERO
        if found is None:
            return self._no_rule(_how_to_add(row["operation"], row["module"], name))
        try:
            bound = inspect.signature(found).bind(self, *args, **kwargs)
        except TypeError as error:
            where = place(row["operation"], row["module"])
            return self._no_rule(f"{where}: its rule does not know these arguments: {error}. {MEASURE}")
        unread = tree_leaves([value for key, value in bound.arguments.items() if key.startswith("_")])
        if any(isinstance(x, Tensor) and self.of(x) not in (ZERO, EVERY) for x in unread):
            self.fail("an argument that the rule does not read changes with scale", *unread)
        return found(self, *args, **kwargs)

    def _keep(self, name: str, row: dict[str, Any], k: Any, out: Any, followed: list[Tensor], before: Any) -> None:
        """Keep the degrees of what came out, and refuse what a forward pass cannot follow."""
        changes = [x for x in followed if x.is_floating_point() or x.is_complex()]
        changes = [x for x in changes if (d := self.of(x)) not in (ZERO, EVERY) or getattr(d, "leading", False)]
        results = tree_leaves(out)
        if any(not isinstance(x, Tensor) and x is not None for x in results):  # Python sees a value
            exact = not changes and not row["leading"] and not any(x.is_floating_point() for x in followed)
            if not exact and (name != "equal" or row["leading"]):
                self.fail("Python reads a value that is made of parameters or inputs, for a branch or a number")
        ks = k if isinstance(k, tuple) else (k,) * len(results)
        for x, degree in zip(results, ks, strict=True):
            if not isinstance(x, Tensor):
                continue
            if not (x.is_floating_point() or x.is_complex()):
                truth = x.dtype == torch.bool and name == "to_copy"
                if changes and name not in CHOICES and not truth:
                    self.fail("rounds to whole numbers", *changes)
                degree = ZERO
            old = next((k for y, k in before if x is y), None)
            if old is not None and old != EVERY and degree not in (old, EVERY):
                self.fail("changes the degree of a value in place; write it out of place", old, degree)
            kind = row["kind"] or getattr(degree, "kind", "")
            if old is not None and kind != "masked":  # there may be more in this memory
                kind = ""
            degree = old if degree == EVERY and old is not None else degree
            self.enter(x, degree if degree == EVERY else Degree(degree, leading=row["leading"], kind=kind))
        row["out"] = tuple(ks) if isinstance(k, tuple) else k

    def _no_rule(self, message: str) -> Any:
        self.note("✗ " + message.partition(". ")[0])
        self.error = NoRule(message)
        raise self.error


def _whole(x: Tensor) -> Tensor:
    """All of the memory that a constant is a part of: what it holds elsewhere does not scale."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def _how_to_add(operation: str, path: str, name: str) -> str:
    return (
        f"no rule for {place(operation, path)}. {MEASURE}. Or say what it does to degrees, for example:\n\n"
        f"    @nbutils.homogeneity.rule({name!r})\n"
        f"    def {name.rpartition(':')[2]}(algebra, x):\n"
        "        return algebra.constant(x)  # needs degree 0; or algebra.of(x), .mul(x, …), .add, .pow, .bounded, …\n"
    )


class _Python(TorchFunctionMode):
    """Refuses what takes values out of the pass: NumPy, lists, and another tensor behind a name (``.data = …``)."""

    def __init__(self, algebra: Algebra):
        super().__init__()
        self.algebra = algebra

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        for x in [x for x in tree_leaves(args) if isinstance(x, Tensor)] if name in TAKES_OUT else []:
            k = ZERO if self.algebra.constant_(x) else self.algebra.of(x)
            if (x.is_floating_point() and not self.algebra.constant_(x)) or getattr(k, "leading", False):
                self.algebra.begin(name, [k])
                self.algebra.fail("takes a value out of torch that is made of parameters or inputs", x)
        if name == "__set__" and "'data'" in repr(getattr(func, "__self__", "")):
            self.algebra.begin("data")
            self.algebra.fail(".data is set: write it out, or measure")
        return func(*args, **kwargs or {})


def _entered(algebra: Algebra, k: Any, x: Any) -> Any:
    """A copy of an input, with its degree."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach().clone()
    if x.is_floating_point() and k != EVERY:
        algebra.enter(x, Degree(k))
    elif k == EVERY and x.is_floating_point() and algebra.of(x) != EVERY:
        raise ValueError("an input of degree EVERY has to be of zeros and infinities; a Boolean mask needs no degree")
    return x


def carry(module: nn.Module, inputs: Any, k_in: Any, algebra: Forward) -> tuple[Any, list[Any]]:
    """Carry degrees through a forward pass of a copy: that of the first output, and of each module's in order."""
    names, values, degrees = given(module, inputs, k_in)
    by_module: list[Any] = []
    with plain(module, experts="batched_mm") as copied, torch.no_grad():
        for parameter in copied.parameters():
            algebra.enter(parameter, Degree(1))
        values = [tree_map_only(Tensor, partial(_entered, algebra, k), x) for x, k in zip(values, degrees, strict=True)]
        watch(copied, lambda name, out: by_module.append((name, algebra.of(out))))
        args, kwargs = ((), dict(zip(names, values, strict=True))) if names else (values, {})
        try:
            with algebra.tracker, _Python(algebra), algebra:
                out = first_output(copied(*args, **kwargs))
                if getattr(algebra.of(out), "kind", "") == "masked":
                    algebra.fail("the lowest number of a type stands for −∞ before a softmax only")
        except Exception as error:
            if algebra.error is None:
                raise
            raise algebra.error from (None if error is algebra.error else error)
        if algebra.error is not None:  # the module has caught it
            raise algebra.error
        return algebra.of(out), by_module


def watch(module: nn.Module, seen: Any) -> None:
    """Call ``seen`` with name and first output of each part that has run."""
    for name, part in module.named_modules():

        def hook(_part: nn.Module, _args: Any, out: Any, name: str = name) -> None:
            if isinstance(first := first_output(out), Tensor):
                seen(name, first)

        part.register_forward_hook(hook)
