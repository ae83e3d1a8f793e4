"""What a model still does when its parameters, or those of a part, are multiplied by c: its function along the ray.

The similarity of representations says little about what becomes of predictions. A row of the table has both, for one
part and one c: how often the prediction is still that of the unscaled model, how often it is right, what it is worth at
the best temperature, how many positions a head attends to, and how similar the last representations are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from normgrowth.saturation.batches import Batch, batches_by_length, check_unpadded, real_tokens
from normgrowth.saturation.parts import ABSENT, PARTS, UNUSED, part_scaled, split
from normgrowth.saturation.scaling import advice, mode, scaled
from normgrowth.saturation.similarity import _centre, _mean_cosine, _unit, _weights
from normgrowth.saturation.temperature import KEPT_BYTES, Gaps, gaps, loss_at_best

SCALES = (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 10.0, 1000.0)
ALL = "all"
ATTENTION_BYTES = 1 << 28  # of the attention weights of a batch, all layers together
LOGIT_BYTES = 1 << 27  # of the logits of a batch
FEWEST_POSITIONS = 5  # of a query whose effective positions count: earlier ones have few whatever the head does
COLUMNS = ["agreement", "accuracy", "loss", "effective_positions", "raw", "common", "centred"]

Scaling = Callable[..., AbstractContextManager[Any]]  # called with the model, c and dtype


class Heads(NamedTuple):
    """Attention of one layer of a batch."""

    weights: Tensor  # (batch, heads, T, T)
    real: Tensor  # which queries and keys are not padding, bool, (batch, T)
    of_encoder: bool  # of an encoder–decoder, so that it sees later positions whatever the model predicts


class Observed(NamedTuple):
    """What a forward pass of a batch gives."""

    logits: Tensor | None  # (batch, T, vocabulary)
    states: Tensor  # last representations, (batch, T, dim)
    tokens: Tensor  # that logits and states belong to, (batch, T)
    real: Tensor  # which of these are not padding, bool
    attention: list[Heads]  # of each layer that has some


class Function(NamedTuple):
    """What a model does with all sentences at one scale."""

    best: Tensor  # the most likely next token at each of the n positions, or each sentence's nearest other one
    states: Tensor  # last representations, (n, dim)
    weights: Tensor  # of these in a mean over sentences, (n,)
    accuracy: float
    loss: float
    effective_positions: float


# ---- table ----


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
          more (in a causal model, from the fifth token of a sentence on), median over heads
        - ``raw``, ``common``, ``centred``: similarity of the last representations to those at c = 1

        Accuracy and loss are NaN without next tokens, effective positions without attention weights. ``table.attrs``
        has ``next_token`` (bool), ``chance`` (a loss, or an agreement), and ``reasons``: a sentence for each part that
        the model does not have, and for each row of NaN, because a number overflows there.

    Raises:
        ValueError: a part is unknown or cannot be told (see ``parts.split``); there is no scale, or one that is not
            positive.
    """
    positive = bool(scales) and all(c > 0 for c in scales)
    if not positive:
        raise ValueError(f"scales must be one or more positive numbers; got {list(scales)}")
    reasons: dict[str, str] = {}
    scalings = _scalings(model, ids, parts, decoder, reasons)
    with mode(model):
        task = _Task(model, ids, decoder, dtype)
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
            except OverflowError as error:
                reasons[f"{part}, c = {c:g}"] = str(error)
            rows.append((part, c, *values))
    if math.isnan(unscaled.effective_positions):
        reasons["effective_positions"] = "no attention weights, or no sentence of five tokens"
    table = pd.DataFrame(rows, columns=["part", "c", *COLUMNS])
    table.attrs.update(next_token=task.next_token, chance=task.chance(), reasons=reasons)
    return table


def half_scale(table: pd.DataFrame, part: str = ALL) -> float:
    """The smallest c > 1 at which the agreement of a part is ½, linear in ln c between the scales of a table.

    Infinite if the agreement stays above ½ up to the largest scale.

    Raises:
        ValueError: the table has no scale above 1 for this part.

    >>> table = pd.DataFrame({"part": "all", "c": [1.0, 2.0, 4.0], "agreement": [1.0, 0.75, 0.25]})
    >>> round(half_scale(table) ** 2, 6)  # halfway between ln 2 and ln 4
    8.0
    """
    rows = table[(table.part == part) & (table.c >= 1) & table.agreement.notna()].sort_values("c")
    if not (rows.c > 1).any():
        raise ValueError(f"the table has no scale above 1 for {part!r}")
    log_before, before = 0.0, 1.0  # at c = 1
    for c, agreement in zip(rows.c, rows.agreement, strict=True):
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


def _compare(function: Function, unscaled: Function) -> list[float]:
    """The columns of one row of the table."""
    h, h_scaled, weights = unscaled.states, function.states, unscaled.weights
    unit, unit_scaled = _unit(h), _unit(h_scaled)
    common = (weights @ unit) @ (weights @ unit_scaled) / weights.sum() ** 2
    return [
        float((function.best == unscaled.best).double().mean()),
        function.accuracy,
        function.loss,
        function.effective_positions,
        float(_mean_cosine(unit, unit_scaled, weights)),
        float(common),
        float(_mean_cosine(_unit(_centre(h)), _unit(_centre(h_scaled)), weights)),
    ]


# ---- function of a model at one scale ----


class _Task:
    """Sentences in batches that are bounded in memory, and what the model is asked about them."""

    def __init__(
        self,
        model: nn.Module,
        ids: Sequence[Sequence[int]],
        decoder: Sequence[Sequence[int]] | None,
        dtype: torch.dtype | None,
    ):
        config = getattr(model, "config", None)
        pad = getattr(config.get_text_config(), "pad_token_id", None) if config is not None else None
        options: dict[str, Any] = {"pad": pad or 0, "device": next(model.parameters()).device}
        self.model = model
        check_vocabulary(model, [*ids, *(decoder or [])])
        longest = max(range(len(ids)), key=lambda number: len(ids[number])) if ids else 0
        trial_decoder = None if decoder is None else [decoder[longest][:8]]
        (trial,) = batches_by_length([ids[longest][:8]] if ids else [], decoder=trial_decoder, **options)
        with scaled(model, 1.0, dtype=dtype):
            observed = observe(model, trial)
            self.next_token = _predicts_next(model, trial, observed)
        self.vocabulary = 0 if observed.logits is None else observed.logits.shape[-1]
        heads = sum(layer.weights.shape[1] for layer in observed.attention)
        self.batches = batches_by_length(
            ids,
            decoder=decoder,
            max_tokens=min(4096, LOGIT_BYTES // (8 * max(1, self.vocabulary))),
            max_pairs=ATTENTION_BYTES / (8 * max(1, heads)),
            **options,
        )
        predictions = sum(len(sentence) - 1 for sentence in (ids if decoder is None else decoder))
        self.stride = math.ceil(max(1, predictions) * self.vocabulary * 4 / KEPT_BYTES)
        if not self.next_token and len(ids) < 2:
            raise ValueError("a model without a next token is asked for the nearest other sentence: give two or more")

    def function(self, c: float) -> Function:
        """What the model, which is already scaled, does with all sentences. ``c`` is for messages alone."""
        best: list[Tensor] = []
        states: list[Tensor] = []
        weights: list[Tensor] = []
        pooled: list[Tensor] = []
        right = 0
        predictions = 0
        kept: list[Gaps] = []
        unit: float | None = None
        positions = torch.zeros(())
        queries = torch.zeros(())
        for batch in self.batches:
            observed = observe(self.model, batch)
            real = observed.real
            _check_finite(observed, c)
            states.append(observed.states[real])
            weights.append(_weights(real, "sentences"))
            if self.next_token:
                assert observed.logits is not None
                best.append(observed.logits.argmax(-1)[real])
                followed = real[:, 1:]
                logits = observed.logits[:, :-1][followed]
                target = observed.tokens[:, 1:][followed]
                right += int((logits.argmax(-1) == target).sum())
                chosen = torch.arange(predictions, predictions + len(target), device=target.device) % self.stride == 0
                predictions += len(target)
                if chosen.any():
                    of_batch, unit = gaps(logits[chosen], target[chosen], unit)
                    kept.append(of_batch)
                del logits
            else:
                pooled.append(observed.states.masked_fill(~real[..., None], 0).sum(1) / real.sum(1, keepdim=True))
            of_layers = [
                _effective_positions(layer.weights, self._queries(layer))
                for layer in observed.attention
                if layer.weights.shape[-1] >= FEWEST_POSITIONS
            ]
            if of_layers:
                positions = positions + torch.cat([total for total, _ in of_layers])
                queries = queries + torch.cat([count for _, count in of_layers])
            del observed
        return Function(
            best=torch.cat(best) if self.next_token else _nearest(torch.cat(pooled)),
            states=torch.cat(states),
            weights=torch.cat(weights),
            accuracy=right / predictions if self.next_token else math.nan,
            loss=loss_at_best(kept) if self.next_token else math.nan,
            effective_positions=float((positions / queries).median()),
        )

    def _queries(self, layer: Heads) -> Tensor:
        """Which queries of a layer may attend to ``FEWEST_POSITIONS`` or more, bool, ``(batch, T)``."""
        is_causal = self.next_token and not layer.of_encoder
        positions = layer.real.cumsum(1) if is_causal else layer.real.sum(1, keepdim=True).expand_as(layer.real)
        return layer.real & (positions >= FEWEST_POSITIONS)

    def chance(self) -> dict[str, float]:
        """What a model would get that knows nothing: agreement of nearest sentences or loss of next tokens."""
        if self.next_token:
            return {"loss": math.log(self.vocabulary)}
        sentences = sum(len(batch["input_ids"]) for batch in self.batches)
        return {"agreement": 1 / (sentences - 1)}


def _nearest(pooled: Tensor) -> Tensor:
    """For each of some vectors ``(n, dim)`` the number of the other one of the largest cosine, ``(n,)``."""
    unit = _unit(pooled)
    return (unit @ unit.mT).fill_diagonal_(-math.inf).argmax(-1)


def _effective_positions(weights: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of exp(entropy) over some queries, bool ``(batch, T)``, and their number, both ``(heads,)``.

    What is missing from 1 in a row lies on a sink, which counts as a position.
    """
    weights = weights.double()
    rest = (1 - weights.sum(-1)).clamp(min=0)
    entropy = torch.special.entr(weights).sum(-1) + torch.special.entr(rest)
    counted = queries[:, None].expand_as(entropy)
    return entropy.exp().where(counted, 0.0).sum((0, 2)), counted.sum((0, 2)).double()


def _check_finite(observed: Observed, c: float) -> None:
    for name, tensor in (("last representations", observed.states), ("logits", observed.logits)):
        if tensor is not None and not tensor[observed.real].isfinite().all():
            raise OverflowError(f"the {name} are not finite in {tensor.dtype} at c = {c:g}. {advice(tensor.dtype)}")


# ---- forward passes ----


def observe(model: nn.Module, batch: Batch) -> Observed:
    """One forward pass with logits, last representations and attention weights.

    Raises:
        TypeError: the model has neither a configuration of ``transformers`` nor a method ``hidden_states``.
    """
    tokens = batch["input_ids"]
    real = real_tokens(batch)
    network: Any = model
    if callable(getattr(model, "hidden_states", None)):
        check_unpadded(batch)
        states = network.hidden_states(tokens)[-1]
        scores = network.attentions(tokens) if callable(getattr(model, "attentions", None)) else []
        output = network(tokens)
        has_logits = isinstance(output, Tensor) and output.shape[:2] == tokens.shape
        attention = [Heads(layer.softmax(-1), real, False) for layer in scores]
        return Observed(output if has_logits else None, states, tokens, real, attention)
    if not hasattr(model, "config"):
        raise TypeError(
            f"{type(model).__name__} is not a model of transformers: give it a method hidden_states(tokens)"
        )
    inputs: Mapping[str, Tensor] = batch
    is_encoder_alone = network.config.is_encoder_decoder and "decoder_input_ids" not in batch
    if is_encoder_alone:
        network = network.get_encoder()
    output = network(**inputs, output_hidden_states=True, output_attentions=True, return_dict=True)
    logits = getattr(output, "logits", None)
    if "decoder_input_ids" not in batch:
        heads = _heads(getattr(output, "attentions", None), real, is_encoder_alone)
        return Observed(logits, output.hidden_states[-1], tokens, real, heads)
    tokens = batch["decoder_input_ids"]
    real_in_decoder = batch.get("decoder_attention_mask", torch.ones_like(tokens)).bool()
    heads = _heads(output.encoder_attentions, real, True) + _heads(output.decoder_attentions, real_in_decoder, False)
    return Observed(logits, output.decoder_hidden_states[-1], tokens, real_in_decoder, heads)


def _heads(layers: Sequence[Tensor | None] | None, real: Tensor, of_encoder: bool) -> list[Heads]:
    """The layers that have attention weights between their tokens."""
    return [Heads(weights, real, of_encoder) for weights in layers or () if weights is not None and weights.ndim == 4]


def check_vocabulary(model: nn.Module, sentences: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if a token has no row in the embedding of a model of ``transformers``."""
    network: Any = model
    table = network.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    rows = getattr(table, "num_embeddings", None)
    largest = max((max(sentence) for sentence in sentences if len(sentence)), default=0)
    if rows is not None and largest >= rows:
        raise ValueError(
            f"token {largest} is beyond the {rows} rows of the embedding: the tokenizer is not that of this model"
        )


def _predicts_next(model: nn.Module, batch: Batch, observed: Observed) -> bool:
    """Whether there are logits that stay as they are when a later token changes.

    Raises:
        ValueError: there are logits, but no later token.
    """
    logits = observed.logits
    if logits is None or logits.ndim != 3 or logits.shape[:2] != observed.tokens.shape:
        return False
    if logits.shape[1] < 2:
        raise ValueError("no sentence has two tokens: there is no next one to predict")
    name = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    changed = batch[name].clone()
    changed[:, -1] = (changed[:, -1] == 0).to(changed.dtype)  # 1 in place of 0, and 0 in place of any other token
    other = observe(model, {**batch, name: changed}).logits
    assert other is not None
    tolerance = 1e3 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    return bool((logits[:, :-1] - other[:, :-1]).abs().max() <= tolerance)
