"""The algebra of degrees: sums need equal degrees, in a product they add, and so on (Table 1 of the paper).

``nbutils.homogeneity.rules`` has the rules of torch, and ``nbutils.homogeneity.forward`` carries degrees through a
forward pass by them. A tensor keeps its degree by the memory that it lies in: so views share it. One that is neither
made of parameters nor of inputs of a degree is a *constant*: only of constants is the value looked at, and one of zeros
and infinities has ``EVERY`` degree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "CHOICES",
    "EVERY",
    "MASK_READERS",
    "RULES",
    "Algebra",
    "Degree",
    "EpsilonWarning",
    "NoRule",
    "NotHomogeneous",
    "rule",
]

EVERY = -math.inf  # like the degree of the zero polynomial: in a sum it never counts, in a product it always wins
ZERO = Fraction(0)
EPSILON = 1e-3  # a number up to it, added to a size or its lower bound, is an ε
INFINITE = 1e30  # transformers mask by the lowest number of a type, −3.4e38
RULES: dict[str, Callable[..., Any]] = {}
CHOICES: set[str] = set()  # operations that return places or truths, which do not change with scale
MASK_READERS: set[str] = set()  # operations that go on with scores
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
        super().__init__(f"{place(operation, module_path)}: {why}{met}. {MEASURE}")


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


def place(operation: str, path: str) -> str:
    return operation + (f" in module {path!r}" if path else "")


def empty(x: Any, infinite: float = math.inf) -> bool:
    """Whether all of a constant is zero or infinite."""
    x = torch.as_tensor(x)
    zero = x == 0
    return bool((zero | (x.abs() >= infinite) if x.is_floating_point() else zero).all())


class Algebra:
    """What rules are made of. ``rows`` has what was done, in order.

    >>> algebra = Algebra()
    >>> product = algebra.mul(Fraction(1), Fraction(1))  # a weight times an input
    >>> shown(algebra.add(product, Fraction(2))), shown(algebra.pow(product, 0.25))
    (2, Fraction(1, 2))
    """

    def __init__(self, approximate: bool = False):
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
        if x.untyped_storage() in self.blank and not empty(x):
            self.fail("a constant was filled where no operation was seen: by a kernel of its own or by NumPy")
        return True

    def of(self, x: Any) -> Any:
        """Degree of an operand: 1 of a parameter, 0 of a constant, ``EVERY`` of zeros, infinities and None."""
        if x is None or isinstance(x, Fraction):
            return EVERY if x is None else x
        if isinstance(x, tuple | list):
            return self.same(*x)
        if self.constant_(x):
            return EVERY if empty(x) else ZERO
        return self.known[x.untyped_storage()]

    def _terms(self, operands: tuple[Any, ...]) -> list[Any]:
        """The degrees in a sum; −3.4e38 stands for −∞."""
        terms = {id(x): k for x in operands if (k := self.of(x)) != EVERY}
        for x in operands:
            value = id(x) in terms and not isinstance(x, Fraction | tuple | list)
            if value and self.constant_(x) and empty(x, INFINITE):
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
        k, kind = self.of(x) + self.of(y), "even" if isinstance(x, Tensor) and x is y else ""
        for value, factor in ((x, y), (y, x)):
            if isinstance(factor, int | float) and factor > 0:
                kind = getattr(self.of(value), "kind", "")
        return k if k == EVERY else Degree(k, kind=kind)

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
        return Degree(self.of(x))

    def epsilon(self, x: Any, eps: Any) -> Any:
        """A size plus ε, or not below it: ε of at most 0.001 is taken as 0. None if this is something else."""
        k, number = self.of(x), isinstance(eps, int | float) or (isinstance(eps, Tensor) and eps.numel() == 1)
        if not number or not self.constant_(eps) or k in (ZERO, EVERY) or getattr(k, "kind", "") != "size":
            return None
        if k < 0 and float(eps) > 0:
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
