"""Populations of trainings by seaborn: every run, and the median with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nbutils import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike


def draw(
    values: Mapping[str, Mapping[str, ArrayLike]],
    xlabel: str,
    *,
    colours: Sequence[str] = figures.COLOURS,
    at: str,
    sides: Sequence[int],
) -> Axes:
    """A row for each group, in it a line of points for each quantity: small for runs, large for their median.

    The bar is the median's 95 % interval (bootstrap). Quantities have no legend: their names stand beside one row.

    Args:
        values: by quantity and group the values of the runs.
        at: the group in whose row names stand.
        sides: for each quantity 1 if its name stands to the right of its points, -1 if to the left.

    >>> ax = draw({"loss": {"SGD": [1, 2, 3], "Adam": [2, 3]}}, "nats", at="SGD", sides=[1])
    >>> ax.get_xlabel(), [label.get_text() for label in ax.get_yticklabels()], [text.get_text() for text in ax.texts]
    ('nats', ['SGD', 'Adam'], ['loss'])
    """
    import seaborn as sns

    runs = [(what, group, x) for what, of in values.items() for group, each in of.items() for x in np.asarray(each)]
    count, groups = len(values), list(dict.fromkeys(group for _, group, _ in runs))
    ax = figures.axes("", "", height=1 + 0.2 * (count + 1) * len(groups))
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
    markers = [*figures.MARKERS[:count]]
    sns.pointplot(**same, **centre, dodge=0.8 - 0.8 / count, markers=markers, err_kws={"linewidth": 1.5})
    for line, (what, colour, side) in enumerate(zip(values, colours, sides, strict=False)):
        x = side * np.nanmax(side * np.asarray(values[what][at]))
        y = groups.index(at) - 0.4 + 0.8 * (line + 0.5) / count
        style: dict[str, Any] = {"color": colour, "ha": "left" if side > 0 else "right", "va": "center"}
        ax.annotate(what, (x, y), (8 * side, 0), textcoords="offset points", fontsize="small", **style)
    return ax
