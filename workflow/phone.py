"""For phones: figures of panels beside each other are drawn a second time, with the panels below each other.

An extension of the kernel in which a chapter runs; a reader's notebook does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG = "image/svg+xml"
STACKED = "application/vnd.norm-growth.stacked+svg"  # what a notebook's output calls the second drawing
WIDTH, HEIGHT = 4.2, 2.9  # of a panel, in inches of 72 px


def load_ipython_extension(shell: Any) -> None:
    shell.display_formatter.mimebundle_formatter.for_type_by_name("matplotlib.figure", "Figure", drawings)


def drawings(figure: Figure) -> dict[str, str]:
    """By MIME type a figure as it is and, if it has several columns, stacked, as it is left then."""
    from IPython import get_ipython
    from IPython.core.pylabtools import print_figure

    # that of the inline backend would draw the figure again, as it was left
    get_ipython().display_formatter.formatters[SVG].pop(type(figure), None)
    images = {SVG: print_figure(figure, "svg", metadata={"Date": None})}
    if any((spec := ax.get_subplotspec()) and spec.get_gridspec().ncols > 1 for ax in figure.axes):
        stack(figure)
        images[STACKED] = print_figure(figure, "svg", metadata={"Date": None})
    return images


def stack(figure: Figure) -> None:
    """Put the panels of a grid below each other, row by row; each then needs what its row or column shared.

    >>> import matplotlib.pyplot as plt
    >>> figure, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(8, 3))
    >>> label = left.set_ylabel("ρ")
    >>> stack(figure)
    >>> figure.canvas.draw()
    >>> right.get_ylabel(), bool(left.get_position().y0 > right.get_position().y1)
    ('ρ', True)
    """
    from matplotlib import rcParams

    place = rcParams["axes.titlelocation"]
    panels = [(ax, spec.rowspan.start, spec.colspan.start) for ax in figure.axes if (spec := ax.get_subplotspec())]
    beside = {row: ax.get_ylabel() for ax, row, column in panels if column == 0}
    above = {column: ax.get_title(place) for ax, row, column in panels if row == 0}
    below = {column: ax.get_xlabel() for ax, _, column in panels}  # of the last row
    grid = figure.add_gridspec(len(panels), 1)
    for line, (ax, row, column) in enumerate(panels):
        ax.set_subplotspec(grid[line])
        ax.tick_params(labelleft=True, labelbottom=True)
        ax.set_title(ax.get_title(place) or above[column])
        ax.set(xlabel=ax.get_xlabel() or below[column], ylabel=ax.get_ylabel() or beside[row])
    figure.set_layout_engine("constrained")
    for legend in [*figure.legends]:  # as narrow as a panel
        names = [text.get_text() for text in legend.texts]
        figure.legend(list(filter(None, legend.legend_handles)), names, loc="outside lower center")
        legend.remove()
    figure.set_size_inches(WIDTH, HEIGHT * len(panels))
