"""Real text, a byte-level BPE, batches of windows, and T5's span corruption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nbutils.text.corpora import Corpus as Corpus  # a chapter needs one import
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

DENSITY, SPAN = 0.15, 3.0


def span_batches(
    tokens: Tensor, batch: int, length: int, generator: torch.Generator, sentinels: Sequence[int]
) -> Iterator[dict[str, Tensor]]:
    """Without end: ``input_ids`` (batch, length) and ``labels``; T5 makes the decoder's inputs from them.

    The windows lie at uniform random places of ``tokens`` (n,). Noise begins and ends at uniform random places, too. In
    the input the k-th of ``sentinels`` (ids in their order of use) takes the place of a row's k-th span of noise; the
    labels have these spans, each after its sentinel. Both end with ``END``.

    Raises:
        ValueError: an input shorter than 3, fewer tokens than a window, fewer sentinels than spans.

    >>> stream = span_batches(torch.arange(2, 99), 4, 32, torch.Generator().manual_seed(0), [100, 99])
    >>> {name: tuple(ids.shape) for name, ids in next(stream).items()}
    {'input_ids': (4, 32), 'labels': (4, 8)}
    """
    if length < 3:
        raise ValueError(f"an input of {length} tokens is too short for span corruption: at least 3")
    taken = next(taken for taken in count(2) if _input_length(taken + 1) > length)  # it grows by 0 or 1
    if (spans := _span_counts(taken)[1]) > len(sentinels):
        raise ValueError(f"{spans} spans need as many sentinels; there are {len(sentinels)}")

    def corrupted(rows: Tensor) -> dict[str, Tensor]:
        mask = _span_mask(batch, taken, generator).to(rows.device)
        return {"input_ids": _replaced(rows, mask, sentinels), "labels": _replaced(rows, ~mask, sentinels)}

    return map(corrupted, random_windows(tokens, batch, taken, generator))


def _span_counts(length: int) -> tuple[int, int]:
    """Numbers of noise tokens and of noise spans in ``length`` ≥ 2 tokens: fixed by the length, not random."""
    noise = max(round(length * DENSITY), 1)
    return noise, max(round(noise / SPAN), 1)


def _input_length(taken: int) -> int:
    """What is left of so many tokens, a sentinel for each span, and the end."""
    noise, spans = _span_counts(taken)
    return taken - noise + spans + 1


def _span_mask(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Noise masks (batch, length), bool, all equally likely: kept and noise in turns, kept first and noise last."""
    noise, spans = _span_counts(length)
    kept = _cut_lengths(batch, length - noise, spans, generator)  # (batch, spans)
    lost = _cut_lengths(batch, noise, spans, generator)
    starts = torch.stack([kept, lost], dim=2).flatten(1).cumsum(1)[:, :-1]  # (batch, 2 spans − 1)
    edges = torch.zeros(batch, length, dtype=torch.int64, device=generator.device).scatter_(1, starts, 1)
    return edges.cumsum(1) % 2 == 1


def _cut_lengths(batch: int, total: int, parts: int, generator: torch.Generator) -> Tensor:
    """Lengths (batch, parts) ≥ 1 that sum to ``total``, uniform over all such."""
    keys = torch.rand(batch, total - 1, generator=generator, device=generator.device, dtype=torch.float64)
    cuts = (keys.argsort(1)[:, : parts - 1] + 1).sort(1).values
    return pad(pad(cuts, (1, 0)), (0, 1), value=total).diff(dim=1)


def _replaced(tokens: Tensor, mask: Tensor, sentinels: Sequence[int]) -> Tensor:
    """Rows with a sentinel for each run of ``mask``, which is as often true in every row, and with the end."""
    first = mask & ~pad(mask, (1, 0))[:, :-1]
    number = (first.cumsum(1) - 1).clamp(min=0)
    values = torch.where(first, torch.tensor(sentinels, device=tokens.device)[number], tokens)
    return pad(values[first | ~mask].view(len(tokens), -1), (0, 1), value=END)


def check_knows_words(tokenizer: Any, sentences: Sequence[str]) -> None:
    """Raise ValueError for a tokenizer of ``transformers`` that tells no word of the sentences from another.

    For a folder without one ``AutoTokenizer`` may make one up, with special tokens alone, or with one for every word.

    >>> class Made:
    ...     all_special_ids, unk_token_id = [0, 1], 1
    ...     def __call__(self, sentences):
    ...         return {"input_ids": [[5, 1, 5, 1, 0] for _ in sentences]}
    >>> check_knows_words(Made(), ["All words are unknown to it."])
    Traceback (most recent call last):
    ValueError: this tokenizer knows no word: 1 sentences give 1 different tokens, special ones left out
    """
    special = {*tokenizer.all_special_ids, tokenizer.unk_token_id}
    known = {token for ids in tokenizer(list(sentences))["input_ids"] for token in ids} - special
    if len(known) < 2:
        raise ValueError(
            f"this tokenizer knows no word: {len(sentences)} sentences give {len(known)} different tokens, "
            "special ones left out"
        )
