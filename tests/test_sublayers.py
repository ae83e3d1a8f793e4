"""Sublayers against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbutils import sublayers
from nbutils.devices import generator
from nbutils.experiments import encoder_sublayers
from nbutils.experiments.encoder_sublayers import Sublayer
from normgrowth.saturation import scaled


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
    for placement in encoder_sublayers.SUBLAYER_PLACEMENTS:
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
    full, _ = draw("attention", seed=3, biases=encoder_sublayers.BIASES["attention"], project=False)
    for name, value in bare.named_parameters():
        if name != "output_weight":
            assert torch.equal(value, dict(full.named_parameters())[name])


def test_bad_switches_are_named():
    with pytest.raises(ValueError, match="unknown placement 'mid'"):
        Sublayer("attention", 8, placement="mid")
    with pytest.raises(ValueError, match="feedforward has output, inner"):
        Sublayer("feedforward", 8, biases=("value",))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_key_bias_has_no_effect_at_all(seed):
    with_bias, x = draw("attention", seed=seed, biases=("key", "query"))
    without, _ = draw("attention", seed=seed, biases=("query",))
    torch.testing.assert_close(with_bias(x), without(x), rtol=1e-9, atol=1e-9)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_hard_attention_takes_the_value_of_the_best_key_and_is_the_limit(seed):
    layer, x = draw("attention", seed=seed, biases=("output",))
    scores, values = layer.attend(x)
    chosen = torch.stack([values[h, scores[h].argmax(-1)] for h in range(2)])
    torch.testing.assert_close(layer.head(x, hard=True), chosen.transpose(0, 1).flatten(1))
    torch.testing.assert_close(
        layer.core(x, hard=True), layer.head(x, hard=True) @ layer.output_weight.T + layer.output_bias
    )
    with scaled(layer, 1e4):
        best = layer.attend(x)[0].topk(2).values
        clear = ((best[..., 0] - best[..., 1]) > 100).all(0)
        torch.testing.assert_close(layer.head(x)[clear], layer.head(x, hard=True)[clear])
