"""What a model still does when its parameters, or those of a part, are multiplied by c: its function along the ray.

The similarity of representations says little about what becomes of predictions. A row of the table has both, for one
part and one c: how often the prediction is still that of the unscaled model, how often it is right, what it is worth at
the best temperature, how many positions a head attends to, and how similar the last representations are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import nn

from normgrowth.saturation.function import FEWEST_POSITIONS, Function, Task
from normgrowth.saturation.parts import ABSENT, PARTS, UNUSED, part_scaled, split, uncompiled
from normgrowth.saturation.scaling import mode, scaled
from normgrowth.saturation.similarity import _centre, _mean_cosine, _unit

SCALES = (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 10.0, 1000.0)
ALL = "all"
COLUMNS = ["agreement", "accuracy", "loss", "effective_positions", "raw", "common", "centred"]

Scaling = Callable[..., AbstractContextManager[Any]]  # called with the model, c and dtype


def along_ray(
    model: nn.Module,
    ids: Sequence[Sequence[int]],
    scales: Sequence[float] = SCALES,
    parts: Sequence[str] | None = None,
    *,
    decoder: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> pd.DataFrame:
    """What survives of a model when its parameters, or those of a part, are multiplied by c.

    The model predicts the next token if its logits at a position do not depend on later tokens; this is tried. Any
    other model is asked which sentence is nearest, by the cosine of mean last representations.

    Args:
        model: of ``transformers``, loaded with ``attn_implementation="eager"``, or with methods
            ``hidden_states(tokens)`` and ``attentions(tokens)``, then for sentences of one length.
        ids: token ids of sentences, as in ``similarity``. They are taken in batches that are bounded in memory.
        scales: the values of c.
        parts: names in ``parts.PARTS``, each of which is scaled by itself, or ``"all"``; all parameters by default.
        decoder: the token ids that the decoder of an encoder–decoder reads with each sentence.
        dtype: the precision of the computation, casts inside the model included; None for the model's own.

    Returns:
        A row for each part and c, with columns

        - ``part``, ``c``
        - ``agreement``: share of all real positions where the most likely token is that at c = 1, or of sentences whose
          nearest other sentence is that at c = 1
        - ``accuracy``: share of positions where the most likely token is the one that comes next
        - ``loss``: cross entropy of the next token in nats, at the temperature that makes it least: at most
          ln(vocabulary). Where the logits of all positions would not fit into half a GB, of every k-th position
        - ``effective_positions``: exp of the entropy of attention weights, mean over the queries with five positions or
          more (in a causal model, from the fifth token of a sentence on), median over heads:
          of an even number the mean of the middle two. Heads without such a query do not count
        - ``raw``, ``common``, ``centred``: similarity of the last representations to those at c = 1

        Accuracy and loss are NaN without next tokens, effective positions without attention weights. ``table.attrs``
        has ``next_token`` (bool), ``chance`` (a loss, or an agreement), and ``reasons``: a sentence for each part that
        the model does not have, for each NaN, and for a loss of some positions alone.

    Raises:
        ValueError: a part is unknown or cannot be told (see ``parts.split``); there is no scale, or one that is not
            positive.
    """
    positive = bool(scales) and all(c > 0 for c in scales)
    if not positive:
        raise ValueError(f"scales must be one or more positive numbers; got {list(scales)}")
    model = uncompiled(model)
    reasons: dict[str, str] = {}
    scalings = _scalings(model, ids, parts, decoder, reasons)
    with mode(model):
        task = Task(model, ids, decoder, dtype)
        with scaled(model, 1.0, dtype=dtype):
            unscaled = task.function(1.0)
        rows = []
        for part, c, scaling in _progress([(part, c, scaling) for part, scaling in scalings.items() for c in scales]):
            values = [math.nan] * len(COLUMNS)
            try:
                if c == 1:
                    values = _compare(unscaled, unscaled)
                else:
                    with scaling(model, c, dtype=dtype):
                        function = task.function(c)
                    values = _compare(function, unscaled)
                without = _without_direction(values)
                if without:
                    reasons[f"{part}, c = {c:g}"] = without
            except OverflowError as error:
                reasons[f"{part}, c = {c:g}"] = str(error)
            rows.append((part, c, *values))
    if task.no_next_token:
        reasons["accuracy, loss"] = f"no next tokens: {task.no_next_token}"
    if unscaled.heads_without != 0:
        reasons["effective_positions"] = _few_positions(unscaled.heads_without)
    if task.next_token and task.stride > 1:
        reasons["loss"] = f"at one of {task.stride} positions, so that the logits fit into memory"
    table = pd.DataFrame(rows, columns=["part", "c", *COLUMNS])
    table.attrs.update(next_token=task.next_token, chance=task.chance(), reasons=reasons)
    return table


def half_scale(table: pd.DataFrame, part: str = ALL) -> float:
    """The smallest c > 1 at which the agreement of a part is ½, linear in ln c between the scales of a table.

    Infinite if the agreement stays above ½ up to the largest scale, and NaN if it does so up to scales where it is NaN:
    it is more than the last scale before these, and not known. An untrained model, whose most likely tokens mean
    nothing, may have one as small as a trained one: read it beside accuracy and loss.

    Raises:
        ValueError: the table has no scale above 1 for this part.

    >>> table = pd.DataFrame({"part": "all", "c": [1.0, 2.0, 4.0], "agreement": [1.0, 0.75, 0.25]})
    >>> round(half_scale(table) ** 2, 6)  # halfway between ln 2 and ln 4
    8.0
    """
    rows = table[(table.part == part) & (table.c >= 1)].sort_values("c")
    if not (rows.c > 1).any():
        raise ValueError(f"the table has no scale above 1 for {part!r}")
    log_before, before = 0.0, 1.0  # at c = 1
    for c, agreement in zip(rows.c, rows.agreement, strict=True):
        if math.isnan(agreement):
            return math.nan
        if agreement <= 0.5:
            share = (before - 0.5) / (before - agreement)
            return math.exp(log_before + share * (math.log(c) - log_before))
        log_before, before = math.log(c), agreement
    return math.inf


def _scalings(
    model: nn.Module,
    ids: Sequence[Sequence[int]],
    parts: Sequence[str] | None,
    decoder: Sequence[Sequence[int]] | None,
    reasons: dict[str, str],
) -> dict[str, Scaling]:
    """For each part that the model has, what scales it. ``reasons`` gets a sentence for those that it does not have."""
    if parts is None:
        return {ALL: scaled}
    unknown = set(parts) - {ALL, *PARTS}
    if unknown:
        raise ValueError(f"unknown part {', '.join(sorted(unknown))}: choose among {', '.join((ALL, *PARTS))}")
    shares = split(model, ids[0], None if decoder is None else decoder[0]) if set(parts) != {ALL} else {}
    scalings: dict[str, Scaling] = {}
    for part in dict.fromkeys(parts):
        if part == ALL:
            scalings[part] = scaled
        elif part in shares:
            scalings[part] = partial(part_scaled, shares=shares[part])
        elif part != UNUSED:
            reasons[part] = f"{type(model).__name__} has none" + (f": {ABSENT[part]}" if part in ABSENT else "")
    return scalings


def _progress(rows: list[Any]) -> Any:
    from tqdm import tqdm

    return tqdm(rows, desc="scales", unit="", disable=None, leave=False)


def _few_positions(heads_without: float) -> str:
    """Why effective positions are missing, or are those of some heads, given the share of heads without."""
    if math.isnan(heads_without):
        return "the model returns no attention weights"
    if heads_without == 1:
        return f"no sentence has {FEWEST_POSITIONS} tokens"
    return f"of some heads alone: what the others read has fewer than {FEWEST_POSITIONS} tokens in all sentences"


def _without_direction(values: Sequence[float]) -> str:
    """Why values of a row that is computed are NaN; empty if none is but accuracy, loss and effective positions."""
    row = dict(zip(COLUMNS, values, strict=True))
    missing = [name for name in ("agreement", "raw", "common", "centred") if math.isnan(row[name])]
    if not missing:
        return ""
    kind = "all alike" if missing == ["centred"] else "0, without a direction"
    return f"no {', '.join(missing)}: here or at c = 1 last representations are {kind}"


def _compare(function: Function, unscaled: Function) -> list[float]:
    """The columns of one row of the table."""
    h, h_scaled, weights = unscaled.states, function.states, unscaled.weights
    unit, unit_scaled = _unit(h), _unit(h_scaled)
    common = (weights @ unit) @ (weights @ unit_scaled) / weights.sum() ** 2
    is_known = bool((function.best >= 0).all() and (unscaled.best >= 0).all())
    return [
        float((function.best == unscaled.best).double().mean()) if is_known else math.nan,
        function.accuracy,
        function.loss,
        function.effective_positions,
        float(_mean_cosine(unit, unit_scaled, weights)),
        float(common),
        float(_mean_cosine(_unit(_centre(h)), _unit(_centre(h_scaled)), weights)),
    ]
