"""Similarity over real tokens, and the numbers beside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny
from torch import nn

from nbutils import models
from nbutils.devices import generator
from normgrowth import saturation

KINDS = ("bert", "roberta", "gpt2", "t5", "xlnet")


def sentences(count=6, low=3, high=12, seed=0):
    """Token numbers from 4 on, past the special tokens of all kinds."""
    rng = generator(seed, "cpu")
    lengths = torch.randint(low, high + 1, (count,), generator=rng)
    return [torch.randint(4, 50, (int(n),), generator=rng).tolist() for n in lengths]


def padded(texts, pad=0):
    return saturation.batches_by_length(texts, max_tokens=10**6, pad=pad)[0]


def raw(model, batch, *c, **options):
    return saturation.compare(model, [batch], *c, **options).raw


class Rows(nn.Module):
    """Representations are given, token by token."""

    def __init__(self, rows, *layers):
        super().__init__()
        self.table = nn.Parameter(rows)
        self.layers = (lambda x: x, *layers)

    def hidden_states(self, tokens):
        return [layer(self.table[tokens]) for layer in self.layers]


def table(count=9, dim=16, seed=4):
    return torch.randn(count, dim, generator=generator(seed, "cpu"))


# ---- models of transformers ----


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    """The mean over single sentences is that of one padded batch, for every architecture, at c = 1000."""
    model, texts = tiny(kind), sentences()
    pad = model.config.pad_token_id or 0
    single = torch.stack([raw(model, {"input_ids": torch.tensor([text])}) for text in texts])
    assert single.shape == (6, 3) and single.dtype == torch.float64
    torch.testing.assert_close(raw(model, padded(texts, pad)), single.mean(0), rtol=0, atol=1e-5)
    for max_tokens in (1, 20, 40):
        many = saturation.similarity(model, texts, max_tokens=max_tokens)
        torch.testing.assert_close(many.raw, single.mean(0), rtol=0, atol=1e-5)
    lengths = torch.tensor([float(len(text)) for text in texts], dtype=torch.float64)
    by_token = saturation.similarity(model, texts, average="tokens").raw
    torch.testing.assert_close(by_token, lengths @ single / lengths.sum(), rtol=0, atol=1e-5)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_scale_one_is_similarity_one_and_float64_agrees(kind):
    model, batch = tiny(kind), padded(sentences(), 1 if kind == "roberta" else 0)
    torch.testing.assert_close(raw(model, batch, 1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(raw(model, batch), raw(model, batch, dtype=torch.float64), rtol=0, atol=1e-3)


def mask_leak(model, batch, c=1000.0, *, hidden=None):
    """How far other tokens in the places of the hidden ones (or of the padding) change the rest, largest by layer.

    Scores grow as a power of c, to 6e13 at c = 1000, so an additive mask of −1e4 or −1e9 that holds at c = 1 fails.
    """
    ids, real = batch["input_ids"], saturation.real_tokens(batch)
    hidden = ~real if hidden is None else hidden
    left = real & ~hidden
    assert hidden.any() and left.any()
    drawn = torch.randint(int(real.sum()), ids.shape, generator=generator(0, "cpu"))
    other = {**batch, "input_ids": torch.where(hidden, ids[real][drawn], ids)}
    with saturation.mode(model), saturation.scaled(model, c):
        both = zip(*(saturation.layers(model, each) for each in (batch, other)), strict=True)
        states = [(a.states[left].double(), b.states[left].double()) for a, b in both]
    return torch.stack([((h - other).norm(dim=-1) / h.norm(dim=-1)).max() for h, other in states])


@pytest.mark.parametrize("kind", KINDS)
def test_masks_hold_at_a_thousand(kind):
    model, batch = tiny(kind), padded(sentences(), 1 if kind == "roberta" else 0)
    assert mask_leak(model, batch).max() < 1e-6
    full, future = {"input_ids": torch.arange(4, 14)[None]}, torch.arange(10)[None] >= 5
    if kind == "gpt2":
        assert mask_leak(model, full, hidden=future).max() < 1e-6
    if kind == "bert":  # an encoder sees the other side: the helper can tell
        assert mask_leak(model, full, 1, hidden=future).max() > 1e-3


def test_decoders_follow_their_encoder_and_may_be_padded():
    model, texts = tiny("t5"), sentences()
    others = sentences(seed=1)
    both = saturation.similarity(model, texts, decoder=others)
    torch.testing.assert_close(both.raw[:3], saturation.similarity(model, texts).raw)
    single = [{"input_ids": torch.tensor([a]), "decoder_input_ids": torch.tensor([b])}
              for a, b in zip(texts, others, strict=True)]  # fmt: skip
    expected = torch.stack([raw(model, batch) for batch in single]).mean(0)
    assert expected.shape == (6,)
    torch.testing.assert_close(both.raw, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(saturation.compare(model, single).raw, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("placement", ["post", "pre", "residual-post"])
def test_language_model_of_the_book(placement):
    """Its mask holds at c = 1000, and float32 is enough there."""
    model = models.CausalLM(50, 16, 3, 2, 24, placement=placement, init_std="standard")
    batch = {"input_ids": torch.randint(50, (4, 24), generator=generator(0, "cpu"))}
    found = raw(model, batch)
    assert found.shape == (4,) and found[0] == pytest.approx(1)
    torch.testing.assert_close(found, raw(model, batch, dtype=torch.float64), rtol=0, atol=1e-5)
    assert mask_leak(model, batch, hidden=(torch.arange(24) >= 9).expand(4, 24)).max() < 1e-6


# ---- the numbers ----


def cosine(a, b):
    return (a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)


@pytest.mark.parametrize("options", [{}, {"average": "sentences"}, {"average": "tokens"}])
def test_all_five_numbers_against_their_definitions(options):
    """Sentences of two, three and four tokens: a token weighs 1, or, by default, one over its sentence's length."""
    model, texts = Rows(table(), lambda x: x + x.square().mean()), [[0, 1], [2, 3, 4], [5, 6, 7, 8]]
    found = saturation.compare(model, [{"input_ids": torch.tensor([text])} for text in texts], 3.0, **options)
    lengths = torch.tensor([float(len(text)) for text in texts for _ in text], dtype=torch.float64)
    w = torch.ones_like(lengths) if options.get("average") == "tokens" else 1 / lengths
    w = w / w.sum()
    rows = [model.table.detach()[text] for text in texts]
    for layer in (0, 1):
        one, two = (torch.cat([c * x + layer * (c * x).square().mean() for x in rows]).double() for c in (1.0, 3.0))
        unit, unit_two = (x / x.norm(dim=1, keepdim=True) for x in (one, two))
        want = [
            w @ cosine(one, two),
            (w @ unit) @ (w @ unit_two),
            w @ cosine(one - one.mean(0), two - two.mean(0)),
            *((x @ x.T).triu(1).sum() / 36 for x in (unit, unit_two)),
        ]
        assert [float(values[layer]) for values in found] == pytest.approx([float(x) for x in want], abs=1e-6)
    assert all(values.dtype == torch.float64 and values.shape == (2,) for values in found)


@pytest.mark.parametrize(("spread", "kept"), [(0.0, False), (1e-7, False), (1e-3, True)])
def test_what_differs_by_rounding_alone_has_no_centred_direction(spread, kept):
    row = torch.tensor([[3.0, 4.0, 12.0]])
    model = Rows(torch.cat([row, row * (1 + spread), row * (1 - spread)]))
    found = saturation.compare(model, [{"input_ids": torch.arange(3)[None]}])
    assert bool(found.centred.isfinite()) == kept and found.anisotropy == pytest.approx(1)


def test_one_token_has_no_pair():
    assert saturation.compare(Rows(table()), [{"input_ids": torch.zeros(1, 1).long()}]).anisotropy.isnan().all()


def test_dropout_is_off_unless_asked_and_draws_from_its_seed():
    model, batch = tiny("bert"), padded(sentences())
    model.encoder.layer[0].eval()  # a mode of its own
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    torch.testing.assert_close(raw(model, batch, 1), torch.ones(3, dtype=torch.float64))
    on, same, first, zero = (
        raw(model, batch, 1, dropout=True, **seed) for seed in ({"seed": 5}, {"seed": 5}, {}, {"seed": 0})
    )
    assert (on < 0.98).all() and torch.equal(on, same) and torch.equal(first, zero) and not torch.equal(on, zero)
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())


# ---- what goes wrong is named ----


def test_overflow_of_a_layer_is_named():
    """Layer n is of degree n: 10³⁸ is passed by the thirteenth power of 1000, and in float16 by the second."""
    layers = [lambda x, n=n: x**n for n in range(2, 15)]
    model, batch = Rows(torch.ones(2, 4), *layers), {"input_ids": torch.zeros(1, 2).long()}
    with pytest.raises(OverflowError, match=r"layer 12 of 13 is not finite in torch.float32 at c = 1000.*float64"):
        raw(model, batch)
    torch.testing.assert_close(raw(model, batch, dtype=torch.float64), torch.ones(14, dtype=torch.float64))
    with pytest.raises(OverflowError, match=r"layer 1 of 13 is not finite in torch.float16 at c = 1000"):
        raw(model.half(), batch)
    assert raw(model, batch, 2).isfinite().all() and raw(model, batch, dtype=torch.float64).isfinite().all()


@pytest.mark.parametrize(("bad", "error"), [(0.0, ValueError), (torch.inf, OverflowError), (torch.nan, OverflowError)])
def test_a_token_without_a_direction_is_named(bad, error):
    """Only one that is 0 altogether has none; of a padded token nobody asks."""
    model = tiny("bert")
    model.forward = lambda input_ids, **_: type("Output", (), {"hidden_states": [rows[:1].expand(2, 3, 2), rows]})()
    rows = torch.tensor([[[0.0, 1.0]] * 3, [[2.0, 0.0], [0.0, 3.0], [bad, bad]]])
    ids = torch.ones(2, 3, dtype=torch.long)
    assert raw(model, {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}, 5).isfinite().all()
    with pytest.raises(error, match=r"layer 1 of 1 (has a token at c = 1 whose repr|is not finite)"):
        raw(model, {"input_ids": ids}, 5)


ONES = torch.ones(3, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: raw(m, {"input_ids": ONES, "attention_mask": torch.tril(ONES)}), ValueError, "no attention mask"),
        (lambda m: raw(nn.Linear(2, 2), {"input_ids": ONES}), TypeError, r"is not a model .*hidden_states\(tokens"),
        (lambda m: saturation.similarity(m, [[1]], average="words"), ValueError, "unknown average 'words'"),
        (lambda m: saturation.similarity(m, []), ValueError, "no sentence"),
        (
            lambda m: saturation.similarity(m, [[1], []]),
            ValueError,
            r"sentence 1 has no token \(does the folder have a tokenizer\?\)",
        ),
        (lambda m: saturation.similarity(m, [[1], [2]], decoder=[[1], []]), ValueError, "sentence 1 has no token"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(Rows(table()))


# ---- batches ----


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 100), st.booleans())
def test_batches_hold_every_sentence_once(lengths, max_tokens, both):
    texts = [[number + 1] * length for number, length in enumerate(lengths)]
    decoder = [[*text, 99] for text in texts] if both else None
    found = []
    for batch in saturation.batches_by_length(texts, decoder=decoder, max_tokens=max_tokens):
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        widest = batch["decoder_input_ids"] if both else ids
        assert widest.numel() <= max_tokens or len(ids) == 1
        assert (ids[~real] == 0).all()
        found += [row[mask].tolist() for row, mask in zip(ids, real, strict=True)]
        if both:
            rows = zip(widest, batch["decoder_attention_mask"].bool(), strict=True)
            assert [row[mask].tolist() for row, mask in rows] == [[*text, 99] for text in found[-len(ids) :]]
    assert sorted(found) == sorted(texts)
