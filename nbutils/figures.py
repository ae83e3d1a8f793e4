"""One style for all figures, numbers that prose takes from the run, and the code that a chapter rests on."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nbutils import data

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike

# Okabe and Ito (2008): told apart with any colour vision, and in grey by their lightness.
BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#222222"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
MARKERS = ("o", "s", "D", "^", "v", "P")  # beside a colour: some printers and readers have none
THEORY: dict[str, Any] = {"color": BLACK, "linestyle": "--", "linewidth": 1.2, "zorder": 3}


def use_style() -> None:
    """Apply the book's style file; in a notebook figures become SVG, sharp at any size."""
    import matplotlib.pyplot as plt

    plt.style.use(str(data.path("book.mplstyle")))
    if _in_notebook():
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata={"Date": None})  # the same run gives the same file


def axes(xlabel: str, ylabel: str, *, log: str = "", height: float = 3.8) -> Axes:
    """One pair of axes with labels; ``log`` names the logarithmic ones: ``""``, ``"x"``, ``"y"`` or ``"xy"``."""
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(6.4, height))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if "x" in log:
        ax.set_xscale("log")
    if "y" in log:
        ax.set_yscale("log")
    return ax


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


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")  # a notebook has loaded it
    return shell is not None and shell.get_ipython() is not None


def show(bundle: dict[str, Any], **metadata: Any) -> None:
    """Show data by MIME type in a notebook; elsewhere print the plain text among them.

    >>> show({"text/plain": "a line", "text/markdown": "a *line*"})
    a line
    """
    if _in_notebook():
        from IPython.display import display

        display(bundle, metadata=metadata, raw=True)
    elif "text/plain" in bundle:
        print(bundle["text/plain"])


def glue(**numbers: str) -> None:
    """Keep numbers of the run, already formatted, for the prose of the chapter: it shows them by ``{glue:text}``.

    Writes what ``myst_nb.glue`` writes, without needing it: Colab does not have it. Outside the book it prints, too.

    >>> glue(exponent=f"{-0.5:.2f}")  # with a minus sign, not a hyphen
    exponent = −0.50
    """
    for name, given in numbers.items():
        text = re.sub(r"(?<![\w.)])-(?=[\d.]|inf)", "−", str(given))
        scrap = {"name": name, "mime_prefix": "application/papermill.record/"}
        show({"application/papermill.record/text/plain": repr(text)}, scrapbook=scrap)
        if not os.environ.get("NBUTILS_BOOK"):
            print(f"{name} = {text}")


def listing(*functions: Callable[..., Any]) -> None:
    """Show the source of functions or classes, so that a chapter's mathematics can be read in the chapter.

    >>> import nbutils.intervals
    >>> listing(nbutils.intervals.rounding)  # doctest: +ELLIPSIS
    def rounding(terms: int, bits: int = 53) -> float:
    ...
    """
    text = "\n\n".join(inspect.getsource(function).rstrip() for function in functions)
    show({"text/plain": text, "text/markdown": f"```python\n{text}\n```"})
