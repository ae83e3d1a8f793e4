"""Growth laws fitted to a norm curve, and a bootstrap for telling them apart although residuals correlate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["FORMS", "Fit", "Form", "bootstrap", "fit", "local_exponents"]

Array = NDArray[np.float64]
P_NEAR_0 = 0.01  # for smaller p, a·tᵖ + b is (ap) ln t + (a + b), with an error of (p ln t)/2 of the growth


class Form(NamedTuple):
    """A growth law ρ(t)."""

    label: str  # its formula
    rho: Callable[..., Array]  # of t and the parameters
    parameters: tuple[str, ...]  # names
    start: Callable[[Array, Array], tuple[float, ...]]  # initial values of a fit, from first and last point of (t, ρ)


def _line(x: Callable[[Array], Array]) -> Callable[[Array, Array], tuple[float, ...]]:
    """Initial values (slope, intercept) of a straight line in x(t): the line through the first and the last point."""

    def start(t: Array, rho: Array) -> tuple[float, float]:
        slope = (rho[-1] - rho[0]) / (x(t[-1]) - x(t[0]))
        return slope, rho[0] - slope * x(t[0])

    return start


# `square` is the law of a walk from ρ₀: ρ² = ρ₀² + ct.
FORMS: dict[str, Form] = {
    "sqrt": Form("a√t + b", lambda t, a, b: a * np.sqrt(t) + b, ("a", "b"), _line(np.sqrt)),
    "square": Form(
        "√(A + ct)",
        lambda t, c, A: np.sqrt(np.maximum(A + c * t, 0)),
        ("c", "A"),
        lambda t, rho: _line(lambda t: t)(t, rho**2),
    ),
    "power": Form("a·tᵖ", lambda t, a, p: a * t**p, ("a", "p"), lambda t, rho: (rho[-1] / t[-1] ** 0.5, 0.5)),
    "power_offset": Form(
        "a·tᵖ + b",
        lambda t, a, p, b: a * t**p + b,
        ("a", "p", "b"),
        lambda t, rho: (_line(np.sqrt)(t, rho)[0], 0.5, _line(np.sqrt)(t, rho)[1]),
    ),
    "linear": Form("at + b", lambda t, a, b: a * t + b, ("a", "b"), _line(lambda t: t)),
    "quarter": Form("a·t^¼ + b", lambda t, a, b: a * t**0.25 + b, ("a", "b"), _line(lambda t: t**0.25)),
    "log": Form("a·ln(1+t) + b", lambda t, a, b: a * np.log1p(t) + b, ("a", "b"), _line(np.log1p)),
}


class Fit(NamedTuple):
    """Least-squares fit of one form to ρ(t)."""

    values: dict[str, float]
    fitted: Array  # (n,)
    residuals: Array  # (n,) data − fit
    r2: float  # explained share of the variance of ρ; NaN for a constant curve, which has no variance
    aic: float  # Gaussian AIC for independent residuals: where neighbours correlate, calibrate it by `bootstrap`


def fit(form: str, t: ArrayLike, rho: ArrayLike) -> Fit:
    """Fit one of ``FORMS`` to norms ``rho`` at times ``t`` (both ``(n,)``) by least squares in ρ.

    All forms predict ρ itself, so their R² and AIC are comparable; those of a fit to ρ² would not be.

    Raises:
        ValueError: fewer points than parameters + 2, or times that do not increase.

    >>> t = np.arange(1.0, 50.0)
    >>> {name: round(value, 6) for name, value in fit("sqrt", t, 3 * np.sqrt(t) + 2).values.items()}
    {'a': 3.0, 'b': 2.0}
    """
    t = np.asarray(t, dtype=np.float64)
    rho = np.asarray(rho, dtype=np.float64)
    law = FORMS[form]
    if len(t) != len(rho) or len(t) < len(law.parameters) + 2 or (np.diff(t) <= 0).any():
        raise ValueError(
            f"{law.label} needs at least {len(law.parameters) + 2} points with increasing times; "
            f"got {len(t)} times and {len(rho)} norms"
        )
    values = _least_squares(law, t, rho, law.start(t, rho))
    if form == "power_offset" and abs(values[1]) < P_NEAR_0 and t[0] > 0:
        values = _try_negative_power(law, t, rho, values)
    fitted = law.rho(t, *values)
    residuals = rho - fitted
    n = len(t)
    squares = float(residuals @ residuals)
    variance = float(((rho - rho.mean()) ** 2).sum())
    if rho.min() == rho.max():  # the mean is rounded, and the sum may be above 0
        variance = 0.0
    return Fit(
        values=dict(zip(law.parameters, map(float, values), strict=True)),
        fitted=fitted,
        residuals=residuals,
        r2=1 - squares / variance if variance > 0 else float("nan"),
        aic=n * np.log(max(squares, np.finfo(float).tiny) / n) + 2 * (len(values) + 1),  # the variance is one more
    )


def _try_negative_power(law: Form, t: Array, rho: Array, values: Array) -> Array:
    """The better of a·tᵖ + b with ``values`` and a second fit that starts at p = −½.

    A search that starts at p > 0 cannot pass p = 0, where a is infinite.
    """
    slope, offset = _line(lambda t: t**-0.5)(t, rho)
    try:
        negative = _least_squares(law, t, rho, (slope, -0.5, offset))
    except RuntimeError:
        return values
    squares = float(((rho - law.rho(t, *values)) ** 2).sum())
    squares_negative = float(((rho - law.rho(t, *negative)) ** 2).sum())
    return negative if squares_negative < squares else values


def _least_squares(law: Form, t: Array, rho: Array, start: Sequence[float]) -> Array:
    """Parameters that minimise the sum of squares; scipy raises RuntimeError if it does not converge."""
    from scipy.optimize import curve_fit  # a third of the start of a command that needs no fit

    # parameters are scaled by their initial size, since they span ten decades (A against p)
    scale = np.maximum(np.abs(start), 1e-3)
    values, _ = curve_fit(lambda t, *x: law.rho(t, *(scale * x)), t, rho, p0=start / scale, maxfev=50_000)
    return scale * values


def bootstrap(
    truth: Fit, t: ArrayLike, statistic: Callable[[Array, Array], ArrayLike], *, block: int, samples: int, seed: int
) -> Array:
    """Distribution of a statistic of the curve if ``truth`` were the law.

    Each resample is the fitted curve plus blocks of its residuals. Blocks keep the correlation between neighbours
    (moving-block bootstrap, Künsch 1989).

    Args:
        truth: the fit whose curve and residuals are used.
        t: times of its curve, shape ``(n,)``.
        statistic: function ``statistic(t, rho)`` that returns numbers of a fixed shape.
        block: points in a block, from 1 to n.
        samples: number of resamples.
        seed: seed of the draws.

    Returns:
        The statistic of each resample, shape ``(samples, *shape)``.

    Raises:
        ValueError: a block longer than the curve, or shorter than one point.

    >>> t = np.arange(1.0, 50.0)
    >>> truth = fit("linear", t, 3 * t + np.sin(t))
    >>> slopes = bootstrap(truth, t, lambda t, rho: np.polyfit(t, rho, 1)[0], block=6, samples=200, seed=0)
    >>> slopes.shape, round(float(slopes.mean()), 2)
    ((200,), 3.0)
    """
    generator = np.random.default_rng(seed)
    t = np.asarray(t, dtype=np.float64)
    n = len(t)
    centred = truth.residuals - truth.residuals.mean()
    if not 1 <= block <= n:
        raise ValueError(f"block = {block}: a block must have between 1 and n = {n} points")

    def resample() -> Array:
        starts = generator.integers(0, n - block + 1, size=math.ceil(n / block))
        points = (starts[:, None] + np.arange(block)).ravel()[:n]
        return truth.fitted + centred[points]

    return np.array([statistic(t, resample()) for _ in range(samples)])


def local_exponents(t: ArrayLike, rho: ArrayLike, edges: ArrayLike) -> Array:
    """Slope of ln ρ against ln t between successive ``edges``, shape ``(len(edges)-1,)``.

    Between the times ``t`` (n,), which must increase, ln ρ is interpolated linearly in ln t.

    Raises:
        ValueError: an edge lies outside the positive times of the series.

    >>> local_exponents([1, 10, 100], [2, 20, 2000], [1, 10, 100])
    array([1., 2.])
    """
    t = np.asarray(t, dtype=np.float64)
    rho = np.asarray(rho, dtype=np.float64)
    edges = np.asarray(edges, dtype=np.float64)
    positive = t > 0
    times = t[positive]
    if len(times) == 0 or edges.min() < times[0] or edges.max() > times[-1]:
        raise ValueError(f"edges {edges.min():g} … {edges.max():g} must lie within the positive times of the series")
    log_rho = np.interp(np.log(edges), np.log(times), np.log(rho[positive]))
    return np.diff(log_rho) / np.diff(np.log(edges))
