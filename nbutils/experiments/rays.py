"""A model with some of its parameters multiplied, what it then does with passages of text, and texts to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nbutils.experiments.readings import multiplied
from normgrowth import saturation
from normgrowth.saturation.function import FEWEST_POSITIONS, effective_positions
from normgrowth.saturation.temperature import gaps, loss_at_best

EVERY = 3  # of so many positions one counts in a loss, which takes time with 49,152 tokens to choose from


class Reading(NamedTuple):
    """What a language model does with passages ``(n, T)``.

    Used in ``survives`` and ``today``.
    """

    best: Tensor  # most likely next tokens, (n, T)
    right: Tensor  # share of them that come next, (n,)
    loss: float  # of every third next token, in nats, at the best temperature; or NaN
    logits: Tensor  # of the last position of the last passage, (vocabulary,)
    states: Tensor  # last representations, (n, T, dim)
    largest: Tensor  # largest weight of each head, mean over its queries, (n, heads)
    positions: Tensor  # exp of the entropy of its weights, mean over its queries, (n, heads)
    first: Tensor  # its weight on the first token, mean over its queries, (n, heads)


def nothing(passages: Tensor) -> Reading:
    """A reading of NaN, for a model that is not here.

    Used in ``survives``.
    """
    n, length = passages.shape
    unknown = torch.full((n, 1), torch.nan)
    best = torch.full((n, length), -1)
    return Reading(best, unknown[:, 0], torch.nan, unknown[0], unknown[..., None], unknown, unknown, unknown)


def attention_of(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest weight, effective positions and weight on the first token of each head, ``(n, heads)`` each.

    They are means over the queries that see ``FEWEST_POSITIONS`` or more, as in ``saturation.along_ray``. ``weights``
    are ``(n, heads, T, T)``.

    Used in ``survives`` and ``today``.

    >>> uniform = torch.full((1, 1, 8, 8), 1 / 8)
    >>> [round(x.item(), 3) for x in attention_of(uniform)]
    [0.125, 8.0, 0.125]
    """
    later = weights[:, :, FEWEST_POSITIONS - 1 :]
    return later.amax(-1).mean(-1), effective_positions(later).mean(-1), later[..., 0].mean(-1)


def loss_at_best_temperature(logits: Tensor, targets: Tensor) -> float:
    """Mean cross entropy in nats of β · logits ``(…, vocabulary)`` for the targets ``(…)``, at the β ≥ 0 of the least.

    Used in ``survives`` and ``today``.

    >>> round(loss_at_best_temperature(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)), 4)  # ln 4
    1.3863
    """
    short_of_largest, _ = gaps(logits.flatten(0, -2), targets.flatten(), None)
    return loss_at_best([short_of_largest])


def read(
    model: Any, passages: Tensor, factor: float | Callable[[str], float] = 1.0, *, with_loss: bool = False
) -> Reading:
    """What a language model of ``transformers``, in float64, does with passages ``(n, T)``.

    Each parameter is multiplied by a factor, or by ``factor(name)``. A loss takes as long as a third of the rest, and
    is NaN unless asked for.

    Used in ``survives`` and ``today``.
    """
    with multiplied(model, factor):
        output = model(passages, output_hidden_states=True, output_attentions=True)
    logits = output.logits
    best = logits.argmax(-1)
    right = (best[:, :-1] == passages[:, 1:]).double().mean(1)
    loss = loss_at_best_temperature(logits[:, :-1:EVERY], passages[:, 1::EVERY]) if with_loss else torch.nan
    attention = [attention_of(weights) for weights in output.attentions]
    of_heads = [torch.cat(layers, dim=1) for layers in zip(*attention, strict=True)]
    return Reading(best, right, loss, logits[-1, -1].clone(), output.hidden_states[-1], *of_heads)


def agreement(reading: Reading, unscaled: Reading) -> Tensor:
    """Share of the most likely tokens that are those of another reading, for each passage, ``(n,)``.

    Used in ``survives`` and ``today``.
    """
    same = (reading.best == unscaled.best).double().mean(1)
    return same.where(reading.right.isfinite(), torch.nan)


def right_of_constant(passages: Tensor) -> Tensor:
    """Share of next tokens, for each passage ``(n, T)``, that the most frequent next token of all of them is, ``(n,)``.

    Used in ``survives``.

    >>> right_of_constant(torch.tensor([[5, 7, 7], [7, 7, 3]])).tolist()
    [1.0, 0.5]
    """
    following = passages[:, 1:]
    return (following == following.flatten().mode().values).double().mean(1)


def likeness(reading: Reading, unscaled: Reading) -> Tensor:
    """Mean cosine of the last representations with those of another reading, for each passage, ``(n,)``.

    Used in ``survives``.
    """
    return torch.cosine_similarity(reading.states, unscaled.states, dim=-1).mean(1)


def half_scales(scales: Sequence[float], agreements: Tensor) -> list[float]:
    """The c > 1 at which the agreement of each passage is ½, as ``saturation.half_scale`` takes it.

    Args:
        scales: values of c.
        agreements: ``(scales, n)``.

    Used in ``survives``.

    >>> round(half_scales([1.0, 4.0], torch.tensor([[1.0], [0.0]]))[0], 6)  # halfway between ln 1 and ln 4
    2.0
    """
    import pandas as pd

    columns = {"part": saturation.ALL, "c": scales}
    tables = [pd.DataFrame({**columns, "agreement": curve.tolist()}) for curve in agreements.T]
    return [saturation.half_scale(table) for table in tables]
