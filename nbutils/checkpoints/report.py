"""What a measured series shows: growth laws with intervals, norm budget, what did not count, and the figure."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nbutils import fits
from nbutils.checkpoints import Series, grouped
from nbutils.intervals import Estimate

Array = NDArray[np.float64]
UNDETERMINED = "not determined by this series"


def as_json(result: Series) -> str:
    """The table as a list of rows, and what did not count with its reasons."""
    rows = json.loads(result.table.to_json(orient="records", double_precision=15))
    skips = {kind: [skip._asdict() for skip in getattr(result, kind)] for kind in ("duplicates", "skipped")}
    found = {"table": rows, **skips, "left_out": result.left_out, "parameters": result.parameters}
    return json.dumps(found, indent=1, ensure_ascii=False)


def summary(result: Series) -> str:
    """What the series shows, in lines: growth with intervals, local exponents, norm budget, and what did not count."""
    table = result.table
    total = table[table.layer == "total"]
    resumed = f", {result.resumed} of them from the run before" if result.resumed else ""
    first, last = total.iloc[0], total.iloc[-1]
    lines = [
        f"{len(total)} checkpoint{'s' if len(total) > 1 else ''}, steps {first.step} to {last.step}{resumed}; "
        f"{result.parameters:,} parameters",
        f"norm {_from_to(total)}",
        *growth(total),
        *budget(total),
    ]
    parts = table[table.layer != "total"].groupby("layer", sort=False)
    lines += _section("by layer", (f"{layer}: {_from_to(rows)}" for layer, rows in parts))
    lines += _section("duplicates, not counted", map(str, result.duplicates))
    lines += _section("skipped, not counted", grouped(result.skipped))
    reasons: dict[str, list[str]] = {}
    for name, why in result.left_out.items():
        reasons.setdefault(why, []).append(name)
    lines += _section("tensors left out", (f"{why}: {_first_two(names)}" for why, names in reasons.items()))
    return "\n".join(lines)


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = [f"  {line}" for line in lines]
    return [f"{title}:", *found] if found else []


def _first_two(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


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


def _enough(rho: Array) -> bool:
    """Whether there are norms enough for a fit: one rule for text and figure."""
    return len(rho) >= 5 and rho.min() < rho.max()


def growth(total: pd.DataFrame, samples: int = 200) -> list[str]:
    """Growth laws with 95 % intervals from moving-block resamples, and the local exponent of each octave."""
    t, rho = _curve(total)
    if not _enough(rho):
        few = f"no fit: at least 5 norms that differ, at steps above 0, are needed; there are {len(t)}"
        return [few, *_by_octave(t, rho)]
    block = max(2, round(len(t) ** (1 / 2)))
    forms = ("sqrt", "square", "log", "power", *(["power_offset"] if len(t) > 6 else []))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scipy, on resamples that a form fits badly; they are counted below
        found = [f"  {fits.FORMS[form].label}: {_law(form, t, rho, block, samples)}" for form in forms]
    title = (
        f"fits over steps {t[0]:.0f} to {t[-1]:.0f}, with 95 % intervals from the scatter around each curve "
        f"(residuals in blocks of {block}; another seed may differ more):"
    )
    return [title, *found, *_by_octave(t, rho)]


def _law(form: str, t: Array, rho: Array, block: int, samples: int) -> str:
    """The parameters of one form with their intervals, or why the series does not determine them."""
    names = fits.FORMS[form].parameters

    def parameters(t: Array, rho: Array) -> list[float]:
        try:
            return list(fits.fit(form, t, rho).values.values())
        except RuntimeError:  # a resample that the form does not fit
            return [math.nan] * len(names)

    try:
        found = fits.fit(form, t, rho)
    except RuntimeError:
        return "no fit"
    if form == "power_offset" and abs(found.values["p"]) < fits.P_NEAR_0:
        return f"{UNDETERMINED} (p runs to 0: a logarithm fits as well)"
    draws = fits.bootstrap(found, t, parameters, block=block, samples=samples, seed=0)
    kept = draws[np.isfinite(draws).all(1)]
    if len(kept) < 0.9 * samples:
        return f"{UNDETERMINED} (R² = {found.r2:.4f})"
    ends = np.quantile(kept, [0.025, 0.975], axis=0).T
    each = zip(names, ends, strict=True)
    estimates = {name: Estimate(found.values[name], low, high, len(kept)) for name, (low, high) in each}
    if why := undetermined(estimates, float(rho.max())):
        return f"{UNDETERMINED} ({why})"
    named = (f"{name} = {e.value:.4g} [{e.low:.4g}, {e.high:.4g}]" for name, e in estimates.items())
    return f"{', '.join(named)}; R² = {found.r2:.4f}"


def undetermined(estimates: Mapping[str, Estimate], size: float) -> str:
    """Why estimates with intervals mean nothing, or ``""``; ``size`` is that of the norms."""
    if len(estimates) == 3:  # a·tᵖ + b
        p, low, high, _ = estimates["p"]
        if low < fits.P_NEAR_0 and high > -fits.P_NEAR_0:
            return f"p = {p:.3g} [{low:.3g}, {high:.3g}] may be 0: a logarithm fits as well"
    for name, (value, low, high, _) in estimates.items():
        rounding = 1e-6 * {"p": 1.0, "b": size}.get(name, abs(value))
        if not low - rounding <= value <= high + rounding:
            return f"{name} = {value:.4g} lies outside its own interval [{low:.4g}, {high:.4g}]"
    return ""


def octaves(t: Array) -> Array:
    """Edges of the whole octaves that steps above 0 cover, counted back from the last; none where there is no octave.

    >>> octaves(np.array([1000.0, 3000.0, 8000.0])).tolist()
    [1000.0, 2000.0, 4000.0, 8000.0]
    """
    count = int(np.log2(t[-1] / t[0])) if len(t) else 0
    return t[-1] * 2.0 ** np.arange(-count, 1) if count else np.array([])


def named(step: float) -> str:
    """A step between two of the series, as text."""
    return f"{step:.0f}" if step >= 100 else f"{step:.3g}"


def _by_octave(t: Array, rho: Array) -> list[str]:
    """Local exponents of whole octaves."""
    edges = octaves(t)
    if not len(edges):
        return []
    names = list(map(named, edges))
    each = zip(names, names[1:], fits.local_exponents(t, rho, edges), strict=False)
    slopes = ", ".join(f"{start}–{end}: {slope:.3f}" for start, end, slope in each)
    rare = " (interpolated where steps are further apart)" if (t[1:] > 2 * t[:-1]).any() else ""
    return [f"exponent d ln ρ / d ln t by octave{rare}: {slopes}"]


def budget(total: pd.DataFrame) -> list[str]:
    """Shares of the growth of ρ² over all intervals."""
    moved, inner = total.displacement_sq.sum(), total.inner.sum()
    grown = moved + inner
    if len(total) < 2:
        return []
    shares = f", {moved / grown:.1%} and {inner / grown:.1%}" if abs(grown) > 1e-9 * (moved + abs(inner)) > 0 else ""
    return [
        f"norm budget: ρ² grew by {grown:.6g} = ‖Δ‖² {moved:.6g} + 2θ·Δ {inner:.6g}{shares} (of intervals, not steps)"
    ]


def plot(result: Series, path: Path) -> None:
    """Norm against step, by layer where there are layers, with the fitted square root beside it."""
    import matplotlib.pyplot as plt

    from nbutils import figures

    figures.use_style()
    table = result.table
    total, parts = table[table.layer == "total"], table[table.layer != "total"]
    ax = figures.axes("step $t$", r"parameter norm $\rho$")
    figure = plt.gcf()
    layers = list(dict.fromkeys(parts.layer))
    blocks = [layer for layer in layers if layer.split(" ")[-1].isdigit()]
    colours = dict(zip(blocks, plt.get_cmap("viridis")(np.linspace(0.05, 0.85, max(len(blocks), 1))), strict=False))
    colours |= {"embeddings": figures.ORANGE, "head": figures.GREEN, "rest": figures.PINK}
    for layer, rows in parts.groupby("layer", sort=False):
        named = layer not in blocks or layer in (blocks[0], blocks[-1])
        ax.plot(rows.step, rows.norm, color=colours.get(layer), linewidth=1.2, label=layer if named else None)
    ax.plot(total.step, total.norm, "o-", color=figures.BLUE, label="total", markersize=3.5 if len(total) < 60 else 2)
    t, rho = _curve(total)
    if _enough(rho):
        a, b = fits.fit("sqrt", t, rho).values.values()
        line, label = np.linspace(t[0], t[-1], 300), f"fit $a\\sqrt{{t}}+b$\n$a$ = {a:.4g}, $b$ = {b:.4g}"
        ax.plot(line, a * np.sqrt(line) + b, label=label, **figures.THEORY)
    elif len(t):
        line = np.linspace(total.step.iloc[0], t[-1], 300)
        ax.plot(line, rho[-1] * np.sqrt(line / t[-1]), label=r"$\propto\sqrt{t}$", **figures.THEORY)
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=9)
    if layers:  # many curves: beside them
        figure.set_figwidth(8.4)
        ax.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(path, dpi=200)
    plt.close(figure)
