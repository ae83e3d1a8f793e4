"""What a measured series shows: growth laws with intervals, norm budget, the no-drift curve, and skips."""

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
    """The table as a list of rows, and what was not counted, with reasons."""
    document = {
        "table": json.loads(result.table.to_json(orient="records", double_precision=15)),
        "duplicates": [skip._asdict() for skip in result.duplicates],
        "skipped": [skip._asdict() for skip in result.skipped],
        "left_out": result.left_out,
        "constant": dict(result.constant),
        "notes": list(result.notes),
        "parameters": result.parameters,
    }
    return json.dumps(document, indent=1, ensure_ascii=False)


def summarise(result: MeasuredSeries) -> str:
    """Lines on growth laws with intervals, local exponents, norm budget, layers, and what was not counted."""
    table = result.table
    total = table[table.layer == "total"]
    first = total.iloc[0]
    last = total.iloc[-1]
    lines = [
        f"{len(total)} checkpoint{'s' * (len(total) > 1)}, steps {first.step} to {last.step}; "
        f"{result.parameters:,} parameters",
        f"norm {_from_to(total)}",
        *growth(total),
        *_by_octave(total),
        *budget(total),
    ]
    layers = table[table.layer != "total"].groupby("layer", sort=False)
    lines += _section("by layer", (f"{layer}: {_from_to(rows)}" for layer, rows in layers))
    lines += _section("to know", result.notes)
    lines += _section("the same in all checkpoints, and counted (--trained leaves them out)", _constant(result))
    lines += _section("duplicates, not counted", map(str, result.duplicates))
    lines += _section("skipped, not counted", grouped(result.skipped))
    left_out = [Skip(name, why) for name, why in result.left_out.items()]
    lines += _section("tensors left out", grouped(left_out))
    return "\n".join(lines)


def _constant(result: MeasuredSeries) -> list[str]:
    """The tensors that never change, largest share of ρ² first; small ones together."""
    by_share = sorted(result.constant.items(), key=lambda item: -item[1])
    lines = [f"{name}: {share:.2%} of ρ²" for name, share in by_share[:10]]
    rest = by_share[10:]
    if rest:
        lines.append(f"{len(rest):,} more: {sum(share for _, share in rest):.2%} of ρ²")
    return lines


def _section(title: str, lines: Iterable[str]) -> list[str]:
    """A title and indented lines below it; nothing if there are no lines."""
    indented = [f"  {line}" for line in lines]
    return [f"{title}:", *indented] if indented else []


def _from_to(rows: pd.DataFrame) -> str:
    """First and last norm of one layer, and its exponent between its first step above 0 and its last."""
    ends = f"{rows.norm.iloc[0]:.6g} to {rows.norm.iloc[-1]:.6g}"
    t, rho = _curve(rows)
    if len(t) < 2:
        return ends
    exponent = math.log(rho[-1] / rho[0]) / math.log(t[-1] / t[0])
    return f"{ends}; exponent {exponent:.3f} from step {t[0]:.0f} to {t[-1]:.0f}"


def _curve(rows: pd.DataFrame) -> tuple[Array, Array]:
    """Steps above 0 and their norms, as far as these are above 0 as well."""
    positive = rows[(rows.step > 0) & (rows.norm > 0)]
    return positive.step.to_numpy(float), positive.norm.to_numpy(float)


def growth(total: pd.DataFrame) -> list[str]:
    """Growth laws with 95 % intervals from moving-block resamples."""
    t, rho = _curve(total)
    if len(rho) < 5 or rho.min() == rho.max():
        return [f"no fit: at least 5 norms that differ, at steps above 0, are needed; there are {len(t)}"]
    block = max(2, round(len(t) ** (1 / 2)))
    lines = [f"fits over steps {t[0]:.0f} to {t[-1]:.0f}, with 95 % intervals (residuals in blocks of {block}):"]
    for form in ("sqrt", "square", "log", "power", "power_offset"):
        lines.append(f"  {fits.FORMS[form].label}: {_law(form, t, rho, block)}")
    return lines


def _law(form: str, t: Array, rho: Array, block: int) -> str:
    """The parameters of one form with their intervals, or why the series does not determine them."""
    if form == "power_offset" and len(t) < 7:
        return f"{UNDETERMINED} (7 norms are needed; there are {len(t)})"

    def parameters(t: Array, rho: Array) -> list[float]:
        return list(fits.fit(form, t, rho).values.values())

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy warns of forms that fit badly
            law = fits.fit(form, t, rho)
            if form == "power_offset" and abs(law.values["p"]) < fits.P_NEAR_0:
                return f"{UNDETERMINED} (p runs to 0: a logarithm fits as well)"
            draws = fits.bootstrap(law, t, parameters, block=block, samples=200, seed=0)
    except RuntimeError:
        return f"{UNDETERMINED} (a fit of the series, or of one of its resamples, did not converge)"
    lows, highs = np.quantile(draws, [0.025, 0.975], axis=0)
    estimates = {name: (value, lows[i], highs[i]) for i, (name, value) in enumerate(law.values.items())}
    if why := undetermined(estimates, rho.max()):
        return f"{UNDETERMINED} ({why})"
    intervals = [f"{name} = {value:.4g} [{low:.4g}, {high:.4g}]" for name, (value, low, high) in estimates.items()]
    return f"{', '.join(intervals)}; R² = {law.r2:.4f}"


def undetermined(estimates: dict[str, tuple[float, float, float]], size: float) -> str:
    """Why a series does not determine the parameters of a form, or ``""`` if it does.

    Args:
        estimates: value, and lower and upper end of its interval, of each parameter.
        size: the largest norm, to which rounding of an offset ``b`` is compared.
    """
    p, low, high = estimates.get("p", (1.0, 1.0, 1.0))
    if len(estimates) == 3 and low < fits.P_NEAR_0 and high > -fits.P_NEAR_0:  # a·tᵖ + b
        return f"p = {p:.3g} [{low:.3g}, {high:.3g}] may be 0: a logarithm fits as well"
    for name, (value, low, high) in estimates.items():
        rounding = 1e-6 * (size if name == "b" else abs(value))
        if not low - rounding <= value <= high + rounding:
            return f"{name} = {value:.4g} lies outside its own interval [{low:.4g}, {high:.4g}]"
    return ""


def no_drift(total: pd.DataFrame) -> Array:
    """The no-drift curve √(ρ₀² + Σ‖Δ‖²), shape (steps,): the norm if every interval Δ had been orthogonal to θ.

    It is arithmetic on the series and no null model: for noise under the same optimizer run ``norms.NoiseGradients``.

    >>> no_drift(pd.DataFrame({"norm": [3.0, 9.0], "displacement_sq": [None, 16.0]}))
    array([3., 5.])
    """
    displacement_sq = total.displacement_sq.astype(float).fillna(0).to_numpy()
    return np.sqrt(total.norm.iloc[0] ** 2 + np.cumsum(displacement_sq))


def square_root(total: pd.DataFrame) -> Array:
    """√(ρ₀² + ct) from the first norm to the last, shape (steps,)."""
    t = total.step.to_numpy(float)
    squares = total.norm.to_numpy() ** 2
    return np.sqrt(squares[0] + (squares[-1] - squares[0]) * (t - t[0]) / (t[-1] - t[0]))


def exponents(total: pd.DataFrame) -> pd.DataFrame:
    """d ln ρ / d ln t of the series and of its no-drift curve in each whole octave, counted back from the last step.

    Columns: ``middle``, the octave's geometric mean, ``exponent`` of the series and ``no_drift``, that of the curve.
    Without a whole octave there are no rows.

    >>> total = pd.DataFrame({"step": [1, 2, 4], "norm": [1.0, 2.0, 8.0], "displacement_sq": [None, 3.0, 12.0]})
    >>> exponents(total).exponent.round(6).tolist()
    [1.0, 2.0]
    """
    t, rho = _curve(total)
    octaves = int(np.log2(t[-1] / t[0])) if len(t) else 0
    edges = t[-1:] * 2.0 ** np.arange(-octaves, 1)
    table = pd.DataFrame({"middle": np.sqrt(edges[1:] * edges[:-1])})
    if octaves == 0:
        return table
    without_drift = no_drift(total)[(total.step > 0) & (total.norm > 0)]
    return table.assign(
        exponent=fits.local_exponents(t, rho, edges), no_drift=fits.local_exponents(t, without_drift, edges)
    )


def _by_octave(total: pd.DataFrame) -> list[str]:
    """One line with the local exponent of each octave; nothing without a whole octave."""
    octaves = exponents(total)
    if octaves.empty:
        return []
    named = []
    for middle, exponent in zip(octaves.middle, octaves.exponent, strict=True):
        start = middle / math.sqrt(2)
        end = middle * math.sqrt(2)
        named.append(f"{start:.0f}–{end:.0f}: {exponent:.3f}")
    return [f"exponent d ln ρ / d ln t by octave (interpolated between steps): {', '.join(named)}"]


def budget(total: pd.DataFrame) -> list[str]:
    """One line on the growth of ρ² over all intervals, and the shares of its two terms; nothing for one checkpoint."""
    if len(total) < 2:
        return []
    displacement_sq = total.displacement_sq.sum()
    inner = total.inner.sum()
    growth_sq = displacement_sq + inner
    shares = ""
    if growth_sq > 1e-9 * (displacement_sq + abs(inner)) > 0:  # otherwise the two terms cancel
        shares = f", {displacement_sq / growth_sq:.1%} and {inner / growth_sq:.1%}"
    terms = f"‖Δ‖² {displacement_sq:.6g} + 2θ·Δ {inner:.6g}"
    return [f"norm budget: ρ² moved by {growth_sq:.6g} = {terms}{shares} (of intervals, not steps)"]
