"""The loss of logits at the temperature that suits them best: how much they say, whatever their size."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

KEPT_BYTES = 1 << 29  # of logits that are in memory at a time
CHUNK = 1 << 22  # numbers of logits that are computed with at a time


class Gaps(NamedTuple):
    """By how much logits fall short of the largest of their position, in units of the largest gap of all."""

    of_all: Tensor  # (n, vocabulary)
    of_target: Tensor  # (n,): of the token that comes next


def gaps(logits: Tensor, target: Tensor, unit: float | None) -> tuple[Gaps, float]:
    """``Gaps`` of logits ``(n, vocabulary)`` whose next tokens are ``target`` ``(n,)``, and the unit that they are in.

    Logits of a network that is scaled by c = 1000 are of size 10¹⁰. The unit of a first batch serves all later ones.
    """
    largest = logits.amax(-1, keepdim=True)
    if unit is None:
        unit = max(float((largest - logits.amin(-1, keepdim=True)).max()), torch.finfo(torch.float64).tiny)
    small = torch.empty_like(logits)
    rows = _rows(logits.shape[1])
    for part, of_rows, top in zip(small.split(rows), logits.split(rows), largest.split(rows), strict=True):
        part.copy_((top - of_rows) / unit)
    return Gaps(small, small.gather(-1, target[:, None])[:, 0]), unit


def _rows(vocabulary: int) -> int:
    """How many positions are in memory at a time."""
    return max(1, CHUNK // vocabulary)


def loss_at_best(batches: list[Gaps], *, tolerance: float = 1e-7) -> float:
    """Minimum over β ≥ 0 of the mean cross entropy of β · logits, in nats.

    It is convex in β, and its minimum is taken by Newton's steps within a bracket. β = 0 gives ln(vocabulary).

    >>> uniform = Gaps(torch.zeros(1, 4), torch.zeros(1))
    >>> round(loss_at_best([uniform]), 4)  # ln 4
    1.3863
    """
    beta = 0.0
    below, above = 0.0, math.inf  # the minimum lies between them
    while True:
        loss, slope, curvature = _at(batches, beta)
        if slope >= 0 and beta == 0:
            return loss
        if curvature <= 0 or slope**2 <= tolerance * curvature or above - below < 1e-9 * above:
            return loss
        if slope < 0:
            below = beta
        else:
            above = beta
        beta = beta - slope / curvature
        if beta >= above:
            beta = (below + above) / 2
        elif beta <= below:
            beta = 2 * below if above == math.inf else (below + above) / 2


def _at(batches: list[Gaps], beta: float) -> tuple[float, float, float]:
    """Mean cross entropy at β, and its first and second derivative."""
    loss = slope = curvature = 0.0
    for batch in batches:
        rows = _rows(batch.of_all.shape[1])
        for all_gaps, target_gap in zip(batch.of_all.split(rows), batch.of_target.split(rows), strict=True):
            weights = (-beta * all_gaps).exp()  # the largest is 1
            total = weights.sum(-1)
            mean = (weights * all_gaps).sum(-1) / total
            variance = (weights * all_gaps.square()).sum(-1) / total - mean.square()
            loss += float((beta * target_gap + total.log()).double().sum())
            slope += float((target_gap - mean).double().sum())
            curvature += float(variance.double().sum())
    n = sum(len(batch.of_target) for batch in batches)
    return loss / n, slope / n, curvature / n
