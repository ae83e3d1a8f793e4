"""Figures of a measured series and the page of ``normgrowth report``, with the no-drift curve beside them."""

from __future__ import annotations

import io
from collections.abc import Callable
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pandas as pd

from normgrowth import __version__, style
from normgrowth.checkpoints import MeasuredSeries
from normgrowth.report.summary import exponents, no_drift, square_root, summarise

Draw = Callable[[pd.DataFrame, pd.DataFrame], None]  # draws from rows of the total and rows of layers
POINTS: dict[str, Any] = {"color": style.BLUE, "markersize": 3.5}
TEMPLATE = Path(__file__).with_name("page.html")


def lead(total: pd.DataFrame) -> str:
    """What the series shows, for readers who do not know the book."""
    first = total.iloc[0]
    last = total.iloc[-1]
    octaves = exponents(total)
    text = f"From step {first.step} to {last.step} the parameter norm went from {first.norm:.4g} to {last.norm:.4g}"
    if len(octaves):
        text += f"; in the last octave it grew like t to the power {octaves.exponent.iloc[-1]:.2f} (√t is 0.5)"
    displacement_sq = total.displacement_sq.sum()
    drift = total.inner.sum()
    growth = displacement_sq + drift
    if growth > 0:
        text += (
            f". Of the growth of its square {displacement_sq / growth:.0%} is squared displacement and "
            f"{drift / growth:.0%} drift outward"
        )
    return f"{text}. If no interval had drifted, it would have ended at {no_drift(total)[-1]:.4g}."


def write(result: MeasuredSeries, source: str, path: Path, *, similarity: str = "") -> None:
    """Write the page as one file that loads nothing else. The figures need matplotlib.

    Args:
        source: of the series, in words.
        similarity: HTML of ``report.similarity`` on the last checkpoint.

    Raises:
        ValueError: fewer than two checkpoints, which show no growth.
    """
    total, layers = _split(result.table)
    if len(total) < 2:
        raise ValueError(f"{len(total)} checkpoint: a report needs two or more")
    without_data: set[Draw] = set()
    if layers.empty:
        without_data.add(_layers)
    if exponents(total).empty:
        without_data.add(_octaves)
    figures = [_figure(draw, total, layers, caption) for draw, caption in FIGURES if draw not in without_data]
    skipped = " Some checkpoints were left out; why stands below." if result.skipped else ""
    fields = {
        "source": escape(source),
        "lead": escape(lead(total) + skipped),
        "figures": "\n".join(figures),
        "similarity": similarity,
        "summary": escape(summarise(result)),
        "version": __version__,
    }
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    path.write_text(template.substitute(fields), encoding="utf-8")


def plot(result: MeasuredSeries, path: Path) -> None:
    """Write the page's figure of the norm to a file: by layer if the table has layers, otherwise the total."""
    import matplotlib.pyplot as plt

    style.use_style()
    total, layers = _split(result.table)
    draw = _norm if layers.empty else _layers
    draw(total, layers)
    plt.savefig(path, dpi=200)
    plt.close()


def _split(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of the total, and rows of layers."""
    is_total = table.layer == "total"
    return table[is_total].reset_index(drop=True), table[~is_total]


def _figure(draw: Draw, total: pd.DataFrame, layers: pd.DataFrame, caption: str) -> str:
    """An HTML figure with an inline SVG and its caption."""
    import matplotlib.pyplot as plt

    with plt.rc_context():
        style.use_style()
        drawing = io.StringIO()
        draw(total, layers)
        plt.gcf().set_size_inches(4.6, 2.9)  # hardly wider than a phone, where its text then stays large enough
        plt.savefig(drawing, format="svg", metadata={"Date": None})
        plt.close()
    after_svg = drawing.getvalue().partition("<svg")[2]
    svg = f'<svg role="img" aria-label="{escape(caption)}"{after_svg}'
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _norm(total: pd.DataFrame, layers: pd.DataFrame) -> None:
    ax = style.axes("step $t$", r"parameter norm $\rho$")
    ax.plot(total.step, total.norm, "o-", label="this series", **POINTS)
    if len(total) > 1:
        ax.plot(total.step, square_root(total), label=r"$\sqrt{\rho_0^2+ct}$", **style.THEORY)
        ax.plot(total.step, no_drift(total), ":", color=style.RED, label="no drift")
    ax.legend()


def _layers(total: pd.DataFrame, layers: pd.DataFrame) -> None:
    import matplotlib.pyplot as plt

    ax = style.axes("step $t$", r"parameter norm $\rho$")
    groups = list(layers.groupby("layer", sort=False))
    colours = plt.get_cmap("viridis")(np.linspace(0.1, 0.8, len(groups)))
    for (name, rows), colour in zip(groups, colours, strict=True):
        ax.plot(rows.step, rows.norm, color=colour, linewidth=1.2, label=name)
    ax.plot(total.step, total.norm, color=style.BLUE, linewidth=2.4, label="total")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=8, ncols=1 + len(groups) // 16, loc="upper left", bbox_to_anchor=(1.01, 1))


def _octaves(total: pd.DataFrame, layers: pd.DataFrame) -> None:
    ax = style.axes("step $t$", r"$d\ln\rho\,/\,d\ln t$", log="x")
    octaves = exponents(total)
    ticks = octaves.middle[:: 1 + len(octaves) // 7]
    ax.set_xticks(ticks, [f"{step:.0f}" for step in ticks])
    ax.minorticks_off()
    ax.plot(octaves.middle, octaves.exponent, "o", color=style.BLUE, label="this series")
    ax.plot(octaves.middle, octaves.no_drift, "s", color=style.RED, fillstyle="none", label="no drift")
    ax.axhline(0.5, **style.THEORY)
    ax.legend()


def _budget(total: pd.DataFrame, layers: pd.DataFrame) -> None:
    ax = style.axes("step $t$", r"growth of $\rho^2$ in an interval")
    ax.plot(total.step, total.displacement_sq, "o-", label=r"$\|\Delta\|^2$", **POINTS)
    ax.plot(total.step, total.inner, "s-", color=style.ORANGE, markersize=3.5, label=r"$2\theta\cdot\Delta$")
    ax.axhline(0, color=style.BLACK, linewidth=0.8)
    ax.legend()


def _direction(total: pd.DataFrame, layers: pd.DataFrame) -> None:
    ax = style.axes("step $t$", "angle in degrees")
    ax.plot(total.step, np.degrees(np.arccos(total.cos_similarity)), "o-", **POINTS)
    ax.set_ylim(bottom=0)


FIGURES: tuple[tuple[Draw, str], ...] = (
    (
        _norm,
        "Norm. Dashed: the square root through both ends. Dotted: the no-drift curve √(ρ₀² + Σ‖Δ‖²), the norm if no "
        "interval had drifted.",
    ),
    (_layers, "Norm by layer."),
    (_octaves, "Exponent by octave, and that of the no-drift curve. One half is √t."),
    (_budget, "What the growth of ρ² is made of, by interval: squared displacement, and drift (outward above 0)."),
    (_direction, "Angle between neighbouring checkpoints: how far the direction turns in an interval."),
)
