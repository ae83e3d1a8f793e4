"""A degree by the rules against the outputs at several scales."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from torch import Tensor, nn

from normgrowth.homogeneity.algebra import NotHomogeneous, readable
from normgrowth.homogeneity.finite import NotFinite, finite_output
from normgrowth.homogeneity.measure import Selection, scalable

__all__ = ["check_degree"]

# Pairs of scales are 10^e and 10^(e + 1). An asymptotic degree may settle late, where a leading term starts small.
EXPONENTS = (3, 4, 5, 6, 8, 10, 13, 17, 22, 28, 36, 46, 60, 80, 100)
SMALLER_EXPONENTS = (2, 1, 0)  # for those that overflow at 10^4
EXACT_EXPONENTS = (0, 1)
ASYMPTOTIC_TOLERANCE = 0.05  # of the output
EXACT_TOLERANCE = 1e-6


def check_degree(
    module: nn.Module, inputs: Any, input_degree: Any, k: Fraction, approximate: bool, parameters: Selection = None
) -> None:
    """Raise if the outputs do not have the degree k.

    An exact degree is compared from scale 1 to 10 and from 10 to 100. An asymptotic one is compared from 10³ to 10⁴ and
    then higher, until it holds or float64 overflows; where 10⁴ overflows, it is compared lower.

    Raises:
        NotHomogeneous: the outputs grow otherwise.
        NotFinite: there are no two scales at which that can be seen, since an output is not finite.
        ValueError: the output is 0 at some scale.
    """
    outputs: dict[int, Tensor] = {}
    with scalable(module, inputs, input_degree, parameters) as output:

        def compare(exponent: int) -> _Growth:
            for e in (exponent, exponent + 1):
                if e not in outputs:
                    outputs[e] = finite_output(module, inputs, output, 10.0**e)
            return _growth(outputs[exponent], outputs[exponent + 1], exponent, k)

        if approximate:
            _check_asymptotic(compare, k)
        else:
            _check_exact(compare, k)


class _Growth(NamedTuple):
    """How the output grows from the scale 10^exponent to 10^(exponent + 1)."""

    exponent: int
    power: float  # of the scale, by which the norm grows
    error: float  # of the output where it has the degree k, as a part of it

    def refuse(self, k: Fraction) -> None:
        """Raise NotHomogeneous: the outputs do not have the degree k."""
        text = f"from scale {10.0**self.exponent:g} to {10.0 ** (self.exponent + 1):g} the norm of the output grows"
        turns = ", and its direction turns" if abs(self.power - k) < self.error / 10 else ""
        raise NotHomogeneous(
            f"by the rules its degree is {readable(k)}, but {text} by the power {self.power:.4g}{turns}"
        )


def _growth(small: Tensor, large: Tensor, exponent: int, k: Fraction) -> _Growth:
    if not (small.any() and large.any()):
        raise ValueError(f"the output is 0 at scale {10.0**exponent:g} or {10.0 ** (exponent + 1):g}: it has no degree")
    small_size, large_size = small.abs().max(), large.abs().max()
    small, large = small / small_size, large / large_size  # so that squares do not overflow
    log_ratio = float(large_size.log() - small_size.log())
    expected = small * math.exp(min(float(k) * math.log(10) - log_ratio, 700.0))
    power = (log_ratio + float(large.norm().log() - small.norm().log())) / math.log(10)
    return _Growth(exponent, power, float((large - expected).norm() / large.norm()))


def _check_exact(compare: Callable[[int], _Growth], k: Fraction) -> None:
    for exponent in EXACT_EXPONENTS:
        try:
            growth = compare(exponent)
        except NotFinite:
            if exponent == EXACT_EXPONENTS[0]:
                raise
            return
        if not growth.error <= EXACT_TOLERANCE:
            growth.refuse(k)


def _check_asymptotic(compare: Callable[[int], _Growth], k: Fraction) -> None:
    growth = None
    overflow = None
    for exponent in EXPONENTS:
        try:
            growth = compare(exponent)
        except NotFinite as error:
            overflow = error
            break
        if growth.error <= ASYMPTOTIC_TOLERANCE:
            return
    if growth is not None:
        growth.refuse(k)
    for exponent in SMALLER_EXPONENTS:
        with contextlib.suppress(NotFinite):
            if compare(exponent).error <= ASYMPTOTIC_TOLERANCE:
                return
    raise NotFinite(f"by the rules its degree is {readable(k)}, which the outputs cannot show: {overflow}")
