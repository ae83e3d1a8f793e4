"""One style for all figures: colours, markers, the look of theory, and axes with labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito (2008): told apart with any colour vision, and in grey by their lightness.
BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#222222"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
MARKERS = ("o", "s", "D", "^", "v", "P")  # beside a colour: some printers and readers have none
THEORY: dict[str, Any] = {"color": BLACK, "linestyle": "--", "linewidth": 1.2, "zorder": 3}
STYLE_FILE = Path(__file__).with_name("style.mplstyle")


def use_style() -> None:
    """Apply the style file to matplotlib."""
    import matplotlib.pyplot as plt

    plt.style.use(str(STYLE_FILE))


def axes(xlabel: str, ylabel: str, *, log: str = "", height: float = 3.8) -> Axes:
    """One pair of axes with labels; ``log`` names the logarithmic ones: ``""``, ``"x"``, ``"y"`` or ``"xy"``.

    ``height`` is that of the figure in inches; its width is 6.4.
    """
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(6.4, height))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if "x" in log:
        ax.set_xscale("log")
    if "y" in log:
        ax.set_yscale("log")
    return ax
