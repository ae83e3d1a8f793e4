"""Growth laws fitted to a norm curve, and how far a curve with correlated residuals can tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import curve_fit

Array = NDArray[np.float64]
P_NEAR_0 = 0.01  # a·tᵖ + b with p below is (ap) ln t + (a + b), to (p ln t)/2 of the growth


class Form(NamedTuple):
    """A growth law ρ(t): its formula, the names of its parameters, and where a fit starts (from the data's ends)."""

    label: str
    rho: Callable[..., Array]
    parameters: tuple[str, ...]
    start: Callable[[Array, Array], tuple[float, ...]]


def _line(x: Callable[[Array], Array]) -> Callable[[Array, Array], tuple[float, ...]]:
    """Starting values (slope, intercept) of a straight line in x(t) through the first and the last point."""

    def start(t: Array, rho: Array) -> tuple[float, float]:
        slope = (rho[-1] - rho[0]) / (x(t[-1]) - x(t[0]))
        return slope, rho[0] - slope * x(t[0])

    return start


# The two-parameter forms are affine in t or a function of t; `square` is the law of a walk from ρ₀: ρ² = ρ₀² + ct.
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
    r2: float  # share of the variance of ρ explained; NaN for a curve that does not move: there is none to explain
    aic: float  # Gaussian AIC, residuals taken as independent: where neighbours correlate, calibrate it by `bootstrap`


def fit(form: str, t: ArrayLike, rho: ArrayLike) -> Fit:
    """Fit one of ``FORMS`` to norms ``rho`` at times ``t`` (both ``(n,)``) by least squares in ρ.

    All forms predict ρ itself, so their R² and AIC may be compared; that of ρ² against t may not.

    Raises:
        ValueError: fewer points than parameters + 2, times not increasing.

    >>> t = np.arange(1.0, 50.0)
    >>> {name: round(value, 6) for name, value in fit("sqrt", t, 3 * np.sqrt(t) + 2).values.items()}
    {'a': 3.0, 'b': 2.0}
    """
    t, rho = np.asarray(t, dtype=np.float64), np.asarray(rho, dtype=np.float64)
    law = FORMS[form]
    if len(t) != len(rho) or len(t) < len(law.parameters) + 2 or (np.diff(t) <= 0).any():
        raise ValueError(
            f"{law.label} needs at least {len(law.parameters) + 2} points with increasing times; "
            f"got {len(t)} times and {len(rho)} norms"
        )
    values = _least_squares(law, t, rho, law.start(t, rho))
    if form == "power_offset" and abs(values[1]) < P_NEAR_0 and t[0] > 0:
        values = _falling(law, t, rho, values)
    fitted = law.rho(t, *values)
    residuals = rho - fitted
    rss, n = float(residuals @ residuals), len(t)
    variance = float(((rho - rho.mean()) ** 2).sum()) if rho.min() < rho.max() else 0.0  # a mean is rounded
    return Fit(
        dict(zip(law.parameters, map(float, values), strict=True)),
        fitted,
        residuals,
        1 - rss / variance if variance > 0 else float("nan"),
        n * np.log(max(rss, np.finfo(float).tiny) / n) + 2 * (len(values) + 1),  # the variance is a parameter too
    )


def _falling(law: Form, t: Array, rho: Array, values: Array) -> Array:
    """From p > 0 a search cannot pass p = 0, where a is infinite: begin again at p = −½ and keep what fits better."""
    slope, offset = _line(lambda t: t**-0.5)(t, rho)
    try:
        other = _least_squares(law, t, rho, (slope, -0.5, offset))
    except RuntimeError:
        return values
    squares = [float(((rho - law.rho(t, *x)) ** 2).sum()) for x in (values, other)]
    return other if squares[1] < squares[0] else values


def _least_squares(law: Form, t: Array, rho: Array, start: Sequence[float]) -> Array:
    # scale parameters by their starting size: they span ten decades (A against p)
    scale = np.maximum(np.abs(start), 1e-3)
    values, _ = curve_fit(lambda t, *x: law.rho(t, *(scale * x)), t, rho, p0=start / scale, maxfev=50_000)
    return scale * values


def bootstrap(
    truth: Fit, t: ArrayLike, statistic: Callable[[Array, Array], ArrayLike], *, block: int, samples: int, seed: int
) -> Array:
    """Distribution of a statistic of the curve if ``truth`` were the law: fitted curve + blocks of its residuals.

    The blocks are whole, and so correlation survives (moving-block bootstrap, Künsch 1989).
    ``statistic(t, rho)`` returns numbers of any fixed shape; the result has shape ``(samples, *shape)``.

    Raises:
        ValueError: a block longer than the curve.

    >>> t = np.arange(1.0, 50.0)
    >>> truth = fit("linear", t, 3 * t + np.sin(t))
    >>> slopes = bootstrap(truth, t, lambda t, rho: np.polyfit(t, rho, 1)[0], block=6, samples=200, seed=0)
    >>> slopes.shape, round(float(slopes.mean()), 2)
    ((200,), 3.0)
    """
    generator, t = np.random.default_rng(seed), np.asarray(t, dtype=np.float64)
    n, centred = len(t), truth.residuals - truth.residuals.mean()
    if not 1 <= block <= n:
        raise ValueError(f"block = {block}: a block must have between 1 and n = {n} points")

    def draw() -> Array:
        starts = generator.integers(0, n - block + 1, size=-(-n // block))
        return truth.fitted + centred[(starts[:, None] + np.arange(block)).ravel()[:n]]

    return np.array([statistic(t, draw()) for _ in range(samples)])


def local_exponents(t: ArrayLike, rho: ArrayLike, edges: ArrayLike) -> Array:
    """Slope of ln ρ against ln t between successive ``edges``, ρ interpolated in log–log, shape ``(len(edges)-1,)``.

    >>> local_exponents([1, 10, 100], [2, 20, 2000], [1, 10, 100])
    array([1., 2.])
    """
    t, rho, edges = (np.asarray(x, dtype=np.float64) for x in (t, rho, edges))
    positive = t > 0
    inside = t[positive]
    if len(inside) == 0 or edges.min() < inside[0] or edges.max() > inside[-1]:
        raise ValueError(f"edges {edges.min():g} … {edges.max():g} must lie within the positive times of the series")
    log_rho = np.interp(np.log(edges), np.log(inside), np.log(rho[positive]))
    return np.diff(log_rho) / np.diff(np.log(edges))
