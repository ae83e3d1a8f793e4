"""The languages against slow definitions of their own, balance, and what the cheapest readers can tell."""

import itertools
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbutils.devices import generator
from nbutils.experiments import languages as lang

LETTER = {lang.PAD: "", lang.A: "a", lang.B: "b"}


def words(tokens):
    return ["".join(LETTER[symbol] for symbol in row) for row in tokens.tolist()]


@pytest.mark.parametrize("length", range(1, 11))
def test_the_recogniser_on_all_strings(length):
    tokens = lang.strings(length)
    assert words(tokens) == ["".join(word) for word in itertools.product("ab", repeat=length)]
    for word, label in zip(words(tokens), lang.is_majority(tokens).tolist(), strict=True):
        assert label == (lang.IGNORE if 2 * word.count("a") == length else (max("ab", key=word.count) == "b"))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60), st.integers(0, 9), st.integers(0, 10**6))
def test_labels_are_right_and_balanced(count, size, seed):
    tokens, labels = lang.majority(count, 2 * size + 1, generator(seed, "cpu"))
    assert labels.tolist() == [max("ab", key=word.count) == "b" for word in words(tokens)]
    assert abs(2 * int(labels.sum()) - count) <= 1
    again, same = lang.majority(count, 2 * size + 1, generator(seed, "cpu"))
    assert torch.equal(tokens, again) and torch.equal(labels, same)


def best_accuracy(feature, labels):
    """Of the best rule that sees this feature only, on these very rows (an upper bound but for noise)."""
    joint = torch.stack([torch.bincount(feature[labels == label], minlength=64) for label in labels.unique()])
    return float(joint.max(0).values.sum() / len(labels))


@pytest.mark.parametrize("length", [1, 5, 21])
def test_one_position_tells_as_little_of_majority_as_it_can(length):
    tokens, labels = lang.majority(20_000, length, generator(0, "cpu"))
    least = 0.5 + comb(length - 1, (length - 1) // 2) / 2**length
    for feature in tokens.T:
        assert best_accuracy(feature, labels) == pytest.approx(least, abs=0.015)


def test_majority_is_uniform_in_each_class():
    tokens, _ = lang.majority(64_000, 5, generator(0, "cpu"))
    counts = torch.bincount((tokens - lang.A) @ 2 ** torch.arange(5), minlength=32)
    assert (counts - 2000).abs().max() < 5 * 2000**0.5


def test_counter_is_every_n_with_the_letter_after():
    tokens, labels = lang.counter(400, 13, generator(0, "cpu"))
    assert {tuple(row) for row in tokens.tolist()} == {
        (*[3] * n, *[4] * n, *[5] * n, *[0] * (13 - 3 * n)) for n in range(1, 5)
    }
    for row, after in zip(tokens.tolist(), labels.tolist(), strict=True):
        n = row.count(3)
        known = [*row[1:], 0][n : 3 * n - 1]
        assert after == [*[lang.IGNORE] * n, *known, 6, *[lang.IGNORE] * (13 - 3 * n)]


def test_brackets_close_what_was_opened_last():
    tokens, labels = lang.dyck2(300, 12, generator(0, "cpu"))
    for row, asked in zip(tokens.tolist(), labels.tolist(), strict=True):
        stack = []
        for token, label in zip(row, asked, strict=True):
            if token < 5:
                stack.append(token)
            else:
                assert stack.pop() == token - 2
            assert label == (stack[-1] + 2 if stack else lang.IGNORE)
    assert best_accuracy(tokens[:, 0], tokens[:, 5]) < 0.6
    may_close = labels[:, :-1] != lang.IGNORE  # some 2,800 places: 0.05 is five of their standard deviations
    assert (tokens[:, 1:][may_close] < 5).double().mean() == pytest.approx(0.5, abs=0.05)


def test_copies():
    tokens, first = lang.copy_first(20_000, 7, generator(0, "cpu"))
    assert torch.equal(tokens[:, 0] - lang.A, first) and torch.bincount(first).tolist() == [10_000] * 2
    assert best_accuracy(tokens[:, -1], first) < 0.52
    tokens, before = lang.copy_previous(10, 7, generator(0, "cpu"))
    assert torch.equal(before[:, 1:], tokens[:, :-1]) and (before[:, 0] == lang.IGNORE).all()
    assert set(tokens.unique().tolist()) == {3, 4, 5, 6}


def test_majority_needs_an_odd_length():
    with pytest.raises(ValueError, match="odd"):
        lang.majority(2, 4, generator(0, "cpu"))
