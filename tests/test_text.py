"""Corpora, the BPE, windows, and the laws of span corruption."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbutils import text
from nbutils.devices import generator


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library with what must be left out."""
    root = tmp_path / "lib"
    for number in range(30):
        file = root / ("deep" if number % 3 else ".") / f"module{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            f'"""Return the value of the thing number.\n\nMore."""\nx{number} = {number}\n' * (1 + number % 4)
        )
    left_out = "test/a.py deep/tests/b.py site-packages/c.py config-3/d.py lib2to3/e.py sitecustomize.py f.txt"
    for name in (*left_out.split(), "_sysconfigdata_x.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("left_out = 1\n")
    (root / "empty.py").write_text("\n \n")
    monkeypatch.setattr(text, "LIBRARY", root)
    return root


def small(*documents):
    return text.Corpus(tuple(documents or ["the cat and the hat\n" * 20, "naïve </s> ∂x\n"]), ("dev\n",))


# Corpora.


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_normalise_is_idempotent(raw):
    once = text.normalise(raw)
    assert text.normalise(once) == once
    assert "\n\n\n" not in once and not once.startswith("\n")
    assert once == "" or once.endswith("\n")


def test_a_tenth_of_the_text_is_dev(monkeypatch):
    """The first document is for training, then dev has the next one whenever it has less than its share."""
    documents = [f"document {number:04}\n" for number in range(1000)]
    monkeypatch.setattr(text, "_documents", lambda: iter(documents))
    assert text.corpus(10**6).dev == tuple(documents[1::10])
    assert text.corpus(28).dev == (documents[1],)


def test_the_library_without_what_is_not_its_text(library):
    found = text.corpus(10**6)
    documents = found.train + found.dev
    assert len(documents) == 30 and not any("left_out" in document for document in documents)
    assert {file.read_text() for file in library.rglob("module*.py")} == set(documents)


def test_split_by_file_and_stable_under_size(library):
    sizes = [500, 1000, 1500]
    found = [text.corpus(size) for size in sizes]
    for smaller, larger in itertools.pairwise(found):
        assert "".join(larger.dev).startswith("".join(smaller.dev))
        assert "".join(larger.train).startswith("".join(smaller.train))
    assert len(set(found)) == 3 and text.corpus(1000) == found[1]
    for size, each in zip(sizes, found, strict=True):
        assert size - 60 < sum(map(len, each.train + each.dev)) <= size


def test_no_sources_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LIBRARY", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="none"):
        text.corpus(1000)


# The BPE.


def test_bpe_takes_text_back_and_forth():
    corpus = small()
    tokenizer = text.bpe(corpus, 300, sentinels=5)
    for words in (*corpus.train, "never seen: 漢字 <pad> </s> <extra_id_0>\t\n"):
        ids = text.tokens([words], tokenizer)
        assert ids.dtype == torch.int64 and ids[-1] == text.END and (ids[:-1] > text.END).all()
        assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == words
    assert int((text.tokens(corpus.train, tokenizer) == text.END).sum()) == len(corpus.train)
    last = tokenizer.get_vocab_size() - 1
    assert [tokenizer.token_to_id(f"<extra_id_{k}>") for k in range(5)] == list(range(last, last - 5, -1))
    assert tokenizer.token_to_id("<pad>") == 0 and tokenizer.token_to_id("</s>") == text.END


def test_bpe_has_the_size_that_was_asked_for():
    """The bytes, the special tokens and the sentinels are part of it."""
    assert text.bpe(text.corpus(100_000), 700, sentinels=20).get_vocab_size() == 700
    assert text.bpe(small(), 256 + 2 + 3, sentinels=3).get_vocab_size() == 261


# Windows.


def test_windows_reach_every_place():
    ids, starts = torch.arange(100, 120), Counter()
    for windows in itertools.islice(text.random_windows(ids, 8, 6, generator(0, "cpu")), 100):
        assert windows.shape == (8, 6) and (windows.diff(dim=1) == 1).all()
        starts.update(windows[:, 0].tolist())
    assert set(starts) == set(range(100, 115))
    first, again = (next(text.random_windows(ids, 8, 6, generator(3, "cpu"))) for _ in range(2))
    assert torch.equal(first, again)
    assert next(text.random_windows(torch.arange(5), 3, 5, generator(0, "cpu"))).tolist() == [list(range(5))] * 3


# Span corruption.


SENTINELS = range(999, 899, -1)


def corrupted(tokens, batch, length, seed=0, sentinels=SENTINELS):
    return next(text.span_batches(tokens, batch, length, generator(seed, "cpu"), sentinels))


def taken(length):
    """From T5's rule: how many tokens give an input of this length, and its labels'."""
    for tokens in range(2, 2 * length):
        noise = max(round(0.15 * tokens), 1)
        spans = max(round(noise * 0.85), 1)
        if tokens - noise + spans + 1 == length:
            found = tokens, noise + spans + 1
    return found


def runs(row):
    return [(value, len(list(group))) for value, group in itertools.groupby(row)]


def test_all_masks_are_equally_likely():
    """24 tokens have 4 of noise in 3 spans: 3 · 171 masks, from kept tokens to noise and back."""
    masks = Counter(map(tuple, text._noise_mask(513 * 200, 24, generator(0, "cpu")).tolist()))
    assert len(masks) == 3 * 171 and max(abs(count - 200) for count in masks.values()) < 5 * 200**0.5
    for mask in masks:
        assert [value for value, _ in runs(mask)] == [False, True] * 3 and sum(mask) == 4


def rebuilt(inputs, labels, sentinels):
    """The tokens, by putting each sentinel's run of the labels into its place in the input."""
    spans, current = {}, None
    for index in labels[:-1]:
        if index in sentinels:
            current = spans.setdefault(index, [])
        else:
            current.append(index)
    whole = [[index] if index not in sentinels else spans[index] for index in inputs[:-1]]
    return [index for part in whole for index in part]


@settings(max_examples=50, deadline=None)
@given(st.integers(3, 150), st.integers(0, 10**6))
def test_input_and_labels_give_the_tokens_back(length, seed):
    """The windows are known by their tokens: 2, 3, 4, …; noise is 15 % of them."""
    batch = corrupted(torch.arange(2, 300), 3, length, seed)
    inputs, labels = batch["input_ids"], batch["labels"]
    assert (inputs.shape, labels.shape) == ((3, length), (3, taken(length)[1]))
    for ins, outs in zip(inputs.tolist(), labels.tolist(), strict=True):
        row = rebuilt(ins, outs, set(SENTINELS))
        assert row == list(range(row[0], row[0] + taken(length)[0]))
        used = [index for index in ins if index >= 900]
        assert used == list(SENTINELS[: len(used)]) == [index for index in outs if index >= 900]
        for part in (ins, outs):
            assert part[-1] == text.END and text.END not in part[:-1]
        assert ins[0] < 900 and outs[0] == 999 and ins[-2] == used[-1]  # the noise ends the window


def test_lengths_of_t5():
    """As many noise tokens and runs of them as where tokens drop out one by one, as in T5's baselines."""
    mask = torch.rand(1_000_000, generator=generator(0, "cpu")) < 0.15
    noise, starts = mask.double().mean(), (mask[1:] & ~mask[:-1]).double().mean()
    batch = corrupted(torch.full((5000,), 7), 4, 512)
    kept, lost = ((batch[name] == 7).sum(1) for name in ("input_ids", "labels"))
    found = torch.stack([lost, batch["labels"].shape[1] - lost - 1]) / (kept + lost)
    assert torch.allclose(found, torch.stack([noise, starts]).float()[:, None], atol=0.002)


def test_windows_of_one_seed_are_the_same_and_differ_from_each_other():
    found, again = (corrupted(torch.arange(2, 900), 6, 64) for _ in range(2))
    assert all(torch.equal(found[name], again[name]) for name in ("input_ids", "labels"))
    assert len({tuple(row) for row in found["input_ids"].tolist()}) == 6
