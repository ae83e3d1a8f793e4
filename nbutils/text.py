"""Real text without a network, a byte-level BPE, windows, and T5's span corruption.

The text is the sources of the running Python's standard library.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
import tokenize
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LIBRARY = Path(sysconfig.get_path("stdlib"))
# Not text of the library: tests and their data, tables, generated files, and what belongs to this machine.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "__pycache__"}
_LEFT_OUT |= {"lib-dynload", "site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"}
DEV = 0.1  # share of the dev split
END = 1  # id of the end of a document, as in T5; 0 is padding
DENSITY = 0.15  # of noise
SPAN = 1 / (1 - DENSITY)  # mean length of its runs: T5's baselines drop tokens one by one (Raffel et al. 2020, 3.1.4)


class Corpus(NamedTuple):
    """Normalised documents, split into train and dev."""

    train: tuple[str, ...]
    dev: tuple[str, ...]


def normalise(text: str) -> str:
    """NFC, no blanks at line ends, at most one empty line in a row, one newline at the end. Idempotent.

    >>> normalise("a  \\n\\n\\n\\nb")
    'a\\n\\nb\\n'
    """
    text = re.sub(r"[^\S\n]+$", "", unicodedata.normalize("NFC", text), flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).strip("\n")
    return f"{text}\n" if text else ""


def corpus(size: int) -> Corpus:
    """At most ``size`` bytes of the library's sources; about a tenth is the dev split, made of whole files.

    Files come in a fixed mixed order (by the hash of their path), so that a larger ``size`` only appends, and a file
    never changes its split.

    Raises:
        FileNotFoundError: this Python comes without its sources.

    >>> small, large = (corpus(size).train for size in (400_000, 600_000))
    >>> small[:-1] == large[: len(small) - 1]  # only its last document may be cut
    True
    """
    parts: tuple[list[str], list[str]] = ([], [])
    sizes = [0, 0]
    for document in _cut(_files(), size):
        part = int(sizes[1] < DEV * sum(sizes))  # 1 (dev) whenever dev has less than its share so far
        parts[part].append(document)
        sizes[part] += len(document.encode())
    return Corpus(tuple(parts[0]), tuple(parts[1]))


def _is_text(name: str) -> bool:
    return name not in _LEFT_OUT and not name.startswith(("config-", "_sysconfigdata"))


def _files() -> Iterator[str]:
    """Normalised sources, in the order of the hash of their paths: mixed, and the same on every machine."""
    names: list[str] = []
    for folder, inner, files in os.walk(LIBRARY):
        inner[:] = filter(_is_text, inner)
        here = Path(folder).relative_to(LIBRARY)
        names += [(here / name).as_posix() for name in files if name.endswith(".py") and _is_text(name)]
    if not names:
        raise FileNotFoundError(f"no Python sources in {LIBRARY}: use a Python that has its library as .py files")
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        with tokenize.open(LIBRARY / name) as lines:
            if text := normalise(lines.read()):
                yield text


def _cut(documents: Iterable[str], size: int) -> Iterator[str]:
    """Documents up to ``size`` bytes; the last one ends at a line end below it."""
    for document in documents:
        data = document.encode()
        part = data if len(data) <= size else data[: data.rfind(b"\n", 0, size) + 1]
        if part:
            yield part.decode()
        if part != data:
            return
        size -= len(data)


def bpe(corpus: Corpus, vocab: int, sentinels: int = 0) -> Tokenizer:
    """A byte-level BPE of ``vocab`` tokens trained on ``corpus.train``; the same text gives the same vocabulary.

    Ids: 0 padding, 1 end of a document, and the ``sentinels`` of span corruption at the top. Fewer than ``vocab``
    tokens if the text has no more pairs to merge, and never fewer than these and the 256 bytes.

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

    >>> window = next(random_windows(torch.arange(100), 2, 4, torch.Generator().manual_seed(0)))
    >>> (window - window[:, :1]).tolist()
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    rows = tokens.unfold(0, length, 1)  # (n − length + 1, length), a view
    while True:
        starts = torch.randint(len(rows), (batch,), generator=generator, device=generator.device)
        yield rows[starts.to(rows.device)]


def span_batches(
    tokens: Tensor, batch: int, length: int, generator: torch.Generator, sentinels: Sequence[int]
) -> Iterator[dict[str, Tensor]]:
    """Without end: ``input_ids`` (batch, length) and ``labels``; T5 makes the decoder's inputs from them.

    The windows lie at uniform random places of ``tokens`` (n,). Noise begins and ends at uniform random places, too. In
    the input the k-th of ``sentinels`` (ids in their order of use) takes the place of a row's k-th span of noise; the
    labels have these spans, each after its sentinel. Both end with ``END``.

    >>> stream = span_batches(torch.arange(2, 96), 4, 32, torch.Generator().manual_seed(0), [100, 99, 98, 97])
    >>> {name: tuple(ids.shape) for name, ids in next(stream).items()}
    {'input_ids': (4, 32), 'labels': (4, 10)}
    """
    taken = next(taken for taken in count(2) if _input_length(taken + 1) > length)  # it grows by 0 or 1
    for rows in random_windows(tokens, batch, taken, generator):
        mask = _span_mask(batch, taken, generator).to(rows.device)
        yield {"input_ids": _replaced(rows, mask, sentinels), "labels": _replaced(rows, ~mask, sentinels)}


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
