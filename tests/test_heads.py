"""Saturated attention against the softmax it is the limit of, and heads whose answer is known."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tiny import tiny
from torch import nn

from nbutils.devices import generator
from normgrowth import heads

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 7))
INTEGERS = arrays(np.float64, SHAPES, elements=st.integers(-6, 6).map(float)).map(torch.from_numpy)


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


def test_masked_rows_and_keys():
    inf = torch.inf
    scores = torch.tensor([[-inf, -5.0, -5.0], [-inf, -inf, -inf], [0.0, -inf, -1.0]])
    expected = torch.tensor([[0, 0.5, 0.5], [0, 0, 0], [1, 0, 0]])
    assert torch.equal(heads.saturated(scores), expected)
    assert torch.equal(heads.saturated(scores, rtol=0.5)[1], torch.zeros(3))


def test_ties_are_relative_to_the_largest_score_of_the_row():
    scores = torch.tensor([[1e13, 1e13 * (1 - 1e-7), 1e13 * (1 - 1e-5)]], dtype=torch.float64)
    for rtol, ties in ((0.0, 1), (1e-6, 2), (1e-4, 3)):
        assert heads.positions(heads.saturated(scores, rtol=rtol)).tolist() == [ties]


# ---- the mask of the released code ----


def test_saturated_negative_scores_attend_to_the_future_under_the_released_mask():
    """All but the last two queries then have ties; the others attend to one position."""
    scores = -1 - torch.rand(1, 1, 17, 17, generator=generator(0, "cpu"), dtype=torch.float64)
    past = torch.ones(17, 17, dtype=torch.bool).tril()
    found = heads.summarise(heads.saturated(heads.multiplicative_mask(scores)), past)
    assert float(found.positions) == pytest.approx(8 + 1 / 17, rel=1e-12)
    assert float(found.masked_mass) == pytest.approx(16 / 17)
    found = heads.summarise(heads.saturated(heads.causal_mask(scores)), past)
    assert (float(found.positions), float(found.masked_mass)) == (1, 0)
    soft = heads.multiplicative_mask(-scores).softmax(-1)  # positive scores hide the difference only once saturated
    assert float(heads.summarise(soft, past).masked_mass) > 0.05


# ---- measures ----


def test_summary_leaves_padding_out():
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "attention_mask": torch.tensor([[1] * 4, [1, 1, 0, 0]])}
    allowed = heads.allowed_positions(batch, causal=True)
    assert allowed.sum().item() == 10 + 3
    scores = torch.zeros(2, 3, 4, 4).masked_fill(~allowed, -torch.inf)
    summary = heads.summarise(heads.saturated(scores), allowed)
    torch.testing.assert_close(summary.positions, torch.full((3,), (1 + 2 + 3 + 4 + 1 + 2) / 6, dtype=torch.float64))
    assert summary.share.tolist() == [1] * 3 and summary.normalised_entropy.tolist() == pytest.approx([1] * 3)
    assert heads.allowed_positions(batch, causal=False).sum().item() == 16 + 4


HALVES = torch.full((1, 1, 2, 2), 0.5)
BAD = [[torch.nan, 1.0, torch.inf], [-torch.inf, torch.nan, 0.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: heads.saturated(torch.tensor(BAD)), r"^3 scores are NaN or \+inf"),
        (lambda: heads.positions(torch.tensor([[0.5, 0.6]])), "not probabilities"),
        (lambda: heads.positions(torch.tensor([[torch.nan, 1.0]])), "not probabilities"),
        (lambda: heads.summarise(torch.ones(1, 1)), r"shape \(1, 1\): give \(batch, heads, T, T\)"),
        (lambda: heads.summarise(torch.ones(1, 1, 1, 2, 2)), r"give \(batch, heads, T, T\)"),
        (lambda: heads.summarise(HALVES, torch.zeros(2, 2)), "no query"),
        (lambda: heads.summarise(HALVES.expand(1, 2, 2, 2), torch.tensor([1, 0])[:, None, None]), "no query"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_may_be_all_masked_or_rounded_to_half_precision():
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0], [0.49, 0.24, 0.24, 0.022]])
    assert heads.positions(weights).tolist() == [3, 0, 1]  # at least half of the largest


def test_kinds_of_heads_at_their_bounds():
    """At most 1.5 positions: argmax-like; at least a quarter of those allowed: mean-like."""
    numbers = torch.tensor([[1.5, 1.51, 1.51, 1.5, 1.0], [0.0, 0.25, 0.24, 1.0, 1.0]]).double()
    sink = torch.tensor([0.0, 0.0, 0.0, 0.49, 0.5])
    summary = heads.HeadSummary(*numbers, *torch.zeros(2, 5), sink)
    assert heads.classify(summary) == ["argmax-like", "mean-like", "other", "argmax-like", "sink"]


def test_summary_by_hand():
    """Two sentences, two heads, three queries; the last query of the second sentence may attend to nothing."""
    weights = torch.zeros(2, 2, 3, 3)
    weights[:, :, :, 0] = 1  # head 0: the first key always
    weights[:, 1] = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.5, 0.25, 0.25]])
    weights[1, :, 2] = 0
    allowed = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    allowed[1, :, 2] = False
    found = heads.summarise(weights, allowed)
    three = 1.5 * math.log(2) / math.log(3)
    assert found.positions.tolist() == pytest.approx([1, (1 + 2 + 3 + 1 + 2) / 5])
    assert found.share.tolist() == pytest.approx([5 / 9, 1])  # allowed: 1, 2, 3, 1, 2
    assert found.normalised_entropy.tolist() == pytest.approx([0, (1 + 1 + three) / 3])
    assert found.masked_mass.tolist() == [0, 0]


# ---- models ----


BATCH = {"input_ids": torch.tensor([[5, 9, 7, 4, 30, 12], [8, 6, 41, 9, 0, 0]])}
BATCH["attention_mask"] = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])


@pytest.mark.parametrize(("kind", "causal"), [("bert", False), ("gpt2", True)])
def test_first_layer_at_a_thousand_is_its_saturated_attention(kind, causal):
    """Without biases the first layer's scores grow as c⁴: c² by the weights, c² by the layer norm's gain."""
    model = tiny(kind, "eager")
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


@pytest.mark.parametrize("kind", ["t5", "xlnet", "xlm"])
def test_other_architectures(kind):
    model = tiny(kind, "eager").eval()
    found = heads.attention_scores(model, BATCH, 1000)
    assert [x.shape for x in found] == [(2, 2, 6, 6)] * 2
    allowed = heads.allowed_positions(BATCH, causal=False)
    assert heads.summarise(found[0].softmax(-1), allowed).masked_mass.max() == 0


def test_an_encoder_comes_before_its_decoder():
    decoder = {"decoder_input_ids": torch.tensor([[0, 3, 8, 2], [0, 5, 6, 9]])}
    found = heads.attention_scores(tiny("t5", "eager"), {**BATCH, **decoder}, 1000)
    assert [tuple(x.shape) for x in found] == [(2, 2, 6, 6)] * 2 + [(2, 2, 4, 4)] * 2
    for scores in found[2:]:
        assert heads.summarise(scores.softmax(-1), torch.ones(4, 4).tril()).masked_mass.max() == 0


def test_no_attention_is_named():
    with pytest.raises(ValueError, match='BertModel gives no attention: load it with attn_implementation="eager"'):
        heads.attention_scores(tiny("bert", "sdpa"), BATCH)
    with pytest.raises(TypeError, match=r"Linear is not a model of transformers.*attentions\(tokens\)"):
        heads.attention_scores(nn.Linear(1, 1), BATCH)


class OwnHead(nn.Module):
    """One head whose keys are positive embeddings and whose query is minus a constant: all scores are negative."""

    def __init__(self, mask):
        super().__init__()
        self.table = nn.Parameter(1 + torch.rand(50, 4, generator=generator(0, "cpu")))
        self.query = nn.Parameter(-torch.ones(4))
        self.mask = mask

    def attentions(self, tokens):
        keys = self.table[tokens]  # (batch, T, 4)
        return [self.mask((keys @ self.query)[:, None, None, :].expand(-1, 1, tokens.shape[1], -1))]


def test_own_model_under_both_masks_and_scaled():
    tokens = {"input_ids": torch.arange(20)[None]}
    for c in (1.0, 1000.0):
        (released,) = heads.attention_scores(OwnHead(heads.multiplicative_mask), tokens, c)
        assert float(heads.summarise(heads.saturated(released)).positions) == pytest.approx(19 / 2 + 1 / 20)
        (correct,) = heads.attention_scores(OwnHead(heads.causal_mask), tokens, c)
        assert float(heads.summarise(heads.saturated(correct)).positions) == 1
    with pytest.raises(ValueError, match="no attention mask"):
        heads.attention_scores(OwnHead(heads.causal_mask), BATCH)
    with pytest.raises(OverflowError, match="'table' overflows"):
        heads.attention_scores(OwnHead(heads.causal_mask), tokens, 1e39)
    huge = OwnHead(lambda scores: -scores)
    with pytest.raises(OverflowError, match=r"scores of layer 1 are not finite in torch.float32 at c = 1e\+25"):
        heads.attention_scores(huge, tokens, 1e25)


def test_scores_are_of_the_model_as_it_is_unless_scaled_and_without_dropout():
    tokens = {"input_ids": torch.arange(6)[None], "attention_mask": torch.ones(1, 6)}
    model = OwnHead(heads.causal_mask)
    (now,) = heads.attention_scores(model, tokens)
    assert torch.equal(now, model.attentions(tokens["input_ids"])[0])
    assert heads.attention_scores(model, tokens, dtype=torch.float64)[0].dtype == torch.float64
    bert = tiny("bert", "eager").train()  # its dropout is 0.1
    assert all(torch.equal(*pair) for pair in zip(*(heads.attention_scores(bert, BATCH) for _ in "ab"), strict=True))


@pytest.mark.parametrize(("total", "keys"), [(1.0, 2), (0.99, 2), (0.9, 3), (0.0, 2)])
def test_what_rows_lack_of_one_lies_on_a_sink(total, keys):
    """Beyond rounding, and not of a row that is all masked."""
    model = tiny("gpt2", "eager")
    model.base_model.forward = lambda **_: SimpleNamespace(attentions=(torch.full((1, 1, 2, 2), total / 2),))
    (scores,) = heads.attention_scores(model, {"input_ids": torch.ones(1, 2).long()})
    assert scores.shape == (1, 1, 2, keys)
    if keys == 3:
        assert scores[..., -1].exp().flatten().tolist() == pytest.approx([1 - total] * 2)
