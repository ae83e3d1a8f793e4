"""Figures that move: only what moves is stored, and nothing else may move."""

import json
import re

import matplotlib.pyplot as plt
import numpy as np
import pytest

from nbutils import animation, figures


@pytest.fixture
def drawing():
    """A figure with an image, bars and a line that move with the frame number."""
    figures.use_style()
    _, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3))
    image = left.imshow(np.eye(4), vmin=0, vmax=1, interpolation="none")
    bars = list(right.bar([0, 1], [1, 1]))
    (line,) = right.plot([0, 1], [0, 1], "o-")
    right.set(xlabel="$x$", ylim=(0, 10))

    def frame(i):
        image.set_data(np.eye(4) * i / 10)
        bars[0].set_height(i)
        line.set_ydata([i, 1])

    yield frame, [image, *bars, line], right
    plt.close("all")


def frames_of(text):
    return json.loads(re.search(r"frames = (\[\[.*?\]\]), labels", text, re.S)[1].replace("<\\/", "</"))


def snippet(frame, artists, count=11):
    labels = [f"c = {i}" for i in range(count)]
    return animation.snippet(frame, artists, labels, name="scale c", alt='One "moves" & grows')


def test_a_frame_holds_what_moves_and_the_axes_are_drawn_once(drawing):
    frame, artists, _ = drawing
    text = snippet(frame, artists)
    found = frames_of(text)
    assert len(found) == 11 and {len(one) for one in found} == {4}
    changes = [len({one[part] for one in found}) for part in range(4)]
    assert sorted(changes) == [1, 11, 11, 11]  # one bar stands still
    assert text.count("<svg") == 1 and not any("tick" in part for one in found for part in one)


def test_more_frames_cost_little(drawing):
    frame, artists, _ = drawing
    few, many = (len(snippet(frame, artists, count)) for count in (2, 42))
    assert (many - few) / 40 < 0.1 * few


def test_without_scripts_the_last_frame_stands_and_controls_are_hidden(drawing):
    frame, artists, _ = drawing
    text = snippet(frame, artists)
    before, _, script = text.partition("<script>")
    assert all(part in before for part in frames_of(text)[-1])
    assert "hidden" in re.search(r'<div class="nb-controls"[^>]*>', before)[0]
    assert 'role="img" aria-label="One &quot;moves&quot; &amp; grows"' in before
    assert script.count("</script>") == 1 and "http" not in script.replace("http://www.w3.org", "")


def test_its_style_does_not_reach_the_page(drawing):
    frame, artists, _ = drawing
    styles = re.findall(r"<style.*?</style>", snippet(frame, artists), re.S)
    assert styles and all(re.search(r">\s*#moving-\w+ svg \*\{", style) for style in styles)


def test_what_moves_unsaid_is_an_error(drawing):
    frame, artists, axes = drawing

    def zoom(i):
        frame(i)
        axes.set_ylim(0, 10 + i)

    with pytest.raises(ValueError, match="not among artists"):
        snippet(zoom, artists)
    with pytest.raises(ValueError, match="not among artists"):
        snippet(frame, artists[:1])
    with pytest.raises(ValueError, match="at least one"):
        snippet(frame, [])
