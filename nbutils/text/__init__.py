"""Real text, a byte-level BPE, batches of windows, and T5's span corruption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nbutils.text.corpora import Corpus as Corpus  # a chapter needs one import
from nbutils.text.corpora import CorpusMissing as CorpusMissing
from nbutils.text.corpora import corpus as corpus
from nbutils.text.corpora import sentences as sentences

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = 1  # id of the end of a document, as in T5; 0 is padding


def bpe(corpus: Corpus, vocab: int, sentinels: int = 0) -> Tokenizer:
    """A byte-level BPE of ``vocab`` tokens trained on ``corpus.train``; the same text gives the same vocabulary.

    Ids: 0 padding, 1 end of a document, and the ``sentinels`` of span corruption at the top. Fewer than ``vocab``
    tokens if the text has no more pairs to merge.

    Raises:
        ValueError: ``vocab`` has no room for the 256 bytes, the two special tokens and the sentinels.

    >>> tokenizer = bpe(Corpus("by hand", ("ab ab",), ()), vocab=260)  # room for two merges
    >>> tokenizer.encode("ab ab").tokens
    ['ab', 'Ġab']
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = 256 + 2 + sentinels
    if vocab < least:
        raise ValueError(f"a vocabulary of {vocab} is too small: 256 bytes, 2 special tokens, {sentinels} sentinels")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - sentinels,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.train, trainer)
    last_is_first = [f"<extra_id_{k}>" for k in reversed(range(sentinels))]  # T5: the first is the last id
    tokenizer.add_special_tokens(last_is_first)
    tokenizer.encode_special_tokens = True  # "</s>" in a document is text
    return tokenizer


def sentinel_ids(tokenizer: Tokenizer) -> Tensor:
    """Ids of ``<extra_id_0>``, ``<extra_id_1>``, … in their order of use: the last id, the one before, …

    >>> from tokenizers import Tokenizer, models
    >>> sentinel_ids(Tokenizer(models.WordLevel({"<extra_id_0>": 9, "<extra_id_1>": 8})))
    tensor([9, 8])
    """
    ids = []
    while (found := tokenizer.token_to_id(f"<extra_id_{len(ids)}>")) is not None:
        ids.append(found)
    return torch.tensor(ids, dtype=torch.int64)


def tokens(documents: Iterable[str], tokenizer: Tokenizer) -> Tensor:
    """All documents as one tensor of ids (n,), int64, each document followed by ``END``.

    >>> from tokenizers import Tokenizer, models
    >>> tokens(["a", "b"], Tokenizer(models.WordLevel({"a": 2, "b": 3})))
    tensor([2, 1, 3, 1])
    """
    encoded = tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
    return torch.tensor([index for one in encoded for index in (*one.ids, END)], dtype=torch.int64)


def random_windows(tokens: Tensor, batch: int, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Without end: windows (batch, length) at uniform random places of ``tokens`` (n,), on its device.

    Raises:
        ValueError: ``tokens`` is no tensor (n,) or shorter than a window.

    >>> window = next(random_windows(torch.arange(100), 2, 4, torch.Generator().manual_seed(0)))
    >>> (window - window[:, :1]).tolist()
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    if tokens.dim() != 1 or len(tokens) < length:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} hold no window of {length}")
    rows = tokens.unfold(0, length, 1)  # (n − length + 1, length), a view

    def draw() -> Tensor:
        starts = torch.randint(len(rows), (batch,), generator=generator, device=generator.device)
        return rows[starts.to(rows.device)]

    return (draw() for _ in repeat(None))


def batches(tokens: Tensor, batch: int, length: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end: inputs and next-token targets (batch, length) of ``random_windows``.

    >>> inputs, targets = next(batches(torch.arange(100), 2, 4, torch.Generator().manual_seed(0)))
    >>> (targets - inputs).tolist()  # in 0, 1, 2, … the next token is one more
    [[1, 1, 1, 1], [1, 1, 1, 1]]
    """
    return ((window[:, :-1], window[:, 1:]) for window in random_windows(tokens, batch, length + 1, generator))


# Span corruption: spans of mean length 3 over 15 % of the tokens (Raffel et al. 2020, section 3.1.4, and its code).


def span_counts(length: int, density: float = 0.15, span: float = 3.0) -> tuple[int, int]:
    """Numbers of noise tokens and of noise spans in ``length`` tokens: fixed by the length, not random.

    >>> span_counts(568)
    (85, 28)
    """
    if length < 2 or not 0 < density < 1 or span < 1:
        raise ValueError(f"need length ≥ 2, 0 < density < 1, span ≥ 1; got {length}, {density}, {span}")
    noise = min(max(round(length * density), 1), length - 1)
    spans = max(round(noise / span), 1)
    if spans > length - noise:
        raise ValueError(
            f"{spans} noise spans cannot be kept apart by {length - noise} other tokens: lower the density"
        )
    return noise, spans


def span_lengths(length: int, density: float = 0.15, span: float = 3.0) -> tuple[int, int]:
    """How many tokens to take so that the corrupted input has ``length`` tokens, and the length of the labels.

    Input: what is left, a sentinel per span, ``END``. Labels: the noise, a sentinel per span, ``END``.

    >>> span_lengths(512)  # T5's own numbers
    (568, 114)
    """

    def lengths(taken: int) -> tuple[int, int]:
        noise, spans = span_counts(taken, density, span)
        return taken - noise + spans + 1, noise + spans + 1

    if length < lengths(2)[0]:
        raise ValueError(f"an input of {length} tokens is too short for span corruption: at least {lengths(2)[0]}")
    taken = 2
    while lengths(taken + 1)[0] <= length:  # one more token makes the input longer by 0 or 1
        taken += 1
    return taken, lengths(taken)[1]


def span_mask(batch: int, length: int, generator: torch.Generator, density: float = 0.15, span: float = 3.0) -> Tensor:
    """Noise masks (batch, length), bool. Spans alternate, beginning with kept tokens and ending with noise.

    All such masks are equally likely: both the noise and the rest are cut into their spans at uniform random places.

    >>> mask = span_mask(3, 20, torch.Generator().manual_seed(0))
    >>> mask.sum(1).tolist(), mask[:, 0].tolist(), mask[:, -1].tolist()  # 15 % of 20
    ([3, 3, 3], [False, False, False], [True, True, True])
    """
    noise, spans = span_counts(length, density, span)
    kept = _cut_lengths(batch, length - noise, spans, generator)  # (batch, spans)
    lost = _cut_lengths(batch, noise, spans, generator)
    starts = torch.stack([kept, lost], dim=2).flatten(1).cumsum(1)[:, :-1]  # (batch, 2 spans − 1)
    edges = torch.zeros(batch, length, dtype=torch.int64, device=generator.device).scatter_(1, starts, 1)
    return edges.cumsum(1) % 2 == 1


def _cut_lengths(batch: int, total: int, parts: int, generator: torch.Generator) -> Tensor:
    """Lengths (batch, parts) ≥ 1 that sum to ``total``, uniform over all such."""
    keys = torch.rand(batch, total - 1, generator=generator, device=generator.device, dtype=torch.float64)
    cuts = (keys.argsort(1)[:, : parts - 1] + 1).sort(1).values
    return torch.nn.functional.pad(torch.nn.functional.pad(cuts, (1, 0)), (0, 1), value=total).diff(dim=1)


def corrupt(tokens: Tensor, mask: Tensor, sentinels: Tensor) -> tuple[Tensor, Tensor]:
    """Input ids and labels of span corruption, each row ended by ``END``.

    Args:
        tokens: (batch, length), int64.
        mask: (batch, length), bool, true at noise; as many noise tokens and spans in every row.
        sentinels: ids in their order of use. The k-th takes the place of a row's k-th span of noise in the input, and
            of its k-th span of kept tokens in the labels.

    Raises:
        ValueError: rows with other counts, or more spans than sentinels.

    >>> mask = torch.tensor([[False, True, True, False, True]])
    >>> corrupt(torch.tensor([[10, 11, 12, 13, 14]]), mask, torch.tensor([99, 98]))
    (tensor([[10, 99, 13, 98,  1]]), tensor([[99, 11, 12, 98, 14,  1]]))
    """
    return _replaced(tokens, mask, sentinels), _replaced(tokens, ~mask, sentinels)


def _replaced(tokens: Tensor, mask: Tensor, sentinels: Tensor) -> Tensor:
    first = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    number = first.cumsum(1)
    if number.numel() and int(number.max()) > len(sentinels):
        raise ValueError(f"{int(number.max())} spans need as many sentinels; there are {len(sentinels)}")
    kept = ~mask | first
    counts = kept.sum(1)
    if (counts != counts[0]).any():
        raise ValueError("all rows of the mask must have the same number of noise tokens and of spans")
    values = torch.where(first, sentinels.to(tokens.device)[(number - 1).clamp(min=0)], tokens)
    return torch.nn.functional.pad(values[kept].view(len(tokens), -1), (0, 1), value=END)


def span_batches(
    tokens: Tensor,
    batch: int,
    length: int,
    generator: torch.Generator,
    sentinels: Tensor,
    density: float = 0.15,
    span: float = 3.0,
) -> Iterator[dict[str, Tensor]]:
    """Without end: ``input_ids`` (batch, length) and ``labels``; T5 makes the decoder's inputs from them.

    The windows lie at uniform random places of ``tokens`` (n,).

    >>> stream = span_batches(torch.arange(2, 99), 4, 32, torch.Generator().manual_seed(0), torch.tensor([100, 99]))
    >>> {name: tuple(ids.shape) for name, ids in next(stream).items()}  # as span_lengths(32) says
    {'input_ids': (4, 32), 'labels': (4, 8)}
    """
    taken, _ = span_lengths(length, density, span)

    def corrupted(rows: Tensor) -> dict[str, Tensor]:
        mask = span_mask(batch, taken, generator, density, span).to(rows.device)
        inputs, labels = corrupt(rows, mask, sentinels)
        return {"input_ids": inputs, "labels": labels}

    return map(corrupted, random_windows(tokens, batch, taken, generator))


def check_knows_words(tokenizer: Any, sentences: Sequence[str]) -> None:
    """Raise ValueError for a tokenizer of ``transformers`` that tells no word of the sentences from another.

    For a folder without one ``AutoTokenizer`` may make one up, with special tokens alone, or with one for every word.

    >>> class Made:
    ...     all_special_ids, unk_token_id = [0, 1], 1
    ...     def __call__(self, sentences):
    ...         return {"input_ids": [[5, 1, 5, 1, 0] for _ in sentences]}
    >>> check_knows_words(Made(), ["All words are unknown to it."])
    Traceback (most recent call last):
    ValueError: this tokenizer knows no word: it gives 1 token that is not special for 1 sentences
    """
    special = {*tokenizer.all_special_ids, tokenizer.unk_token_id}
    known = {token for ids in tokenizer(list(sentences))["input_ids"] for token in ids} - special
    if len(known) < 2:
        raise ValueError(
            f"this tokenizer knows no word: it gives {len(known)} token{'s' * (len(known) != 1)} that "
            f"{'are' if len(known) != 1 else 'is'} not special for {len(sentences)} sentences"
        )
