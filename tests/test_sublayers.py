"""Sublayers against their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbutils import sublayers
from nbutils.chapters import rates
from nbutils.devices import generator
from nbutils.homogeneity import one_minus_cosine
from nbutils.sublayers import Encoder, Sublayer


def draw(kind, *, seed=0, dim=8, **switches):
    rng = generator(seed, "cpu")
    x = torch.randn(5, dim, generator=rng, dtype=torch.float64)
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


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_is_scaled_dot_product_attention(heads):
    layer, x = draw("attention", biases=("query", "key", "value"), heads=heads)
    q, k, v = (
        (x @ getattr(layer, f"{n}_weight").T + getattr(layer, f"{n}_bias")).view(5, heads, -1).transpose(0, 1)
        for n in ("query", "key", "value")
    )
    known = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(5, 8)
    torch.testing.assert_close(layer.head(x), known)
    torch.testing.assert_close(layer.core(x), known @ layer.output_weight.T)


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


def test_heads_must_divide_the_width_of_attention_alone():
    rng = generator(0, "cpu")
    assert Sublayer("feedforward", 6, heads=4, generator=rng)(torch.zeros(1, 2, 6, dtype=torch.float64)).shape == (
        1,
        2,
        6,
    )
    with pytest.raises(ValueError, match="4 heads do not divide the width 6"):
        Sublayer("attention", 6, heads=4, generator=rng)


def test_one_minus_cos_does_not_cancel():
    u = torch.tensor([[1e200, 0.0], [1.0, 1.0]], dtype=torch.float64)
    v = torch.tensor([[1e200, 1e185], [1.0, -1.0]], dtype=torch.float64)
    np.testing.assert_allclose(one_minus_cosine(u, v), [5e-31, 1], rtol=1e-9)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_key_bias_has_no_effect_at_all(seed):
    with_bias, x = draw("attention", seed=seed, biases=("key", "query"))
    without, _ = draw("attention", seed=seed, biases=("query",))
    torch.testing.assert_close(with_bias(x), without(x), rtol=1e-9, atol=1e-9)


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
            assert rates.degree_at(encoder, x, 1e5) == pytest.approx(degree, abs=1e-3)
    last = Encoder(5, 8, 2, placement=placement, final_norm=True, generator=generator(1, "cpu"))
    assert rates.degree_at(last, x, 1e5) == pytest.approx(1, abs=1e-6)


def test_a_kind_that_is_read_from_elsewhere_is_the_same():
    assert Sublayer("".join(["atten", "tion"]), 4, heads=2).key_dim == 2


@pytest.mark.parametrize(("more", "inner"), [({}, 10), ({"hidden": 7}, 7), ({"project": False}, 5)])
def test_the_inner_width_of_feed_forward_layers(more, inner):
    assert Sublayer("feedforward", 5, **more).inner_weight.shape == (inner, 5)
