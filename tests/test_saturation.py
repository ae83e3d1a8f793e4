"""Similarity over real tokens, and the two numbers beside it."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nbutils import models, saturation
from nbutils.devices import generator

SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def build(kind):
    """A tiny model of ``transformers`` with random weights, in training mode; the global generator stays as it was."""
    import transformers as tf

    match kind:
        case "bert":
            make = lambda: tf.BertModel(tf.BertConfig(vocab_size=50, max_position_embeddings=24, **SIZE))  # noqa: E731
        case "roberta":
            config = tf.RobertaConfig(vocab_size=50, max_position_embeddings=26, **SIZE)
            make = lambda: tf.RobertaForMaskedLM(config)  # noqa: E731
        case "gpt2":
            config = tf.GPT2Config(
                vocab_size=50, n_positions=24, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
            )
            make = lambda: tf.GPT2LMHeadModel(config)  # noqa: E731
        case "t5":
            config = tf.T5Config(
                vocab_size=50, d_model=16, d_ff=32, d_kv=8, num_heads=2, num_layers=2, decoder_start_token_id=0
            )
            make = lambda: tf.T5ForConditionalGeneration(config)  # noqa: E731
        case "xlnet":
            config = tf.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=32)
            make = lambda: tf.XLNetLMHeadModel(config)  # noqa: E731
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().train()
        with torch.no_grad():  # the standard 0.02 makes every score 0: larger weights, so that heads differ
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(5)
    return model


KINDS = ("bert", "roberta", "gpt2", "t5", "xlnet")


def sentences(count=6, low=3, high=12, seed=0):
    """Token numbers from 4 on, past the special tokens of all kinds."""
    rng = generator(seed, "cpu")
    lengths = torch.randint(low, high + 1, (count,), generator=rng)
    return [torch.randint(4, 50, (int(n),), generator=rng).tolist() for n in lengths]


def padded(texts, pad=0):
    return saturation.batches_by_length(texts, max_tokens=10**6, pad=pad)[0]


def test_tied_language_model_is_scaled_once():
    model = build("gpt2")
    table = model.transformer.wte.weight.detach().clone()
    with saturation.scaled(model, 1000):
        assert model.lm_head.weight is model.transformer.wte.weight
        assert torch.equal(model.lm_head.weight, 1000 * table)


# ---- similarity ----


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    """The mean over single sentences is that of one padded batch, for every architecture, at c = 1000."""
    model, texts = build(kind), sentences()
    pad = model.config.pad_token_id or 0
    single = [saturation.similarity(model, {"input_ids": torch.tensor([text])}) for text in texts]
    one_by_one = torch.stack(single).mean(0)
    assert one_by_one.shape == (3,) and one_by_one.dtype == torch.float64
    together = saturation.similarity(model, padded(texts, pad))
    torch.testing.assert_close(together, one_by_one, rtol=0, atol=1e-5)
    for max_tokens in (1, 20, 40):
        many = saturation.similarity_many(model, texts, max_tokens=max_tokens)
        torch.testing.assert_close(many.raw, one_by_one, rtol=0, atol=1e-5)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.float64)
    by_token = saturation.similarity(model, padded(texts, pad), average="tokens")
    expected = (torch.stack(single) * lengths[:, None]).sum(0) / lengths.sum()
    torch.testing.assert_close(by_token, expected, rtol=0, atol=1e-5)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_scale_one_is_similarity_one_and_float64_agrees(kind):
    model, batch = build(kind), padded(sentences(), 1 if kind == "roberta" else 0)
    torch.testing.assert_close(saturation.similarity(model, batch, 1), torch.ones(3, dtype=torch.float64))
    wide = saturation.similarity(model, batch, dtype=torch.float64)
    torch.testing.assert_close(saturation.similarity(model, batch), wide, rtol=0, atol=1e-3)


def mask_leak(model, batch, c=1000.0, *, hidden=None):
    """How far other tokens in the places of the hidden ones (or of the padding) change the rest, largest by layer.

    Scores grow as a power of c, to 6e13 at c = 1000, so an additive mask of −1e4 or −1e9 that holds at c = 1 fails.
    """
    ids = batch["input_ids"]
    real = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(ids, dtype=torch.bool)
    hidden = ~real if hidden is None else hidden
    left = real & ~hidden
    assert hidden.any() and left.any()
    drawn = torch.randint(int(real.sum()), ids.shape, generator=generator(0, "cpu"))
    other = {**batch, "input_ids": torch.where(hidden, ids[real][drawn], ids)}
    with saturation.mode(model):
        pairs = zip(*(saturation._at(model, each, c, None) for each in (batch, other)), strict=True)
        states = [(a.states[left].double(), b.states[left].double()) for a, b in pairs]
    return torch.stack([((h - other).norm(dim=-1) / h.norm(dim=-1)).max() for h, other in states])


@pytest.mark.parametrize("kind", KINDS)
def test_masks_hold_at_a_thousand(kind):
    model, batch = build(kind), padded(sentences(), 1 if kind == "roberta" else 0)
    assert mask_leak(model, batch).max() < 1e-6
    if kind == "gpt2":
        full = {"input_ids": torch.tensor([list(range(4, 14))])}
        future = torch.arange(10)[None] >= 5
        assert mask_leak(model, full, hidden=future).max() < 1e-6
    if kind == "bert":  # an encoder sees the other side: the helper can tell
        full = {"input_ids": torch.tensor([list(range(4, 14))])}
        assert mask_leak(model, full, 1, hidden=torch.arange(10)[None] >= 5).max() > 1e-3


def test_encoder_decoder_with_and_without_decoder():
    model, batch = build("t5"), padded(sentences())
    alone = saturation.similarity(model, batch)
    decoder = {"decoder_input_ids": batch["input_ids"], "decoder_attention_mask": batch["attention_mask"]}
    both = saturation.similarity(model, {**batch, **decoder})
    assert both.shape == (6,)
    torch.testing.assert_close(both[:3], alone)
    torch.testing.assert_close(both[3], alone[0])  # one embedding table, no positions


class Own(nn.Module):
    """Attention scores x xᵀ with an additive mask of the given depth, on tokens as one-hot vectors."""

    def __init__(self, depth=-torch.inf, vocab=8):
        super().__init__()
        rows = torch.rand(vocab, 4, generator=generator(3, "cpu"))
        self.table = nn.Parameter(rows * (1 + torch.arange(vocab))[:, None] - 0.5)  # later tokens are larger
        self.depth = depth

    def hidden_states(self, tokens):
        x = self.table[tokens]
        future = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
        scores = x @ x.mT + torch.zeros(()).where(~future, self.depth)
        return [x, scores.softmax(-1) @ x]


@pytest.mark.parametrize(("depth", "leaks"), [(-torch.inf, False), (-1e9, False), (-1e4, True)])
def test_leaking_mask_is_seen(depth, leaks):
    batch = {"input_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]])}
    future = torch.arange(8)[None] >= 4
    leak = mask_leak(Own(depth), batch, 1000, hidden=future)
    assert leak[0] == 0
    assert leak[1] > 0.1 if leaks else leak[1] == 0
    assert mask_leak(Own(depth), batch, 1, hidden=future).max() == 0


def test_own_model_against_the_definition():
    model, tokens = Own(), torch.tensor([[0, 1, 2, 3], [3, 3, 5, 6]])
    raw = saturation.similarity(model, {"input_ids": tokens}, 50)
    big = copy.deepcopy(model)
    with torch.no_grad():
        big.table.mul_(50)
        pairs = zip(model.hidden_states(tokens), big.hidden_states(tokens), strict=True)
        expected = [float(torch.cosine_similarity(a, b, dim=-1).mean()) for a, b in pairs]
    torch.testing.assert_close(raw, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)
    many = saturation.similarity_many(model, [[0, 1, 2], [3, 3, 5, 6], [1, 2, 1]], 50)  # two lengths: two batches
    assert many.raw.shape == (2,)


def test_centred_against_the_definition():
    """One mean over the tokens of all batches, taken from each side; a shift common to all tokens drops out."""
    model, texts = Own(), [torch.tensor([[0, 1, 2, 3], [3, 3, 5, 6]]), torch.tensor([[7, 2]])]
    found = saturation.compare(model, [{"input_ids": text} for text in texts], 50, average="tokens")
    sides = []
    for scale in (1, 50):
        with torch.no_grad(), saturation.scaled(model, scale):
            states = torch.cat([model.hidden_states(text)[1].flatten(0, 1) for text in texts]).double()
        sides.append(states - states.mean(0))
    expected = float(torch.cosine_similarity(*sides, dim=-1).mean())
    assert float(found.centred[1]) == pytest.approx(expected, abs=1e-6)
    assert abs(expected - float(found.raw[1])) > 1e-3  # the two differ here


@pytest.mark.parametrize("placement", ["post", "pre", "residual-post"])
def test_language_model_of_the_book(placement):
    """Its mask holds at c = 1000, and float32 is enough there."""
    model = models.CausalLM(50, 16, 3, 2, 24, placement=placement, init_std="standard")
    batch = {"input_ids": torch.randint(50, (4, 24), generator=generator(0, "cpu"))}
    found = saturation.similarity(model, batch)
    assert found.shape == (4,) and found[0] == pytest.approx(1)
    torch.testing.assert_close(found, saturation.similarity(model, batch, dtype=torch.float64), rtol=0, atol=1e-5)
    future = (torch.arange(24) >= 9).expand(4, 24)
    assert mask_leak(model, batch, hidden=future).max() < 1e-6


def test_collapsed_tokens_have_a_trivial_similarity():
    """One direction for all tokens plus a little: raw near 1, anisotropy near 1, centred much lower."""

    class Collapsed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 6, generator=generator(1, "cpu")))

        def hidden_states(self, tokens):
            return [torch.tanh(self.table[tokens]) * 0.05 + torch.ones(6)]

    batch = {"input_ids": torch.arange(8)[None]}
    found = saturation.compare(Collapsed(), [batch])
    assert found.raw > 0.99 and found.anisotropy > 0.99 and found.anisotropy_scaled > 0.99
    assert found.centred < 0.98
    torch.testing.assert_close(found.anisotropy, saturation.anisotropy(Collapsed(), batch))


def test_identical_tokens_have_no_centred_direction():
    found = saturation.compare(Own(), [{"input_ids": torch.full((2, 3), 4)}])
    assert found.centred.isnan().all()
    torch.testing.assert_close(found.anisotropy, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("c", [1.0, 2.0, 50.0])
def test_anisotropy_is_that_of_the_scaled_model(c):
    tokens = torch.tensor([[0, 1, 2, 3], [3, 3, 5, 6]])
    with torch.no_grad(), saturation.scaled(model := Own(), c):
        expected = [saturation.mean_pair_cosine(states.flatten(0, 1)) for states in model.hidden_states(tokens)]
    torch.testing.assert_close(saturation.anisotropy(model, {"input_ids": tokens}, c), torch.stack(expected))


def test_the_scale_is_the_papers_thousand_unless_given():
    batch = {"input_ids": torch.tensor([[0, 1, 2, 3]])}
    for function in (saturation.similarity, lambda *what: saturation.compare(what[0], [what[1]], *what[2:]).raw):
        assert torch.equal(function(Own(), batch), function(Own(), batch, 1000.0))
        assert not torch.equal(function(Own(), batch), function(Own(), batch, 30.0))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 4))
def test_pair_cosine_is_the_mean_over_pairs(seed, n, dim):
    x = torch.randn(n, dim, generator=generator(seed, "cpu"), dtype=torch.float64)
    unit = x / x.norm(dim=1, keepdim=True)
    pairs = [float(unit[i] @ unit[j]) for i in range(n) for j in range(n) if i != j]
    assert float(saturation.mean_pair_cosine(x)) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert float(saturation.mean_pair_cosine(1e30 * x)) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def test_one_token_has_no_pair():
    assert saturation.mean_pair_cosine(torch.ones(1, 3)).isnan()


# ---- dropout ----


def test_dropout_is_off_unless_asked_and_draws_from_its_seed():
    model, batch = build("bert"), padded(sentences())
    model.encoder.layer[0].eval()  # a mode of its own
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    off = saturation.similarity(model, batch, 1)
    torch.testing.assert_close(off, torch.ones(3, dtype=torch.float64))
    on = saturation.similarity(model, batch, 1, dropout=True, seed=5)
    assert (on < 0.98).all()
    assert torch.equal(on, saturation.similarity(model, batch, 1, dropout=True, seed=5))
    assert not torch.equal(on, saturation.similarity(model, batch, 1, dropout=True, seed=6))
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())


# ---- what goes wrong is named ----


class Unnormalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))

    def hidden_states(self, tokens):
        states = [torch.ones(*tokens.shape, 4, dtype=self.w.dtype)]
        for _ in range(15):
            states.append(states[-1] @ self.w)
        return states


def test_overflow_of_a_layer_is_named():
    batch = {"input_ids": torch.zeros(1, 2, dtype=torch.long)}
    with pytest.raises(OverflowError, match=r"layer 11 of 15 is not finite in torch.float32 at c = 1000.*float64"):
        saturation.similarity(Unnormalised(), batch)
    wide = saturation.similarity(Unnormalised(), batch, dtype=torch.float64)
    torch.testing.assert_close(wide, torch.ones(16, dtype=torch.float64))
    with torch.no_grad():
        dead = Unnormalised()
        dead.w.zero_()
    with pytest.raises(ValueError, match="layer 1 at c = 1 has a token whose representation is 0"):
        saturation.similarity(dead, batch)


def test_half_precision_is_refused_at_a_thousand():
    model, batch = build("bert").half(), padded(sentences())
    with pytest.raises(OverflowError, match=r"layer 1 of 2 is not finite in torch.float16 at c = 1000"):
        saturation.similarity(model, batch)
    assert saturation.similarity(model, batch, 2).isfinite().all()
    assert saturation.similarity(model, batch, dtype=torch.float32).isfinite().all()


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({}, "needs input_ids"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.eye(2, 3)}, "no attention mask"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.zeros(1, 3)}, "no real token"),
    ],
)
def test_bad_batches_are_named(batch, said):
    with pytest.raises(ValueError, match=said):
        saturation.similarity(Own(), batch)


def test_other_bad_input_is_named():
    with pytest.raises(TypeError, match="Linear is no model of transformers"):
        saturation.similarity(nn.Linear(2, 2), {"input_ids": torch.ones(1, 2, dtype=torch.long)})
    with pytest.raises(ValueError, match="unknown average 'words'"):
        saturation.similarity(Own(), {"input_ids": torch.ones(1, 2, dtype=torch.long)}, average="words")
    with pytest.raises(ValueError, match=r"sentence 1 has no token \(has the folder a tokenizer\?\)"):
        saturation.batches_by_length([[1], []])
    with pytest.raises(ValueError, match="no sentence"):
        saturation.batches_by_length([])


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 100), st.booleans())
def test_batches_hold_every_sentence_once(lengths, max_tokens, padding):
    texts = [[number + 1] * length for number, length in enumerate(lengths)]
    batches = saturation.batches_by_length(texts, max_tokens=max_tokens, padding=padding)
    found = []
    for batch in batches:
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        assert ids.numel() <= max_tokens or len(ids) == 1
        assert padding or real.all()
        found += [row[mask].tolist() for row, mask in zip(ids, real, strict=True)]
    assert sorted(found) == sorted(texts)


# ---- edges, defaults and axes ----


class Table(nn.Module):
    """Layer 0: rows of a table; layer 1: the same, and ones times the square of their mean. Keeps what it has seen."""

    def __init__(self, rows=9, dim=16):
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, dim, generator=generator(4, "cpu")))
        self.drop = nn.Dropout(0.1)
        self.seen = []

    def hidden_states(self, tokens):
        x = self.drop(self.table[tokens])
        self.seen.append((tuple(tokens.shape), x.dtype))
        return [x, x + x.square().mean()]


def cosine(a, b):
    return (a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)


@pytest.mark.parametrize("average", ["sentences", "tokens"])
def test_all_five_numbers_against_their_definitions(average):
    """Sentences of two, three and four tokens: a token weighs 1, or one over the length of its sentence."""
    model, texts = Table(), [[0, 1], [2, 3, 4], [5, 6, 7, 8]]
    found = saturation.similarity_many(model, texts, 3.0, average=average)
    lengths = torch.tensor([float(len(text)) for text in texts for _ in text], dtype=torch.float64)
    w = 1 / lengths if average == "sentences" else torch.ones_like(lengths)
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


def test_both_runs_have_the_precision_that_is_asked_for():
    model, batch = Table(), {"input_ids": torch.tensor([[0, 1, 2]])}
    for dtype, seen in ((None, torch.float32), (torch.float64, torch.float64)):
        for call in (
            lambda dtype=dtype: saturation.similarity(model, batch, dtype=dtype),
            lambda dtype=dtype: saturation.similarity(model, batch, 1, dtype=dtype),
            lambda dtype=dtype: saturation.compare(model, [batch], dtype=dtype),
            lambda dtype=dtype: saturation.anisotropy(model, batch, dtype=dtype),
            lambda dtype=dtype: saturation.anisotropy(model, batch, 2.0, dtype=dtype),
        ):
            model.seen.clear()
            call()
            assert {kind for _, kind in model.seen} == {seen}


def test_sentences_weigh_alike_without_dropout_and_with_seed_zero_unless_given():
    model, texts = Table(), [[0, 1], [2, 3, 4, 5]]
    batch = {"input_ids": torch.tensor([[0, 1, 2, 3]])}
    plain = saturation.similarity_many(model, texts)
    assert torch.equal(plain.raw, saturation.similarity_many(model, texts, 1000.0, average="sentences").raw)
    assert not torch.equal(plain.raw, saturation.similarity_many(model, texts, average="tokens").raw)
    assert torch.equal(plain.raw, saturation.similarity_many(model, texts, dropout=False).raw)
    for function in (saturation.similarity, lambda m, b, **o: saturation.compare(m, [b], **o).raw):
        assert torch.equal(function(model, batch, dropout=True), function(model, batch, dropout=True, seed=0))
        assert not torch.equal(function(model, batch, dropout=True), function(model, batch, dropout=True, seed=1))
        assert not torch.equal(function(model, batch, dropout=True), function(model, batch))
    assert torch.equal(saturation.anisotropy(model, batch), saturation.anisotropy(model, batch, 1.0))


def test_batches_hold_4096_tokens_unless_more_are_asked_for():
    texts = [[1]] * 4097
    assert [tuple(b["input_ids"].shape) for b in saturation.batches_by_length(texts)] == [(4096, 1), (1, 1)]
    model = Table()
    saturation.similarity_many(model, texts)
    assert [shape for shape, _ in model.seen] == [(4096, 1), (1, 1)] * 2
    (batch,) = saturation.batches_by_length([[5, 6, 7], [8]])
    assert batch["input_ids"].tolist() == [[8, 0, 0], [5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert [len(b["input_ids"]) for b in saturation.batches_by_length([[1], [2, 3], [4, 5]], padding=False)] == [1, 2]
    assert [len(b["input_ids"]) for b in saturation.batches_by_length([[1, 1]] * 4, max_tokens=6)] == [3, 1]


def test_padding_is_the_token_of_the_model():
    class Padded(nn.Module):
        def __init__(self, pad):
            super().__init__()
            self.config = type("Config", (), {"pad_token_id": pad})()
            self.table, self.seen = nn.Parameter(torch.eye(9)), []

        def forward(self, input_ids, attention_mask, output_hidden_states, return_dict):
            assert output_hidden_states and return_dict
            self.seen.append((input_ids.tolist(), attention_mask.tolist()))
            return type("Output", (), {"hidden_states": (self.table[input_ids],)})()

    for pad, shown in ((7, 7), (0, 0), (None, 0)):
        model = Padded(pad)
        found = saturation.similarity_many(model, [[1, 2, 3], [4]])
        assert model.seen == [([[4, shown, shown], [1, 2, 3]], [[1, 0, 0], [1, 1, 1]])] * 2
        assert float(found.raw) == pytest.approx(1) and float(found.anisotropy) == pytest.approx(0)
    saturation.similarity(model, {"input_ids": torch.tensor([[1, 2]])})
    assert model.seen[-1] == ([[1, 2]], [[1, 1]]), "without a mask all tokens are real"


def test_the_first_sentence_without_a_real_token_is_named():
    mask = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match="sentence 2 of the batch has no real token"):
        saturation.layers(Own(), {"input_ids": torch.ones_like(mask), "attention_mask": mask})
    for batch, said in (({}, "it has nothing"), ({"labels": mask, "a": mask}, "it has labels, a")):
        with pytest.raises(ValueError, match=said):
            saturation.layers(Own(), batch)
    with pytest.raises(ValueError, match="no batch to compare on"):
        saturation.compare(Own(), [])


def test_a_zero_among_other_numbers_is_still_a_direction():
    """Only a token that is 0 altogether has none; one that is not real may be anything."""
    states = torch.tensor([[[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]]])
    real = torch.tensor([[True, True, False]])
    layer = saturation.Layer(states, real)
    assert saturation._checked([layer], 1.0) == [layer]
    with pytest.raises(ValueError, match="layer 1 at c = 5 has a token"):
        saturation._checked([layer, saturation.Layer(states, torch.ones_like(real))], 5.0)
    for bad in (torch.inf, -torch.inf, torch.nan):
        wrong = saturation.Layer(torch.tensor([[[1.0, 1.0], [1.0, bad]]]), torch.ones(1, 2, dtype=torch.bool))
        with pytest.raises(OverflowError, match="layer 1 of 1 is not finite"):
            saturation._checked([saturation.Layer(states[:, :2], real[:, :2]), wrong], 5.0)


def test_a_decoder_without_a_mask_has_real_tokens_only():
    model = build("t5").eval()
    batch = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 4]]), "decoder_input_ids": torch.tensor([[0, 5], [0, 6]])}
    found = saturation.layers(model, batch)
    assert [tuple(layer.states.shape) for layer in found] == [(2, 3, 16)] * 3 + [(2, 2, 16)] * 3
    assert all(layer.real.dtype == torch.bool and layer.real.all() for layer in found)
    masked = saturation.layers(model, {**batch, "decoder_attention_mask": torch.tensor([[1, 1], [1, 0]])})
    assert [int((~layer.real).sum()) for layer in masked] == [0] * 3 + [1] * 3


def test_what_differs_by_rounding_alone_has_no_centred_direction():
    """8 ε of the length: rounding is below, a thousand times as much is not."""
    row = torch.tensor([[3.0, 4.0, 12.0]])
    for size, kept in ((1e-7, False), (1e-3, True)):
        x = torch.cat([row, row * (1 + size), row * (1 - size)])
        assert bool((saturation._centre(x).norm(dim=1) > 0).any()) == kept
