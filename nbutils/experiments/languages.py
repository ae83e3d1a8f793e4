"""Formal languages as data: majority, copying, aⁿbⁿcⁿ and brackets of two kinds.

Symbols: 0 padding (at the right), 3 ``a``, 4 ``b`` and so on. Tokens and labels are int64, on the generator's device;
rows come in random order.
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
        ValueError: ``length`` is even.
    """
    if length % 2 == 0:
        raise ValueError(f"majority needs an odd length, so that there is no tie; got {length}")
    bits = _below(2, (count, length), generator)
    labels = _balanced(count, generator)
    wrong = (2 * bits.sum(1) > length).long() != labels
    return A + (bits ^ wrong[:, None].long()), labels  # swapping all symbols maps one class onto the other


def counter(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """aⁿbⁿcⁿ (count, length), n uniform in 1, …, length // 3, padded at the right, and the letter after each.

    Letters are 3, 4 and 5, the end is 6. Labels (count, length) are ``IGNORE`` on the a, where n is not known yet.

    >>> tokens, labels = counter(1, 3, torch.Generator())
    >>> tokens.tolist(), labels.tolist()
    ([[3, 4, 5]], [[-100, 5, 6]])
    """
    n = _below(length // 3, (count, 1), generator) + 1
    place = torch.arange(length, device=generator.device)
    block = place // n
    tokens = torch.where(block < 3, A + block, PAD)
    return tokens, torch.where((block > 0) & (block < 3), A + (place + 1) // n, IGNORE)


def dyck2(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Beginnings of well-formed strings of two kinds of brackets, and at each place which one may be closed next.

    ``3 + kind`` opens, ``5 + kind`` closes. Each bracket opens or closes with probability 1/2, and opens where nothing
    is open. Labels (count, length) are the closing brackets, ``IGNORE`` where nothing is open.
    """
    opens, kind = _below(2, (count, length), generator) == 1, _below(2, (count, length), generator)
    stack, depth = kind.new_zeros(count, length + 1), kind.new_zeros(count)
    rows, tokens, labels = torch.arange(count, device=generator.device), kind.clone(), kind.clone()
    for place in range(length):
        push = opens[:, place] | (depth == 0)
        tokens[:, place] = torch.where(push, 3 + kind[:, place], 5 + stack[rows, depth])
        depth = depth + torch.where(push, 1, -1)
        stack[rows, depth] = torch.where(push, kind[:, place], stack[rows, depth])
        labels[:, place] = torch.where(depth > 0, 5 + stack[rows, depth], IGNORE)
    return tokens, labels


def copy_first(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Strings of ``A`` and ``B`` (count, length) and which comes first (count,): 0 for ``A``, 1 for ``B``, balanced."""
    tokens = A + _below(2, (count, length), generator)
    labels = _balanced(count, generator)
    tokens[:, 0] = A + labels
    return tokens, labels


def copy_previous(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four letters, random (count, length), and at each place the one before (count, length); at first ``IGNORE``."""
    tokens = A + _below(4, (count, length), generator)
    return tokens, torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=IGNORE)


def _below(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(high, shape, generator=generator, device=generator.device)


def _balanced(count: int, generator: torch.Generator) -> Tensor:
    """Labels 0 and 1 (count,) in random order; their numbers differ by at most one, and who has one more is random."""
    order = torch.randperm(2, generator=generator, device=generator.device)
    labels = order[torch.arange(count, device=generator.device) % 2]
    return labels[torch.randperm(count, generator=generator, device=generator.device)]
