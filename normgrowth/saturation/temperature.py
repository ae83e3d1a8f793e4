"""The loss of logits at the temperature that suits them best: how much they say, whatever their size."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

KEPT_BYTES = 1 << 29  # of logits that are in memory at a time
CHUNK = 1 << 22  # numbers of logits that are computed with at a time
STEPS = 200  # a bracket is found and closed in far fewer

Point = tuple[float, float, float]


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
        widest = largest.double() - logits.amin(-1, keepdim=True).double()
        unit = max(float(widest.max()), torch.finfo(torch.float64).tiny)
    small = torch.empty_like(logits, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    rows = _rows(logits.shape[1])
    for part, of_rows, top in zip(small.split(rows), logits.split(rows), largest.split(rows), strict=True):
        part.copy_((top.double() - of_rows.double()) / unit)
    return Gaps(small, small.gather(-1, target[:, None])[:, 0]), unit


def _rows(vocabulary: int) -> int:
    """How many positions are in memory at a time."""
    return max(1, CHUNK // vocabulary)


def loss_at_best(batches: list[Gaps], *, tolerance: float = 1e-7) -> float:
    """Minimum over β ≥ 0 of the mean cross entropy of β · logits, in nats, to ``tolerance``.

    It is convex in β. Its minimum is bracketed, and taken by Newton's steps as long as these stay within the bracket.
    β = 0 gives ln(vocabulary), which is never exceeded.

    >>> uniform = Gaps(torch.zeros(1, 4), torch.zeros(1))
    >>> round(loss_at_best([uniform]), 4)  # ln 4
    1.3863
    """
    beta = 0.0
    below: Point | None = None  # β, loss and slope on either side of the minimum
    above: Point | None = None
    smallest = math.inf
    factor = 2.0
    for step in range(STEPS):
        loss, slope, curvature = _at(batches, beta)
        smallest = min(smallest, loss)
        if slope >= 0:  # at once where β = 0
            above = (beta, loss, slope)
        else:
            below = (beta, loss, slope)
        bound = _bound(below, above)
        if smallest - bound <= tolerance:
            break
        newton = beta - slope / curvature if curvature > 0 else math.nan
        if above is None:  # so that no plateau is taken for the minimum, in ever longer steps
            beta = max(newton, factor * beta) if curvature > 0 else factor * beta
            factor = factor**1.5
        elif below is not None:
            beta = newton if below[0] < newton < above[0] and step % 4 else _between(below[0], above[0])
    return smallest


def _between(low: float, high: float) -> float:
    """Between two values of β that may be of different size."""
    return math.sqrt(low * high) if low > 0 else high / 16


def _bound(below: Point | None, above: Point | None) -> float:
    """What a convex and positive function is at least, given its tangents on the left and right of its minimum."""
    if below is None:
        return above[1] if above is not None else 0.0
    if above is None:
        return 0.0
    if above[2] == 0:
        return above[1]
    width = above[0] - below[0]
    crossing = (above[2] * width - above[1] + below[1]) / (above[2] - below[2])  # of the tangents, from the left
    return below[1] + below[2] * min(max(crossing, 0.0), width)


def _at(batches: list[Gaps], beta: float) -> Point:
    """Mean cross entropy at β, and its first and second derivative."""
    loss = slope = curvature = 0.0
    for batch in batches:
        rows = _rows(batch.of_all.shape[1])
        for stored, stored_target in zip(batch.of_all.split(rows), batch.of_target.split(rows), strict=True):
            all_gaps = stored.double()
            target_gap = stored_target.double()
            weights = (-beta * all_gaps).exp()  # the largest is 1
            total = weights.sum(-1)
            mean = (weights * all_gaps).sum(-1) / total
            variance = (weights * all_gaps.square()).sum(-1) / total - mean.square()
            loss += float((beta * target_gap + total.log()).sum())
            slope += float((target_gap - mean).sum())
            curvature += float(variance.clamp(min=0).sum())
    n = sum(len(batch.of_target) for batch in batches)
    return loss / n, slope / n, curvature / n
