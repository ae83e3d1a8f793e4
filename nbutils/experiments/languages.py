"""Formal languages as data: majority, copying, aⁿbⁿcⁿ, and brackets of two kinds.

Symbol 0 is padding (at the right), 3 is ``a``, 4 is ``b`` and so on. Tokens and labels are int64, on the generator's
device; rows come in random order.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD = 0
A = 3
B = 4
IGNORE = -100  # a target that the loss leaves out


def strings(length: int) -> Tensor:
    """All 2^length strings of ``A`` and ``B``, (2^length, length), in lexicographic order.

    Used in ``counting``.

    >>> strings(2).tolist()
    [[3, 3], [3, 4], [4, 3], [4, 4]]
    """
    bit_positions = torch.arange(length - 1, -1, -1)
    bits = (torch.arange(2**length)[:, None] >> bit_positions) % 2
    return bits + A


def is_majority(tokens: Tensor) -> Tensor:
    """Majority of each row of ``tokens`` (n, T), as int64 (n,): 1 for ``B``, 0 for ``A``, ``IGNORE`` at a tie.

    Used in ``counting``.

    >>> is_majority(torch.tensor([[A, B, B, B], [A, A, B, A], [A, B, B, A]])).tolist()
    [1, 0, -100]
    """
    excess = (tokens == A).sum(1) - (tokens == B).sum(1)
    return torch.where(excess == 0, IGNORE, (excess < 0).long())


def majority(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Strings of ``A`` and ``B`` (count, length), and their majority (count,): 0 for ``A``, 1 for ``B``.

    Strings are uniform in each class. ``length`` is odd, so that ties cannot occur. A single position predicts the
    label with accuracy 1/2 + C(T−1, (T−1)/2)/2^T. This cannot be avoided: every symbol is part of the count.

    Used in ``counting``.

    Raises:
        ValueError: ``length`` is even.
    """
    if length % 2 == 0:
        raise ValueError(f"majority needs an odd length, so that there is no tie; got {length}")
    bits = _random_integers(2, (count, length), generator)
    labels = _balanced_labels(count, generator)
    mislabelled = (2 * bits.sum(1) > length).long() != labels
    bits = bits ^ mislabelled[:, None].long()  # swapping all symbols maps one class onto the other
    return A + bits, labels


def counter(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Strings aⁿbⁿcⁿ (count, length), padded at the right, and at each position the next letter (count, length).

    n is uniform in 1, …, length // 3. Letters are 3, 4 and 5, and the end is 6. Labels are ``IGNORE`` at padding and on
    every a, since n is not yet known there.

    Used in ``counting``.

    >>> tokens, labels = counter(1, 3, torch.Generator())
    >>> tokens.tolist(), labels.tolist()
    ([[3, 4, 5]], [[-100, 5, 6]])
    """
    n = _random_integers(length // 3, (count, 1), generator) + 1
    position = torch.arange(length, device=generator.device)
    block = position // n
    tokens = torch.where(block < 3, A + block, PAD)
    next_letter = A + (position + 1) // n
    labels = torch.where((block > 0) & (block < 3), next_letter, IGNORE)
    return tokens, labels


def dyck2(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prefixes of well-formed strings of two kinds of brackets, and at each position the bracket that may close next.

    ``3 + kind`` opens, ``5 + kind`` closes. A position opens or closes a bracket with probability 1/2 each, and always
    opens one if none is open. Labels (count, length) are the closing brackets, ``IGNORE`` where no bracket is open.

    Used in ``counting``.
    """
    opens = _random_integers(2, (count, length), generator) == 1
    kind = _random_integers(2, (count, length), generator)
    stack = kind.new_zeros(count, length + 1)
    depth = kind.new_zeros(count)
    rows = torch.arange(count, device=generator.device)
    tokens = kind.clone()
    labels = kind.clone()
    for position in range(length):
        push = opens[:, position] | (depth == 0)
        tokens[:, position] = torch.where(push, 3 + kind[:, position], 5 + stack[rows, depth])
        depth = depth + torch.where(push, 1, -1)
        stack[rows, depth] = torch.where(push, kind[:, position], stack[rows, depth])
        labels[:, position] = torch.where(depth > 0, 5 + stack[rows, depth], IGNORE)
    return tokens, labels


def copy_first(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Strings of ``A`` and ``B`` (count, length), and the first symbol (count,): 0 for ``A``, 1 for ``B``, balanced.

    Used in ``counting``.
    """
    tokens = A + _random_integers(2, (count, length), generator)
    labels = _balanced_labels(count, generator)
    tokens[:, 0] = A + labels
    return tokens, labels


def copy_previous(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random strings of four letters (count, length), and at each position the letter before, ``IGNORE`` at the first.

    Used in ``counting``.
    """
    tokens = A + _random_integers(4, (count, length), generator)
    labels = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=IGNORE)
    return tokens, labels


def _random_integers(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform in 0, …, high − 1."""
    return torch.randint(high, shape, generator=generator, device=generator.device)


def _balanced_labels(count: int, generator: torch.Generator) -> Tensor:
    """Labels 0 and 1 (count,) in random order, equally many; if ``count`` is odd, a random label has one more."""
    order = torch.randperm(2, generator=generator, device=generator.device)
    labels = order[torch.arange(count, device=generator.device) % 2]
    return labels[torch.randperm(count, generator=generator, device=generator.device)]
