"""Formal languages as data: majority, aⁿbⁿ, Dyck-1 and copying, each with balanced labels and near misses.

Symbols: 0 padding (at the right), 1 start (never drawn: put it in front where a model needs one), 2 separator ``#``,
3 ``a`` or ``(``, 4 ``b`` or ``)``. Copying uses ``symbols`` letters, from 3 on. Tokens and labels are int64, on the
generator's device; rows come in random order.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD, START, SEPARATOR, A, B = range(5)
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
    excess = _signs(tokens).sum(1)
    return torch.where(excess == 0, IGNORE, (excess < 0).long())


def is_anbn(tokens: Tensor) -> Tensor:
    """(n,), int64: 1 where a row of ``tokens`` (n, T) is aⁿbⁿ, n ≥ 1, with padding at the right only.

    >>> is_anbn(torch.tensor([[A, A, B, B], [A, B, PAD, PAD], [A, B, A, B]])).tolist()
    [1, 1, 0]
    """
    signs = _signs(tokens)
    # In order: all a, then all b, then padding. The symbols' signs 1, −1 are then followed by 0.
    rank = torch.where(signs == 1, 0, torch.where(signs == -1, 1, 2))
    ordered = (rank.diff(dim=1) >= 0).all(1)
    return (ordered & (signs.sum(1) == 0) & (signs != 0).any(1)).long()


def is_dyck(tokens: Tensor) -> Tensor:
    """(n,), int64: 1 where the brackets of a row of ``tokens`` (n, T) match: no depth below 0, and 0 at the end.

    >>> int(is_dyck(strings(8)).sum())  # the Catalan number C₄
    14
    """
    depth = _signs(tokens).cumsum(1)
    return ((depth >= 0).all(1) & (depth[:, -1] == 0)).long()


def majority(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Strings of ``A`` and ``B`` (count, length) and which is the majority (count,): 0 for ``A``, 1 for ``B``.

    Uniform over the strings of each class. ``length`` is odd, so that there is no tie. A single position tells the
    label with accuracy 1/2 + C(T−1, (T−1)/2)/2^T, which cannot be avoided: each symbol is a part of the majority.

    Raises:
        ValueError: ``length`` is even or below 1.

    >>> tokens, labels = majority(1000, 7, torch.Generator().manual_seed(0))
    >>> int(labels.sum()), bool((labels == is_majority(tokens)).all())
    (500, True)
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

    >>> tokens, labels = anbn(1000, 8, torch.Generator().manual_seed(0))
    >>> bool((labels == is_anbn(tokens)).all())
    True
    >>> float((((tokens == A).sum(1) == (tokens == B).sum(1)) == labels).double().mean())  # by the count alone
    0.75
    """
    if length < 4:
        raise ValueError(f"anbn needs a length of at least 4; got {length}")
    pairs, labels, place = _pairs(count, generator)
    half = _below(length // 2 - 1, (pairs,), generator)[place][:, None] + 2  # n, the same for a member and a non-member
    position = torch.arange(length, device=generator.device)
    kind = _kinds(labels, place)
    sign = 2 * _below(2, (count,), generator) - 1
    turn = half + (sign * (kind == 1))[:, None]  # where the b begin
    first = _uniform_below(half - 1, generator) + 1  # an inner a: 1 ≤ first < n
    second = _uniform_below(half - 1, generator) + half  # an inner b: n ≤ second < 2n − 1
    swapped = ((position == first) | (position == second)) & (kind == 2)[:, None]
    is_b = (position >= turn) ^ swapped
    return torch.where(position < 2 * half, A + is_b.long(), PAD), labels


def dyck(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Strings of brackets (count, length) and whether they match (count,), Dyck-1. Members are uniform.

    Non-members start as members and keep their first and last bracket: in one half an inner bracket is turned, so that
    the numbers differ; in the other an inner ``(`` and a later inner ``)`` change places, so that a depth falls below 0
    though the numbers agree. The ends tell nothing of the label; the best single place gets 0.57 of the labels right at
    length 16 and 0.54 at 40; the count alone gets 3/4.

    Raises:
        ValueError: ``length`` is odd or below 6 (shorter, the second kind does not exist).

    >>> tokens, labels = dyck(1000, 8, torch.Generator().manual_seed(0))
    >>> bool((labels == is_dyck(tokens)).all())
    True
    >>> float((((tokens == A).sum(1) == 4) == labels).double().mean())  # by the count alone
    0.75
    """
    if length < 6 or length % 2:
        raise ValueError(f"dyck needs an even length of at least 6; got {length}")
    _, labels, place = _pairs(count, generator)
    kind = _kinds(labels, place)
    signs = _dyck_words(count, length, generator)
    turned = 1 + _below(length - 2, (count, 1), generator)
    signs = torch.where((torch.arange(length, device=signs.device) == turned) & (kind == 1)[:, None], -signs, signs)
    todo = (kind == 2).nonzero()[:, 0]
    while len(todo):  # draw word and places anew until they make a near miss
        words = _dyck_words(len(todo), length, generator)
        places = (1 + _below(length - 2, (len(todo), 2), generator)).sort(1).values
        chosen = words.gather(1, places)
        tried = words.scatter(1, places, chosen.flip(1))
        good = (chosen[:, 0] == 1) & (chosen[:, 1] == -1) & (tried.cumsum(1) < 0).any(1)
        signs[todo[good]] = tried[good]
        todo = todo[~good]
    return torch.where(signs > 0, A, B), labels


def copy_first(count: int, length: int, generator: torch.Generator, symbols: int = 2) -> tuple[Tensor, Tensor]:
    """Random letters (count, length) and the index of the first (count,), from 0 to symbols − 1, each equally often.

    >>> tokens, labels = copy_first(6, 4, torch.Generator().manual_seed(0), symbols=3)
    >>> labels.bincount().tolist(), bool((labels == tokens[:, 0] - A).all())
    ([2, 2, 2], True)
    """
    tokens = A + _below(symbols, (count, length), generator)
    labels = _balanced(count, symbols, generator)
    tokens[:, 0] = A + labels
    return tokens, labels


def copy_previous(count: int, length: int, generator: torch.Generator, symbols: int = 2) -> tuple[Tensor, Tensor]:
    """Random letters (count, length) and, at each position, the letter before (count, length); at first ``IGNORE``.

    >>> tokens, targets = copy_previous(1, 5, torch.Generator().manual_seed(0))
    >>> targets[0, 0].item(), bool((targets[:, 1:] == tokens[:, :-1]).all())
    (-100, True)
    """
    tokens = A + _below(symbols, (count, length), generator)
    return tokens, torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=IGNORE)


def copy_word(count: int, length: int, generator: torch.Generator, symbols: int = 2) -> tuple[Tensor, Tensor]:
    """The string w#w without its last letter (count, length), w of length / 2, and the next token (count, length).

    Targets are ``IGNORE`` before the separator, where nothing tells the next letter; from it on they are w's letters.

    Raises:
        ValueError: ``length`` is odd or below 2.

    >>> tokens, targets = copy_word(1, 6, torch.Generator().manual_seed(0))
    >>> tokens[0, 3].item(), targets[0, 3:].tolist() == tokens[0, :3].tolist()
    (2, True)
    """
    if length < 2 or length % 2:
        raise ValueError(f"copy_word needs an even length of at least 2; got {length}")
    word = A + _below(symbols, (count, length // 2), generator)
    separator = torch.full_like(word[:, :1], SEPARATOR)
    return torch.cat([word, separator, word[:, :-1]], 1), torch.cat([torch.full_like(word, IGNORE), word], 1)


def _signs(tokens: Tensor) -> Tensor:
    """1 at ``A``, −1 at ``B``, 0 elsewhere."""
    return (tokens == A).long() - (tokens == B).long()


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


def _pairs(count: int, generator: torch.Generator) -> tuple[int, Tensor, Tensor]:
    """Number of pairs, labels (count,) with one of each in a pair, and each row's pair (count,), in random order."""
    rows = torch.randperm(count, generator=generator, device=generator.device)
    pairs = (count + 1) // 2
    last = _below(2, (1,), generator)  # an odd row out is of either class
    return pairs, (rows + last) % 2, rows // 2


def _kinds(labels: Tensor, place: Tensor) -> Tensor:
    """0 for members; non-members by turns 1 (wrong count) and 2 (wrong order)."""
    return torch.where(labels == 1, 0, 1 + place % 2)


def _dyck_words(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Uniform Dyck words (count, length) as signs ±1.

    With r symbols left at depth h, the next one opens with probability (h + 2)(r − h) / (2 r (h + 1)): the share of the
    completions that begin so (ballot numbers; Arnold and Sleep 1980).
    """
    uniform = torch.rand(count, length, generator=generator, device=generator.device, dtype=torch.float64)
    signs = torch.empty(count, length, dtype=torch.int64, device=generator.device)
    depth = torch.zeros(count, dtype=torch.int64, device=generator.device)
    for position in range(length):
        left = length - position
        opens = uniform[:, position] < (depth + 2) * (left - depth) / (2 * left * (depth + 1))
        signs[:, position] = torch.where(opens, 1, -1)
        depth += signs[:, position]
    return signs
