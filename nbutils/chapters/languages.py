"""Formal languages as data: majority, aⁿbⁿ and copying, each with balanced labels and near misses.

Symbols: 0 padding (at the right), 3 ``a``, 4 ``b``. Copying uses ``symbols`` letters, from 3 on. Tokens and labels are
int64, on the generator's device; rows come in random order.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD, A, B = 0, 3, 4
IGNORE = -100  # a target that no loss counts


def strings(length: int) -> Tensor:
    """All 2^length strings of ``A`` and ``B``, (2^length, length), in lexicographic order.

    >>> strings(2).tolist()
    [[3, 3], [3, 4], [4, 3], [4, 4]]
    """
    places = torch.arange(length - 1, -1, -1)
    return (torch.arange(2**length)[:, None] >> places) % 2 + A


def is_majority(tokens: Tensor) -> Tensor:
    """(n,), int64: 1 where ``B`` is the majority of a row of ``tokens`` (n, T), 0 for ``A``, ``IGNORE`` at a tie.

    >>> is_majority(torch.tensor([[A, B, B, B], [A, A, B, A], [A, B, B, A]])).tolist()
    [1, 0, -100]
    """
    excess = (tokens == A).sum(1) - (tokens == B).sum(1)
    return torch.where(excess == 0, IGNORE, (excess < 0).long())


def majority(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Strings of ``A`` and ``B`` (count, length) and which is the majority (count,): 0 for ``A``, 1 for ``B``.

    Uniform over the strings of each class. ``length`` is odd, so that there is no tie. A single position tells the
    label with accuracy 1/2 + C(T−1, (T−1)/2)/2^T, which cannot be avoided: each symbol is a part of the majority.

    Raises:
        ValueError: ``length`` is even or below 1.
    """
    if length < 1 or length % 2 == 0:
        raise ValueError(f"majority needs an odd length, so that there is no tie; got {length}")
    bits = _below(2, (count, length), generator)
    labels = _balanced(count, 2, generator)
    wrong = (2 * bits.sum(1) > length).long() != labels
    return A + (bits ^ wrong[:, None].long()), labels  # swapping all symbols maps one class onto the other


def anbn(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Strings (count, length), padded at the right, and whether they are aⁿbⁿ (count,); n uniform in 2, …, length // 2.

    Non-members come with the same lengths, first ``A`` and last ``B``. Half of them are off by one in the count,
    aⁿ⁺¹bⁿ⁻¹ or aⁿ⁻¹bⁿ⁺¹; in the others an inner a and an inner b have changed places, which only the order shows.
    Length and ends tell nothing of the label; the best single place, the second (never b in a member), gets 0.61 of the
    labels right at length 16 and 0.55 at 40; the count alone gets 3/4.

    Raises:
        ValueError: ``length`` is below 4.
    """
    if length < 4:
        raise ValueError(f"anbn needs a length of at least 4; got {length}")
    rows = torch.randperm(count, generator=generator, device=generator.device)
    labels = (rows + _below(2, (1,), generator)) % 2  # one of each in a pair; an odd row out is of either class
    place = rows // 2  # of the row's pair
    half = _below(length // 2 - 1, ((count + 1) // 2,), generator)[place][:, None] + 2  # n, the same for both of a pair
    position = torch.arange(length, device=generator.device)
    kind = torch.where(labels == 1, 0, 1 + place % 2)  # non-members by turns 1 (wrong count) and 2 (wrong order)
    sign = 2 * _below(2, (count,), generator) - 1
    turn = half + (sign * (kind == 1))[:, None]  # where the b begin
    first = _uniform_below(half - 1, generator) + 1  # an inner a: 1 ≤ first < n
    second = _uniform_below(half - 1, generator) + half  # an inner b: n ≤ second < 2n − 1
    swapped = ((position == first) | (position == second)) & (kind == 2)[:, None]
    is_b = (position >= turn) ^ swapped
    return torch.where(position < 2 * half, A + is_b.long(), PAD), labels


def copy_first(count: int, length: int, generator: torch.Generator, symbols: int = 2) -> tuple[Tensor, Tensor]:
    """Random letters (count, length) and the index of the first (count,), from 0 to symbols − 1, each equally often."""
    tokens = A + _below(symbols, (count, length), generator)
    labels = _balanced(count, symbols, generator)
    tokens[:, 0] = A + labels
    return tokens, labels


def copy_previous(count: int, length: int, generator: torch.Generator, symbols: int = 2) -> tuple[Tensor, Tensor]:
    """Random letters (count, length) and, at each position, the letter before (count, length); at first ``IGNORE``."""
    tokens = A + _below(symbols, (count, length), generator)
    return tokens, torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=IGNORE)


def _below(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(high, shape, generator=generator, device=generator.device)


def _uniform_below(high: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in 0, …, high − 1 for each element."""
    uniform = torch.rand(high.shape, generator=generator, device=generator.device, dtype=torch.float64)
    return (uniform * high).long()


def _balanced(count: int, classes: int, generator: torch.Generator) -> Tensor:
    """Labels (count,) in random order; the classes' numbers differ by at most one, and who has one more is random."""
    order = torch.randperm(classes, generator=generator, device=generator.device)
    labels = order[torch.arange(count, device=generator.device) % classes]
    return labels[torch.randperm(count, generator=generator, device=generator.device)]
