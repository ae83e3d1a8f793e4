"""Saturated attention, and how to tell heads that pick one position from heads that average.

Scores are the arguments of the softmax, shape ``(..., T, T)``, queries before keys; a score of −∞ is masked. As scores
are multiplied by c → ∞, the softmax of a row puts equal weight on its maximal scores and none elsewhere. Only
differences within a row matter, so log probabilities serve as scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class HeadSummary(NamedTuple):
    """Means over sentences and queries, for each head: shapes ``(heads,)``, float64."""

    positions: Tensor  # number of attended positions
    share: Tensor  # mean number of attended positions / mean number of allowed positions
    normalised_entropy: Tensor  # entropy / log(number of allowed positions), over queries with at least two of them
    masked_mass: Tensor  # weight on positions that are not allowed
    sink: Tensor  # weight on the sink: the last key if there is one key more than there are queries; otherwise 0


class HeadSums(NamedTuple):
    """Sums over sentences and queries, for each head, from which a ``HeadSummary`` follows: ``(heads,)``, float64."""

    queries: Tensor  # number of queries that may attend to a key
    attended: Tensor
    allowed: Tensor
    normalised_entropy: Tensor
    undecided: Tensor  # number of queries that may attend to two keys or more, over which that entropy is a mean
    masked_mass: Tensor
    sink: Tensor


def saturated(scores: Tensor, *, rtol: float = 0.0) -> Tensor:
    """Attention in the limit c → ∞ of scores times c: equal weight on the maximal scores of each row.

    Args:
        scores: shape ``(..., T, T)``, −∞ where masked. In a row that is masked entirely all weights are 0.
        rtol: scores within ``rtol`` times the largest magnitude of the row count as tied with the maximum. By default
            only equal scores are tied. Rounding may break ties of an exact computation. In float32 an ``rtol`` of the
            order of 1e-6 restores them, but may also tie scores that are only close. With ``rtol`` > 0 the threshold
            changes if a constant is added to a row.

    Returns:
        Weights with the shape and dtype of ``scores``.

    Raises:
        ValueError: a score is NaN or +∞, or ``rtol`` is negative.

    >>> saturated(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, -torch.inf]]))
    tensor([[0.0000, 0.5000, 0.5000],
            [1.0000, 0.0000, 0.0000]])
    """
    if not (scores < torch.inf).all():
        raise ValueError(f"{int((~(scores < torch.inf)).sum())} scores are NaN or +inf: no maximum to attend to")
    if not rtol >= 0:
        raise ValueError(f"rtol must not be negative; got {rtol}")
    unmasked = scores != -torch.inf
    magnitude = scores.abs().masked_fill(~unmasked, 0).amax(-1, keepdim=True)
    maximal = unmasked & (scores >= scores.amax(-1, keepdim=True) - rtol * magnitude)
    return maximal.to(scores.dtype) / maximal.sum(-1, keepdim=True).clamp(min=1)


def positions(weights: Tensor) -> Tensor:
    """Number of keys with at least half of the largest weight of their row, shape ``(..., T)``, int64.

    In saturated attention all attended keys have the same weight, so this is exactly the number of ties.

    Raises:
        ValueError: a row neither sums to 1 nor consists of zeros, or a weight is negative.

    >>> positions(torch.tensor([[0.5, 0.3, 0.2], [0.0, 1.0, 0.0]]))
    tensor([2, 1])
    """
    weights = weights.double()
    total = weights.sum(-1)
    error = torch.minimum((total - 1).abs(), total.abs())
    if not ((weights >= 0).all() and (error < 1e-2).all()):  # 1e-2 allows for rows in float16 and bfloat16
        raise ValueError("weights are not probabilities: each row must be at least 0 and sum to 1 (or be all 0)")
    return ((weights > 0) & (weights >= 0.5 * weights.amax(-1, keepdim=True))).sum(-1)


def summarise(weights: Tensor, allowed: Tensor | None = None) -> HeadSummary:
    """Means over sentences and queries, for each head.

    Args:
        weights: ``saturated(scores)`` or ``scores.softmax(-1)``, shape ``(batch, heads, T, T)``. With one key more
            than there are queries, the last key is a sink, which is always allowed and counts as a position.
        allowed: which keys each query may attend to, bool, broadcast to ``(batch, heads, T, T)``; all by default.
            Queries without an allowed key do not count.

    Raises:
        ValueError: ``weights`` have another shape or are not probabilities, or no query counts.

    >>> from normgrowth.heads import causal_mask
    >>> scores = causal_mask(torch.zeros(1, 1, 4, 4))
    >>> summary = summarise(saturated(scores), scores > -torch.inf)  # 1, 2, 3 and 4 positions: all that are allowed
    >>> summary.positions.item(), summary.share.item()
    (2.5, 1.0)
    """
    return means(sums_of(weights, allowed))


def sums_of(weights: Tensor, allowed: Tensor | None) -> HeadSums:
    """The sums of a batch. Raises ValueError as ``summarise`` does, but not where no query counts."""
    if weights.ndim != 4:
        raise ValueError(f"weights have shape {tuple(weights.shape)}: give (batch, heads, T, T)")
    has_sink = weights.shape[-1] == weights.shape[-2] + 1
    if allowed is None:
        allowed = torch.ones_like(weights)
    elif has_sink:
        allowed = torch.cat([allowed.bool(), allowed.any(-1, keepdim=True)], -1)
    allowed = allowed.bool().expand_as(weights)
    count = allowed.sum(-1)
    queries = count > 0
    weights = weights.masked_fill(~queries[..., None], 0)  # what such rows hold, be it NaN, means nothing

    def total(x: Tensor, selected: Tensor = queries) -> Tensor:
        """Sum over the selected queries of all sentences, for each head."""
        return x.double().where(selected, 0.0).sum((0, 2)).cpu()

    entropy = torch.special.entr(weights.double()).sum(-1)
    weight_on_last_key = weights[..., -1]
    return HeadSums(
        queries=total(queries),
        attended=total(positions(weights)),
        allowed=total(count),
        normalised_entropy=total(entropy / count.double().log(), count > 1),
        undecided=total(count > 1),
        masked_mass=total(weights.double().masked_fill(allowed, 0).sum(-1)),
        sink=total(weight_on_last_key if has_sink else torch.zeros_like(weight_on_last_key)),
    )


def means(sums: HeadSums) -> HeadSummary:
    """Means from the sums over all queries. Raises ValueError where no query counts."""
    if not (sums.queries > 0).all():
        raise ValueError("no query has a key that it may attend to")
    attended = sums.attended / sums.queries
    return HeadSummary(
        positions=attended,
        # A mean of ratios would be large for any head, since the first queries may attend to few positions.
        share=attended / (sums.allowed / sums.queries),
        normalised_entropy=sums.normalised_entropy / sums.undecided,
        masked_mass=sums.masked_mass / sums.queries,
        sink=sums.sink / sums.queries,
    )


def classify(summary: HeadSummary) -> list[str]:
    """The kind of each head: ``sink``, ``argmax-like``, ``mean-like`` or ``other``, by where it attends on average.

    The first condition that holds decides:

    - ``sink``: at least half of the weight lies on a sink.
    - ``argmax-like``: the head attends to at most 1.5 positions.
    - ``mean-like``: it attends to at least a quarter of the allowed positions.

    On short inputs a head may satisfy the conditions of both argmax-like and mean-like: use T ≥ 12. Where there are
    only a few types of tokens, a head that averages over all tokens of one type is mean-like by this rule.

    >>> picks_one = torch.eye(12)
    >>> averages = torch.full((12, 12), 1 / 12)
    >>> classify(summarise(torch.stack([picks_one, averages])[None]))
    ['argmax-like', 'mean-like']
    """
    conditions = {
        "sink": summary.sink >= 0.5,
        "argmax-like": summary.positions <= 1.5,
        "mean-like": summary.share >= 0.25,
    }
    holds = [condition.numpy() for condition in conditions.values()]
    return np.select(holds, list(conditions), "other").tolist()
