"""Degrees of classes of ``transformers`` whose code does what language models do not: right, or the true reason."""

import math

import pytest
import torch
import transformers as hf
from configurations import TOKENS, fill

from normgrowth.homogeneity import NotHomogeneous, degree, scalable

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IMAGE = {"image_size": 32, "patch_size": 8}
WINDOWS = {"image_size": 16, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
SERIES = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2], "d_model": 16, "encoder_layers": 1,
          "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}  # fmt: skip
SAM = {"output_channels": 8, "global_attn_indexes": [1], "window_size": 2, "mlp_dim": 24, **IMAGE}


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def pixels(size=32):
    return {"pixel_values": noise(1, 3, size, size)}


def series():
    """Eighteen steps that are known, with a feature of time, and eight that are not."""
    return {
        "past_values": noise(1, 18), "past_time_features": noise(1, 18, 1), "past_observed_mask": torch.ones(1, 18),
        "future_values": noise(1, 8), "future_time_features": noise(1, 8, 1),
    }  # fmt: skip


# What the class does: (class, configuration, inputs, asymptotic degree)
ANSWERED = {
    "a token of degree 1 beside patches of degree 2, before a norm": (
        hf.TimesformerModel, lambda: hf.TimesformerConfig(**SIZES, **IMAGE, num_frames=2),
        lambda: {"pixel_values": noise(1, 2, 3, 32, 32)}, 1),
    "features of two degrees side by side, before a convolution": (
        hf.CanineModel, lambda: hf.CanineConfig(**SIZES, num_hash_buckets=40, max_position_embeddings=64),
        lambda: {"input_ids": TOKENS}, 1),
    "weights over their standard deviation, by a batch norm": (
        hf.BitModel, lambda: hf.BitConfig(embedding_size=32, hidden_sizes=[32, 32], depths=[1, 1], num_groups=4),
        pixels, 1),
    "relative positions, interpolated in one dimension": (
        hf.SamVisionModel, lambda: hf.SamVisionConfig(**SIZES, **SAM), pixels, 1),
    "positions interpolated by cubics": (
        hf.YolosModel, lambda: hf.YolosConfig(**SIZES, image_size=[32, 32], patch_size=8, num_detection_tokens=4),
        lambda: pixels(40), 1),
    "a Fourier transform times its conjugate": (
        hf.AutoformerModel, lambda: hf.AutoformerConfig(**SERIES, num_time_features=1), series, 2),
    "a temperature on its bound": (hf.Swinv2Model, lambda: hf.Swinv2Config(**WINDOWS), lambda: pixels(16), 1),
}  # fmt: skip


def build(model_class, config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return fill(model_class(config).eval())


@pytest.mark.parametrize("name", ANSWERED)
def test_a_class_has_the_degree_of_its_outputs(name):
    model_class, config, inputs, expected = ANSWERED[name]
    model = build(model_class, config())
    assert degree(model, inputs(), approximate=True) == expected
    with scalable(model, inputs(), 0) as output, torch.no_grad():
        small, large = (float(output(c).norm()) for c in (1e5, 1e6))
    assert math.log10(large / small) == pytest.approx(expected, abs=0.01)


def test_chance_and_statistics_are_named_by_the_mode_of_the_module():
    """A masked autoencoder draws its mask in eval mode, too; an instance norm takes statistics in both."""
    masked = build(hf.ViTMAEModel, hf.ViTMAEConfig(**SIZES, **IMAGE))
    with pytest.raises(NotHomogeneous, match="is random, in eval mode too"):
        degree(masked, pixels(), approximate=True)
    net = torch.nn.Sequential(torch.nn.Conv1d(3, 3, 1), torch.nn.InstanceNorm1d(3, affine=True), torch.nn.Dropout())
    with pytest.raises(NotHomogeneous, match="takes statistics of the batch; call eval"):
        degree(net, noise(2, 3, 9), approximate=True)
    assert degree(net.eval(), noise(2, 3, 9), approximate=True, check=True) == 1
    with pytest.raises(NotHomogeneous, match="is random: call eval"):
        degree(net[2].train(), noise(2, 3, 9), 1)
