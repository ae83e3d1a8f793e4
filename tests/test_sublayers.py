"""Sublayers against their definitions, and the rates of saturation against the degrees that meet."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbutils import sublayers
from nbutils.device import generator
from nbutils.homogeneity import one_minus_cosine
from nbutils.sublayers import Encoder, Sublayer

WINDOW = np.geomspace(100, 1e4, 7)


def draw(kind, *, seed=0, term=None, dim=8, **switches):
    rng = generator(seed, "cpu")
    x = torch.randn(5, dim, generator=rng, dtype=torch.float64)
    if term == "residual":
        switches["placement"] = "post"
    elif term is not None:
        switches["biases"] = (term,)
    return Sublayer(kind, dim, generator=rng, **switches), x


def test_layer_norm_is_torch_s():
    x = torch.randn(3, 7, generator=generator(0, "cpu"), dtype=torch.float64)
    norm = sublayers.LayerNorm(7, eps=1e-5, generator=generator(1, "cpu"))
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (7,), norm.gain, norm.shift, 1e-5))
    exact = sublayers.standardise(x)
    torch.testing.assert_close(exact.square().mean(-1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(sublayers.standardise(1e200 * x), exact)  # squares would overflow


def test_batch_standardise_forgets_every_bias_and_layer_norm_does_not():
    rng = generator(0, "cpu")
    x, b = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((2, 5, 4), (4,)))
    batch = sublayers.batch_standardise
    torch.testing.assert_close(batch(x + b), batch(x))
    torch.testing.assert_close(batch(x).flatten(0, 1).square().mean(0), torch.ones(4, dtype=torch.float64))
    assert not torch.allclose(sublayers.standardise(x + b), sublayers.standardise(x), atol=0.1)
    torch.testing.assert_close(sublayers.standardise(x + 3.0), sublayers.standardise(x))


def test_attention_is_scaled_dot_product_attention():
    layer, x = draw("attention", biases=("query", "key", "value"), heads=2)
    q, k, v = (
        (x @ getattr(layer, f"{n}_weight").T + getattr(layer, f"{n}_bias")).view(5, 2, 4).transpose(0, 1)
        for n in ("query", "key", "value")
    )
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(5, 8)
    torch.testing.assert_close(layer.head(x), heads)
    torch.testing.assert_close(layer.core(x), heads @ layer.output_weight.T)


def test_placements():
    outputs = {}
    for placement in sublayers.PLACEMENTS:
        layer, x = draw("feedforward", biases=("inner", "output"), placement=placement)
        outputs[placement] = layer(x)
    full, x = draw("feedforward", biases=("inner", "output"))
    norm, core = full.norm, full.core
    expected = {
        "simplified": norm(core(x)),
        "post": norm(x + core(x)),
        "pre": x + core(norm(x)),
        "residual-post": x + norm(core(x)),
        "none": x + core(x),
    }
    for placement, output in outputs.items():
        torch.testing.assert_close(output, expected[placement])


def test_switches_do_not_change_the_other_weights():
    bare, _ = draw("attention", seed=3)
    full, _ = draw("attention", seed=3, biases=sublayers.BIASES["attention"], project=False)
    for name, value in bare.named_parameters():
        if name != "output_weight":
            assert torch.equal(value, dict(full.named_parameters())[name])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "conv"}, "unknown kind 'conv': choose one of attention, feedforward"),
        ({"kind": "attention", "placement": "mid"}, "unknown placement 'mid'"),
        ({"kind": "feedforward", "biases": ("value",)}, "feedforward has output, inner"),
        ({"kind": "attention", "heads": 3}, "3 heads do not divide the width 8"),
    ],
)
def test_bad_switches_are_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        Sublayer(dim=8, **arguments)


def test_one_minus_cos_does_not_cancel():
    u = torch.tensor([[1e200, 0.0], [1.0, 1.0]], dtype=torch.float64)
    v = torch.tensor([[1e200, 1e185], [1.0, -1.0]], dtype=torch.float64)
    np.testing.assert_allclose(one_minus_cosine(u, v), [5e-31, 1], rtol=1e-9)


def test_scaling_leaves_the_module_alone_and_scales_the_input_too():
    layer, x = draw("feedforward", project=False)
    before = {name: value.clone() for name, value in layer.named_parameters()}
    head = sublayers.scaled(layer, x, 3.0, input_degree=2, method="head")
    torch.testing.assert_close(head, 3.0**3 * layer.head(x))
    assert all(torch.equal(before[name], value) for name, value in layer.named_parameters())


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3))
def test_head_has_one_degree_more_than_its_input(seed, p):
    layer, x = draw("attention", seed=seed)
    assert sublayers.degree_at(layer, x, 1e5, input_degree=p, method="head") == pytest.approx(p + 1, abs=1e-3)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.floats(0.01, 100))
def test_feedforward_is_exactly_one_homogeneous(seed, p, c):
    layer, x = draw("feedforward", seed=seed)
    torch.testing.assert_close(sublayers.scaled(layer, x, c, input_degree=p), c * layer(x), rtol=1e-10, atol=1e-10 * c)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(1, 6))
def test_attention_is_within_its_bound_of_the_argmax(seed, c):
    layer, x = draw("attention", seed=seed)
    scores, values = sublayers.scaled(layer, x, c, method="attend")
    hard = sublayers.hard_attention(scores, values)
    chosen = torch.stack([values[h, scores[h].argmax(-1)] for h in range(2)])
    torch.testing.assert_close(hard.distance, (scores.softmax(-1) @ values - chosen).norm(dim=-1))
    assert (hard.distance <= hard.bound + 1e-13).all() and (hard.gap >= 0).all()


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_key_bias_has_no_effect_at_all(seed):
    with_bias, x = draw("attention", seed=seed, biases=("key", "query"))
    without, _ = draw("attention", seed=seed, biases=("query",))
    torch.testing.assert_close(with_bias(x), without(x), rtol=1e-9, atol=1e-9)


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
        errors.append(sublayers.saturation_errors(layer, x, WINDOW, limit=1e9, input_degree=p))
    predicted = sublayers.predicted_rate(kind, term, p, project=project)
    if math.isinf(predicted):
        assert np.array(errors)[:, -1].max() < 1e-28
    else:
        rate = sublayers.saturation_rate(WINDOW, errors)
        assert rate.interval[0] <= predicted <= rate.interval[1] and abs(rate.local - predicted).max() < 0.1


@pytest.mark.parametrize(("kind", "term", "p", "project"), CASES)
def test_leading_coefficient_needs_no_fit(kind, term, p, project):
    predicted = sublayers.predicted_rate(kind, term, p, project=project)
    if math.isinf(predicted):
        return
    layer, x = draw(kind, seed=5, term=term, project=project)
    main, low = sublayers.main_term(layer, x), sublayers.lower_term(layer, x, term)
    theory = sublayers.leading_coefficient(layer.norm, main, low) * 1e4**-predicted
    measured = sublayers.saturation_errors(layer, x, 1e4, limit=1e9, input_degree=p)[0]
    assert measured == pytest.approx(theory, rel=0.02)


def test_main_term_puts_the_biases_back():
    layer, x = draw("attention", biases=sublayers.BIASES["attention"])
    before = layer(x)
    sublayers.main_term(layer, x)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize(
    ("placement", "degrees"),
    [
        ("simplified", [1, 1, 1]),
        ("post", [1, 1, 1]),
        ("pre", [1, 3, 3]),
        ("residual-post", [1, 1, 1]),
        ("none", [1, 5, 9]),
    ],
)
def test_encoder_degrees(placement, degrees):
    x = torch.eye(5, dtype=torch.float64)
    for depth, degree in enumerate(degrees):
        for biases in (False, True):
            encoder = Encoder(5, 8, depth, placement=placement, biases=biases, generator=generator(1, "cpu"))
            assert sublayers.degree_at(encoder, x, 1e5) == pytest.approx(degree, abs=1e-3)
    last = Encoder(5, 8, 2, placement=placement, final_norm=True, generator=generator(1, "cpu"))
    assert sublayers.degree_at(last, x, 1e5) == pytest.approx(1, abs=1e-6)


def test_terms_that_do_not_meet_are_named():
    layer, x = draw("attention", biases=("key",))
    for term in ("key", "value"):
        with pytest.raises(ValueError, match=f"the layer adds no '{term}' bias to its main term"):
            sublayers.lower_term(layer, x, term)
    with pytest.raises(ValueError, match="'inner' of attention does not meet the main term"):
        sublayers.arriving_degrees("attention", "inner", 1)
    assert math.isinf(sublayers.predicted_rate("attention", "query", 1))


def test_rate_rejects_what_is_no_power_and_widens_for_a_drift():
    c = np.geomspace(10, 1000, 8)
    with pytest.raises(ValueError, match="an error is not positive"):
        sublayers.saturation_rate(c, np.zeros((3, 8)))
    with pytest.raises(ValueError, match="give \\(networks ≥ 2, scales ≥ 4\\)"):
        sublayers.saturation_rate(c, c**-2)
    pure = sublayers.saturation_rate(c, [c**-2, 2 * c**-2])
    bent = sublayers.saturation_rate(c, [c**-2 * (1 + 3 / c), c**-2 * (1 + 3 / c)])
    assert np.ptp(pure.interval) < 1e-9 < np.ptp(bent.interval)
    assert bent.interval[0] <= 2 <= bent.interval[1]
    exponential = sublayers.saturation_rate(c, [np.exp(-c / 100), np.exp(-c / 90)])
    assert np.ptp(exponential.interval) > 1  # no power: a width limit rejects it


def test_reference_must_lie_beyond_the_scales():
    layer, x = draw("feedforward")
    with pytest.raises(ValueError, match="scale 1000: all scales must lie below the reference scale 1000"):
        sublayers.saturation_errors(layer, x, [10, 1000], limit=1000)
    assert sublayers.saturation_errors(layer, x, [1, 2], limit=1000, by_token=True).shape == (2, 5)
