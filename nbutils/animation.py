"""Figures that move: frames of one matplotlib figure with play, pause and a slider, without a kernel or a network.

The axes are drawn once. A frame holds only the artists that move, as SVG, so a hundred frames are small.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

MOVING = re.compile(r'^( *)<g id="moving-\d+">\n.*?^\1</g>\n|^ *<image [^>]*id="moving-\d+"[^>]*/>\n', re.M | re.S)
SNIPPET = """<div class="nb-animation" id="@ID" style="max-width:640px">
<div style="background:#fff;border-radius:4px;overflow:hidden">@SVG</div>
<div class="nb-controls" hidden style="display:none;gap:.6rem;align-items:center;margin-top:.4rem">
<button type="button" style="min-width:4.5rem">Play</button>
<input type="range" min="0" max="@LAST" value="@LAST" aria-label="@NAME" style="flex:1;min-width:6rem">
<output style="min-width:7rem">@LABEL</output></div>
<script>(() => {
const root = document.getElementById("@ID"), frames = @FRAMES, labels = @LABELS;
const bar = root.querySelector(".nb-controls"), [button, slider, output] = bar.children;
const parts = [...root.querySelectorAll("g.nb-moving")];
let timer = null;
const show = i => {
  slider.value = i; output.textContent = labels[i]; slider.setAttribute("aria-valuetext", labels[i]);
  parts.forEach((part, k) => { part.innerHTML = frames[i][k]; });
};
const stop = () => { clearInterval(timer); timer = null; button.textContent = "Play"; };
const next = () => { +slider.value < +slider.max ? show(+slider.value + 1) : stop(); };
button.onclick = () => {
  if (timer) return stop();
  if (+slider.value === +slider.max) show(0);
  button.textContent = "Pause"; timer = setInterval(next, @WAIT);
};
slider.oninput = () => { stop(); show(+slider.value); };
button.hidden = matchMedia("(prefers-reduced-motion: reduce)").matches;
show(+slider.value); bar.hidden = false; bar.style.display = "flex";
})()</script></div>"""


def snippet(
    update: Callable[[int], None], artists: Sequence[Artist], labels: Sequence[str], *, name: str, alt: str
) -> str:
    """HTML of an animation. It never starts by itself, and without scripts the last frame stands as a figure.

    Readers who ask for reduced motion get the slider alone.

    Args:
        update: draws frame ``i`` by changing ``artists`` (lines, patches or images of one figure, no text).
        artists: what moves. Everything else must stay as it is.
        labels: what the frame shows, one a frame, such as ``"c = 2"``.
        name: what the slider moves, such as ``"scale c"``.
        alt: what a reader who does not see the figure must know.

    Raises:
        ValueError: no frames, or the first, the middle or the last shows that something else than ``artists`` moves.

    >>> import matplotlib.pyplot as plt
    >>> (line,) = plt.plot([0, 1], [0, 1])
    >>> text = snippet(lambda i: line.set_ydata([0, i]), [line], ["0", "1"], name="slope", alt="A line turns.")
    >>> text.count("<svg"), 'aria-label="slope"' in text
    (1, True)
    """
    if not labels or not artists:
        raise ValueError("an animation needs at least one frame label and one artist that moves")
    for number, artist in enumerate(artists):
        artist.set_gid(f"moving-{number}")
    figure, last = artists[0].figure, len(labels) - 1
    update(last)
    _svg(figure)
    figure.set_layout_engine("none")  # the layout of the last frame holds for all
    still = set()
    for i in (0, last // 2, last):  # to look at every frame would take ten times as long
        update(i)
        still.add(MOVING.sub('<g class="nb-moving"></g>', _svg(figure)))
    frames = []
    with _alone(artists):  # to draw axes and words takes nearly all the time
        for i in range(len(labels)):
            update(i)
            frames.append([_short(match[0]) for match in MOVING.finditer(_svg(figure))])
    for artist in artists:
        artist.set_gid(None)
    if len(still) > 1 or len({len(frame) for frame in frames}) > 1:
        raise ValueError("something moves that is not among artists: fix limits and text, and pass every moving artist")
    svg, parts = still.pop(), iter(frames[-1])
    svg = re.sub(r'(?<=<g class="nb-moving">)', lambda _: next(parts), svg)
    identifier = "moving-" + hashlib.sha256(f"{svg}{frames}{name}".encode()).hexdigest()[:12]
    svg = svg[svg.index("<svg") :].replace("*{", f"#{identifier} svg *{{")  # its style must not reach the page
    svg = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        rf'<svg \1 width="100%" role="img" aria-label="{html.escape(alt)}" xmlns:xlink="http://www.w3.org/1999/xlink">',
        svg,
        count=1,
    )
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    filled = {"LAST": len(labels) - 1, "LABELS": _json(labels), "FRAMES": _json(frames), "ID": identifier, "SVG": svg}
    filled |= {"NAME": html.escape(name), "LABEL": html.escape(labels[-1]), "WAIT": max(60, 6000 // len(labels))}
    return re.sub(r"@([A-Z]+)\b", lambda match: str(filled[match[1]]), SNIPPET)


def show(update: Callable[[int], None], artists: Sequence[Artist], labels: Sequence[str], *, name: str, alt: str):
    """Show the animation of :func:`snippet` in a notebook and close its figure.

    >>> import matplotlib.pyplot as plt
    >>> figure, ax = plt.subplots()
    >>> (line,) = ax.plot([0, 1], [0, 1])
    >>> show(lambda i: line.set_ydata([0, i]), [line], "01", name="slope", alt="A line turns.")  # doctest: +ELLIPSIS
    {'text/html': '<div class="nb-animation" ... 'text/plain': 'A line turns.'}
    >>> plt.fignum_exists(figure.number)
    False
    """
    import matplotlib.pyplot as plt
    from IPython.display import display

    text = snippet(update, artists, labels, name=name, alt=alt)
    display({"text/html": text, "text/plain": alt}, raw=True)
    plt.close(artists[0].figure)


@contextmanager
def _alone(artists: Sequence[Artist]) -> Iterator[None]:
    """Of their figure only these artists are visible."""
    figure = artists[0].figure
    others = {child for part in (figure, *figure.axes) for child in part.get_children()}
    others = {child for child in others - {*artists, *figure.axes} if child.get_visible()}
    for other in others:
        other.set_visible(False)
    yield
    for other in others:
        other.set_visible(True)


def _svg(figure: Figure) -> str:
    import matplotlib.pyplot as plt

    text = io.StringIO()
    with plt.rc_context({"svg.hashsalt": "animation"}):  # the same names in every frame
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _short(fragment: str) -> str:
    fragment = re.sub(r' id="moving-\d+"', "", re.sub(r"\s+", " ", fragment)).strip()
    if fragment.startswith("<image"):
        return fragment
    return re.sub(r"\d+\.\d{2,}", lambda match: f"{float(match[0]):.1f}", fragment)  # a tenth of a point is enough


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
