"""One weight under the loss log(1 + exp(−θ)): where rounding stops plain descent, and the speed of Adam."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq


def predicted_stop(dtype: type[np.floating], rate: float, *, naive: bool) -> float:
    """Where rounding stops plain descent on one weight, with P bits of precision.

    A step is absorbed at η e^−θ = 2^(e − P) for θ in [2^e, 2^(e+1)), half a unit in the last place: at
    θ = log η + (P − e) log 2. Naively 1 + e^−θ is 1 from θ = P log 2 on. The smaller one counts.

    >>> found = [predicted_stop(np.float32, 100, naive=naive) for naive in (False, True)]
    >>> [round(theta, 2) for theta in found]  # log 100 + 20 log 2, and 24 log 2
    [18.47, 16.64]
    """
    bits = np.finfo(dtype).nmant + 1
    stops = ((2.0**e, math.log(rate) + (bits - e) * math.log(2)) for e in range(8))
    absorbed = next(max(low, theta) for low, theta in stops if theta < 2 * low)
    return min(absorbed, bits * math.log(2)) if naive else absorbed


def adam_speed(rate: float, betas: tuple[float, float] = (0.9, 0.999)) -> float:
    """Speed δ of Adam without ε on a gradient e^−θ: δ = η(1−β₁)/(1−β₁e^δ) · √((1−β₂e^2δ)/(1−β₂)).

    Always below ½ log(1/β₂), however large η is: the memory of v is longer than the gradient lasts.

    >>> round(adam_speed(1e-3), 5), adam_speed(1.0) < math.log(1 / 0.999) / 2
    (0.00041, True)
    """
    b1, b2 = betas
    top = math.log(1 / b2) / 2

    def excess(d: float) -> float:
        left = max(0.0, 1 - b2 * math.exp(2 * d)) / (1 - b2)
        return rate * (1 - b1) / (1 - b1 * math.exp(d)) * math.sqrt(left) - d

    return float(brentq(excess, 0, top, xtol=1e-16))
