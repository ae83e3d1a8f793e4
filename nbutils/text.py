"""Text, a byte-level BPE, random windows, and T5's span corruption.

The text is the source code of the running Python's standard library: real text that needs no network.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
import tokenize
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Corpus", "bpe", "corpus", "normalise", "random_windows", "span_batches", "tokens"]

LIBRARY = Path(sysconfig.get_path("stdlib"))
# Tests and their data, tables, generated files, and files that belong to this machine
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "__pycache__"}
_LEFT_OUT |= {"lib-dynload", "site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"}
DEV_SHARE = 0.1  # share of the dev split
END = 1  # id of the end of a document, as in T5; 0 is padding
NOISE_DENSITY = 0.15  # share of noise tokens
# Mean length of a noise span: T5's baselines drop tokens independently (Raffel et al. 2020, 3.1.4).
MEAN_SPAN = 1 / (1 - NOISE_DENSITY)


class Corpus(NamedTuple):
    """Normalised documents, split into train and dev."""

    train: tuple[str, ...]
    dev: tuple[str, ...]


def normalise(text: str) -> str:
    """Normalise to NFC, no blanks at line ends, at most one empty line in a row, one newline at the end. Idempotent.

    >>> normalise("a  \\n\\n\\n\\nb")
    'a\\n\\nb\\n'
    """
    text = re.sub(r"[^\S\n]+$", "", unicodedata.normalize("NFC", text), flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).strip("\n")
    return f"{text}\n" if text else ""


def corpus(size: int) -> Corpus:
    """At most ``size`` bytes of the library's sources; about a tenth is the dev split, which has whole files.

    Files are ordered by the hash of their path: a larger ``size`` only appends, and a file never changes its split.

    Raises:
        FileNotFoundError: this Python comes without its sources.

    >>> small, large = (corpus(size).train for size in (400_000, 600_000))
    >>> small[:-1] == large[: len(small) - 1]  # only its last document may be cut
    True
    """
    train: list[str] = []
    dev: list[str] = []
    train_bytes = 0
    dev_bytes = 0
    for document in _truncated(_documents(), size):
        if dev_bytes < DEV_SHARE * (train_bytes + dev_bytes):  # dev has less than its share so far
            dev.append(document)
            dev_bytes += len(document.encode())
        else:
            train.append(document)
            train_bytes += len(document.encode())
    return Corpus(tuple(train), tuple(dev))


def _is_text(name: str) -> bool:
    return name not in _LEFT_OUT and not name.startswith(("config-", "_sysconfigdata"))


def _documents() -> Iterator[str]:
    """Normalised sources, ordered by the hash of their paths: mixed, and in the same order on every machine."""
    names: list[str] = []
    for path, folders, files in os.walk(LIBRARY):
        folders[:] = filter(_is_text, folders)  # os.walk enters only the folders that are left
        folder = Path(path).relative_to(LIBRARY)
        names += [(folder / name).as_posix() for name in files if name.endswith(".py") and _is_text(name)]
    if not names:
        raise FileNotFoundError(f"no Python sources in {LIBRARY}: use a Python that has its library as .py files")
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        with tokenize.open(LIBRARY / name) as file:
            text = normalise(file.read())
        if text:
            yield text


def _truncated(documents: Iterable[str], size: int) -> Iterator[str]:
    """The first ``size`` bytes of the documents; the last document is cut at the end of a line."""
    for document in documents:
        data = document.encode()
        if len(data) > size:
            first_lines = data[: data.rfind(b"\n", 0, size) + 1]
            if first_lines:
                yield first_lines.decode()
            return
        yield document
        size -= len(data)


def bpe(corpus: Corpus, vocab: int, sentinels: int = 0) -> Tokenizer:
    """A byte-level BPE of ``vocab`` tokens trained on ``corpus.train``; the same text gives the same vocabulary.

    Id 0 is padding and id 1 the end of a document; the ``sentinels`` of span corruption have the highest ids. There are
    fewer than ``vocab`` tokens if the text has no more pairs to merge, but always these ids and the 256 bytes.

    >>> tokenizer = bpe(Corpus(("ab ab",), ()), vocab=260)  # room for two merges
    >>> tokenizer.encode("ab ab").tokens
    ['ab', 'Ġab']
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
    sentinel_tokens = [f"<extra_id_{k}>" for k in reversed(range(sentinels))]  # T5: the first has the last id
    tokenizer.add_special_tokens(sentinel_tokens)
    tokenizer.encode_special_tokens = True  # "</s>" in a document is text
    return tokenizer


def tokens(documents: Iterable[str], tokenizer: Tokenizer) -> Tensor:
    """The ids of all documents as a tensor (n,), int64; ``END`` follows every document.

    >>> from tokenizers import Tokenizer, models
    >>> tokens(["a", "b"], Tokenizer(models.WordLevel({"a": 2, "b": 3})))
    tensor([2, 1, 3, 1])
    """
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(list(documents), add_special_tokens=False):
        ids += [*encoding.ids, END]
    return torch.tensor(ids, dtype=torch.int64)


def random_windows(tokens: Tensor, batch: int, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless windows (batch, length) that start at uniform random places of ``tokens`` (n,), on its device.

    >>> window = next(random_windows(torch.arange(100), 2, 4, torch.Generator().manual_seed(0)))
    >>> (window - window[:, :1]).tolist()
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    windows = tokens.unfold(0, length, 1)  # (n − length + 1, length), a view
    while True:
        starts = torch.randint(len(windows), (batch,), generator=generator, device=generator.device)
        yield windows[starts.to(windows.device)]


def span_batches(
    tokens: Tensor, batch: int, length: int, generator: torch.Generator, sentinels: Sequence[int]
) -> Iterator[dict[str, Tensor]]:
    """Endless batches of ``input_ids`` (batch, length) and ``labels``; T5 makes the decoder's inputs from the labels.

    The windows start at uniform random places of ``tokens`` (n,), and noise begins and ends at uniform random places of
    a window. In the input, the k-th of ``sentinels`` (ids in their order of use) replaces the k-th noise span of a row.
    The labels consist of these spans, each after its sentinel. Input and labels end with ``END``.

    >>> stream = span_batches(torch.arange(2, 96), 4, 32, torch.Generator().manual_seed(0), [100, 99, 98, 97])
    >>> {name: tuple(ids.shape) for name, ids in next(stream).items()}
    {'input_ids': (4, 32), 'labels': (4, 10)}
    """
    window_length = 2
    while _input_length(window_length + 1) <= length:  # the input length grows by 0 or 1 with the window's
        window_length += 1
    for windows in random_windows(tokens, batch, window_length, generator):
        noise = _noise_mask(batch, window_length, generator).to(windows.device)
        yield {
            "input_ids": _replace_spans(windows, noise, sentinels),
            "labels": _replace_spans(windows, ~noise, sentinels),
        }


def _noise_counts(window_length: int) -> tuple[int, int]:
    """Numbers of noise tokens and of noise spans in a window of 2 or more tokens: fixed by its length, not random."""
    noise_tokens = max(round(window_length * NOISE_DENSITY), 1)
    noise_spans = max(round(noise_tokens / MEAN_SPAN), 1)
    return noise_tokens, noise_spans


def _input_length(window_length: int) -> int:
    """Length of the input made of a window: the tokens that are not noise, a sentinel for every span, and ``END``."""
    noise_tokens, noise_spans = _noise_counts(window_length)
    return window_length - noise_tokens + noise_spans + 1


def _noise_mask(batch: int, window_length: int, generator: torch.Generator) -> Tensor:
    """Noise masks (batch, window_length), bool, all equally likely; a row starts with text and ends with noise."""
    noise_tokens, noise_spans = _noise_counts(window_length)
    text_lengths = _span_lengths(batch, window_length - noise_tokens, noise_spans, generator)  # (batch, spans)
    noise_lengths = _span_lengths(batch, noise_tokens, noise_spans, generator)
    lengths = torch.stack([text_lengths, noise_lengths], dim=2).flatten(1)  # text and noise in turns
    starts = lengths.cumsum(1)[:, :-1]  # (batch, 2 spans − 1)
    edges = torch.zeros(batch, window_length, dtype=torch.int64, device=generator.device).scatter_(1, starts, 1)
    return edges.cumsum(1) % 2 == 1


def _span_lengths(batch: int, total: int, spans: int, generator: torch.Generator) -> Tensor:
    """Lengths (batch, spans), at least 1, that sum to ``total``; all such lengths are equally likely."""
    keys = torch.rand(batch, total - 1, generator=generator, device=generator.device, dtype=torch.float64)
    cuts = (keys.argsort(1)[:, : spans - 1] + 1).sort(1).values
    return pad(pad(cuts, (1, 0)), (0, 1), value=total).diff(dim=1)


def _replace_spans(tokens: Tensor, mask: Tensor, sentinels: Sequence[int]) -> Tensor:
    """Replace every span of ``mask`` by a sentinel and add ``END``; all rows of ``mask`` have the same sum."""
    starts = mask & ~pad(mask, (1, 0))[:, :-1]
    span_number = (starts.cumsum(1) - 1).clamp(min=0)
    replaced = torch.where(starts, torch.tensor(sentinels, device=tokens.device)[span_number], tokens)
    rows = replaced[starts | ~mask].view(len(tokens), -1)
    return pad(rows, (0, 1), value=END)
