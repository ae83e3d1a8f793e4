"""The algebra of degrees (Table 1 of the paper), carried along with one forward pass.

``Algebra`` sees each operation that the pass runs (those of ATen, torch's C++ library), finds its rule in ``RULES`` and
keeps the degree of what comes out, by the memory that it lies in: so views share it, and a change in place is seen. A
tensor that is neither made of parameters nor of inputs of a degree is a *constant*: only of constants is the value
looked at, and one of zeros and infinities has ``EVERY`` degree.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["CHOICES", "EVERY", "RULES", "Algebra", "Degree", "EpsilonWarning", "NoRule", "NotHomogeneous", "rule"]

EVERY = -math.inf  # like the degree of the zero polynomial: in a sum it never counts, in a product it always wins
ZERO = Fraction(0)
EPSILON = 1e-3  # a number up to it, added to a size or its lower bound, is an ε
INFINITE = 1e30  # transformers mask by the lowest number of a type, −3.4e38
FACTORIES = ("empty", "zeros", "ones", "full", "eye", "arange", "scalar_tensor", "new_")
RULES: dict[str, Callable[..., Any]] = {}
CHOICES: set[str] = set()  # operations that return places or truths, which do not change with scale
MEASURE = "Or measure it: nbutils.homogeneity.measure_degree"


class Degree(Fraction):
    """A degree, with what else is known of the value.

    ``leading``: it is that of the leading term only, which may vanish on a region. ``kind`` is ``"even"`` where no
    entry is negative, as of a square, ``"size"`` for the size of a vector, which vanishes only with the vector, and
    ``"masked"`` for scores of which some have −3.4e38 in place of −∞.
    """

    leading: bool
    kind: str

    def __new__(cls, k: Any = 0, below: int | None = None, *, leading: bool = False, kind: str = "") -> Degree:
        self = super().__new__(cls, k, below)
        self.leading, self.kind = leading, kind
        return self


class NotHomogeneous(ValueError):
    """There is no degree: ``operation`` in ``module_path`` where the ``degrees`` meet."""

    def __init__(self, why: str, operation: str, module_path: str, degrees: tuple[Any, ...]):
        self.operation, self.module_path, self.degrees = operation, module_path, degrees
        met = f"; it meets degree {shown(degrees)}" if degrees else ""
        super().__init__(f"{_place(operation, module_path)}: {why}{met}. {MEASURE}")


class NoRule(LookupError):
    """An operation that the algebra does not know; the message shows how to add it."""


class EpsilonWarning(UserWarning):
    """A normalization has ε > 0: the degree is that of ε = 0."""


def rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a rule for operations of ATen, or ``library::operation`` of another library.

    A rule takes the ``Algebra`` and the arguments of the operation. It returns the degree of the result, or one for
    each. Arguments that it does not read it takes under a name with a ``_``: they may not change with scale.

    >>> @rule("sinc")
    ... def sinc(algebra, x):
    ...     return algebra.constant(x)
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def shown(degrees: Any) -> Any:
    """Degrees for people: whole ones as int, ``EVERY`` as a word, several joined by commas.

    >>> shown((Fraction(2), Fraction(1, 2), EVERY, None))
    '2, 1/2, every, –'
    """
    if isinstance(degrees, tuple):
        return ", ".join(str(shown(k)) for k in degrees)
    if degrees is None or degrees == EVERY:
        return "–" if degrees is None else "every"
    return int(degrees) if degrees == int(degrees) else Fraction(degrees)


def _place(operation: str, path: str) -> str:
    return operation + (f" in module {path!r}" if path else "")


def _empty(x: Any, infinite: float = math.inf) -> bool:
    """Whether all of a constant is zero or infinite."""
    x = torch.as_tensor(x)
    zero = x == 0
    return bool((zero | (x.abs() >= infinite) if x.is_floating_point() else zero).all())


class Algebra(TorchDispatchMode):
    """What rules are made of. ``rows`` has what was done, in order.

    >>> algebra = Algebra()
    >>> product = algebra.mul(Fraction(1), Fraction(1))  # a weight times an input
    >>> shown(algebra.add(product, Fraction(2))), shown(algebra.pow(product, 0.25))
    (2, Fraction(1, 2))
    """

    def __init__(self, approximate: bool = False):
        super().__init__()
        self.approximate, self.tracker = approximate, ModuleTracker()
        self.known, self.blank, self.parameters = (WeakIdKeyDictionary() for _ in range(3))  # by memory
        self.rows: list[dict[str, Any]] = []
        self.error: Exception | None = None

    # --- Degrees of operands ------------------------------------------------------------------------------------------

    def enter(self, x: Tensor, k: Any) -> None:
        """Let a tensor, and all that shares its memory, have a degree."""
        self.known[x.untyped_storage()] = k
        if isinstance(x, nn.Parameter):
            self.parameters[x.untyped_storage()] = True

    def constant_(self, x: Any) -> bool:
        """Whether an operand is a constant. Raises, if something unseen has written into it."""
        if not isinstance(x, Tensor):
            return True
        if x.untyped_storage() in self.known:
            return False
        if isinstance(x, nn.Parameter):  # that of a closure or a list
            self.enter(x, Degree(1))
            return False
        if x.requires_grad:
            self.fail("a constant has a gradient: what is made of parameters must be made in forward")
        if x.untyped_storage() in self.blank and not _empty(x):
            self.fail("a constant was filled where no operation was seen: by a kernel of its own or by NumPy")
        return True

    def of(self, x: Any) -> Any:
        """Degree of an operand: 1 of a parameter, 0 of a constant, ``EVERY`` of zeros, infinities and None."""
        if x is None or isinstance(x, Fraction):
            return EVERY if x is None else x
        if isinstance(x, tuple | list):
            return self.same(*x)
        if self.constant_(x):
            return EVERY if _empty(x) else ZERO
        return self.known[x.untyped_storage()]

    def _terms(self, operands: tuple[Any, ...]) -> list[Any]:
        """The degrees in a sum; −3.4e38 stands for −∞."""
        terms = {id(x): k for x in operands if (k := self.of(x)) != EVERY}
        for x in operands:
            value = id(x) in terms and not isinstance(x, Fraction | tuple | list)
            if value and self.constant_(x) and _empty(x, INFINITE):
                self.note("the lowest number of the type taken as −∞", kind="masked")
                del terms[id(x)]
        return list(terms.values())

    # --- The rows of Table 1 ------------------------------------------------------------------------------------------

    def add(self, *operands: Any) -> Any:
        """A sum: equal degrees; asymptotically the largest of them, if its terms do not cancel."""
        terms = self._terms(operands)
        if len(set(terms)) > 1:
            if not self.approximate:
                self.fail("a sum needs equal degrees", *operands)
            self.leads(f"asymptotic: of {shown(tuple(sorted(set(terms))))} the largest")
        return terms[0] if len(terms) == 1 else max(map(Fraction, terms), default=EVERY)

    def same(self, *parts: Any) -> Any:
        """Parts side by side, as in ``cat`` and ``where``: equal degrees, asymptotically too."""
        terms = self._terms(parts)
        if len(set(terms)) > 1:
            self.fail("parts side by side need equal degrees", *parts)
        return max(map(Fraction, terms), default=EVERY)

    def mul(self, x: Any, y: Any) -> Any:
        """A product: degrees add."""
        kinds = {x is y: "even"} if isinstance(x, Tensor) else {}
        for value, factor in ((x, y), (y, x)):
            if isinstance(factor, int | float) and factor > 0:
                kinds[True] = getattr(self.of(value), "kind", "")
        k = self.of(x) + self.of(y)
        return k if k == EVERY else Degree(k, kind=kinds.get(True, ""))

    def div(self, x: Any, y: Any, *, rounding_mode: Any = None) -> Any:
        """A quotient: degrees subtract."""
        if rounding_mode is not None:
            return self.constant(x, y)
        self._divides(y)
        if isinstance(y, int | float) and y > 0:
            return self.of(x)
        return k if (k := self.of(x) - self.of(y)) == EVERY else Degree(k)

    def _divides(self, y: Any) -> None:
        k = self.of(y)
        if k == EVERY:
            self.fail("the divisor is 0 or infinite", y)
        if getattr(k, "leading", False) and k.kind != "size":
            self.fail("the leading term of the divisor may vanish", y)

    def pow(self, x: Any, exponent: Any) -> Any:
        """A fixed power multiplies the degree; an exponent that is a value needs degree 0 on both sides."""
        if not isinstance(exponent, int | float):
            return self.constant(x, exponent)
        k = self.of(x)
        if k == EVERY:
            return EVERY if exponent > 0 else self.fail(f"0 or infinity to the power {exponent}", x)
        if exponent < 0:
            self._divides(x)
        kind = getattr(k, "kind", "") or ("even" if exponent % 2 == 0 else "")
        return Degree(k * Fraction(exponent).limit_denominator(10**6), kind=kind)

    def size(self, x: Any, power: int = 1) -> Any:
        """A norm, or the variance with ``power`` 2."""
        return k if (k := self.of(x)) == EVERY else Degree(power * k, kind="size")

    def constant(self, *xs: Any) -> Any:
        """Any function at all: exact where its arguments do not change with scale, never otherwise."""
        if any(getattr(self.of(x), "leading", False) for x in xs):
            self.fail("needs a degree that is exact, not asymptotic", *xs)
        return self.continuous(*xs)

    def continuous(self, *xs: Any) -> Any:
        """A function that is continuous everywhere: as ``constant``, and a limit may be its argument, too."""
        return ZERO if all(self.of(x) in (ZERO, EVERY) for x in xs) else self.fail("needs degree 0", *xs)

    def bounded(self, x: Any, kind: str = "") -> Any:
        """A saturating function (softmax, σ, tanh): 0, exactly at degree 0 and asymptotically at a positive degree."""
        if not (self.approximate and self.of(x) > 0):
            return Degree(self.continuous(x), kind=kind)
        self.leads("asymptotic: saturates")
        return Degree(0, kind=kind)

    def far_linear(self, x: Any) -> Any:
        """A function that is linear far out on either side (GELU, SiLU): asymptotically a positive degree stays."""
        if not (self.approximate and self.of(x) > 0):
            return self.continuous(x)
        self.leads("asymptotic: linear far from 0")
        return self.of(x)

    def epsilon(self, x: Any, eps: Any) -> Any:
        """A size plus ε, or not below it: ε of at most 0.001 is taken as 0. None if this is something else."""
        k, number = self.of(x), isinstance(eps, int | float) or (isinstance(eps, Tensor) and eps.numel() == 1)
        if not number or not self.constant_(eps) or k in (ZERO, EVERY) or getattr(k, "kind", "") != "size":
            return None
        if self.approximate and k < 0:
            return self.fail("ε outgrows the size", x, eps)
        if not 0 < float(eps) <= EPSILON:
            return None
        self.note(f"ε = {float(eps):.3g} taken as 0", epsilon=True)
        return k

    def normalized(self, x: Any, eps: float = 0.0) -> Any:
        """x over its own size: 0. With ε > 0 exact only where x does not change with scale."""
        size = self.size(x, 2)
        if size != EVERY and self.epsilon(size, eps) is None and self.add(size, eps) != size:
            self.fail("ε outgrows x", x)
        return ZERO

    def affine(self, x: Any, weight: Any = None, bias: Any = None) -> Any:
        """x · weight + bias. An absent weight is 1 and an absent bias 0."""
        return self.add(self.of(x) if weight is None else self.mul(x, weight), bias)

    # --- The table ----------------------------------------------------------------------------------------------------

    def begin(self, operation: str, degrees: Any = ()) -> dict[str, Any]:
        """Begin a row of the table, of the operation that is being looked at."""
        deepest = max((name for name in self.tracker.parents if name != "Global"), key=len, default="")
        row = {"module": deepest.partition(".")[2], "operation": operation, "in": tuple(degrees), "out": None}
        self.rows.append(row | {"note": [], "epsilon": False, "leading": False, "kind": ""})
        return self.rows[-1]

    def note(self, text: str, **facts: Any) -> None:
        """Put a remark in the row of the current operation."""
        row = self.rows[-1] if self.rows else self.begin("")
        row["note"].append(text)
        row |= facts

    def leads(self, text: str) -> None:
        """Put a remark, and mark the result as ``leading``."""
        self.note(text, leading=True)

    def fail(self, why: str, *operands: Any) -> Any:
        """Raise ``NotHomogeneous`` at the operation that is being looked at."""
        row = self.rows[-1] if self.rows else self.begin("the module")
        self.note(f"✗ {why}")
        self.error = NotHomogeneous(why, row["operation"], row["module"], tuple(map(self.of, operands)))
        raise self.error

    def _no_rule(self, message: str) -> Any:
        self.note("✗ " + message.partition(". ")[0])
        self.error = NoRule(message)
        raise self.error

    # --- One operation ------------------------------------------------------------------------------------------------

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
        before = [(x, self.of(x)) for x in written]
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
            self._no_rule(_how_to_add(row["operation"], row["module"], name))
        try:
            bound = inspect.signature(found).bind(self, *args, **kwargs)
        except TypeError as error:
            place = _place(row["operation"], row["module"])
            self._no_rule(f"{place}: its rule does not know these arguments: {error}. {MEASURE}")
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


MASK_READERS: set[str] = set()  # operations that go on with scores, filled by the rules


def _how_to_add(operation: str, path: str, name: str) -> str:
    return (
        f"no rule for {_place(operation, path)}. {MEASURE}. Or say what it does to degrees, for example:\n\n"
        f"    @nbutils.homogeneity.rule({name!r})\n"
        f"    def {name.rpartition(':')[2]}(algebra, x):\n"
        "        return algebra.constant(x)  # needs degree 0; or algebra.of(x), .mul(x, …), .add, .pow, .bounded, …\n"
    )


class Python(TorchFunctionMode):
    """Refuses what takes values out of the pass: NumPy, lists, and another tensor behind a name (``.data = …``)."""

    def __init__(self, algebra: Algebra):
        super().__init__()
        self.algebra = algebra

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr"):
            k = ZERO if self.algebra.constant_(args[0]) else self.algebra.of(args[0])
            if (args[0].is_floating_point() and not self.algebra.constant_(args[0])) or getattr(k, "leading", False):
                self.algebra.begin(name, [k])
                self.algebra.fail("takes a value out of torch that is made of parameters or inputs", args[0])
        if name == "__set__" and "'data'" in repr(getattr(func, "__self__", "")):
            self.algebra.begin("data")
            self.algebra.fail(".data is set: write it out, or measure")
        return func(*args, **kwargs or {})
