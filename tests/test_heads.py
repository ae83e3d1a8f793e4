"""Saturated attention against the softmax it is the limit of, and heads whose answer is known."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from nbutils import heads, models, saturation
from nbutils.devices import generator

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 7))
INTEGERS = arrays(np.float64, SHAPES, elements=st.integers(-6, 6).map(float)).map(torch.from_numpy)
REAL = arrays(np.float64, SHAPES, elements=st.floats(-50, 50)).map(torch.from_numpy)
SQUARE = (
    st.integers(1, 9).flatmap(lambda n: arrays(np.float64, (n, n), elements=st.floats(-9, 9))).map(torch.from_numpy)
)


# ---- saturated attention ----


@settings(deadline=None)
@given(INTEGERS)
def test_it_is_the_limit_of_softmax(scores):
    """Scores at least 1 apart or equal: at c = 60 the rest of a row has at most 6 e⁻⁶⁰, ties or none."""
    torch.testing.assert_close((60 * scores).softmax(-1), heads.saturated(scores), rtol=1e-12, atol=1e-25)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.floats(0.1, 40))
def test_rate_of_the_limit_for_tie_free_scores(seed, n, c):
    """The weight off the maximum is at most (n − 1) e^(−c·gap)."""
    scores = torch.randn(n, generator=generator(seed, "cpu"), dtype=torch.float64)
    best, second = scores.topk(2).values
    off = float(((c * scores).softmax(-1) - heads.saturated(scores)).abs().sum()) / 2
    assert off <= (n - 1) * math.exp(-c * float(best - second)) + 1e-15


@settings(deadline=None)
@given(INTEGERS, st.integers(-100, 100), st.integers(1, 50))
def test_shift_and_positive_scale_change_nothing(scores, shift, scale):
    expected = heads.saturated(scores)
    assert torch.equal(heads.saturated(scores + shift), expected)
    assert torch.equal(heads.saturated(scores * scale), expected)
    assert torch.equal(heads.saturated(scores.log_softmax(-1), rtol=1e-9), expected)  # log p, up to its rounding


@settings(deadline=None)
@given(REAL)
def test_uniform_on_the_maxima_and_nowhere_else(scores):
    weights = heads.saturated(scores)
    for row, weight in zip(scores.tolist(), weights.tolist(), strict=True):
        best = [i for i, s in enumerate(row) if s == max(row)]
        assert weight == [1 / len(best) if i in best else 0 for i in range(len(row))]


def test_masked_rows_and_keys():
    inf = torch.inf
    scores = torch.tensor([[-inf, -5.0, -5.0], [-inf, -inf, -inf], [0.0, -inf, -1.0]])
    expected = torch.tensor([[0, 0.5, 0.5], [0, 0, 0], [1, 0, 0]])
    assert torch.equal(heads.saturated(scores), expected)
    assert torch.equal(heads.saturated(scores, rtol=0.5)[1], torch.zeros(3))


def test_relative_ties():
    scores = torch.tensor([[1e13, 1e13 * (1 - 1e-7), 1e13 * (1 - 1e-5)]], dtype=torch.float64)
    assert heads.positions(heads.saturated(scores)).tolist() == [1]
    assert heads.positions(heads.saturated(scores, rtol=1e-6)).tolist() == [2]
    assert heads.positions(heads.saturated(scores, rtol=1e-4)).tolist() == [3]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_without_a_maximum_are_named(bad):
    with pytest.raises(ValueError, match="1 scores are NaN or"):
        heads.saturated(torch.tensor([[0.0, bad]]))
    with pytest.raises(ValueError, match="rtol must not be negative; got -1"):
        heads.saturated(torch.zeros(1, 1), rtol=-1)


# ---- the mask of the released code ----


@pytest.mark.parametrize("length", [1, 2, 3, 4, 17, 83, 700])
def test_negative_scores_attend_to_the_future(length):
    """By construction, without the formula: draw negative scores, mask, saturate, count."""
    scores = -1 - torch.rand(1, 1, length, length, generator=generator(length, "cpu"), dtype=torch.float64)
    weights = heads.saturated(heads.multiplicative_mask(scores))
    summary = heads.summarise(weights)
    assert float(summary.positions) == pytest.approx(heads.released_mask_positions(length), rel=1e-12)
    assert float(summary.split) == pytest.approx(max(length - 2, 0) / length, abs=1e-12)  # all but the last two
    past = torch.ones(length, length, dtype=torch.bool).tril()
    assert float(heads.summarise(weights, past).masked_mass) == pytest.approx((length - 1) / length)
    correct = heads.summarise(heads.saturated(heads.causal_mask(scores)), past)
    assert (float(correct.positions), float(correct.split), float(correct.masked_mass)) == (1, 0, 0)


def test_positive_scores_hide_the_difference_of_the_masks():
    scores = 1 + torch.rand(1, 1, 20, 20, generator=generator(0, "cpu"))
    assert torch.equal(heads.saturated(heads.multiplicative_mask(scores)), heads.saturated(heads.causal_mask(scores)))
    soft = heads.multiplicative_mask(scores).softmax(-1)  # but not before saturation
    assert float(heads.summarise(soft, torch.ones(20, 20).tril()).masked_mass) > 0.05


@settings(deadline=None)
@given(SQUARE)
def test_multiplicative_mask_is_a_product(scores):
    assert torch.equal(heads.multiplicative_mask(scores), scores * torch.ones_like(scores).tril())
    assert torch.equal(heads.causal_mask(scores).softmax(-1).triu(1), torch.zeros_like(scores).triu(1))


def test_no_length_is_named():
    with pytest.raises(ValueError, match="at least 1; got 0"):
        heads.released_mask_positions(0)


# ---- measures ----


@settings(deadline=None)
@given(REAL)
def test_entropy_bounds_and_counts(scores):
    n = scores.shape[-1]
    soft, hard = scores.softmax(-1), heads.saturated(scores)
    assert (heads.entropy(soft) >= 0).all() and (heads.entropy(soft) <= math.log(n) + 1e-12).all()
    torch.testing.assert_close(heads.entropy(hard), heads.positions(hard).double().log(), rtol=1e-12, atol=1e-12)
    counts = heads.positions(soft)
    assert (counts >= 1).all() and (counts <= n).all()
    assert (heads.positions(soft, threshold=1e-9) >= counts).all()
    for threshold in (1e-6, 0.5, 1.0):
        assert torch.equal(heads.positions(hard, threshold=threshold), (hard > 0).sum(-1))


@settings(deadline=None)
@given(st.integers(2, 9))
def test_uniform_attention_has_full_entropy(n):
    past = torch.ones(n, n, dtype=torch.bool).tril()
    weights = heads.causal_mask(torch.zeros(n, n, dtype=torch.float64)).softmax(-1)
    relative = heads.entropy(weights, past, normalised=True)
    assert relative[0].isnan()
    torch.testing.assert_close(relative[1:], torch.ones(n - 1, dtype=torch.float64))
    torch.testing.assert_close(heads.entropy(weights), torch.arange(1, n + 1).double().log())


@settings(deadline=None)
@given(REAL)
def test_mass_is_split_between_allowed_and_masked(scores):
    weights, allowed = scores.softmax(-1), scores > 0
    both = heads.masked_mass(weights, allowed) + heads.masked_mass(weights, ~allowed)
    torch.testing.assert_close(both, torch.ones_like(both))


def test_summary_leaves_padding_out():
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "attention_mask": torch.tensor([[1] * 4, [1, 1, 0, 0]])}
    allowed = heads.allowed_positions(batch, causal=True)
    assert allowed.sum().item() == 10 + 3
    scores = torch.zeros(2, 3, 4, 4).masked_fill(~allowed, -torch.inf)
    summary = heads.summarise(heads.saturated(scores), allowed)
    torch.testing.assert_close(summary.positions, torch.full((3,), (1 + 2 + 3 + 4 + 1 + 2) / 6, dtype=torch.float64))
    torch.testing.assert_close(summary.share, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(summary.normalised_entropy, torch.ones(3, dtype=torch.float64))
    both = heads.allowed_positions(batch, causal=False)
    assert both.sum().item() == 16 + 4


def test_heads_of_known_kind():
    """First position, uniform over the past, one of two token types, and the three best of 32."""
    length, past = 32, torch.ones(32, 32, dtype=torch.bool).tril()
    scores = torch.zeros(1, 4, length, length)
    scores[0, 0, :, 0] = 1
    scores[0, 2, :, ::2] = 1
    scores[0, 3, :, :3] = 1
    summary = heads.summarise(heads.saturated(heads.causal_mask(scores)), past)
    assert heads.classify(summary) == ["argmax-like", "mean-like", "mean-like", "other"]
    assert heads.classify(summary, few=3) == ["argmax-like", "mean-like", "mean-like", "argmax-like"]
    assert heads.classify(summary, many=0.9) == ["argmax-like", "mean-like", "other", "other"]
    assert float(summary.positions[1]) == (length + 1) / 2
    assert summary.masked_mass.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: heads.entropy(torch.tensor([[0.5, 0.6]])), "not probabilities"),
        (lambda: heads.entropy(torch.tensor([[1.5, -0.5]])), "not probabilities"),
        (lambda: heads.positions(torch.tensor([[torch.nan, 1.0]])), "not probabilities"),
        (lambda: heads.positions(torch.ones(1, 1), threshold=0), "threshold must be in"),
        (lambda: heads.summarise(torch.ones(1, 1)), r"shape \(1, 1\)"),
        (lambda: heads.summarise(torch.ones(1, 1, 1, 1), torch.zeros(1, 1)), "no query"),
    ],
)
def test_bad_input_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()


# ---- models ----


def tiny(kind, attention="eager"):
    """A new model of ``transformers``, biases 0 and layer norms at gain 1; matrices 10 times the usual 0.02."""
    import transformers as tf

    common = {"vocab_size": 50, "initializer_range": 0.2, "attn_implementation": attention}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        match kind:
            case "bert":
                return tf.BertModel(
                    tf.BertConfig(
                        hidden_size=16,
                        num_hidden_layers=2,
                        num_attention_heads=2,
                        intermediate_size=32,
                        max_position_embeddings=16,
                        **common,
                    )
                )
            case "gpt2":
                ends = {"bos_token_id": 0, "eos_token_id": 0}
                return tf.GPT2Model(tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **ends, **common))
            case "t5":
                return tf.T5Model(
                    tf.T5Config(d_model=16, d_ff=32, d_kv=8, num_heads=2, num_layers=2, attn_implementation=attention)
                )
            case "xlnet":
                return tf.XLNetModel(tf.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=32))


BATCH = {"input_ids": torch.tensor([[5, 9, 7, 4, 30, 12], [8, 6, 41, 9, 0, 0]])}
BATCH["attention_mask"] = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])


@pytest.mark.parametrize(("kind", "causal"), [("bert", False), ("gpt2", True)])
def test_first_layer_at_a_thousand_is_its_saturated_attention(kind, causal):
    """Without biases the first layer's scores grow as c⁴: c² by the weights, c² by the layer norm's gain."""
    model = tiny(kind)
    allowed = heads.allowed_positions(BATCH, causal=causal).expand(2, 2, 6, 6)
    now, large = heads.attention_scores(model, BATCH), heads.attention_scores(model, BATCH, 1000)
    assert len(now) == 2 and now[0].shape == (2, 2, 6, 6)
    expected = heads.saturated(now[0])
    torch.testing.assert_close(large[0].softmax(-1)[allowed], expected[allowed], rtol=0, atol=1e-6)
    for scores in (*now, *large):
        summary = heads.summarise(scores.softmax(-1), allowed)
        assert summary.masked_mass.max() == 0
        assert heads.summarise(heads.saturated(scores), allowed).positions.min() >= 1
    assert model.training


@pytest.mark.parametrize(("kind", "layers"), [("t5", 2), ("xlnet", 2)])
def test_other_architectures(kind, layers):
    model = tiny(kind).eval()
    found = heads.attention_scores(model, BATCH, 1000)
    assert [x.shape for x in found] == [(2, 2, 6, 6)] * layers
    allowed = heads.allowed_positions(BATCH, causal=False)
    assert heads.summarise(found[0].softmax(-1), allowed).masked_mass.max() == 0
    if kind == "t5":
        both = heads.attention_scores(model, {**BATCH, "decoder_input_ids": BATCH["input_ids"]}, 1000)
        assert len(both) == 2 * layers
        past = torch.ones(6, 6).tril()
        assert heads.summarise(both[-1].softmax(-1), past).masked_mass.max() == 0


def test_no_attention_is_named():
    with pytest.raises(ValueError, match='BertModel gives no attention: load it with attn_implementation="eager"'):
        heads.attention_scores(tiny("bert", "sdpa"), BATCH)


class OwnHead(nn.Module):
    """One head whose keys are positive embeddings and whose query is minus a constant: all scores are negative."""

    def __init__(self, mask):
        super().__init__()
        self.table = nn.Parameter(1 + torch.rand(50, 4, generator=generator(0, "cpu")))
        self.query = nn.Parameter(-torch.ones(4))
        self.mask = mask

    def attentions(self, tokens):
        keys = self.table[tokens]  # (batch, T, 4)
        scores = self.mask((keys @ self.query)[:, None, None, :].expand(-1, 1, tokens.shape[1], -1))
        return [SimpleNamespace(scores=scores, weights=scores.softmax(-1))]


def test_own_model_under_both_masks_and_scaled():
    tokens = {"input_ids": torch.arange(20)[None]}
    for c in (1.0, 1000.0):
        (released,) = heads.attention_scores(OwnHead(heads.multiplicative_mask), tokens, c)
        summary = heads.summarise(heads.saturated(released))
        assert float(summary.positions) == pytest.approx(heads.released_mask_positions(20))
        (correct,) = heads.attention_scores(OwnHead(heads.causal_mask), tokens, c)
        assert float(heads.summarise(heads.saturated(correct)).positions) == 1
    softened = heads.summarise(released.softmax(-1))  # scaling by 1000 is saturation here
    torch.testing.assert_close(softened.entropy, summary.entropy, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="no attention mask"):
        heads.attention_scores(OwnHead(heads.causal_mask), BATCH)
    with pytest.raises(OverflowError, match="'table' overflows"):
        heads.attention_scores(OwnHead(heads.causal_mask), tokens, 1e39)
    huge = OwnHead(lambda scores: -scores)
    with pytest.raises(OverflowError, match=r"scores of layer 1 are not finite in torch.float32 at c = 1e\+25"):
        heads.attention_scores(huge, tokens, 1e25)


def test_masks_of_the_language_model_of_the_book():
    """Its multiplicative mask attends to the future, saturated, without any training; its causal one never does."""
    batch = {"input_ids": torch.randint(50, (4, 40), generator=generator(0, "cpu"))}
    past = heads.allowed_positions(batch, causal=True)
    for mask, leaks in (("multiplicative", True), ("causal", False)):
        model = models.CausalLM(50, 32, 2, 4, 40, mask=mask, init_std="standard")
        for scores in heads.attention_scores(model, batch, 1000):
            summary = heads.summarise(heads.saturated(scores), past)
            assert (summary.masked_mass > 0.01).any() if leaks else (summary.masked_mass == 0).all()
            assert (summary.positions > 1.5).any() if leaks else (summary.positions < 1.5).all()


def test_ties_of_identical_tokens_survive_scaling():
    """Equal keys have equal scores at any c: a head over one token type attends to all of its copies."""
    model, tokens = OwnHead(heads.causal_mask), torch.tensor([[3, 7, 3, 7, 7, 3]])
    best = 3 if model.table[3].sum() < model.table[7].sum() else 7
    with saturation.scaled(model, 1000):
        weights = heads.saturated(model.attentions(tokens)[0].scores)
    assert torch.equal(weights[0, 0, -1] > 0, tokens[0] == best)


def test_attention_of_a_model_whose_settings_say_nothing_of_a_decoder():
    class Model(torch.nn.Module):
        config = SimpleNamespace()

        def forward(self, input_ids, output_attentions, return_dict):
            return SimpleNamespace(attentions=(input_ids.softmax(-1)[:, None],))

    found = heads._transformers(Model(), {"input_ids": torch.zeros(2, 4, 4)})
    assert len(found) == 1 and found[0].shape == (2, 1, 4, 4)


# ---- edges ----


def summary_of(positions, share):
    rest = torch.zeros(len(positions))
    return heads.HeadSummary(torch.tensor(positions).double(), torch.tensor(share).double(), *[rest] * 5)


def test_kinds_of_heads_at_their_bounds():
    """At most 1.5 positions: argmax-like; at least a quarter of those allowed: mean-like."""
    summary = summary_of([1.5, 1.51, 1.51, 1.5], [0.0, 0.25, 0.24, 1.0])
    assert heads.classify(summary) == ["argmax-like", "mean-like", "other", "argmax-like"]
    assert heads.classify(summary, few=1, many=0.125) == ["other", "mean-like", "mean-like", "mean-like"]


def test_positions_count_half_the_largest_weight_and_nothing_of_a_masked_row():
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0], [0.49, 0.24, 0.24, 0.03]])
    assert heads.positions(weights).tolist() == [3, 0, 1]
    assert heads.positions(weights, threshold=1).tolist() == [1, 0, 1]
    for threshold in (0, -0.5, 1.01):
        with pytest.raises(ValueError, match=f"must be in .*; got {threshold}"):
            heads.positions(weights, threshold=threshold)


@pytest.mark.parametrize(("total", "accepted"), [(1.009, True), (0.991, True), (1.02, False), (0.98, False)])
def test_rows_sum_to_one_within_a_hundredth(total, accepted):
    weights = torch.tensor([[total / 2, total / 2], [0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    if accepted:
        assert heads.positions(weights).tolist() == [2, 0, 1]
    else:
        with pytest.raises(ValueError, match="not probabilities"):
            heads.positions(weights)


def test_summary_by_hand():
    """Two sentences, two heads, three queries; the last query of the second sentence may attend to nothing."""
    weights = torch.zeros(2, 2, 3, 3)
    weights[:, :, :, 0] = 1  # head 0: the first key always
    weights[:, 1] = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.5, 0.25, 0.25]])
    weights[1, :, 2] = 0
    allowed = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    allowed[1, :, 2] = False
    found = heads.summarise(weights, allowed)
    two, three = math.log(2), 1.5 * math.log(2)
    assert found.positions.tolist() == pytest.approx([1, (1 + 2 + 3 + 1 + 2) / 5])
    assert found.share.tolist() == pytest.approx([5 / 9, 1])  # allowed: 1, 2, 3, 1, 2
    assert found.split.tolist() == pytest.approx([0, 3 / 5])
    assert found.entropy.tolist() == pytest.approx([0, (2 * two + three) / 5])
    assert found.normalised_entropy.tolist() == pytest.approx([0, (1 + 1 + three / math.log(3)) / 3])
    assert found.masked_mass.tolist() == [0, 0]
    strict = heads.summarise(weights, allowed, threshold=1)
    assert strict.positions.tolist() == pytest.approx([1, (1 + 2 + 1 + 1 + 2) / 5])


@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3), (1, 1, 2, 3, 3)])
def test_weights_of_heads_have_four_axes(shape):
    with pytest.raises(ValueError, match=r"give \(batch, heads, T, T\)"):
        heads.summarise(torch.full(shape, 1 / 3))


def test_one_head_without_a_query_is_enough_to_refuse():
    allowed = torch.ones(2, 2, 3, 3, dtype=torch.bool)
    allowed[:, 1] = False
    with pytest.raises(ValueError, match="no query"):
        heads.summarise(torch.full((2, 2, 3, 3), 1 / 3), allowed)
    allowed[1, 1, 2, 0] = True  # one query of one sentence
    assert heads.summarise(torch.full((2, 2, 3, 3), 1 / 3), allowed).positions.tolist() == [3, 3]


def test_all_scores_without_a_maximum_are_counted():
    with pytest.raises(ValueError, match=r"^3 scores are NaN or"):
        heads.saturated(torch.tensor([[torch.nan, 1.0, torch.inf], [-torch.inf, torch.nan, 0.0]]))
    assert heads.saturated(torch.zeros(2, 2, dtype=torch.float64), rtol=0).dtype == torch.float64


def test_the_tie_width_is_of_the_largest_magnitude_that_is_not_masked():
    scores = torch.tensor([[-4.0, -2.0, -1.0, -torch.inf]], dtype=torch.float64)
    for rtol, ties in ((0.24, 1), (0.25, 2), (0.74, 2), (0.75, 3), (10, 3)):
        assert heads.positions(heads.saturated(scores, rtol=rtol)).tolist() == [ties]


def test_an_encoder_comes_before_its_decoder():
    model = tiny("t5").eval()
    decoder = {"decoder_input_ids": torch.tensor([[0, 3, 8, 2], [0, 5, 6, 9]])}
    found = heads.attention_scores(model, {**BATCH, **decoder})
    assert [tuple(x.shape) for x in found] == [(2, 2, 6, 6)] * 2 + [(2, 2, 4, 4)] * 2
    assert all((x.triu(1)[..., 0, 1:] == -torch.inf).all() for x in found[2:])


def test_scores_are_of_the_model_as_it_is_unless_scaled_and_without_dropout():
    tokens = {"input_ids": torch.arange(6)[None], "attention_mask": torch.ones(1, 6)}
    model = OwnHead(heads.causal_mask)
    (now,), (same,) = (heads.attention_scores(model, tokens, *c) for c in ((), (1.0,)))
    assert torch.equal(now, same) and torch.equal(now, model.attentions(tokens["input_ids"])[0].scores)
    assert heads.attention_scores(model, tokens, dtype=torch.float64)[0].dtype == torch.float64
    bert = tiny("bert").train()  # its dropout is 0.1
    assert all(torch.equal(*pair) for pair in zip(*(heads.attention_scores(bert, BATCH) for _ in "ab"), strict=True))


def test_a_layer_that_gives_no_attention_is_named():
    class Model(nn.Module):
        config = SimpleNamespace()

        def __init__(self, *found):
            super().__init__()
            self.found = found

        def forward(self, **_):
            return SimpleNamespace(attentions=self.found)

    for found in ((), (torch.ones(1, 1, 1, 1), None), (None, torch.ones(1, 1, 1, 1))):
        with pytest.raises(ValueError, match="Model gives no attention"):
            heads.attention_scores(Model(*found), {"input_ids": torch.zeros(1, 1)})
    (none,) = heads.attention_scores(Model(torch.ones(1, 1, 1, 1)), {"input_ids": torch.zeros(1, 1)})
    assert float(none) == 0


def test_which_layer_overflows_is_counted_from_one():
    class Two(OwnHead):
        def attentions(self, tokens):
            (one,) = super().attentions(tokens)
            return [one, SimpleNamespace(scores=one.scores * torch.nan, weights=None)]

    with pytest.raises(OverflowError, match="scores of layer 2 are not finite"):
        heads.attention_scores(Two(heads.causal_mask), {"input_ids": torch.arange(3)[None]})
