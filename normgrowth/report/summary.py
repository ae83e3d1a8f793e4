"""What a measured series shows: growth laws with intervals, norm budget, noise of its lengths, what did not count."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from normgrowth import fits
from normgrowth.checkpoints import MeasuredSeries, Skip, grouped

Array = NDArray[np.float64]
UNDETERMINED = "not determined by this series"


def as_json(result: MeasuredSeries) -> str:
    """The table as a list of rows, and what did not count with its reasons."""
    rows = json.loads(result.table.to_json(orient="records", double_precision=15))
    skips = {kind: [skip._asdict() for skip in getattr(result, kind)] for kind in ("duplicates", "skipped")}
    found = {"table": rows, **skips, "left_out": result.left_out, "parameters": result.parameters}
    return json.dumps(found, indent=1, ensure_ascii=False)


def summarise(result: MeasuredSeries) -> str:
    """What the series shows, in lines: growth with intervals, local exponents, norm budget, and what did not count."""
    table = result.table
    total = table[table.layer == "total"]
    first, last = total.iloc[0], total.iloc[-1]
    lines = [
        f"{len(total)} checkpoint{'s' * (len(total) > 1)}, steps {first.step} to {last.step}; "
        f"{result.parameters:,} parameters",
        f"norm {_from_to(total)}",
        *growth(total),
        *_by_octave(total),
        *budget(total),
    ]
    parts = table[table.layer != "total"].groupby("layer", sort=False)
    lines += _section("by layer", (f"{layer}: {_from_to(rows)}" for layer, rows in parts))
    lines += _section("duplicates, not counted", map(str, result.duplicates))
    lines += _section("skipped, not counted", grouped(result.skipped))
    left_out = [Skip(name, why) for name, why in result.left_out.items()]
    lines += _section("tensors left out", grouped(left_out))
    return "\n".join(lines)


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = [f"  {line}" for line in lines]
    return [f"{title}:", *found] if found else []


def _from_to(rows: pd.DataFrame) -> str:
    """First and last norm of one layer, and its exponent between its first step above 0 and its last."""
    ends = f"{rows.norm.iloc[0]:.6g} to {rows.norm.iloc[-1]:.6g}"
    t, rho = _curve(rows)
    if len(t) < 2:
        return ends
    exponent = math.log(rho[-1] / rho[0]) / math.log(t[-1] / t[0])
    return f"{ends}; exponent {exponent:.3f} from step {t[0]:.0f} to {t[-1]:.0f}"


def _curve(rows: pd.DataFrame) -> tuple[Array, Array]:
    """Steps above 0 and their norms."""
    after = rows[(rows.step > 0) & (rows.norm > 0)]
    return after.step.to_numpy(float), after.norm.to_numpy(float)


def growth(total: pd.DataFrame) -> list[str]:
    """Growth laws with 95 % intervals from moving-block resamples."""
    t, rho = _curve(total)
    if len(rho) < 5 or rho.min() == rho.max():
        return [f"no fit: at least 5 norms that differ, at steps above 0, are needed; there are {len(t)}"]
    block = max(2, round(len(t) ** (1 / 2)))
    forms = ("sqrt", "square", "log", "power", "power_offset")
    title = f"fits over steps {t[0]:.0f} to {t[-1]:.0f}, with 95 % intervals (residuals in blocks of {block}):"
    return [title, *(f"  {fits.FORMS[form].label}: {_law(form, t, rho, block)}" for form in forms)]


def _law(form: str, t: Array, rho: Array, block: int) -> str:
    """The parameters of one form with their intervals, or why the series does not determine them."""

    if form == "power_offset" and len(t) < 7:
        return f"{UNDETERMINED} (7 norms are needed; there are {len(t)})"

    def parameters(t: Array, rho: Array) -> list[float]:
        return list(fits.fit(form, t, rho).values.values())

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of scipy, where a form fits badly
            found = fits.fit(form, t, rho)
            if form == "power_offset" and abs(found.values["p"]) < fits.P_NEAR_0:
                return f"{UNDETERMINED} (p runs to 0: a logarithm fits as well)"
            draws = fits.bootstrap(found, t, parameters, block=block, samples=200, seed=0)
    except RuntimeError:
        return f"{UNDETERMINED} (no fit, of it or of a resample)"
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    estimates = {name: (value, low[i], high[i]) for i, (name, value) in enumerate(found.values.items())}
    if why := undetermined(estimates, rho.max()):
        return f"{UNDETERMINED} ({why})"
    named = (f"{name} = {value:.4g} [{low:.4g}, {high:.4g}]" for name, (value, low, high) in estimates.items())
    return f"{', '.join(named)}; R² = {found.r2:.4f}"


def undetermined(estimates: dict[str, tuple[float, float, float]], size: float) -> str:
    """Why values, each with the ends of its interval, mean nothing, or ``""``; ``size`` is that of the norms."""
    p, low, high = estimates.get("p", (1.0, 1.0, 1.0))
    if len(estimates) == 3 and low < fits.P_NEAR_0 and high > -fits.P_NEAR_0:  # a·tᵖ + b
        return f"p = {p:.3g} [{low:.3g}, {high:.3g}] may be 0: a logarithm fits as well"
    for name, (value, low, high) in estimates.items():
        rounding = 1e-6 * (size if name == "b" else abs(value))
        if not low - rounding <= value <= high + rounding:
            return f"{name} = {value:.4g} lies outside its own interval [{low:.4g}, {high:.4g}]"
    return ""


def noise(total: pd.DataFrame) -> Array:
    """ρ of a walk whose intervals have the lengths ‖Δ‖ of the series and no drift: √(ρ₀² + Σ‖Δ‖²), shape (steps,).

    >>> noise(pd.DataFrame({"norm": [3.0, 9.0], "displacement_sq": [None, 16.0]}))
    array([3., 5.])
    """
    moved = total.displacement_sq.astype(float).fillna(0).to_numpy()
    return np.sqrt(total.norm.iloc[0] ** 2 + np.cumsum(moved))


def square_root(total: pd.DataFrame) -> Array:
    """√(ρ₀² + ct) from the first norm to the last, shape (steps,)."""
    t, squares = total.step.to_numpy(float), total.norm.to_numpy() ** 2
    return np.sqrt(squares[0] + (squares[-1] - squares[0]) * (t - t[0]) / (t[-1] - t[0]))


def exponents(total: pd.DataFrame) -> pd.DataFrame:
    """d ln ρ / d ln t of the series and of noise in each whole octave, counted back from the last step.

    >>> total = pd.DataFrame({"step": [1, 2, 4], "norm": [1.0, 2.0, 8.0], "displacement_sq": [None, 3.0, 12.0]})
    >>> exponents(total).exponent.round(6).tolist()
    [1.0, 2.0]
    """
    t, rho = _curve(total)
    count = int(np.log2(t[-1] / t[0])) if len(t) else 0
    edges = t[-1:] * 2.0 ** np.arange(-count, 1)
    found = pd.DataFrame({"middle": np.sqrt(edges[1:] * edges[:-1])})
    curves = {"exponent": rho, "noise": noise(total)[(total.step > 0) & (total.norm > 0)]}
    return found.assign(**{name: fits.local_exponents(t, curve, edges) for name, curve in curves.items() if count})


def _by_octave(total: pd.DataFrame) -> list[str]:
    edges = ((middle / math.sqrt(2), middle * math.sqrt(2), p) for middle, p, *_ in exponents(total).to_numpy())
    found = ", ".join(f"{start:.0f}–{end:.0f}: {p:.3f}" for start, end, p in edges)
    return [f"exponent d ln ρ / d ln t by octave (interpolated between steps): {found}"] if found else []


def budget(total: pd.DataFrame) -> list[str]:
    """Shares of the growth of ρ² over all intervals."""
    moved, inner = total.displacement_sq.sum(), total.inner.sum()
    grown = moved + inner
    if len(total) < 2:
        return []
    shares = f", {moved / grown:.1%} and {inner / grown:.1%}" if grown > 1e-9 * (moved + abs(inner)) > 0 else ""
    return [
        f"norm budget: ρ² moved by {grown:.6g} = ‖Δ‖² {moved:.6g} + 2θ·Δ {inner:.6g}{shares} (of intervals, not steps)"
    ]
