"""``nbutils report``: a measured series as one page to send, with what noise of the same lengths would have done."""

from __future__ import annotations

import io
from collections.abc import Callable
from html import escape
from pathlib import Path
from string import Template

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nbutils import __version__, figures, fits
from nbutils.checkpoints import Series, report

Array = NDArray[np.float64]
Draw = Callable[[pd.DataFrame, pd.DataFrame], None]  # of the total and of the whole table
TEMPLATE = Path(__file__).with_name("page.html")


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


def sentences(total: pd.DataFrame) -> list[str]:
    """What the series shows, for somebody who has not read the book."""
    first, last = total.iloc[0], total.iloc[-1]
    moved, inner = total.displacement_sq.sum(), total.inner.sum()
    grown, end = moved + inner, noise(total)[-1]
    words = [f"From step {first.step} to {last.step} the parameter norm went from {first.norm:.4g} to {last.norm:.4g}"]
    octaves = exponents(total)
    if len(octaves):
        words[0] += f"; in the last octave it grew like t to the power {octaves['exponent'].iloc[-1]:.2f} (√t is 0.5)"
    if grown > 0 and moved > 0:
        way = "outward" if inner > 0 else "inward"
        words.append(
            f"Of the growth of its square {moved / grown:.0%} is the length of the way and {inner / grown:.0%} drift "
            f"{way}: noise of the same lengths, which learns nothing, would have ended at {end:.4g}"
        )
    return [f"{text}." for text in words]


def exponents(total: pd.DataFrame) -> pd.DataFrame:
    """d ln ρ / d ln t of the series and of noise in each octave, counted back from the last step."""
    after = total[total.step > 0]
    t = after.step.to_numpy(float)
    edges = report.octaves(t)
    curves = {"exponent": after.norm.to_numpy(), "noise": noise(total)[total.step > 0]}
    found = pd.DataFrame({"middle": np.sqrt(edges[1:] * edges[:-1])})
    return found.assign(**{name: fits.local_exponents(t, rho, edges) for name, rho in curves.items() if len(edges)})


def write(result: Series, source: str, path: Path) -> None:
    """Write the page, self-contained. The figures need matplotlib.

    Raises:
        ValueError: fewer than two checkpoints: there is no growth to show.
    """
    total = result.table[result.table.layer == "total"].reset_index(drop=True)
    if len(total) < 2:
        raise ValueError(f"{len(total)} checkpoint: a report needs two or more")
    empty: dict[Draw, bool] = {_layers: result.table.layer.nunique() == 1, _octaves: exponents(total).empty}
    drawn = [_figure(draw, total, result.table, caption) for draw, caption in FIGURES if not empty.get(draw)]
    known = {"source": escape(source), "sentences": "</p><p>".join(map(escape, sentences(total)))}
    known |= {"version": __version__}
    known |= {"figures": "\n".join(drawn), "summary": escape(report.summary(result))}
    path.write_text(Template(TEMPLATE.read_text(encoding="utf-8")).substitute(known), encoding="utf-8")


def _figure(draw: Draw, total: pd.DataFrame, table: pd.DataFrame, caption: str) -> str:
    import matplotlib.pyplot as plt

    with plt.rc_context():
        figures.use_style()
        text = io.StringIO()
        draw(total, table)
        plt.gcf().set_size_inches(4.6, 2.9)  # not much wider than a phone: there its text stays of reading size
        plt.savefig(text, format="svg", metadata={"Date": None})
        plt.close()
    svg = text.getvalue()[text.getvalue().index("<svg") :].replace(
        "<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1
    )
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _norm(total: pd.DataFrame, table: pd.DataFrame) -> None:
    ax = figures.axes("step $t$", r"parameter norm $\rho$")
    ax.plot(total.step, total.norm, "o-", color=figures.BLUE, markersize=3.5, label="this series")
    ax.plot(total.step, square_root(total), label=r"$\sqrt{\rho_0^2+ct}$", **figures.THEORY)
    ax.plot(total.step, noise(total), ":", color=figures.RED, label="noise, same lengths")
    ax.legend()


def _layers(total: pd.DataFrame, table: pd.DataFrame) -> None:
    import matplotlib.pyplot as plt

    ax = figures.axes("step $t$", r"$\rho/\rho_0$ of a layer")
    parts = [(name, rows) for name, rows in table.groupby("layer", sort=False) if name != "total"]
    for (name, rows), colour in zip(parts, plt.get_cmap("viridis")(np.linspace(0.1, 0.8, len(parts))), strict=True):
        if rows.norm.iloc[0] > 0:
            ax.plot(rows.step, rows.norm / rows.norm.iloc[0], color=colour, linewidth=1.2, label=name)
    ax.plot(total.step, total.norm / total.norm.iloc[0], color=figures.BLUE, linewidth=2.4, label="total")
    ax.legend(fontsize=8, ncols=1 + len(parts) // 16, loc="upper left", bbox_to_anchor=(1.01, 1))


def _octaves(total: pd.DataFrame, table: pd.DataFrame) -> None:
    ax, found = figures.axes("step $t$", r"$d\ln\rho\,/\,d\ln t$", log="x"), exponents(total)
    shown = found.middle[:: 1 + len(found) // 7]
    ax.set_xticks(shown, list(map(report.named, shown)))
    ax.minorticks_off()
    ax.plot(found.middle, found.exponent, "o", color=figures.BLUE, label="this series")
    ax.plot(found.middle, found.noise, "s", color=figures.RED, fillstyle="none", label="noise, same lengths")
    ax.axhline(0.5, **figures.THEORY)
    ax.legend()


def _budget(total: pd.DataFrame, table: pd.DataFrame) -> None:
    ax = figures.axes("step $t$", r"growth of $\rho^2$ in an interval")
    ax.plot(total.step, total.displacement_sq, "o-", color=figures.BLUE, markersize=3.5, label=r"$\|\Delta\|^2$")
    ax.plot(total.step, total.inner, "s-", color=figures.ORANGE, markersize=3.5, label=r"$2\theta\cdot\Delta$")
    ax.axhline(0, color=figures.BLACK, linewidth=0.8)
    ax.legend()


def _direction(total: pd.DataFrame, table: pd.DataFrame) -> None:
    ax = figures.axes("step $t$", "angle in degrees")
    ax.plot(
        total.step, np.degrees(np.arccos(total.cos_similarity.astype(float))), "o-", color=figures.BLUE, markersize=3.5
    )
    ax.set_ylim(bottom=0)


FIGURES: tuple[tuple[Draw, str], ...] = (
    (_norm, "Norm. Dashed: the square root through both ends. Dotted: noise of the same lengths."),
    (_layers, "Norm by layer, over its norm at the first step."),
    (_octaves, "Exponent by octave; noise beside it. One half is √t."),
    (_budget, "What the growth of ρ² is made of, by interval: the length of the way, and drift (outward above 0)."),
    (_direction, "Angle between neighbouring checkpoints: how far the direction turns in an interval."),
)
