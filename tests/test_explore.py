"""The figures to move, in a browser from disk: what they read out is what mathematics says, moved by keyboard or mouse.

Each oracle is numpy, or a closed form; none of it knows the script.
"""

import csv
import json
import math
import re

import numpy as np
import pytest

from workflow import ROOT

EXPLORE = ROOT / "book" / "_static" / "explore"
SCRIPTS = ("d3.min.js", "plot.umd.min.js", "t5.js", "explore.js")
NAMES = ("walk", "ray", "attention", "window", "gap", "stacks", "trained")
# What the workflow writes as trained.js, in small: a part that was not measured at one scale.
TRAINED = {
    "scales": [0.8, 1, 1.25, 1000],
    "constant": 0.08,
    "parts": {
        "all parameters": {"agreement": [0.4, 1, 0.1, 0], "accuracy": [0.2, 0.37, 0.04, 0]},
        "gates": {"agreement": [0.9, 1, 0.8, None], "accuracy": [0.3, 0.37, 0.3, None]},
    },
}
# Ground and text of the theme's pages, light and dark.
PAGE = """<!doctype html><html lang="en" data-theme="light"><head><meta charset="utf-8"><title>Figures to move</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">
<link rel="stylesheet" href="{folder}/explore.css">
<style>html {{ --pst-color-text-base: #222832; background: #fff; font-family: sans-serif; }}
html[data-theme="dark"] {{ --pst-color-text-base: #ced6dd; background: #14181e; }}
body {{ color: var(--pst-color-text-base); margin: 0 auto; padding: 0 1rem; max-width: 46rem; }}</style></head>
<body><main><h1>Figures to move</h1>{divs}</main>{scripts}</body></html>"""
MOVE = """(input, value) => {
  input.value = value;
  input.dispatchEvent(new Event("input", {bubbles: true}));
}"""
DRAW = """(root, draws) => Array.from({length: draws}, () => {
  root.querySelector("button").click();
  return root.querySelector("output").textContent;
})"""
P, TIMES = 0.04, np.unique(np.round(10 ** (np.arange(17) / 4))).astype(int)
LATE = TIMES >= 100


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """``opened(names, scripts)``: a page with these figures; what it says and asks for is in ``page.messages``."""
    look = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
    contexts = {javascript: browser.new_context(java_script_enabled=javascript, **look) for javascript in (True, False)}

    def make(names=NAMES, scripts=SCRIPTS, javascript=True):
        loads = f"<script>globalThis.exploreTrained = {json.dumps(TRAINED)};</script>" if "trained" in names else ""
        loads += "".join(f'<script src="{EXPLORE.as_uri()}/{script}"></script>' for script in scripts)
        divs = "".join(f'<div class="explore" data-explore="{name}"><p>It needs scripts.</p></div>' for name in names)
        file = tmp_path_factory.mktemp("explore") / "page.html"
        file.write_text(PAGE.format(folder=EXPLORE.as_uri(), divs=divs, scripts=loads), encoding="utf-8")
        page = contexts[javascript].new_page()
        page.messages, page.asked = [], []
        page.on("console", lambda m: page.messages.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.messages.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(file.as_uri())
        return page

    yield make
    for context in contexts.values():
        context.close()


@pytest.fixture(scope="module")
def page(opened):
    """All, for the tests that only move them. Afterwards nothing was said, and nothing asked of a network."""
    made = opened()
    yield made
    assert made.messages == []
    assert [url for url in made.asked if not url.startswith(("file:", "data:"))] == []


class Figure:
    """One of them: its controls by their labels, and the numbers that it reads out."""

    def __init__(self, page, name):
        self.page, self.root = page, page.locator(f'[data-explore="{name}"]')

    def set(self, **values):
        for label, value in values.items():
            self.control(label).evaluate(MOVE, str(value))
        return self

    def control(self, label):
        return self.root.get_by_label(label.replace("_", " "), exact=True)

    def press(self, label, *keys):
        self.control(label).focus()
        for key in keys:
            self.page.keyboard.press(key)
        return self

    @property
    def readout(self):
        return self.root.locator("output").inner_text().replace("\u00a0", " ")

    def number(self, before):
        """The number read out after these words."""
        found = re.search(re.escape(before) + r" ([-−]?[\d.]+(?:e[-−+]?\d+)?|∞)", self.readout)
        assert found, f"{before!r} is not in {self.readout!r}"
        return float(found[1].replace("−", "-").replace("∞", "inf").rstrip("."))


# Random walks


def walks(law, n, walks, rng):
    """Norms of independent walks at ``TIMES``, as numpy has them, (walks, times)."""
    theta, norms = np.zeros((walks, n)), []
    for m in np.diff(TIMES, prepend=0):
        terms = rng.binomial(m, P, (walks, 1)) if law.startswith("bursts") else m
        if law == "±1":
            step = 2 * rng.binomial(m, 0.5, theta.shape) - m
        elif law == "Cauchy":
            step = m * rng.standard_cauchy(theta.shape)
        else:
            step = np.sqrt(terms) * rng.standard_normal(theta.shape)
        theta = theta + step
        norms.append(np.linalg.norm(theta, axis=1))
    return np.stack(norms, axis=1)


@pytest.mark.parametrize("law", ["±1", "bursts, p = 0.04", "Cauchy"])
def test_walks_are_those_of_numpy(page, law):
    """The slopes of forty draws of twenty walks against a thousand such draws by numpy: means and scatter agree."""
    draws = 40
    figure = Figure(page, "walk").set(dimension_n=2, law_of_the_steps=law)
    texts = figure.root.evaluate(DRAW, draws)
    slopes = [float(re.search(r"slope (\S+) ", text)[1]) for text in texts]
    norms = walks(law, 3, 20_000, np.random.default_rng(0)).reshape(1000, 20, -1)
    typical = np.median(norms, axis=1) if law == "Cauchy" else norms.mean(axis=1)
    known = np.polyfit(np.log(TIMES[LATE]), np.log(typical[:, LATE]).T, 1)[0]
    assert len(set(texts)) == draws and figure.number("theory") == (1 if law == "Cauchy" else 0.5)
    assert np.mean(slopes) == pytest.approx(known.mean(), abs=4 * known.std() / draws**0.5)
    assert np.ptp(known) / 3 < np.ptp(slopes) < np.ptp(known) * 1.1


# Along a ray


@pytest.mark.parametrize("k", [1, 2, 3])
def test_equilibrium_is_the_root_of_the_log_odds(page, k):
    figure = Figure(page, "ray").set(degree_k=k)
    for a in (0.5, 0.51, 0.6, 0.75, 0.8, 0.9, 0.99):
        figure.set(accuracy_a=a)
        known = math.log(a / (1 - a)) ** (1 / k)
        assert figure.number("c* =") == pytest.approx(known, abs=6e-4), a
        entropy = -a * math.log(a) - (1 - a) * math.log(1 - a)  # there the model says a
        assert figure.number("with loss") == pytest.approx(entropy, abs=6e-4), a
    assert figure.set(accuracy_a=1).number("c* =") == math.inf


# Attention


def drawn_scores(figure):
    """The scores, read off the axis."""
    labels = figure.root.locator(".explore-chart text:has(tspan)").evaluate_all(
        "texts => texts.map(text => [...text.children].map(line => line.textContent))"
    )
    assert [label[0] for label in labels] == list("123456")
    return np.array([float(label[1].replace("−∞", "-inf").replace("−", "-")) for label in labels])


@pytest.mark.parametrize("mask", ["none", "future at −∞", "future × 0"])
@pytest.mark.parametrize("second", [-1, 1.8, 2])
def test_attention_is_near_its_limit_as_the_gap_says(page, second, mask):
    figure = Figure(page, "attention").set(score_of_key_2=second, mask=mask)
    for exponent in (0, 0.5, 1.3, 2):
        figure.set(scale_c=exponent)
        scores, c = drawn_scores(figure), 10**exponent
        assert scores[4:].tolist() == {"none": [2, -0.4], "future at −∞": [-np.inf] * 2, "future × 0": [0, 0]}[mask]
        assert scores[1] == pytest.approx(second)
        weights = np.exp(c * (scores - scores.max()))
        weights /= weights.sum()
        limit = (scores == scores.max()) / (scores == scores.max()).sum()
        behind, m = scores.max() - np.sort(scores)[::-1], np.isfinite(scores).sum()
        next_gap = behind[behind > 0].min()
        error = figure.number("Largest error")
        assert error == pytest.approx(abs(weights - limit).max(), rel=6e-3)
        assert figure.number("=") == pytest.approx((m - 1) * math.exp(-c * next_gap), rel=6e-3)
        assert error <= figure.number("=") * 1.01 and figure.number("gap g =") == pytest.approx(next_gap)
        if mask != "none":
            assert figure.number("Weight on the future") == pytest.approx(weights[4:].sum(), abs=6e-4)
            assert figure.number("saturated") == pytest.approx(limit[4:].sum(), abs=6e-4)


# The window of a fit


def curve():
    rows = list(csv.DictReader((ROOT / "book" / "data" / "t5_norm.csv").open()))
    return np.array([int(row["step"]) for row in rows]), np.array([float(row["norm"]) for row in rows])


def test_the_curve_is_the_table():
    """To make the script anew: its two lines are the comment and the one below, with ``data`` as here."""
    step, norm = curve()
    data = {"step": step.tolist(), "norm": norm.tolist()}
    line = "globalThis.exploreT5 = " + json.dumps(data, separators=(",", ":")) + ";"
    assert (EXPLORE / "t5.js").read_text().splitlines()[1:] == [line]


def fitted(first, last):
    step, norm = (values[first : last + 1] for values in curve())
    return np.polyfit(np.log(step), np.log(norm), 1)[0], *np.polyfit(np.sqrt(step), norm, 1)


def test_laws_in_a_window(page):
    figure = Figure(page, "window")
    for first, last in ((2, 103), (1, 103), (2, 20), (52, 103), (99, 103), (1, 5)):
        figure.set(first_step=1).set(last_step=last).set(first_step=first)
        exponent, a, b = fitted(first, last)
        assert figure.number("Exponent") == pytest.approx(exponent, abs=6e-3), (first, last)
        slope, sign, start = re.search(r"Root law ([\d.]+) √t ([+−]) ([\d.]+)\.", figure.readout).groups()
        assert float(slope) == pytest.approx(a, abs=6e-4)
        assert float(start) * (1 if sign == "+" else -1) == pytest.approx(b, abs=0.06)
        steps = curve()[0]
        assert f"from step {steps[first]:,} to {steps[last]:,}" in figure.readout


# Softmax and the gap


@pytest.mark.parametrize("gap", [0, 0.05, 1, 3])
@pytest.mark.parametrize("added", [0, 10])
def test_softmax_is_near_its_limit_as_the_gap_says(page, gap, added):
    figure = Figure(page, "gap").set(gap_g=gap, added_to_all=added)
    scores = added - np.array([0, gap, 4])
    weights = np.exp(8 * (scores - scores.max()))
    weights /= weights.sum()
    limit = (scores == scores.max()) / (scores == scores.max()).sum()
    error = abs(weights - limit).max()
    assert figure.number("the error is") == pytest.approx(error, rel=6e-3)
    assert figure.number("Norm ‖x‖ =") == pytest.approx(np.linalg.norm(scores), abs=6e-3)
    assert figure.number("the bound by the gap") == pytest.approx(2 * math.exp(-8 * (gap or 4)), rel=6e-3)
    assert error <= 2 * math.exp(-8 * (gap or 4))


# Two stacks


@pytest.mark.parametrize(("p", "share"), [(0.5, 0.4), (0.8, 0.5), (1.2, 0.9), (0.2, 1), (0.7, 0)])
def test_a_root_fitted_to_two_stacks(page, p, share):
    figure = Figure(page, "stacks").set(exponent_of_the_second_stack=p)
    figure.control("its share of ρ² at the end").evaluate(MOVE, str(share))
    t = np.arange(5000, 500_001, 5000) / 500_000
    norm = np.sqrt((1 - share) * t + share * t ** (2 * p))
    a, b = np.polyfit(np.sqrt(t), norm, 1)
    left = norm - a * np.sqrt(t) - b
    assert figure.number("R² =") == pytest.approx(1 - left @ left / norm.var() / len(t), abs=6e-5)
    assert figure.number("at the end") == pytest.approx((1 - share) / 2 + share * p, abs=6e-4)
    assert figure.number("a√t + b") == pytest.approx(a / (a + b) / 2, abs=6e-4)


# A trained model


def test_what_the_run_measured_is_read_out(page):
    figure = Figure(page, "trained")
    assert "c = 1: agreement 1.00, accuracy 0.37" in figure.readout and figure.number("accuracy of") == 0.08
    figure.set(scale_c=2)
    assert "c = 1.25: agreement 0.10, accuracy 0.04" in figure.readout
    figure.control("times c").select_option("gates")
    assert "gates, c = 1.25: agreement 0.80" in figure.readout
    assert "gates, c = 1,000: not measured" in figure.set(scale_c=3).readout


# All of them


def test_words_in_the_drawings_can_be_read_on_a_phone(page):
    """Axe and what sticks out are looked at where the figures stand, in test_pages."""
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function(  # until each is drawn anew for its box, and not only made smaller
        "() => [...document.querySelectorAll('.explore-chart svg')]"
        ".every(svg => svg.getBoundingClientRect().width < 370 && svg.getScreenCTM().a > 0.95)"
    )
    sizes = page.evaluate("""() => [...document.querySelectorAll(".explore-chart :is(text, tspan)")].map(text =>
      parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a)""")
    assert len(sizes) > 40 and min(sizes) >= 11


def test_what_cannot_be_drawn_leaves_its_sentence(opened):
    page = opened(["window", "walk", "ways"], [script for script in SCRIPTS if script != "t5.js"])
    assert page.locator(".explore figure").count() == 1 and page.get_by_text("It needs scripts.").count() == 2
    assert page.messages == ["explore.js: nothing is called ways"] * 2  # at once, and when the page is there
    assert opened(javascript=False).get_by_text("It needs scripts.").count() == len(NAMES)
