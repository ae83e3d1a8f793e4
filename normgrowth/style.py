"""One style for all figures: colours, markers, the line of theoretical curves, and axes with labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito (2008): readers with any colour vision can distinguish them, in grey by their lightness.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PINK = "#CC79A7"
SKY = "#56B4E9"
RED = "#D55E00"
BLACK = "#222222"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
MARKERS = ("o", "s", "D", "^", "v", "P")  # in addition to colours, for readers and printers without them
THEORY: dict[str, Any] = {"color": BLACK, "linestyle": "--", "linewidth": 1.2, "zorder": 3}
STYLE_FILE = Path(__file__).with_name("style.mplstyle")


def use_style() -> None:
    """Apply the package's style file to matplotlib."""
    import matplotlib.pyplot as plt

    plt.style.use(str(STYLE_FILE))


def axes(xlabel: str, ylabel: str, *, log: str = "", height: float = 3.8) -> Axes:
    """A figure with one pair of labelled axes.

    Args:
        xlabel, ylabel: the labels.
        log: the logarithmic axes: ``""``, ``"x"``, ``"y"`` or ``"xy"``.
        height: height of the figure in inches; its width is 6.4.
    """
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(6.4, height))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if "x" in log:
        ax.set_xscale("log")
    if "y" in log:
        ax.set_yscale("log")
    return ax
