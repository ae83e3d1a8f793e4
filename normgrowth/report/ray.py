"""Figure of a model's function along the ray: what survives when the parameters, or those of a part, are scaled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from normgrowth import style
from normgrowth.saturation import ALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_ray(table: pd.DataFrame, path: Path) -> None:
    """Write the figure of a table of ``along_ray``: agreement, and below it the loss where there are next tokens.

    A table of several parts has a curve for each of them; one of all parameters alone has the accuracy beside the
    agreement.
    """
    import matplotlib.pyplot as plt

    style.use_style()
    panels = 2 if table.attrs["next_token"] else 1
    figure, axes = plt.subplots(panels, 1, sharex=True, squeeze=False, figsize=(6.4, 3.2 * panels + 0.6))
    upper, lower = axes[0, 0], axes[-1, 0]
    _curves(upper, table, "agreement")
    chance = table.attrs["chance"]
    if list(table.part.unique()) == [ALL] and table.attrs["next_token"]:
        upper.plot(table.c, table.accuracy, "s-", color=style.ORANGE, label="accuracy of the next token")
        upper.lines[0].set_label("agreement with the unscaled model")
    upper.set(ylabel="agreement with the unscaled model" if panels == 1 else "share of positions", ylim=(-0.03, 1.03))
    if "agreement" in chance:
        upper.axhline(chance["agreement"], label="chance", **style.THEORY)
    upper.axvline(1, color=style.BLACK, linewidth=0.8)
    if panels == 2:
        _curves(lower, table, "loss")
        lower.axhline(chance["loss"], **style.THEORY)
        lower.annotate("chance, ln(vocabulary)", (table.c.min(), chance["loss"]), (0, -4), textcoords="offset points",
                       va="top", fontsize=9.5)  # fmt: skip
        lower.axvline(1, color=style.BLACK, linewidth=0.8)
        lower.set(ylabel="loss at the best\ntemperature [nats]", ylim=(0, 1.06 * max(chance["loss"], table.loss.max())))
    lower.set_xlabel("parameters times $c$")
    _spread(lower, table.c)
    upper.legend(loc="upper left", bbox_to_anchor=(1.01, 1), title=None)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def _curves(ax: Axes, table: pd.DataFrame, column: str) -> None:
    """A curve for each part, in colours and markers of its own."""
    for number, (part, rows) in enumerate(table.groupby("part", sort=False)):
        look: dict[str, Any] = {"color": style.COLOURS[number % 6], "marker": style.MARKERS[number % 6]}
        if number >= 6:
            look |= {"color": style.BLACK, "linestyle": ":"}
        ax.plot(rows.c, rows[column], label=part, **look)


def _spread(ax: Axes, scales: pd.Series) -> None:
    """A logarithmic axis with a tick at each scale that has room, or the scales themselves."""
    ax.set_xscale("log")
    ax.minorticks_off()
