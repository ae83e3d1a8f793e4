"""The drawings of the chapters as files, each once for light and once for dark pages."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbformat import NotebookNode

from workflow.pages.rendering import render
from workflow.phone import STACKED, SVG

# The colours of the book's figures on light pages, and what each is on dark ones; of others see _on_dark.
TEXT, GROUND = "#ced6dd", "#121212"
DARK = {
    "#222222": TEXT, "#0072b2": "#4794e6", "#e69f00": "#e8ac2e", "#009e73": "#2fbf92", "#cc79a7": "#dd95bb",
    "#56b4e9": "#a9def9", "#d55e00": "#f0803c",
}  # fmt: skip
COLOUR = re.compile(r"#[0-9a-f]{6}\b", re.I)


@dataclass(frozen=True)
class Figure:
    """A figure of a chapter, by the name that pages refer to; ``width`` is its share of the page's."""

    name: str
    alt: str
    width: str
    svg: str
    see: str = ""  # of its caption
    stacked: str = ""  # its panels below each other

    def size(self, svg: str) -> tuple[int, int]:
        """Width and height in points of a form of it: a browser keeps room for them before the file is there."""
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
        if box is None:
            raise ValueError(f"{self.name} was not drawn by matplotlib: it has no viewBox")
        return round(float(box[1])), round(float(box[2]))

    def files(self) -> dict[str, bytes]:
        """What pages load, by path."""
        files = {}
        for ending, svg in (("", self.svg), ("-stacked", self.stacked)):
            if svg:
                path = f"_static/figures/{self.name}{ending}"
                files[f"{path}.svg"] = svg.encode()
                files[f"{path}-dark.svg"] = dark(svg).encode()
        return files


def dark(svg: str) -> str:
    """A drawing in the colours of dark pages. Letters have no colour of their own: they take that of the whole.
    Heatmaps are images: inverted, in their hues.

    >>> dark('<svg width="9"><path style="stroke: #0072B2"/></svg>')
    '<svg fill="#ced6dd" width="9"><path style="stroke: #4794e6"/></svg>'
    """
    svg = COLOUR.sub(lambda colour: DARK.get(colour[0].lower()) or _on_dark(colour[0]), svg)
    svg = svg.replace("<svg ", f'<svg fill="{TEXT}" ', 1)
    return svg.replace("<image ", '<image filter="invert(1) hue-rotate(180deg)" ')


def _on_dark(colour: str) -> str:
    """A grey between ground and letters, middle ones as clear as on light pages; of other colours, dark ones lighter.

    >>> _on_dark("#000000"), _on_dark("#ffffff"), _on_dark("#ff0000"), _on_dark("#440154")
    ('#ced6dd', '#121212', '#e66b6e', '#896c98')
    """
    red, green, blue = bytes.fromhex(colour[1:])
    text = bytes.fromhex(TEXT[1:])
    if red == green == blue:
        start = tuple(bytes.fromhex(GROUND[1:]))
        share = (1 - red / 255) ** 0.65
    else:
        start = (red, green, blue)
        is_dark = 2 * red + 5 * green + blue < 800
        share = 0.5 if is_dark else 0.0
    return "#" + "".join(f"{round(x + share * (y - x)):02x}" for x, y in zip(start, text, strict=True))


def of_cell(cell: NotebookNode) -> Figure | None:
    """The figure that a code cell draws, whose files the cell shows from now on; None where it draws none."""
    options = cell.metadata.get("mystnb", {})
    drawings = [output for output in cell.outputs if SVG in output.get("data", {})]
    if "figure" not in options or not drawings:
        return None
    image = options.get("image", {})
    last = drawings[-1]
    figure = Figure(
        name=options["figure"]["name"],
        alt=image.get("alt", ""),
        width=image.get("width", "100%"),
        svg=last.data[SVG],
        see=options["figure"].get("caption", "").partition("What to see: ")[2],
        stacked=last.data.get(STACKED, ""),
    )
    last.data = {"text/html": render("figure.html.j2", figure=figure)}
    return figure
