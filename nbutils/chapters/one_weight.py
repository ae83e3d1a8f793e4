"""Descent in steps on one weight: its law, where rounding stops it, and the speed of Adam.

The loss is log(1 + exp(−f)), the label 1, and f = θ unless a degree is given.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

Array = NDArray[np.float64]


def scalar_descent(degree: int, steps: ArrayLike, rate: float, *, theta: float = 1.0) -> Array:
    """θ^k of plain descent on one weight, f = θ^k and y = 1, after each of the given numbers of steps; float64.

    >>> scalar_descent(1, [1, 2], 1.0, theta=0.0).round(4)  # ½, then σ(−½) more
    array([0.5   , 0.8775])
    """
    told, found = iter(sorted(int(s) for s in np.asarray(steps))), []
    due, exp = next(told), math.exp
    for i in range(1, int(np.max(steps)) + 1):
        theta += rate * degree * theta ** (degree - 1) / (1 + exp(theta**degree))
        if i == due:
            found.append(theta**degree)
            due = next(told, 0)
    return np.array(found)


def residual(theta: np.floating, *, naive: bool) -> np.floating:
    """1 − σ(θ) in the arithmetic of ``theta``: by that subtraction, or as e^−θ / (1 + e^−θ).

    >>> [float(f"{residual(np.float32(20), naive=naive):.3g}") for naive in (True, False)]  # e⁻²⁰ = 2.06e-9
    [0.0, 2.06e-09]
    """
    one, small = type(theta)(1), np.exp(-theta)
    return one - one / (one + small) if naive else small / (one + small)


def descend_to_stop(
    dtype: type[np.floating], rate: float, *, naive: bool, start: float, most: int = 10**7
) -> tuple[float, int]:
    """Run θ ← θ + η(1 − σ(θ)) in ``dtype`` until a step changes nothing: where, and after how many steps.

    >>> where, steps = descend_to_stop(np.float16, 1.0, naive=False, start=1.0)
    >>> round(where, 1), round(predicted_stop(np.float16, 1.0, naive=False), 1)  # 9 log 2
    (6.2, 6.2)
    """
    theta, eta = dtype(start), dtype(rate)
    for i in range(most):
        new = theta + eta * residual(theta, naive=naive)
        if new == theta:
            return float(theta), i
        theta = new
    raise RuntimeError(f"still moving after {most} steps, at {theta}")


def first_fixed(dtype: type[np.floating], rate: float, *, naive: bool) -> float:
    """The smallest θ ≥ 1 that such a step leaves where it is, by bisection: no need to walk there.

    >>> round(first_fixed(np.float32, 1.0, naive=False), 2)  # 21 log 2
    14.56
    """
    low, high, eta = 1.0, 80.0 if dtype == np.float64 else 40.0 if dtype == np.float32 else 12.0, dtype(rate)
    for _ in range(60):
        middle = dtype((low + high) / 2)
        moved = middle + eta * residual(middle, naive=naive) != middle
        low, high = (float(middle), high) if moved else (low, float(middle))
    return high


def predicted_stop(dtype: type[np.floating], rate: float, *, naive: bool) -> float:
    """Where rounding stops plain descent on one weight, with P bits of precision.

    A step is absorbed at η e^−θ = 2^(e − P) for θ in [2^e, 2^(e+1)), half a unit in the last place: at
    θ = log η + (P − e) log 2. Naively 1 + e^−θ is 1 from θ = P log 2 on. The smaller one counts.

    >>> found = [predicted_stop(np.float32, 100, naive=naive) for naive in (False, True)]
    >>> [round(theta, 2) for theta in found]  # log 100 + 20 log 2, and 24 log 2
    [18.47, 16.64]
    """
    bits = np.finfo(dtype).nmant + 1
    absorbed = [
        max(2.0**e, math.log(rate) + (bits - e) * math.log(2))
        for e in range(8)
        if math.log(rate) + (bits - e) * math.log(2) < 2.0 ** (e + 1)
    ]
    return min(absorbed[0], bits * math.log(2)) if naive else absorbed[0]


def adam(
    steps: int, rate: float, *, eps: float, dtype: type = float, betas: tuple[float, float] = (0.9, 0.999)
) -> Array:
    """θ after every step of Adam on one weight, f = θ and y = 1 from θ = 0, in the arithmetic of ``dtype``.

    >>> adam(1, 0.1, eps=0.0).round(9)  # the first step is η, whatever the gradient
    array([0.1])
    """
    theta, m, v = dtype(0), dtype(0), dtype(0)
    (b1, b2), one, eta, eps = map(dtype, betas), dtype(1), dtype(rate), dtype(eps)
    exp = math.exp if dtype is float else np.exp
    path, c1, c2 = np.empty(steps), 1.0, 1.0
    for i in range(steps):
        g = -exp(-theta) / (one + exp(-theta))
        m, v = b1 * m + (one - b1) * g, b2 * v + (one - b2) * (g * g)
        c1, c2 = c1 * betas[0], c2 * betas[1]
        theta = theta - eta * (m / dtype(1 - c1)) / ((v / dtype(1 - c2)) ** dtype(0.5) + eps)
        path[i] = theta
    return path


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
