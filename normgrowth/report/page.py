"""Figures of a measured series and the page that ``normgrowth report`` makes, beside noise of the same lengths."""

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
from normgrowth.report.summary import exponents, noise, square_root, summarise

Draw = Callable[[pd.DataFrame, pd.DataFrame], None]  # of the total and of the rows of layers
POINTS: dict[str, Any] = {"color": style.BLUE, "markersize": 3.5}
TEMPLATE = Path(__file__).with_name("page.html")


def lead(total: pd.DataFrame) -> str:
    """What the series shows, for somebody who has not read the book."""
    first, last, octaves = total.iloc[0], total.iloc[-1], exponents(total)
    text = f"From step {first.step} to {last.step} the parameter norm went from {first.norm:.4g} to {last.norm:.4g}"
    if len(octaves):
        text += f"; in the last octave it grew like t to the power {octaves.exponent.iloc[-1]:.2f} (√t is 0.5)"
    moved, inner = total.displacement_sq.sum(), total.inner.sum()
    if moved + inner > 0:
        text += (
            f". Of the growth of its square {moved / (moved + inner):.0%} is squared displacement and "
            f"{inner / (moved + inner):.0%} drift outward"
        )
    return f"{text}. Noise of the same lengths, which learns nothing, would have ended at {noise(total)[-1]:.4g}."


def write(result: MeasuredSeries, source: str, path: Path) -> None:
    """Write the page, self-contained. The figures need matplotlib.

    Raises:
        ValueError: fewer than two checkpoints: there is no growth to show.
    """
    total, parts = _split(result.table)
    if len(total) < 2:
        raise ValueError(f"{len(total)} checkpoint: a report needs two or more")
    empty: dict[Draw, bool] = {_layers: parts.empty, _octaves: exponents(total).empty}
    drawn = [_figure(draw, total, parts, caption) for draw, caption in FIGURES if not empty.get(draw)]
    known = {
        "source": escape(source),
        "lead": escape(lead(total) + (" Some checkpoints were left out; why stands below." if result.skipped else "")),
        "figures": "\n".join(drawn),
        "summary": escape(summarise(result)),
        "version": __version__,
    }
    path.write_text(Template(TEMPLATE.read_text(encoding="utf-8")).substitute(known), encoding="utf-8")


def plot(result: MeasuredSeries, path: Path) -> None:
    """The norm as on the page, by layer where the table has layers, as a file of its own."""
    import matplotlib.pyplot as plt

    style.use_style()
    total, parts = _split(result.table)
    (_norm if parts.empty else _layers)(total, parts)
    plt.savefig(path, dpi=200)
    plt.close()


def _split(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of the total, and those of layers."""
    whole = table.layer == "total"
    return table[whole].reset_index(drop=True), table[~whole]


def _figure(draw: Draw, total: pd.DataFrame, parts: pd.DataFrame, caption: str) -> str:
    import matplotlib.pyplot as plt

    with plt.rc_context():
        style.use_style()
        text = io.StringIO()
        draw(total, parts)
        plt.gcf().set_size_inches(4.6, 2.9)  # not much wider than a phone: there its text stays of reading size
        plt.savefig(text, format="svg", metadata={"Date": None})
        plt.close()
    start = f'<svg role="img" aria-label="{escape(caption)}"'
    svg = start + text.getvalue().partition("<svg")[2]
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _norm(total: pd.DataFrame, parts: pd.DataFrame) -> None:
    ax = style.axes("step $t$", r"parameter norm $\rho$")
    ax.plot(total.step, total.norm, "o-", label="this series", **POINTS)
    if len(total) > 1:
        ax.plot(total.step, square_root(total), label=r"$\sqrt{\rho_0^2+ct}$", **style.THEORY)
        ax.plot(total.step, noise(total), ":", color=style.RED, label="noise, same lengths")
    ax.legend()


def _layers(total: pd.DataFrame, parts: pd.DataFrame) -> None:
    import matplotlib.pyplot as plt

    ax = style.axes("step $t$", r"parameter norm $\rho$")
    layers = list(parts.groupby("layer", sort=False))
    for (name, rows), colour in zip(layers, plt.get_cmap("viridis")(np.linspace(0.1, 0.8, len(layers))), strict=True):
        ax.plot(rows.step, rows.norm, color=colour, linewidth=1.2, label=name)
    ax.plot(total.step, total.norm, color=style.BLUE, linewidth=2.4, label="total")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=8, ncols=1 + len(layers) // 16, loc="upper left", bbox_to_anchor=(1.01, 1))


def _octaves(total: pd.DataFrame, parts: pd.DataFrame) -> None:
    ax, found = style.axes("step $t$", r"$d\ln\rho\,/\,d\ln t$", log="x"), exponents(total)
    shown = found.middle[:: 1 + len(found) // 7]
    ax.set_xticks(shown, [f"{step:.0f}" for step in shown])
    ax.minorticks_off()
    ax.plot(found.middle, found.exponent, "o", color=style.BLUE, label="this series")
    ax.plot(found.middle, found.noise, "s", color=style.RED, fillstyle="none", label="noise, same lengths")
    ax.axhline(0.5, **style.THEORY)
    ax.legend()


def _budget(total: pd.DataFrame, parts: pd.DataFrame) -> None:
    ax = style.axes("step $t$", r"growth of $\rho^2$ in an interval")
    ax.plot(total.step, total.displacement_sq, "o-", label=r"$\|\Delta\|^2$", **POINTS)
    ax.plot(total.step, total.inner, "s-", color=style.ORANGE, markersize=3.5, label=r"$2\theta\cdot\Delta$")
    ax.axhline(0, color=style.BLACK, linewidth=0.8)
    ax.legend()


def _direction(total: pd.DataFrame, parts: pd.DataFrame) -> None:
    ax = style.axes("step $t$", "angle in degrees")
    ax.plot(total.step, np.degrees(np.arccos(total.cos_similarity)), "o-", **POINTS)
    ax.set_ylim(bottom=0)


FIGURES: tuple[tuple[Draw, str], ...] = (
    (_norm, "Norm. Dashed: the square root through both ends. Dotted: noise of the same lengths."),
    (_layers, "Norm by layer."),
    (_octaves, "Exponent by octave; noise beside it. One half is √t."),
    (_budget, "What the growth of ρ² is made of, by interval: squared displacement, and drift (outward above 0)."),
    (_direction, "Angle between neighbouring checkpoints: how far the direction turns in an interval."),
)
