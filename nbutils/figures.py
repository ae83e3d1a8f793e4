"""Figures of the chapters: style, bands of independent runs, and populations of trainings."""

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
    "BLACK", "BLUE", "COLOURS", "GREEN", "MARKERS", "ORANGE", "PINK", "RED", "SKY", "THEORY", "axes", "population",
    "spread", "use_style",
]  # fmt: skip


def use_style() -> None:
    """Apply the style of the book; in a notebook, figures are SVG, sharp at any size."""
    style.use_style()
    if in_notebook():
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata={"Date": None})  # no date: the same run gives the same file


def spread(ax: Axes, x: ArrayLike, runs: ArrayLike, colour: str, *, level: float = 0.9) -> None:
    """Shade the band that holds the middle share ``level`` of independent runs, at each point by itself.

    ``x`` has shape ``(points,)`` and ``runs`` has shape ``(runs, points)``.

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
    label_group: str,
    sides: Sequence[int],
) -> Axes:
    """Draw a row for every group and, in each row, a line of points for every quantity.

    Small points are the runs, the large point is their median, and the bar is its 95 % interval (bootstrap).

    Args:
        values: quantity → group → values of the runs, ``(runs,)``.
        xlabel: label of the axis that all quantities share.
        colours: of the quantities, in order.
        label_group: the group in whose row the names of the quantities stand, in place of a legend.
        sides: for every quantity, 1 if its name stands to the right of its points, −1 if to the left.

    >>> ax = population({"loss": {"SGD": [1, 2, 3], "Adam": [2, 3]}}, "nats", label_group="SGD", sides=[1])
    >>> ax.get_xlabel(), [label.get_text() for label in ax.get_yticklabels()], [text.get_text() for text in ax.texts]
    ('nats', ['SGD', 'Adam'], ['loss'])
    """
    import pandas as pd
    import seaborn as sns

    rows = []
    for quantity, samples in values.items():
        for group, sample in samples.items():
            rows += [(quantity, group, x) for x in np.asarray(sample)]
    table = pd.DataFrame(rows, columns=["quantity", "", xlabel])
    groups = list(dict.fromkeys(table[""]))
    count = len(values)
    ax = axes("", "", height=1 + 0.2 * (count + 1) * len(groups))
    shared: dict[str, Any] = {"data": table, "x": xlabel, "y": "", "hue": "quantity", "legend": False, "ax": ax}
    shared["palette"] = [*colours[:count]]
    sns.stripplot(**shared, dodge=count > 1, jitter=False, size=3, alpha=0.5)
    sns.pointplot(
        **shared, estimator="median", errorbar=("ci", 95), seed=0, markers=[*MARKERS[:count]], markersize=6,
        linestyle="none", dodge=0.8 - 0.8 / count, err_kws={"linewidth": 1.5},
    )  # fmt: skip
    for line, (quantity, colour, side) in enumerate(zip(values, colours, sides, strict=False)):
        x = side * np.nanmax(side * np.asarray(values[quantity][label_group]))
        # seaborn spreads the quantities of a group over 0.8 of a row; the name stands level with its points
        y = groups.index(label_group) - 0.4 + 0.8 * (line + 0.5) / count
        alignment: dict[str, Any] = {"ha": "left" if side > 0 else "right", "va": "center"}
        offset = (8 * side, 0)  # in points
        ax.annotate(quantity, (x, y), offset, textcoords="offset points", fontsize="small", color=colour, **alignment)
    return ax
