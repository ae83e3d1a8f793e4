"""Figures of the chapters: the shared style, bands of independent runs, and populations of trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nbutils.notebook import in_notebook
from normgrowth import style
from normgrowth.style import BLACK, BLUE, COLOURS, GREEN, MARKERS, ORANGE, PINK, RED, SKY, THEORY, axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike

__all__ = [
    "BLACK",
    "BLUE",
    "COLOURS",
    "GREEN",
    "MARKERS",
    "ORANGE",
    "PINK",
    "RED",
    "SKY",
    "THEORY",
    "axes",
    "population",
    "spread",
    "use_style",
]


def use_style() -> None:
    """Apply the style of the book; in a notebook figures become SVG, sharp at any size."""
    style.use_style()
    if in_notebook():
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata={"Date": None})  # the same run gives the same file


def spread(ax: Axes, x: ArrayLike, runs: ArrayLike, colour: str, *, level: float = 0.9) -> None:
    """Shade where the middle ``level`` of independent runs lie, ``runs`` of shape ``(runs, points)``.

    >>> ax = axes("t", "ρ")
    >>> spread(ax, [1, 2], [[0.0, 1.0], [1.0, 3.0], [2.0, 2.0]], BLUE, level=1.0)
    >>> ax.collections[0].get_datalim(ax.transData).extents.tolist()  # from the lowest run to the highest
    [1.0, 0.0, 2.0, 3.0]
    """
    low, high = np.quantile(np.asarray(runs), [(1 - level) / 2, (1 + level) / 2], axis=0)
    ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def population(
    values: Mapping[str, Mapping[str, ArrayLike]],
    xlabel: str,
    *,
    colours: Sequence[str] = COLOURS,
    at: str,
    sides: Sequence[int],
) -> Axes:
    """A row for each group, in it a line of points for each quantity: small for runs, large for their median.

    The bar is the median's 95 % interval (bootstrap).

    Args:
        values: by quantity and group the values of the runs.
        at: the group in whose row the quantities' names stand, in place of a legend.
        sides: for each quantity 1 if its name stands to the right of its points, -1 if to the left.

    >>> ax = population({"loss": {"SGD": [1, 2, 3], "Adam": [2, 3]}}, "nats", at="SGD", sides=[1])
    >>> ax.get_xlabel(), [label.get_text() for label in ax.get_yticklabels()], [text.get_text() for text in ax.texts]
    ('nats', ['SGD', 'Adam'], ['loss'])
    """
    import pandas as pd
    import seaborn as sns

    runs = [(what, group, x) for what, of in values.items() for group, each in of.items() for x in np.asarray(each)]
    count, groups = len(values), list(dict.fromkeys(group for _, group, _ in runs))
    ax = axes("", "", height=1 + 0.2 * (count + 1) * len(groups))
    table = pd.DataFrame(runs, columns=["what", "", xlabel])
    same = {
        "data": table,
        "x": xlabel,
        "y": "",
        "hue": "what",
        "palette": [*colours[:count]],
        "legend": False,
        "ax": ax,
    }
    sns.stripplot(**same, dodge=count > 1, jitter=False, size=3, alpha=0.5)
    centre = {"estimator": "median", "errorbar": ("ci", 95), "seed": 0, "linestyle": "none", "markersize": 6}
    markers = [*MARKERS[:count]]
    sns.pointplot(**same, **centre, dodge=0.8 - 0.8 / count, markers=markers, err_kws={"linewidth": 1.5})
    for line, (what, colour, side) in enumerate(zip(values, colours, sides, strict=False)):
        x = side * np.nanmax(side * np.asarray(values[what][at]))
        y = groups.index(at) - 0.4 + 0.8 * (line + 0.5) / count
        style: dict[str, Any] = {"color": colour, "ha": "left" if side > 0 else "right", "va": "center"}
        ax.annotate(what, (x, y), (8 * side, 0), textcoords="offset points", fontsize="small", **style)
    return ax
