"""The page that ``normgrowth report`` writes: what it says of a series, and that it can be sent."""

import html
import re

import numpy as np
import pandas as pd
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from safetensors.torch import save_file

from normgrowth import models, saturation
from normgrowth.__main__ import main
from normgrowth.report import page, similarity


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


@pytest.fixture(scope="module")
def models_of_transformers(tmp_path_factory):
    """Two checkpoints of a small T5, the first without a tokenizer: an encoder–decoder has the longest names."""
    from test_your_own import save, t5

    folder = tmp_path_factory.mktemp("t5")
    for step, words in ((1, False), (2, True)):
        save(folder / f"step{step}", t5, seed=step, words=words)
    return folder


def rows_of(text):
    """Numbers of the table of similarity, by layer."""
    lines = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', text)
    cells = {layer: re.findall(r"<td>(.*?)</td>", row) for layer, row in lines}
    return {layer: [float(cell.replace("−", "-").replace("–", "nan")) for cell in row] for layer, row in cells.items()}


def test_the_similarity_of_the_last_checkpoint_is_that_of_models(models_of_transformers, tmp_path, browser):
    file = tmp_path / "sentences.txt"
    file.write_text("the of a\nis to the a of\n")
    path = tmp_path / "mine.html"
    main(["report", str(models_of_transformers), "-o", str(path), "--saturation", "--text", str(file), "--c", "30"])
    saved = models.load(models_of_transformers / "step2", file.read_text().splitlines())
    table = models.similarity(saved, 30.0)
    table = table[list(similarity.HEADINGS)]
    rows = rows_of(path.read_text(encoding="utf-8"))
    assert list(rows) == [str(layer) for layer in table.index] and "decoder 2" in rows
    np.testing.assert_allclose(np.array(list(rows.values())), table.to_numpy(), atol=5.01e-4)
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.goto(path.as_uri())
    assert not Axe().run(page).response["violations"]
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_nothing_is_loaded_without_the_option_and_a_reason_stands_for_what_cannot_be(
    models_of_transformers, series, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "mine.html"
    assert main(["report", str(series), "-o", str(path), "--saturation"]) == 0  # weights alone, no configuration
    reason = re.search(r"<p>Not measured: (.*?)</p>", path.read_text(encoding="utf-8"))[1]
    assert f"similarity not measured: {html.unescape(reason)}" in capsys.readouterr().err and "step1600" in reason

    def load(*args, **options):
        raise AssertionError("loaded")

    monkeypatch.setattr(models, "load", load)
    assert main(["report", str(models_of_transformers), "-o", str(path)]) == 0
    assert "Similarity of the last" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("anisotropic", [0.0, 3.0, 30.0])
def test_the_common_part_is_bounded_by_both_anisotropies(anisotropic):
    """For tokens of equal weight; at c = 1, where both means are one vector, the bound is reached."""

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            rng = torch.Generator().manual_seed(0)
            self.embedding = torch.nn.Embedding.from_pretrained(torch.randn(7, 16, generator=rng, dtype=torch.float64))
            self.bias = torch.nn.Parameter(torch.full((16,), anisotropic, dtype=torch.float64))

        def hidden_states(self, tokens):
            x = self.embedding(tokens) ** 3 + self.bias
            return [x, torch.tanh(x) + self.embedding(tokens)]

    tokens = [[0, 1, 2], [3, 4, 5], [6, 1, 3]]
    for c in (1.0, 10.0, 1000.0):
        measured = saturation.similarity(Network(), tokens, c)
        for layer in range(2):
            most = saturation.most_common(
                float(measured.anisotropy[layer]), float(measured.anisotropy_scaled[layer]), 9
            )
            common = abs(float(measured.common[layer]))
            assert common <= most + 1e-12
            of_tokens = saturation.own(pd.DataFrame(measured._asdict()), 9)[layer]
            assert abs(of_tokens) <= 1 + 1e-12
            if c == 1:
                assert of_tokens == pytest.approx(1, abs=1e-9)
                assert common == pytest.approx(most, rel=1e-12)


def test_own_is_not_misled_by_a_few_long_tokens():
    """Directions are random at both scales, but for long first tokens: their mean, taken from all, makes all alike."""

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

        def hidden_states(self, tokens):
            rng = torch.Generator().manual_seed(int(self.scale))  # other directions at c than at 1
            x = torch.randn(*tokens.shape, 64, generator=rng, dtype=torch.float64)
            x[:, 0] = 1000.0
            return [x]

    sentences = [[1] * 12] * 30
    measured = saturation.similarity(Network(), sentences, 100.0)
    table = pd.DataFrame(measured._asdict()).assign(own=lambda table: saturation.own(table, 360))
    assert table.centred[0] > 0.95
    # unit vectors: a twelfth are one direction at both scales, so raw is 1/12, common 1/144, and own 11/143
    assert table.own[0] == pytest.approx(1 / 13, abs=0.03)
