"""The languages against slow definitions of their own, balance, and what the cheapest readers can tell."""

import itertools
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbutils.chapters import languages as lang
from nbutils.devices import generator

LETTER = {lang.PAD: "", lang.A: "a", lang.B: "b"}
MEMBERSHIP = {"majority": lang.majority, "anbn": lang.anbn}


def words(tokens):
    return ["".join(LETTER[symbol] for symbol in row) for row in tokens.tolist()]


SLOW = {
    "majority": lambda word: max("ab", key=word.count) == "b",
    "anbn": lambda word: word != "" and word == "a" * (len(word) // 2) + "b" * (len(word) // 2),
}


def length_for(name, size):
    return {"majority": 2 * size + 1, "anbn": size + 4}[name]


@pytest.mark.parametrize("length", range(1, 11))
def test_the_recogniser_on_all_strings(length):
    tokens = lang.strings(length)
    assert words(tokens) == ["".join(word) for word in itertools.product("ab", repeat=length)]
    for word, label in zip(words(tokens), lang.is_majority(tokens).tolist(), strict=True):
        assert label == (lang.IGNORE if 2 * word.count("a") == length else SLOW["majority"](word))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(MEMBERSHIP)), st.integers(0, 60), st.integers(0, 9), st.integers(0, 10**6))
def test_labels_are_right_and_balanced(name, count, size, seed):
    length = length_for(name, size)
    tokens, labels = MEMBERSHIP[name](count, length, generator(seed, "cpu"))
    assert tokens.shape == (count, length) and labels.shape == (count,)
    assert tokens.dtype == labels.dtype == torch.int64
    assert labels.tolist() == [SLOW[name](word) for word in words(tokens)]
    assert abs(2 * int(labels.sum()) - count) <= 1
    again, same = MEMBERSHIP[name](count, length, generator(seed, "cpu"))
    assert torch.equal(tokens, again) and torch.equal(labels, same)


def best_accuracy(feature, labels):
    """Of the best rule that sees this feature only, on these very rows (an upper bound but for noise)."""
    joint = torch.stack([torch.bincount(feature[labels == label], minlength=64) for label in labels.unique()])
    return float(joint.max(0).values.sum() / len(labels))


def readers(tokens):
    """What a cheap reader sees: the length, the last real symbol, and each position."""
    sizes = (tokens != lang.PAD).sum(1)
    return {
        "length": sizes,
        "last": tokens.gather(1, sizes[:, None] - 1)[:, 0],
        **{place: tokens[:, place] for place in range(tokens.shape[1])},
    }


@pytest.mark.parametrize(("name", "length"), [("anbn", 16), ("anbn", 40)])
def test_no_length_end_or_position_decides(name, length):
    tokens, labels = MEMBERSHIP[name](20_000, length, generator(0, "cpu"))
    seen = {reader: best_accuracy(feature, labels) for reader, feature in readers(tokens).items()}
    assert seen.pop("length") == seen.pop("last") == seen.pop(0) == 0.5  # the same for every pair, exactly
    if name == "anbn":  # no member has b at the second place, and short near misses can hardly avoid it
        sizes = range(2, length // 2 + 1)
        least = 0.5 + (sum(1 / (n - 1) for n in sizes) + 1 / 2) / (4 * len(sizes))
        assert seen.pop(1) == pytest.approx(least, abs=0.01)
    assert max(seen.values()) < (0.59 if length == 16 else 0.55)
    # The number of a, the cheapest count, finds only the non-members of one kind: three quarters at most.
    assert best_accuracy((tokens == lang.A).sum(1) - (tokens == lang.B).sum(1) + 30, labels) == pytest.approx(
        0.75, abs=0.01
    )


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


def test_anbn_near_misses():
    tokens, labels = lang.anbn(8000, 12, generator(0, "cpu"))
    members = {word for word, label in zip(words(tokens), labels, strict=True) if label}
    others = {word for word, label in zip(words(tokens), labels, strict=True) if not label}
    assert members == {"a" * n + "b" * n for n in range(2, 7)}
    off_by_one = {"a" * (n + d) + "b" * (n - d) for n in range(2, 7) for d in (-1, 1)}
    swapped = {word for word in others if word.count("a") == word.count("b")}
    assert others - swapped == off_by_one
    # All swaps of one inner a and one inner b.
    assert len(swapped) == sum((n - 1) ** 2 for n in range(2, 7))


@pytest.mark.parametrize("symbols", [2, 5])
def test_copies(symbols):
    tokens, first = lang.copy_first(100, 7, generator(0, "cpu"), symbols)
    assert torch.equal(tokens[:, 0] - lang.A, first)
    assert torch.bincount(first).tolist() == [100 // symbols] * symbols
    many, labels = lang.copy_first(20_000, 7, generator(1, "cpu"), symbols)
    assert best_accuracy(many[:, -1], labels) < 1 / symbols + 0.02
    tokens, before = lang.copy_previous(10, 7, generator(0, "cpu"), symbols)
    assert torch.equal(before[:, 1:], tokens[:, :-1]) and (before[:, 0] == lang.IGNORE).all()
    assert set(tokens.unique().tolist()) <= set(range(lang.A, lang.A + symbols))


@pytest.mark.parametrize(
    ("make", "length", "said"),
    [
        (lang.majority, 4, "odd"),
        (lang.majority, -1, "odd"),
        (lang.anbn, 3, "at least 4"),
    ],
)
def test_lengths_that_make_no_sense(make, length, said):
    with pytest.raises(ValueError, match=said):
        make(2, length, generator(0, "cpu"))
