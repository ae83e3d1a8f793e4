"""Degrees carried along one forward pass. What such a pass cannot see is refused.

``Forward`` sees every operation that the pass runs (those of ATen, torch's C++ library), looks up its rule in ``RULES``
and keeps the degree of its result.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from normgrowth.homogeneity.algebra import (
    EVERY,
    INFINITE,
    ZERO,
    Algebra,
    Degree,
    all_zero_or_infinite,
    is_leading,
    is_masked,
    readable,
)
from normgrowth.homogeneity.leading import PRODUCTS, SUMS, TERMS, LeadingParts, lower_terms
from normgrowth.homogeneity.measure import (
    Selection,
    arguments,
    first_output,
    is_real_valued,
    selection,
    without_fused_kernels,
)
from normgrowth.homogeneity.rules import ACCEPT_MASKED_SCORES, RETURN_INDICES, RULES

__all__ = ["Forward", "carry"]

LEAVE_TORCH = (
    "numpy", "tolist", "__array__", "__dlpack__", "to_dlpack", "_to_dlpack", "data_ptr", "apply_", "map_", "map2_",
    "tensor", "as_tensor", "asarray", "new_tensor",
)  # fmt: skip
FACTORIES = ("empty", "zeros", "ones", "full", "new_")
MASK_OUTSIDE_SOFTMAX = "the lowest number of a type stands for −∞ before a softmax only"


class Forward(Algebra, TorchDispatchMode):
    """The algebra, applied to every operation while this mode is active."""

    def __init__(self, approximate: bool = False):
        super().__init__(approximate)
        self.leading_parts = LeadingParts(self.degree_of)

    def leading_part(self, x: Any) -> Any:
        return self.leading_parts.of(x) if isinstance(x, Tensor) else x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.strip("_")
        if func.namespace != "aten":
            name = f"{func.namespace}::{name}"
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.begin(name)
            self.fail("is random: call eval()" if self.training else "is random, in eval mode too")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        operands = [x for x in tensors if not self.is_constant(x)]
        written = _written_arguments(func._schema.arguments, args, kwargs)
        if not operands or name.startswith(FACTORIES):
            return self._run_on_constants(name, func, args, kwargs, written)
        row = self.begin(func.overloadpacket.__name__, [self.degree_of(x) for x in tensors])
        if any(x.untyped_storage() in self.parameters for x in written):
            self.fail("changes a parameter in place", *written)
        k = self._degree_by_rule(name, row, operands, args, kwargs)
        degrees_before = {id(x): self.degree_of(_whole_storage(x)) for x in written}
        leading = self._leading_parts(name, row, k, func, args, kwargs)
        zero_parameter = self.leading_parts.parameter_in(operands)
        outputs = func(*args, **kwargs)
        self._keep_degrees(name, row, k, outputs, operands, degrees_before)
        lower = self._lower_degrees(name, row, tree_leaves((args, kwargs)))
        self._keep_leading_parts(leading, zero_parameter, outputs, operands, written)
        for x in tree_leaves(outputs):
            if isinstance(x, Tensor) and is_real_valued(x):
                unknown = [ZERO if self.degree_of(x) > 0 else -math.inf, math.inf]
                self.leading_parts.keep_lower(x, lower or unknown)
        return outputs

    def _run_on_constants(self, name: str, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """Run an operation whose result is a constant, and remember which constants must still be zero.

        New memory is filled with zeros, so that a write by a kernel that no operation shows is noticed later.
        """
        outputs = func(*args, **kwargs)
        for x in written:
            self.zero_filled.pop(x.untyped_storage(), None)
        if "empty" in name or "zeros" in name:
            outputs.zero_()
            self.zero_filled[outputs.untyped_storage()] = True
        return outputs

    def _degree_by_rule(self, name: str, row: dict[str, Any], operands: list[Tensor], args: Any, kwargs: Any) -> Any:
        """The degree of the result. An operation without a rule has degree 0 if no operand changes with scale."""
        row["leading"] = any(is_leading(k) for k in row["in"])
        if any(is_masked(k) for k in row["in"]):
            if name not in ACCEPT_MASKED_SCORES:
                self.fail(MASK_OUTSIDE_SOFTMAX)
            row["masked"] = "softmax" not in name
        if name not in RULES:
            all_scale_free = all(k in (ZERO, EVERY) for k in row["in"])
            only_asymptotically = row["leading"] and any(is_real_valued(x) for x in operands)
            if all_scale_free and not only_asymptotically:
                return ZERO
            example = f"normgrowth.homogeneity.RULES[{name!r}] = lambda algebra, x: algebra.arbitrary(x)"
            self.fail(f"there is no rule for it; if it needs degree 0, say {example}")
        try:
            return RULES[name](self, *args, **kwargs)
        except TypeError as error:
            return self.fail(f"its rule does not know these arguments: {error}")

    def _keep_degrees(
        self,
        name: str,
        row: dict[str, Any],
        k: Any,
        outputs: Any,
        operands: list[Tensor],
        degrees_before: dict[int, Any],
    ) -> None:
        """Keep the degrees of the results, and refuse what a forward pass cannot follow."""
        results = tree_leaves(outputs)
        real_operands = [x for x in operands if is_real_valued(x)]
        if (real_operands or row["leading"]) and not all(isinstance(x, Tensor | None) for x in results):
            self.fail("Python reads a value that is made of parameters or inputs, for a branch or a number")
        changing = [x for x in real_operands if self._changes_with_scale(x)]
        degrees = k if isinstance(k, tuple) else (k,) * len(results)
        for x, degree in zip(results, degrees, strict=True):
            if not isinstance(x, Tensor):
                continue
            if not is_real_valued(x):
                if changing and x.dtype != torch.bool and name not in RETURN_INDICES:
                    self.fail("rounds to whole numbers", *changing)
                degree = ZERO
            degree_before = degrees_before.get(id(x))
            if degree_before is not None and not _fills_memory(x):
                if degree_before != EVERY and degree not in (degree_before, EVERY):
                    self.fail("changes the degree of a value in place; write it out of place", degree_before, degree)
                if degree == EVERY:
                    degree = degree_before
            self.set_degree(x, degree if degree == EVERY else Degree(degree, row["leading"], row["masked"]))
        row["out"] = k

    def _leading_parts(self, name: str, row: dict[str, Any], k: Any, func: Any, args: Any, kwargs: Any) -> list[Any]:
        """The leading parts of the results, in order; none where they are the results themselves.

        Raises:
            NotHomogeneous: that of the first is 0 as a whole, so that it has the degree of lower terms.
        """
        parts = self.leading_parts
        largest = k[0] if isinstance(k, tuple) else k
        if row["has_limit"]:
            return [parts.limit(name, func, args, kwargs)]
        factors: Any = args
        if row["has_lower_terms"] and name in ("cat", "stack"):
            tensors = [x if self.degree_of(x) in (largest, EVERY) else torch.zeros_like(x) for x in args[0]]
            results = parts.result(name, func, (tensors, *args[1:]), kwargs)
        elif row["has_lower_terms"] and name == "prelu_kernel":
            results = [parts.of(args[0]).clamp(max=0) * parts.of(args[1])]
        elif row["has_lower_terms"] and name in TERMS:
            lower, factors = lower_terms(name, args, largest, self.degree_of)
            results = parts.result(name, func, args, kwargs, lower)
        elif parts.differ((args, kwargs)):
            return parts.result(name, func, args, kwargs)
        else:
            return []
        if not results[0].any():
            self._fail_at_zero(f"its leading term, of degree {readable(largest)},", factors)
        return results

    def _lower_degrees(self, name: str, row: dict[str, Any], arguments: list[Any]) -> list[Any]:
        """Degrees that lower terms of a result may have: of a sum, those of its terms but the largest; else see below.

        A product by a value without lower terms shifts those of the other factor. A function of one value keeps those
        of its argument if it keeps the degree. Of others they are not known; below a positive degree they are taken
        not to fall.
        """
        k = row["out"][0] if isinstance(row["out"], tuple) else row["out"]
        unknown = [ZERO if k > 0 else -math.inf, math.inf]
        tensors = [x for x in arguments if isinstance(x, Tensor) and is_real_valued(x)]
        if isinstance(row["out"], tuple) or row["has_limit"]:
            return unknown
        lower = [
            unknown[0] if degree == -math.inf else degree for x in tensors for degree in self.leading_parts.lower(x)
        ]
        with_lower = [x for x in tensors if self.leading_parts.lower(x)]
        if name in PRODUCTS and len(with_lower) <= 1:
            shifted = [
                unknown[0] if degree == -math.inf else degree + k - self.degree_of(x)
                for x in with_lower
                for degree in self.leading_parts.lower(x)
            ]
            biases = [tensors[place] for place in PRODUCTS[name] if place < len(tensors)]
            return shifted + [degree for x in biases if EVERY < (degree := self.degree_of(x)) < k]
        if name in SUMS:
            numbers = [x for x in arguments if isinstance(x, int | float)]
            return lower + [degree for x in tensors + numbers if EVERY < (degree := self.degree_of(x)) < k]
        changing = [x for x in tensors if self._changes_with_scale(x) or self.leading_parts.lower(x)]
        return lower if len(changing) == 1 and self.degree_of(changing[0]) == k else unknown

    def _fail_at_zero(self, what: str, values: Any) -> None:
        """Refuse a degree of which the values show nothing, and name the parameter that makes them 0."""
        name = self.leading_parts.parameter_in(values)
        if name:
            cause = f", since parameter {name!r} is 0"
            advice = "train it or fill it with other values"
        else:
            cause = ""
            advice = "give other parameters or inputs"
        self.fail(f"{what} is 0 here{cause}, and what is left has another degree: {advice}")

    def check_output(self, output: Tensor) -> None:
        """Refuse an output of which all is 0, or all of the leading part, or in which it is not known."""
        if is_real_valued(output) and self.leading_parts.is_zero(output):
            self._fail_at_zero("the leading part of the output", output)
        if is_real_valued(output) and self.leading_parts.is_unknown(output):
            self.fail(
                "leading parts are 0 or equal where a softmax, a bounded function or a norm with an ε meets them: "
                "lower terms decide, of which the degree is not known"
            )

    def _keep_leading_parts(
        self,
        leading: list[Any],
        zero_parameter: str,
        outputs: Any,
        operands: list[Tensor],
        written: list[Tensor],
    ) -> None:
        """Remember the leading parts of new values, and the parameter that makes all of such a value 0."""
        memory = {x.untyped_storage().data_ptr() for x in operands}
        memory -= {x.untyped_storage().data_ptr() for x in written}
        for x, part in zip_longest(tree_leaves(outputs), leading):
            if not isinstance(x, Tensor) or x.untyped_storage().data_ptr() in memory:
                continue
            has_part = isinstance(part, Tensor) and part.shape == x.shape
            self.leading_parts.keep(x, part if has_part else x)
            if zero_parameter and is_real_valued(x) and self.leading_parts.is_zero(x):
                self.leading_parts.zero_parameters[x.untyped_storage()] = zero_parameter

    def _changes_with_scale(self, x: Tensor) -> bool:
        k = self.degree_of(x)
        return k not in (ZERO, EVERY) or is_leading(k)


def _written_arguments(declared: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into, by its declared arguments."""
    values = dict(zip((argument.name for argument in declared), args, strict=False)) | kwargs
    written = [argument.name for argument in declared if argument.alias_info and argument.alias_info.is_write]
    return [values[name] for name in written if isinstance(values.get(name), Tensor)]


def _whole_storage(x: Tensor) -> Tensor:
    """All of the memory in which a tensor lies. Of a constant that is partly written, the rest does not scale."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def _fills_memory(x: Tensor) -> bool:
    """Whether a tensor has all entries of the memory in which it lies, so that nothing else remains there."""
    return x.is_contiguous() and x.numel() * x.element_size() == x.untyped_storage().nbytes()


class _RefuseLeavingTorch(TorchFunctionMode):
    """Refuses functions that take values out of torch, to NumPy or a list, where no operation can be seen."""

    def __init__(self, algebra: Algebra):
        super().__init__()
        self.algebra = algebra

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in LEAVE_TORCH:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and not self.algebra.is_constant(x):
                    self.algebra.begin(name, [self.algebra.degree_of(x)])
                    self.algebra.fail("takes a value out of torch that is made of parameters or inputs", x)
        return func(*args, **kwargs or {})


def carry(module: nn.Module, inputs: Any, input_degree: Any, algebra: Forward, parameters: Selection = None) -> Any:
    """Carry degrees through a forward pass of a copy of the module, to its first output, and return that degree."""

    def with_degree(x: Tensor) -> Tensor:
        x = x.detach().clone()
        if is_real_valued(x) and not all_zero_or_infinite(x, INFINITE):
            algebra.set_degree(x, Degree(input_degree))
        return x

    selected = selection(module, parameters)
    algebra.training = any(part.training for part in module.modules())
    with without_fused_kernels(module, experts="batched_mm") as copied, torch.no_grad():
        for name, parameter in copied.named_parameters():
            if not selected(name):
                parameter.requires_grad_(False)  # a constant
            elif is_real_valued(parameter):
                algebra.set_degree(parameter, Degree(1))
                algebra.leading_parts.add_parameter(name, parameter)
                algebra.parameters[parameter.untyped_storage()] = True
        args, kwargs = tree_map_only(Tensor, with_degree, arguments(inputs))
        try:
            with algebra.module_tracker, _RefuseLeavingTorch(algebra), algebra:
                output = first_output(copied(*args, **kwargs))
                k = algebra.degree_of(output)
            if is_masked(k) and bool((output.abs() >= INFINITE).any()):
                algebra.fail(MASK_OUTSIDE_SOFTMAX)
            if k != EVERY:
                algebra.check_output(output)
        except Exception:
            if algebra.error is None:
                raise
        if algebra.error is not None:  # raised here even if the module has caught it
            raise algebra.error
        return k
