"""A mean head that counts, exactly; what a gap costs; and that scaling leaves a trained counter as it was."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbutils.experiments import counting, languages
from normgrowth import heads
from normgrowth.saturation import mode, scaled


@pytest.mark.parametrize("flat", counting.FLAT)
@pytest.mark.parametrize("c", [1.0, 1000.0])
def test_it_counts_every_string(flat, c):
    head = counting.MeanHead(flat)
    for length in range(1, 9):
        tokens = languages.strings(length)
        excess = (2 * (tokens == languages.B).sum(1) - length).double()
        with mode(head), scaled(head, c):
            torch.testing.assert_close(head(tokens) / c**3, excess / length, rtol=1e-12, atol=1e-14)


@settings(deadline=None, max_examples=40)
@given(st.floats(0, 5), st.integers(1, 9), st.booleans(), st.floats(0.5, 2))
def test_a_gap_costs_what_the_formula_says(gap, length, fixed, c):
    head = counting.MeanHead(gap=gap, fixed=fixed)
    tokens = languages.strings(length)
    labels = languages.is_majority(tokens)
    seen = gap * c**head.score_degree
    ratios = [math.log((length - b) / b) for b in range(1, length)]
    if any(abs(seen - r) < 1e-9 for r in ratios):  # on the edge rounding decides
        return
    with mode(head), scaled(head, c):
        right = ((head(tokens) > 0).long() == labels)[labels >= 0].double().mean()
    counts = [(b, math.comb(length, b)) for b in range(length + 1) if 2 * b != length]
    wrong = [n for b, n in counts if (b * math.exp(seen) > length - b) != (2 * b > length)]
    assert float(right) == pytest.approx(1 - sum(wrong) / sum(n for _, n in counts))


def test_gap_is_the_difference_of_scores_and_the_saturated_head_sees_one_symbol():
    tokens = torch.tensor([[3, 4, 4, 3, 4]])
    head = counting.MeanHead(gap=0.25)
    (scores,) = heads.attention_scores(head, {"input_ids": tokens}, 2.0)
    assert float(scores[0, 0, 0, 1] - scores[0, 0, 0, 0]) == pytest.approx(0.25 * 2**4)
    assert heads.saturated(scores)[0, 0, 0].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 1 / 3])


def test_wrong_heads_are_refused():
    for flat, gap in (("value", 0.0), ("key", 0.1)):
        with pytest.raises(ValueError, match="choose one of query, key, constant; a gap needs constant"):
            counting.MeanHead(flat, gap=gap)


def by_hand(found, c, whole):
    """The share of right answers, or strings, among those asked for, by a copy with larger queries and keys."""
    net = copy.deepcopy(found.model).double().eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p *= c if ".query." in name or ".key." in name else 1.0
    guesses = net(found.tokens).argmax(-1).reshape(len(found.labels), -1).tolist()
    rows = [
        [guess == label for guess, label in zip(*row, strict=True) if label != languages.IGNORE]
        for row in zip(guesses, found.labels.reshape(len(found.labels), -1).tolist(), strict=True)
    ]
    right = [all(row) for row in rows] if whole else [answer for row in rows for answer in row]
    return pytest.approx(sum(right) / len(right))


@pytest.mark.parametrize(("task", "whole"), [*((task, False) for task in counting.TASKS), ("Dyck-2", True)])
def test_scaling_leaves_a_trained_network_as_it_was(task, whole):
    _, found = counting.train_networks(task, length=9, steps=2, seeds=(0, 5), device="cpu")
    before = {name: p.detach().clone() for name, p in found.model.named_parameters()}
    for c in (1, 10):
        assert counting.accuracy(found, c, per_string=whole) == by_hand(found, c, whole)
    assert all(torch.equal(before[name], p) for name, p in found.model.named_parameters())


def test_a_sharper_start_scales_the_scores_alone():
    (plain,), (sharp,) = (
        counting.train_networks("majority", length=9, steps=0, seeds=(0,), sharpen=x, device="cpu") for x in (1.0, 8.0)
    )
    assert torch.equal(plain.tokens, sharp.tokens)
    (one,), (eight,) = (heads.attention_scores(net.model, {"input_ids": net.tokens}) for net in (plain, sharp))
    torch.testing.assert_close(eight, 64 * one)
    assert counting.accuracy(plain, 8) == counting.accuracy(sharp)


def test_training_learns_to_copy():
    found = counting.train_networks("first", length=8, steps=150, seeds=range(3), device="cpu")
    assert min(map(counting.accuracy, found)) > 0.9
