"""Corpora, the BPE, windows, and the laws of span corruption."""

import itertools
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbutils import text
from nbutils.devices import generator
from nbutils.text import corpora


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
    for name in ("test/a.py", "deep/tests/b.py", "site-packages/c.py", "config-3/d.py", "_sysconfigdata_x.py", "e.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("left_out = 1\n")
    monkeypatch.setattr(corpora, "_folder", lambda: root)
    return root


def small(*documents):
    return text.Corpus("by hand", tuple(documents or ["the cat and the hat\n" * 20, "naïve </s> ∂x\n"]), ("dev\n",))


# Corpora.


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_normalise_is_idempotent(raw):
    once = corpora.normalise(raw)
    assert corpora.normalise(once) == once
    assert "\r" not in once and "\n\n\n" not in once and not once.startswith("\n")
    assert once == "" or once.endswith("\n")


def test_the_dev_split_has_its_share_of_all_text(monkeypatch):
    monkeypatch.setattr(corpora, "_files", lambda: iter(["a line of text\n"] * 1000))
    for share in (0.1, 0.5):
        assert len(text.corpus(10**6, dev=share).dev) == pytest.approx(1000 * share, abs=1)


def test_the_library_without_what_is_not_its_text(library):
    found = text.corpus(10**6)
    documents = found.train + found.dev
    assert len(documents) == 30 and not any("left_out" in document for document in documents)
    assert {file.read_text() for file in library.rglob("module*.py")} == set(documents)
    assert "Python 3." in found.source


@given(st.integers(200, 2500), st.integers(0, 800))
def test_a_larger_size_only_appends(size, more):
    documents = [f"{'liné ' * 5}{k}\n" * (k % 7 + 1) for k in range(60)]
    small_cut, large_cut = corpora._cut(documents, size), corpora._cut(documents, size + more)
    assert "".join(large_cut).startswith("".join(small_cut))
    taken = sum(len(document.encode()) for document in small_cut)
    assert size - 40 < taken <= size


def test_split_by_file_and_stable_under_size(library):
    sizes = [500, 1000, 1500]
    found = [text.corpus(size) for size in sizes]
    for smaller, larger in itertools.pairwise(found):
        assert "".join(larger.dev).startswith("".join(smaller.dev))
        assert "".join(larger.train).startswith("".join(smaller.train))
    assert len({one.digest for one in found}) == 3
    assert text.corpus(1000).digest == found[1].digest
    with pytest.raises(ValueError, match="no dev split"):
        text.corpus(60)


def test_real_library():
    found = text.corpus(300_000)
    report = found.report(train=torch.arange(7))
    total = report["train bytes"] + report["dev bytes"]
    assert 299_000 < total <= 300_000 and 0.05 < report["dev bytes"] / total < 0.3
    assert report["train tokens"] == 7 and report["content"] == found.digest[:12]


def test_the_digest_sees_content_and_split():
    one = text.Corpus("b", ("x\n", "y\n"), ("z\n",))
    others = [(("x\ny\n",), ("z\n",)), (("x\n",), ("y\n", "z\n")), (("y\n", "x\n"), ("z\n",))]
    assert len({one.digest, *(text.Corpus("b", *parts).digest for parts in others)}) == 4


def test_no_sources_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "_folder", lambda: tmp_path / "none")
    with pytest.raises(text.CorpusMissing, match="none"):
        text.corpus(1000)


def test_sentences_of_docstrings():
    items = text.sentences(100)
    assert len(items) == len(set(items)) == 100
    assert all(6 <= len(one.split()) <= 40 and one[0].isupper() and one.endswith(".") for one in items)
    assert text.sentences(10) == items[:10]


def test_too_few_sentences(library):
    with pytest.raises(ValueError, match="only 1 sentences"):
        text.sentences(2)


def test_import_needs_no_tokenizer_nor_network_package():
    code = "import sys, nbutils.text; print({'tokenizers', 'datasets', 'nltk', 'huggingface_hub'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


# The BPE.


def test_bpe_takes_text_back_and_forth():
    corpus = small()
    tokenizer = text.bpe(corpus, 300, sentinels=5)
    for words in (*corpus.train, "never seen: 漢字 <pad> </s> <extra_id_0>\t\n"):
        ids = text.tokens([words], tokenizer)
        assert ids.dtype == torch.int64 and ids[-1] == text.END and (ids[:-1] > text.END).all()
        assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == words
    assert int((text.tokens(corpus.train, tokenizer) == text.END).sum()) == len(corpus.train)
    size = tokenizer.get_vocab_size()
    assert text.sentinel_ids(tokenizer).tolist() == [size - 1, size - 2, size - 3, size - 4, size - 5]
    assert tokenizer.token_to_id("<pad>") == 0 and tokenizer.token_to_id("</s>") == text.END


def test_bpe_has_the_size_that_was_asked_for():
    tokenizer = text.bpe(text.corpus(100_000), 700, sentinels=20)
    assert tokenizer.get_vocab_size() == 700
    with pytest.raises(ValueError, match="too small"):
        text.bpe(small(), 270, sentinels=20)


def test_bpe_is_the_same_in_another_process():
    """Another hash seed, one thread: the same vocabulary."""
    code = (
        "from nbutils import text; import hashlib;"
        "print(hashlib.sha256(text.bpe(text.corpus(150_000), 800).to_str().encode()).hexdigest())"
    )
    found = set()
    for seed, parallel in (("1", "true"), ("2", "false")):
        environment = {"PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": parallel}
        found.add(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))
    assert len(found) == 1


# Windows.


def test_batches_are_windows_and_reach_every_place():
    ids = torch.arange(100, 120)
    starts = Counter()
    for inputs, targets in itertools.islice(text.batches(ids, 8, 5, generator(0, "cpu")), 100):
        assert inputs.shape == targets.shape == (8, 5)
        assert torch.equal(targets, inputs + 1) and (inputs.diff(dim=1) == 1).all()
        starts.update(inputs[:, 0].tolist())
    assert set(starts) == set(range(100, 115))
    first, again = (next(text.batches(ids, 8, 5, generator(3, "cpu")))[0] for _ in range(2))
    assert torch.equal(first, again)
    with pytest.raises(ValueError, match="no window of 21"):
        text.batches(ids, 8, 20, generator(0, "cpu"))


# Span corruption.


def test_lengths_of_t5():
    assert text.span_lengths(512) == (568, 114)  # the lengths of T5's pretraining


@given(st.integers(3, 700), st.sampled_from([0.05, 0.15, 0.3, 0.5]), st.sampled_from([2.0, 3.0, 5.0]))
def test_the_input_has_the_wanted_length(length, density, span):
    taken, labels = text.span_lengths(length, density, span)
    noise, spans = text.span_counts(taken, density, span)
    assert taken - noise + spans + 1 == length and noise + spans + 1 == labels
    if taken * density > 1:
        assert abs(noise - density * taken) <= 0.5 and abs(spans - max(noise / span, 1)) <= 0.5


def runs(row):
    return [(value, len(list(group))) for value, group in itertools.groupby(row)]


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 200), st.sampled_from([0.15, 0.4]), st.sampled_from([2.0, 3.0]), st.integers(0, 10**6))
def test_mask_has_its_counts_and_alternates(length, density, span, seed):
    noise, spans = text.span_counts(length, density, span)
    mask = text.span_mask(4, length, generator(seed, "cpu"), density, span)
    assert mask.shape == (4, length) and mask.dtype == torch.bool and (mask.sum(1) == noise).all()
    for row in mask.tolist():
        assert [value for value, _ in runs(row)] == [False, True] * spans  # kept tokens first, noise last


def test_all_masks_are_equally_likely():
    length, density, span = 9, 0.45, 2.0  # 4 noise tokens in 2 spans: 3 · 4 masks
    masks = Counter(map(tuple, text.span_mask(12_000, length, generator(0, "cpu"), density, span).tolist()))
    assert len(masks) == 12 and max(abs(count - 1000) for count in masks.values()) < 5 * 1000**0.5


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
@given(st.integers(4, 150), st.integers(0, 10**6))
def test_input_and_labels_give_the_tokens_back(length, seed):
    sentinels = torch.arange(999, 899, -1)
    taken, labels_length = text.span_lengths(length)
    ids = torch.randint(2, 900, (3, taken), generator=generator(seed, "cpu"))
    mask = text.span_mask(3, taken, generator(seed, "cpu"))
    inputs, labels = text.corrupt(ids, mask, sentinels)
    assert inputs.shape == (3, length) and labels.shape == (3, labels_length)
    used = sentinels[: text.span_counts(taken)[1]].tolist()
    for row, (ins, outs) in zip(ids.tolist(), zip(inputs.tolist(), labels.tolist(), strict=True), strict=True):
        assert rebuilt(ins, outs, set(sentinels.tolist())) == row
        for part in (ins, outs):  # each sentinel once, in order: the vocabulary's last id, the one before, …
            assert [index for index in part if index >= 900] == used
            assert part[-1] == text.END and text.END not in part[:-1]
        assert outs[0] == 999 and ins[-2] == used[-1]  # the noise ends the window


def test_corruption_by_hand():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    mask = torch.tensor([[False, True, True, False, False, True]])
    inputs, labels = text.corrupt(ids, mask, torch.tensor([99, 98]))
    assert inputs.tolist() == [[10, 99, 13, 14, 98, 1]]
    assert labels.tolist() == [[99, 11, 12, 98, 15, 1]]


def test_span_batches():
    ids, sentinels = torch.arange(2, 900), torch.arange(999, 899, -1)
    found, again = (next(text.span_batches(ids, 6, 64, generator(0, "cpu"), sentinels)) for _ in range(2))
    assert found["input_ids"].shape == (6, 64) and found["labels"].shape == (6, text.span_lengths(64)[1])
    assert torch.equal(found["input_ids"], again["input_ids"]) and torch.equal(found["labels"], again["labels"])
    assert len({tuple(row) for row in found["input_ids"].tolist()}) == 6


def test_noise_density_of_batches():
    stream = text.span_batches(torch.full((5000,), 7), 16, 256, generator(0, "cpu"), torch.arange(999, 899, -1))
    share = torch.cat([(part["labels"] == 7).sum(1) for part in itertools.islice(stream, 5)]).double()
    assert float(share.mean()) / text.span_lengths(256)[0] == pytest.approx(0.15, abs=0.5 / 256)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: text.span_lengths(2), "too short"),
        (lambda: text.span_counts(10, 0.9, 1.0), "lower the density"),
        (lambda: text.span_counts(10, 1.5), "density"),
        (
            lambda: text.corrupt(torch.zeros(1, 3).long(), torch.tensor([[True, False, True]]), torch.tensor([9])),
            "sentinels",
        ),
        (
            lambda: text.corrupt(
                torch.zeros(2, 3).long(), torch.tensor([[True, True, False], [True, False, False]]), torch.arange(9)
            ),
            "same number",
        ),
        (lambda: text.span_batches(torch.arange(9), 2, 64, generator(0, "cpu"), torch.arange(9)), "no window"),
    ],
)
def test_span_corruption_names_bad_input(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_a_text_of_exactly_the_wanted_size_is_whole():
    assert corpora._cut(("ab\ncd",), 5) == ("ab\ncd",) and corpora._cut(("ab\ncd",), 4) == ("ab\n",)


def test_the_smallest_vocabulary_has_room_for_bytes_and_special_tokens():
    by_hand = text.Corpus("by hand", ("ab ab",), ())
    assert text.bpe(by_hand, 256 + 2 + 3, sentinels=3).get_vocab_size() == 261
    with pytest.raises(ValueError, match="too small"):
        text.bpe(by_hand, 256 + 2 + 2, sentinels=3)


def test_spans_of_the_shortest_texts():
    """Something is left and something is taken; the shortest input has one token left, a sentinel and the end."""
    assert text.span_counts(2, 0.9) == text.span_counts(2, 0.1) == (1, 1)
    assert text.span_lengths(3) == (2, 3)
    with pytest.raises(ValueError, match="at least 3"):
        text.span_lengths(2)


# Edges, defaults and axes.


@pytest.mark.parametrize(("size", "dev"), [(0, 0.1), (-5, 0.1), (1000, 0.0), (1000, 1.0), (1000, -0.1), (1000, 1.5)])
def test_sizes_and_shares_without_sense_are_told(library, size, dev):
    with pytest.raises(ValueError, match=f"size must be positive and dev between 0 and 1; got {size} and {dev}"):
        text.corpus(size, dev)


def test_the_first_document_is_for_training_and_a_tenth_for_dev(monkeypatch):
    documents = [f"document {number:04}\n" for number in range(1000)]
    monkeypatch.setattr(corpora, "_files", lambda: iter(documents))
    found = text.corpus(10**6)
    assert found.train[0] == documents[0] and found.dev[0] == documents[1] and len(found.dev) == 100
    halves = text.corpus(10**6, 0.5)
    assert halves.dev == tuple(documents[1::2]) and halves.train == tuple(documents[::2])
    with pytest.raises(ValueError, match="1 bytes are one document"):
        text.corpus(1)
    with pytest.raises(ValueError, match="14 bytes are one document"):
        text.corpus(14)  # the first document and not a line more
    assert text.corpus(28).dev == (documents[1],)


def test_dev_has_the_next_document_whenever_it_has_less_than_its_share(monkeypatch):
    """Two of five bytes are less than half, two of four are not."""
    for documents, dev in ((("aa\n", "b\n", "c\n"), ("b\n", "c\n")), (("a\n", "b\n", "c\n"), ("b\n",))):
        monkeypatch.setattr(corpora, "_files", lambda documents=documents: iter(documents))
        assert text.corpus(100, 0.5).dev == dev


def test_after_a_cut_document_nothing_more_is_taken():
    documents = ("aaaa\nbbbbbbbb\n", "cc\n", "d\n")
    assert corpora._cut(documents, 10) == ("aaaa\n",)
    assert corpora._cut(documents, 14) == documents[:1] and corpora._cut(documents, 17) == documents[:2]
    assert corpora._cut(documents, 16) == documents[:1] and corpora._cut(documents, 4) == ()
    assert corpora._cut(("ab\n", "é\n"), 6) == ("ab\n", "é\n") and corpora._cut(("ab\n", "é\n"), 5) == ("ab\n",)


@pytest.mark.parametrize(("words", "good"), [(5, False), (6, True), (40, True), (41, False)])
def test_a_sentence_has_six_to_forty_words(words, good):
    assert corpora._is_sentence(" ".join(["Words", *["word"] * (words - 1)]) + ".") == good


@pytest.mark.parametrize(
    "other",
    ["lower case begins this short sentence.", "This has no full stop at all", "This one has 2 numbers in it.",
     "This one ends with a full stop.. ", "This; has a semicolon in its middle.", "Two  blanks stand in this one."],
)  # fmt: skip
def test_other_words_are_no_sentence(other):
    assert not corpora._is_sentence(other)
    assert corpora._is_sentence("Here isn't a wrong one, nor an ill-formed one.")


def test_a_file_gives_at_most_five_sentences_and_none_comes_twice(monkeypatch):
    names = ["one", "two", "three", "four", "five", "six", "seven"]
    said = [f"The sentence {name} has so many words." for name in names]
    files = [
        f'"""{" ".join(said)}\n\nThis second paragraph is not read at all."""\n',
        f'class A:\n    """{said[6]} {said[6]}"""\n    async def f(self):\n        """{said[0]}"""\n',
        f'def g():\n    """{said[5]}\n    {said[1]}"""\n\n"""{said[2]} No docstring stands at this place."""\n',
    ]
    monkeypatch.setattr(corpora, "_files", lambda: iter(files))
    assert text.sentences(7) == [*said[:5], said[6], said[5]]
    assert text.sentences(5) == said[:5] and text.sentences(2) == said[:2]
    with pytest.raises(ValueError, match="only 7 sentences; 8 were asked for"):
        text.sentences(8)


def test_docstrings_of_all_that_has_one():
    source = (
        '"""A."""\nclass B:\n    """B."""\n    def c(self):\n        """C."""\nasync def d():\n    """D."""\nx = "E."\n'
    )
    assert sorted(corpora._docstrings(source)) == ["A.", "B.", "C.", "D."]
    assert corpora._docstrings("def f():\n    return 'none'\n") == []


def test_files_of_this_machine_and_empty_ones_are_left_out(library):
    for name in ("sitecustomize.py", "deep/usercustomize.py", "deep/config-x/a.py", "lib2to3/a.py", "note.pyc"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("left_out = 1\n")
    (library / "empty.py").write_text("\n \n")
    (library / "config.py").write_text("kept = 1\n")
    found = list(corpora._files())
    assert len(found) == 31 and "kept = 1\n" in found and not any("left_out" in one or not one for one in found)


def test_a_report_tells_bytes_tokens_and_twelve_digits():
    found = text.Corpus("by hand", ("é\n", "ab\n"), ("xyz\n",))
    report = found.report(train=torch.arange(6).view(2, 3), dev=torch.arange(0))
    sizes = {"train bytes": 6, "dev bytes": 4, "train tokens": 6, "dev tokens": 0}
    assert report == {"source": "by hand", **sizes, "content": found.digest[:12]}
    assert len(report["content"]) == 12 and len(found.digest) == 64
    assert found.digest == text.Corpus("from elsewhere", found.train, found.dev).digest


def test_a_text_of_one_window_has_that_window():
    ids = torch.arange(5)
    assert next(text.random_windows(ids, 3, 5, generator(0, "cpu"))).tolist() == [list(range(5))] * 3
    for wrong, length in ((ids, 6), (ids.view(1, 5), 1), (ids.view(5, 1), 1), (torch.tensor(1), 1)):
        with pytest.raises(ValueError, match=f"no window of {length}"):
            text.random_windows(wrong, 3, length, generator(0, "cpu"))
    assert next(text.batches(ids, 2, 4, generator(0, "cpu")))[1].tolist() == [[1, 2, 3, 4]] * 2


def test_fifteen_percent_in_spans_of_three_unless_given():
    assert text.span_counts(100) == text.span_counts(100, 0.15, 3.0) == (15, 5)
    mask = text.span_mask(2, 100, generator(0, "cpu"))
    assert [[value for value, _ in runs(row)] for row in mask.tolist()] == [[False, True] * 5] * 2
    assert text.span_lengths(91) == (100, 21)  # 85 kept, 5 sentinels and the end; 15, 5 and the end
    sentinels = torch.arange(999, 899, -1)
    batch = next(text.span_batches(torch.arange(2, 150), 2, 91, generator(0, "cpu"), sentinels))
    assert batch["labels"].shape == (2, 21) and (batch["labels"] > 899).sum(1).tolist() == [5, 5]
    wide = next(text.span_batches(torch.arange(2, 150), 2, 56, generator(0, "cpu"), sentinels, 0.5, 10.0))
    assert (wide["labels"] > 899).sum(1).tolist() == [5, 5] and wide["labels"].shape[1] == 56  # half of 100


@pytest.mark.parametrize("wrong", [(1,), (0,), (9, 0.0), (9, 1.0), (9, -0.5), (9, 1.5), (9, 0.5, 0.99), (9, 0.5, -1)])
def test_counts_of_spans_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=f"need length ≥ 2, 0 < density < 1, span ≥ 1; got {wrong[0]}"):
        text.span_counts(*wrong)


def test_spans_of_one_token_fill_half_the_text():
    """Five spans and five tokens between them fit; six and four do not."""
    assert text.span_counts(10, 0.5, 1) == (5, 5)
    assert text.span_mask(1, 10, generator(0, "cpu"), 0.5, 1).tolist() == [[False, True] * 5]
    with pytest.raises(ValueError, match="6 noise spans cannot be kept apart by 4 other tokens"):
        text.span_counts(10, 0.6, 1)
    assert text.span_counts(10, 0.99, 20) == (9, 1) and text.span_counts(10, 0.01) == (1, 1)


def test_masks_with_other_counts_are_refused_in_any_order():
    ids, sentinels = torch.zeros(3, 4).long(), torch.arange(9)
    one, two = [False, True, False, False], [False, True, True, False]
    for rows in ([one, one, two], [two, two, one], [one, two, one]):
        with pytest.raises(ValueError, match="same number"):
            text.corrupt(ids, torch.tensor(rows), sentinels)
    with pytest.raises(ValueError, match="2 spans need as many sentinels; there are 1"):
        text.corrupt(ids[:1], torch.tensor([[True, False, True, False]]), torch.tensor([9]))
    empty = text.corrupt(ids[:, :0], torch.zeros(3, 0, dtype=torch.bool), sentinels)
    assert [part.tolist() for part in empty] == [[[1]] * 3] * 2


def test_a_vocabulary_without_sentinels_has_none():
    tokenizer = text.bpe(text.Corpus("by hand", ("ab ab",), ()), 258)
    assert tokenizer.get_vocab_size() == 258 and text.sentinel_ids(tokenizer).tolist() == []
    assert text.sentinel_ids(tokenizer).dtype == torch.int64
    with pytest.raises(ValueError, match="a vocabulary of 257 is too small: 256 bytes, 2 special tokens, 0 sentinels"):
        text.bpe(text.Corpus("by hand", ("ab ab",), ()), 257)
