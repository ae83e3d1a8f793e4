"""The algebra of degrees: in a sum degrees must be equal, in a product they add, and so on (Table 1 of the paper).

``homogeneity.rules`` has the rules of torch's operations, and ``homogeneity.forward`` carries degrees through a forward
pass. A degree belongs to the memory that a tensor lies in, so all views of a tensor share it. A tensor that depends
neither on parameters nor on inputs with a degree is a *constant*. Only the values of constants are read: a constant of
zeros and infinities alone has ``EVERY`` degree.
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
    """A degree, with two properties of the value that the rules use.

    ``leading``: the degree is that of the leading term only, which may vanish on a region. ``masked``: scores have
    −3.4e38 in place of −∞ at some entries.
    """

    leading: bool
    masked: bool

    def __new__(cls, k: Any, leading: bool = False, masked: bool = False) -> Degree:
        self = super().__new__(cls, k)
        self.leading = leading
        self.masked = masked
        return self


def is_leading(k: Any) -> bool:
    """Whether a degree is that of the leading term only."""
    return getattr(k, "leading", False)


def is_masked(k: Any) -> bool:
    """Whether scores of degree k have −3.4e38 in place of −∞ at some entries."""
    return getattr(k, "masked", False)


class NotHomogeneous(ValueError):
    """The output has no degree, a forward pass cannot determine its degree, or an operation has no rule."""


def readable(degrees: Any) -> Any:
    """Degrees for a reader: integers as int, ``EVERY`` as a word, the degrees of a tuple joined by commas.

    >>> readable((Fraction(2), Fraction(1, 2), EVERY, None))
    '2, 1/2, every, –'
    """
    if isinstance(degrees, tuple):
        return ", ".join(str(readable(k)) for k in degrees)
    if degrees is None:
        return "–"
    if degrees == EVERY:
        return "every"
    return int(degrees) if degrees == int(degrees) else Fraction(degrees)


def all_zero_or_infinite(x: Any, infinite: float = math.inf) -> bool:
    """Whether every entry of a constant is zero or, in magnitude, at least ``infinite``."""
    x = torch.as_tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
    zero = x == 0
    if not x.is_floating_point():
        return bool(zero.all())
    return bool((zero | (x.abs() >= infinite)).all())


def innermost_module(tracker: ModuleTracker) -> str:
    """Name of the innermost module that runs, as in ``named_modules``; empty for the outermost."""
    names = [name for name in tracker.parents if name != "Global"]
    return max(names, key=len, default="").partition(".")[2]


class Algebra:
    """The operations from which rules are built. ``rows`` lists the operations of a forward pass, in order.

    An operand is a tensor, a number, None or, in place of a tensor, its degree. Methods that return a degree raise
    ``NotHomogeneous`` where the result has none. ``approximate`` admits degrees that hold only asymptotically, as
    the scale of the parameters grows.

    >>> algebra = Algebra()
    >>> product = algebra.mul(Fraction(1), Fraction(1))  # a weight times an input
    >>> readable(algebra.add(product, Fraction(2))), readable(algebra.pow(product, 0.25))
    (2, Fraction(1, 2))
    """

    def __init__(self, approximate: bool = False):
        super().__init__()
        self.approximate = approximate
        self.training = False  # whether a part of the module is in train mode
        self.module_tracker = ModuleTracker()
        # The keys of these three dictionaries are storages, the memory of tensors, so that all views of a tensor share
        # its entry.
        self.degrees = WeakIdKeyDictionary()
        self.zero_filled = WeakIdKeyDictionary()
        self.parameters = WeakIdKeyDictionary()
        self.rows: list[dict[str, Any]] = []
        self.error: NotHomogeneous | None = None

    # --- Degrees of operands ------------------------------------------------------------------------------------------

    def set_degree(self, x: Tensor, k: Any) -> None:
        """Give a tensor, and every tensor that shares its memory, the degree k."""
        self.degrees[x.untyped_storage()] = k

    def is_constant(self, x: Any) -> bool:
        """Whether an operand is a constant.

        Raises:
            NotHomogeneous: the constant has a gradient, or was filled by something that is not an operation of torch.
        """
        if not isinstance(x, Tensor):
            return True
        if x.untyped_storage() in self.degrees:
            return False
        if x.requires_grad:
            self.fail(
                "a constant has a gradient: parameters must be registered, and values made of them computed in forward"
            )
        if x.untyped_storage() in self.zero_filled and not all_zero_or_infinite(x):
            self.fail("a constant was filled where no operation was seen: by a custom kernel or by NumPy")
        return True

    def degree_of(self, x: Any) -> Any:
        """Degree of an operand: 0 for a constant, but ``EVERY`` for one of zeros and infinities alone, and for None.

        Raises:
            NotHomogeneous: see ``is_constant``.
        """
        if x is None:
            return EVERY
        if isinstance(x, Fraction):
            return x
        if self.is_constant(x):
            return EVERY if all_zero_or_infinite(x) else ZERO
        return self.degrees[x.untyped_storage()]

    def leading_part(self, x: Any) -> Any:
        """What is left of an operand far out. ``Forward`` carries it along; here nothing is known of lower terms."""
        return x

    def _distinct_degrees(self, operands: tuple[Any, ...]) -> set[Fraction]:
        """The distinct degrees of the operands of one operation, without ``EVERY``.

        A constant of −3.4e38 stands for −∞, which fits every degree.
        """
        distinct = set()
        for x in operands:
            k = self.degree_of(x)
            if k == EVERY:
                continue
            has_values = k == ZERO and not isinstance(x, Fraction) and self.is_constant(x)
            if has_values and all_zero_or_infinite(x, INFINITE):
                self.note("the lowest number of the type taken as −∞", masked=True)
            else:
                distinct.add(Fraction(k))
        return distinct

    # --- The rows of Table 1 ------------------------------------------------------------------------------------------

    def add(self, x: Any, y: Any) -> Any:
        """A sum: degrees must be equal. Asymptotically it has the larger degree, unless its leading terms cancel."""
        return self._common_or_largest("a sum needs equal degrees", x, y)

    def side_by_side(self, *parts: Any) -> Any:
        """Parts in one tensor, as in ``cat`` and ``where``: a sum of the parts with zeros in place of the others.

        A part that falls with scale is refused beside others, since a norm with an ε would not lift it.
        """
        if min(self._distinct_degrees(parts), default=ZERO) < 0:
            return self.equal_degrees(*parts)
        return self._common_or_largest("parts side by side need equal degrees", *parts)

    def _common_or_largest(self, reason: str, *operands: Any) -> Any:
        distinct = self._distinct_degrees(operands)
        if len(distinct) > 1:
            if not self.approximate:
                self.fail(reason, *operands)
            degrees = readable(tuple(sorted(distinct)))
            self.note(f"asymptotic: of {degrees} the largest", leading=True, has_lower_terms=True)
        return max(distinct, default=EVERY)

    def equal_degrees(self, *operands: Any) -> Any:
        """Values that are compared, or of which each entry is one or the other: degrees must be equal."""
        distinct = self._distinct_degrees(operands)
        if len(distinct) > 1:
            self.fail("parts side by side need equal degrees", *operands)
        return max(distinct, default=EVERY)

    def mul(self, x: Any, y: Any) -> Any:
        """A product: degrees add."""
        return self.degree_of(x) + self.degree_of(y)

    def div(self, x: Any, y: Any) -> Any:
        """A quotient: degrees subtract."""
        self._check_divisor(y)
        return self.degree_of(x) - self.degree_of(y)

    def _check_divisor(self, y: Any) -> None:
        if self.degree_of(y) == EVERY:
            self.fail("the divisor is 0 or infinite", y)
        if isinstance(y, Tensor) and bool(((self.leading_part(y) == 0) & (y != 0)).any()):
            self.fail("the leading term of the divisor is 0 somewhere", y)

    def pow(self, x: Any, exponent: Any) -> Any:
        """A power with a fixed exponent multiplies the degree. With a tensor as exponent, both need degree 0."""
        if not isinstance(exponent, int | float):
            return self.arbitrary(x, exponent)
        k = self.degree_of(x)
        if exponent < 0:
            self._check_divisor(x)
        if k == EVERY:
            return EVERY if exponent > 0 else self.fail("0 or infinity to the power 0", x)
        return k * Fraction(exponent).limit_denominator(10**6)

    def arbitrary(self, *arguments: Any) -> Any:
        """Any function: it has degree 0 where its arguments have exactly degree 0, and no degree otherwise."""
        if any(is_leading(self.degree_of(x)) for x in arguments):
            self.fail("needs a degree that is exact, not asymptotic", *arguments)
        return self.continuous(*arguments)

    def continuous(self, *arguments: Any) -> Any:
        """A function that is continuous everywhere: like ``arbitrary``, but an asymptotic degree of 0 suffices."""
        if all(self.degree_of(x) in (ZERO, EVERY) for x in arguments):
            return ZERO
        return self.fail("needs degree 0", *arguments)

    def saturating(self, x: Any) -> Any:
        """Softmax, σ, tanh: degree 0, exactly for an argument of degree 0, asymptotically for a positive degree."""
        if self.approximate and self.degree_of(x) > 0:
            self.note("asymptotic: saturates", leading=True, has_limit=True)
        else:
            self.continuous(x)
        return ZERO

    def asymptotically_linear(self, x: Any) -> Any:
        """A function that is linear far from 0 on either side (GELU, SiLU). In the limit it keeps a positive degree."""
        if self.approximate and self.degree_of(x) > 0:
            self.note("asymptotic: linear far from 0", leading=True, has_limit=True)
            return Fraction(self.degree_of(x))
        return self.continuous(x)

    def bounded(self, x: Any, *bounds: Any) -> Any:
        """The larger or the smaller of x and constants. On one side of 0 it keeps a positive degree, asymptotically.

        On the other side it is the bound, of degree 0: its leading part is that of x beside a bound of 0.
        """
        distinct = self._distinct_degrees((x, *bounds))
        are_constant = all(self.is_constant(bound) for bound in bounds)
        if len(distinct) > 1 and self.approximate and are_constant and self.degree_of(x) > 0:
            self.note("asymptotic: bounded on one side", leading=True, has_lower_terms=True)
            return Fraction(self.degree_of(x))
        return self.equal_degrees(x, *bounds)

    def affine(self, x: Any, weight: Any = None, bias: Any = None) -> Any:
        """x · weight + bias. An absent weight is 1 and an absent bias is 0."""
        product = self.degree_of(x) if weight is None else self.mul(x, weight)
        return self.add(product, bias)

    # --- The table ----------------------------------------------------------------------------------------------------

    def begin(self, operation: str, degrees: Any = ()) -> dict[str, Any]:
        """Append the row of an operation to the table, with the degrees of its operands, and return the row."""
        row: dict[str, Any] = {
            "module": innermost_module(self.module_tracker),
            "operation": operation,
            "in": tuple(degrees),
            "out": None,
            "note": [],
            "leading": False,
            "masked": False,
            "has_lower_terms": False,  # beside the leading ones
            "has_limit": False,  # for large arguments only
        }
        self.rows.append(row)
        return row

    def note(self, text: str, **properties: Any) -> None:
        """Add a remark to the row of the current operation, and properties of its result such as ``leading``."""
        row = self.rows[-1] if self.rows else self.begin("the module")
        row["note"].append(text)
        row.update(properties)

    def fail(self, reason: str, *operands: Any) -> Any:
        """Raise ``NotHomogeneous`` at the current operation, and keep the error in case the module catches it."""
        self.note(f"✗ {reason}")
        row = self.rows[-1]
        place = row["operation"]
        if row["module"]:
            place += f" in module {row['module']!r}"
        if operands:
            degrees = tuple(self.degree_of(x) for x in operands)
            reason += f"; it meets degree {readable(degrees)}"
        self.error = NotHomogeneous(f"{place}: {reason}. Or measure it: normgrowth.homogeneity.measure_degree")
        raise self.error
