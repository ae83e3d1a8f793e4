"""The algebra of degrees: sums need equal degrees, in a product they add, and so on (Table 1 of the paper).

``homogeneity.rules`` has the rules of torch, and ``homogeneity.forward`` carries degrees through a forward pass.
A tensor keeps its degree by the memory that it lies in: so views share it. One that is neither made of parameters nor
of inputs of a degree is a *constant*: only of constants is the value looked at, and one of zeros
and infinities has ``EVERY`` degree.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["EVERY", "Algebra", "Degree", "NotHomogeneous"]

EVERY = -math.inf  # like the degree of the zero polynomial: in a sum it never counts, in a product it always wins
ZERO = Fraction(0)
INFINITE = 1e30  # transformers mask by the lowest number of a type, −3.4e38


class Degree(Fraction):
    """A degree, with what else is known of the value.

    ``leading``: it is that of the leading term only, which may vanish on a region. ``kind`` is ``"even"`` where no
    entry is negative, as of a square, ``"size"`` for a norm or a deviation, which vanish with the vector or where it is
    constant, and ``"masked"`` for scores of which some have −3.4e38 in place of −∞.
    """

    leading: bool
    kind: str

    def __new__(cls, k: Any, kind: str = "", leading: bool = False) -> Degree:
        self = super().__new__(cls, k)
        self.kind, self.leading = kind, leading
        return self


def known(k: Any, kind: str = "", leading: bool = False) -> Any:
    """A degree with what is known; of what has ``EVERY`` degree nothing need be."""
    return k if k == EVERY else Degree(k, kind, leading)


def kind(k: Any) -> str:
    return getattr(k, "kind", "")


def leading(k: Any) -> bool:
    return getattr(k, "leading", False)


class NotHomogeneous(ValueError):
    """No degree is given: there is none, a forward pass cannot see it, or an operation has no rule."""


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


def empty(x: Any, infinite: float = math.inf) -> bool:
    """Whether all of a constant is zero or infinite."""
    x = torch.as_tensor(x)
    zero = x == 0
    return bool((zero | (x.abs() >= infinite) if x.is_floating_point() else zero).all())


def real(x: Any) -> bool:
    """Whether an operand is a tensor of real numbers, whose square is nowhere negative."""
    return isinstance(x, Tensor) and not x.is_complex()


class Algebra:
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
        self.error: NotHomogeneous | None = None

    # --- Degrees of operands ------------------------------------------------------------------------------------------

    def enter(self, x: Tensor, k: Any) -> None:
        """Let a tensor, and all that shares its memory, have a degree."""
        self.known[x.untyped_storage()] = k

    def constant_(self, x: Any) -> bool:
        """Whether an operand is a constant. Raises, if something unseen has written into it."""
        if not isinstance(x, Tensor):
            return True
        if x.untyped_storage() in self.known:
            return False
        if x.requires_grad:
            self.fail("a constant has a gradient: parameters must be registered, and what they make made in forward")
        if x.untyped_storage() in self.blank and not empty(x):
            self.fail("a constant was filled where no operation was seen: by a kernel of its own or by NumPy")
        return True

    def of(self, x: Any) -> Any:
        """Degree of an operand: 1 of a parameter, 0 of a constant, ``EVERY`` of zeros, infinities and None."""
        if x is None or isinstance(x, Fraction):
            return EVERY if x is None else x
        if self.constant_(x):
            return EVERY if empty(x) else ZERO
        return self.known[x.untyped_storage()]

    def _terms(self, operands: tuple[Any, ...]) -> set[Fraction]:
        """The degrees that meet; −3.4e38 stands for −∞."""
        terms = set()
        for x in operands:
            k = self.of(x)
            if k == ZERO and not isinstance(x, Fraction) and self.constant_(x) and empty(x, INFINITE):
                self.note("the lowest number of the type taken as −∞", kind="masked")
            elif k != EVERY:
                terms.add(Fraction(k))
        return terms

    # --- The rows of Table 1 ------------------------------------------------------------------------------------------

    def add(self, x: Any, y: Any) -> Any:
        """A sum: equal degrees; asymptotically the largest of them, if its terms do not cancel."""
        terms = self._terms((x, y))
        if len(terms) > 1:
            if not self.approximate:
                self.fail("a sum needs equal degrees", x, y)
            self.note(f"asymptotic: of {shown(tuple(sorted(terms)))} the largest", leading=True)
        return known(max(terms, default=EVERY), "size" if self.epsilon(x, y) else "")

    def same(self, *parts: Any) -> Any:
        """Parts side by side, as in ``cat`` and ``where``: equal degrees, asymptotically too."""
        terms = self._terms(parts)
        if len(terms) > 1:
            self.fail("parts side by side need equal degrees", *parts)
        return max(terms, default=EVERY)

    def mul(self, x: Any, y: Any) -> Any:
        """A product: degrees add."""
        return known(self.of(x) + self.of(y), "even" if x is y and real(x) else "")

    def div(self, x: Any, y: Any) -> Any:
        """A quotient: degrees subtract."""
        self._divides(y)
        return self.of(x) - self.of(y)

    def _divides(self, y: Any) -> None:
        k = self.of(y)
        if k == EVERY:
            self.fail("the divisor is 0 or infinite", y)
        if leading(k) and kind(k) != "size":
            self.fail("the leading term of the divisor may vanish", y)

    def pow(self, x: Any, exponent: Any) -> Any:
        """A fixed power multiplies the degree; an exponent that is a value needs degree 0 on both sides."""
        if not isinstance(exponent, int | float):
            return self.constant(x, exponent)
        k = self.of(x)
        if exponent < 0:
            self._divides(x)
        if k == EVERY:
            return EVERY if exponent > 0 else self.fail("0 or infinity to the power 0", x)
        power = Fraction(exponent).limit_denominator(10**6)
        return known(k * power, kind(k) or ("even" if exponent % 2 == 0 and real(x) else ""))

    def size(self, x: Any, power: int = 1) -> Any:
        """A norm, or the variance with ``power`` 2."""
        return known(power * self.of(x), "size")

    def epsilon(self, x: Any, y: Any) -> bool:
        """Whether y is a number that keeps a size x off 0."""
        return kind(self.of(x)) == "size" and isinstance(y, int | float) and y >= 0

    def constant(self, *xs: Any) -> Any:
        """Any function at all: exact where its arguments do not change with scale, never otherwise."""
        if any(leading(self.of(x)) for x in xs):
            self.fail("needs a degree that is exact, not asymptotic", *xs)
        return self.continuous(*xs)

    def continuous(self, *xs: Any) -> Any:
        """A function that is continuous everywhere: as ``constant``, and a limit may be its argument, too."""
        return ZERO if all(self.of(x) in (ZERO, EVERY) for x in xs) else self.fail("needs degree 0", *xs)

    def bounded(self, x: Any, kind: str = "") -> Any:
        """A saturating function (softmax, σ, tanh): 0, exactly at degree 0 and asymptotically at a positive degree."""
        if self.approximate and self.of(x) > 0:
            self.note("asymptotic: saturates", leading=True)
        else:
            self.continuous(x)
        return Degree(0, kind)

    def far_linear(self, x: Any) -> Any:
        """A function that is linear far out on either side (GELU, SiLU): asymptotically a positive degree stays."""
        if not (self.approximate and self.of(x) > 0):
            return self.continuous(x)
        self.note("asymptotic: linear far from 0", leading=True)
        return Fraction(self.of(x))

    def affine(self, x: Any, weight: Any = None, bias: Any = None) -> Any:
        """x · weight + bias. An absent weight is 1 and an absent bias 0."""
        return self.add(self.of(x) if weight is None else self.mul(x, weight), bias)

    # --- The table ----------------------------------------------------------------------------------------------------

    def begin(self, operation: str, degrees: Any = ()) -> dict[str, Any]:
        """Begin a row of the table, of the operation that is being looked at."""
        deepest = max((name for name in self.tracker.parents if name != "Global"), key=len, default="")
        row = {"module": deepest.partition(".")[2], "operation": operation, "in": tuple(degrees), "out": None}
        self.rows.append(row | {"note": [], "leading": False, "kind": ""})
        return self.rows[-1]

    def note(self, text: str, **facts: Any) -> None:
        """Put a remark in the row of the current operation, and what it makes of the result."""
        row = self.rows[-1] if self.rows else self.begin("the module")
        row["note"].append(text)
        row |= facts

    def fail(self, why: str, *operands: Any) -> Any:
        """Raise ``NotHomogeneous`` at the operation that is being looked at, and remember it."""
        self.note(f"✗ {why}")
        operation, module = self.rows[-1]["operation"], self.rows[-1]["module"]
        where = operation + (f" in module {module!r}" if module else "")
        met = f"; it meets degree {shown(tuple(map(self.of, operands)))}" if operands else ""
        self.error = NotHomogeneous(f"{where}: {why}{met}. Or measure it: normgrowth.homogeneity.measure_degree")
        raise self.error
