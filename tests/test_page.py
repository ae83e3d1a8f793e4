"""The page that ``normgrowth report`` writes: what it says of a series, and that it can be sent."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from safetensors.torch import save_file

from normgrowth.__main__ import main
from normgrowth.report import page


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """Weights that walk: the same noise at every step, so that there is no drift."""
    folder, rng = tmp_path_factory.mktemp("runs"), torch.Generator().manual_seed(0)
    weights = {f"model.layers.{i}.mlp.weight": torch.randn(40, 50, generator=rng) for i in range(2)}
    for step in (0, 100, 200, 400, 800, 1600):
        (folder / f"step{step}").mkdir()
        save_file(weights, folder / f"step{step}" / "model.safetensors")
        length = max(step, 100) ** 0.5 / 10
        weights = {name: w + length * torch.randn(w.shape, generator=rng) for name, w in weights.items()}
    (folder / "step3200").mkdir()
    (folder / "step3200" / "model.safetensors").write_bytes(b"cut short")
    return folder


def test_a_page_to_send(series, tmp_path, capsys):
    assert main(["report", str(series), "-o", str(tmp_path / "mine.html")]) == 0
    html = (tmp_path / "mine.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!https://norm-growth|#)[^"]+"|@import|url\((?!#)', html)  # nothing to load
    assert html.count("<svg ") == html.count("<figcaption>") == html.count('aria-label="') == 5
    assert str(series) in html and "step3200" in html and "cut short" in html  # what was refused, and why
    found = re.search(r"is squared displacement and (-?\d+)% drift", html)
    assert abs(int(found[1])) <= 8, "a walk has no drift, give or take four times 2 %: 2√(Σρ²σ²) / Σnσ²"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible_and_fits_a_phone(series, tmp_path, browser, scheme):
    main(["report", str(series), "-o", str(tmp_path / "mine.html")])
    page = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme=scheme)
    page.goto((tmp_path / "mine.html").as_uri())
    assert not Axe().run(page).response["violations"]
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    size = "Math.min(...[...document.querySelectorAll('svg')].map(x => x.clientWidth / x.viewBox.baseVal.width))"
    assert page.evaluate(size) > 0.9, "text in figures, in points, is nearly of its size in CSS pixels"


def test_the_no_drift_curve_is_the_sum_of_squares():
    """A walk of orthogonal intervals is its own no-drift curve."""
    lengths = np.array([1.0, 2.0, 0.5, 4.0])
    theta = np.cumsum(np.vstack([3 * np.eye(5)[0], np.diag([0, *lengths])[1:]]), axis=0)
    moved = [np.nan, *lengths**2]
    total = pd.DataFrame({"step": [0, 1, 2, 3, 4], "norm": np.linalg.norm(theta, axis=1), "displacement_sq": moved})
    np.testing.assert_allclose(page.no_drift(total), total.norm, rtol=1e-14)
    even = total.assign(norm=np.sqrt(9 + 7.0 * total.step))
    np.testing.assert_allclose(page.square_root(even), even.norm, rtol=1e-14)


@pytest.mark.parametrize(("steps", "text"), [(1, "1 checkpoint: a report needs two or more"), (0, "no such folder")])
def test_no_series(series, tmp_path, capsys, steps, text):
    one = tmp_path / "runs"
    if steps:
        (one / "step5").mkdir(parents=True)
        save_file({"w.weight": torch.ones(3, 3)}, one / "step5" / "model.safetensors")
    assert main(["report", str(one), "-o", str(tmp_path / "mine.html")]) == 2
    assert text in capsys.readouterr().err and not (tmp_path / "mine.html").exists()
