"""Rates of saturation against the degrees of the terms that meet."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbutils import fits
from nbutils.chapters import rates
from nbutils.devices import generator
from nbutils.sublayers import BIASES, Sublayer


def draw(kind, *, seed=0, term=None, dim=8, **switches):
    rng = generator(seed, "cpu")
    x = torch.randn(5, dim, generator=rng, dtype=torch.float64)
    if term == "residual":
        switches["placement"] = "post"
    elif term is not None:
        switches["biases"] = (term,)
    return Sublayer(kind, dim, generator=rng, **switches), x


WINDOW = np.geomspace(100, 1e4, 7)


def test_scaling_leaves_the_module_alone_and_scales_the_input_too():
    layer, x = draw("feedforward", project=False)
    before = {name: value.clone() for name, value in layer.named_parameters()}
    head = rates.scaled(layer, x, 3.0, input_degree=2, method="head")
    torch.testing.assert_close(head, 3.0**3 * layer.head(x))
    torch.testing.assert_close(rates.scaled(layer, x, 3.0, method="head"), 3.0 * layer.head(x))
    assert all(torch.equal(before[name], value) for name, value in layer.named_parameters())


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3))
def test_head_has_one_degree_more_than_its_input(seed, p):
    layer, x = draw("attention", seed=seed)
    assert rates.degree_at(layer, x, 1e5, input_degree=p, method="head") == pytest.approx(p + 1, abs=1e-3)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.floats(0.01, 100))
def test_feedforward_is_exactly_one_homogeneous(seed, p, c):
    layer, x = draw("feedforward", seed=seed)
    torch.testing.assert_close(rates.scaled(layer, x, c, input_degree=p), c * layer(x), rtol=1e-10, atol=1e-10 * c)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(1, 6))
def test_attention_is_within_its_bound_of_the_argmax(seed, c):
    layer, x = draw("attention", seed=seed)
    scores, values = rates.scaled(layer, x, c, method="attend")
    hard = rates.hard_attention(scores, values)
    chosen = torch.stack([values[h, scores[h].argmax(-1)] for h in range(2)])
    torch.testing.assert_close(hard.distance, (scores.softmax(-1) @ values - chosen).norm(dim=-1))
    assert (hard.distance <= hard.bound + 1e-13).all() and (hard.gap >= 0).all()


CASES = [
    (kind, term, p, project)
    for kind, terms in (
        ("attention", ("residual", "output", "value")),
        ("feedforward", ("residual", "output", "inner")),
    )
    for term in terms
    for p in (0, 1)
    for project in (True, False)
]


@pytest.mark.parametrize(("kind", "term", "p", "project"), CASES)
def test_rate_is_twice_the_difference_of_degrees(kind, term, p, project):
    errors = []
    for seed in range(4):
        layer, x = draw(kind, seed=seed, term=term, project=project)
        errors.append(rates.saturation_errors(layer, x, WINDOW, limit=1e9, input_degree=p))
    predicted = rates.predicted_rate(kind, term, p, project=project)
    if math.isinf(predicted):
        assert np.array(errors)[:, -1].max() < 1e-28
    else:
        rate = fits.saturation_rate(WINDOW, errors)
        assert rate.interval[0] <= predicted <= rate.interval[1] and abs(rate.local - predicted).max() < 0.1


@pytest.mark.parametrize(("kind", "term", "p", "project"), CASES)
def test_leading_coefficient_needs_no_fit(kind, term, p, project):
    predicted = rates.predicted_rate(kind, term, p, project=project)
    if math.isinf(predicted):
        return
    layer, x = draw(kind, seed=5, term=term, project=project)
    main, low = rates.main_term(layer, x), rates.lower_term(layer, x, term)
    theory = rates.leading_coefficient(layer.norm, main, low) * 1e4**-predicted
    measured = rates.saturation_errors(layer, x, 1e4, limit=1e9, input_degree=p)[0]
    assert measured == pytest.approx(theory, rel=0.02)


def test_main_term_puts_the_biases_back():
    layer, x = draw("attention", biases=BIASES["attention"])
    before = layer(x)
    rates.main_term(layer, x)
    assert torch.equal(layer(x), before)


def test_terms_that_do_not_meet_are_named():
    layer, x = draw("attention", biases=("key",))
    for term in ("key", "value"):
        with pytest.raises(ValueError, match=f"the layer adds no '{term}' bias to its main term"):
            rates.lower_term(layer, x, term)
    with pytest.raises(ValueError, match="'inner' of attention does not meet the main term"):
        rates.arriving_degrees("attention", "inner", 1)
    assert math.isinf(rates.predicted_rate("attention", "query", 1))


def test_rate_rejects_what_is_no_power_and_widens_for_a_drift():
    c = np.geomspace(10, 1000, 8)
    with pytest.raises(ValueError, match="an error is not positive"):
        fits.saturation_rate(c, np.zeros((3, 8)))
    with pytest.raises(ValueError, match="give \\(networks ≥ 2, scales ≥ 4\\)"):
        fits.saturation_rate(c, c**-2)
    pure = fits.saturation_rate(c, [c**-2, 2 * c**-2])
    bent = fits.saturation_rate(c, [c**-2 * (1 + 3 / c), c**-2 * (1 + 3 / c)])
    assert np.ptp(pure.interval) < 1e-9 < np.ptp(bent.interval)
    assert bent.interval[0] <= 2 <= bent.interval[1]
    exponential = fits.saturation_rate(c, [np.exp(-c / 100), np.exp(-c / 90)])
    assert np.ptp(exponential.interval) > 1  # no power: a width limit rejects it


def test_reference_must_lie_beyond_the_scales():
    layer, x = draw("feedforward")
    with pytest.raises(ValueError, match="scale 1000: all scales must lie below the reference scale 1000"):
        rates.saturation_errors(layer, x, [10, 1000], limit=1000)
    assert rates.saturation_errors(layer, x, [1, 2], limit=1000, by_token=True).shape == (2, 5)
