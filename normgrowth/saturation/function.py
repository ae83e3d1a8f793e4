"""What a model does with sentences at one scale: predictions, their worth, positions of heads, representations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normgrowth import precision
from normgrowth.saturation.batches import batches_by_length
from normgrowth.saturation.observe import Heads, Observed, check_vocabulary, observe, why_no_next_token
from normgrowth.saturation.scaling import advice, scaled
from normgrowth.saturation.similarity import _unit, _weights
from normgrowth.saturation.temperature import KEPT_BYTES, Gaps, gaps, loss_at_best

ATTENTION_BYTES = 1 << 28  # of the attention weights of a batch, all layers together
LOGIT_BYTES = 1 << 27  # of the logits of a batch
FEWEST_POSITIONS = 5  # of a query whose effective positions count: earlier ones have few whatever the head does


class Function(NamedTuple):
    """What a model does with all sentences at one scale."""

    best: Tensor  # the most likely next token at each of the n positions, or each sentence's nearest other one
    states: Tensor  # last representations, (n, dim)
    weights: Tensor  # of these in a mean over sentences, (n,)
    accuracy: float
    loss: float
    effective_positions: float
    heads_without: float  # share of heads that no query has enough positions for; NaN without attention weights


class Task:
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
        if not ids:
            raise ValueError("no sentence to batch")
        check_vocabulary(model, [*ids, *(decoder or [])])
        read = ids if decoder is None else decoder
        longest = max(range(len(ids)), key=lambda number: len(read[number]))
        trial_decoder = None if decoder is None else [decoder[longest]]
        (trial,) = batches_by_length([ids[longest]], decoder=trial_decoder, **options)
        with scaled(model, 1.0, dtype=precision.choose(model)[0] or dtype):
            observed = observe(model, trial)
            self.no_next_token = why_no_next_token(model, trial, observed)
        self.next_token = not self.no_next_token
        self.vocabulary = 0 if observed.logits is None else observed.logits.shape[-1]
        heads = sum(layer.weights.shape[1] for layer in observed.attention)
        self.batches = batches_by_length(
            ids,
            decoder=decoder,
            max_tokens=min(512, LOGIT_BYTES // (8 * max(1, self.vocabulary))),
            max_pairs=ATTENTION_BYTES / (8 * max(1, heads)),
            padding=False,
            **options,
        )
        predictions = sum(len(sentence) - 1 for sentence in read)
        self.stride = math.ceil(max(1, predictions) * self.vocabulary * 8 / KEPT_BYTES)
        if not self.next_token and len(ids) < 2:
            raise ValueError("a model without a next token is asked for the nearest other sentence: give two or more")

    def function(self, c: float) -> Function:
        """What the model, which is already scaled, does with all sentences. ``c`` is for messages alone."""
        states: list[Tensor] = []
        weights: list[Tensor] = []
        pooled: list[Tensor] = []
        heads = _HeadPositions(self.next_token)
        predictions = _Predictions(self.stride)
        for batch in self.batches:
            observed = observe(self.model, batch)
            heads.add(observed.attention)
            observed = observed._replace(attention=[])  # memory for what follows
            _check_finite(observed, c)
            real = observed.real
            states.append(observed.states[real])
            weights.append(_weights(real, "sentences"))
            if self.next_token:
                predictions.add(observed)
            else:
                pooled.append(observed.states.masked_fill(~real[..., None], 0).sum(1) / real.sum(1, keepdim=True))
            del observed
        return Function(
            best=torch.cat(predictions.best) if self.next_token else _nearest(torch.cat(pooled)),
            states=torch.cat(states),
            weights=torch.cat(weights),
            accuracy=predictions.right / predictions.count if self.next_token else math.nan,
            loss=loss_at_best(predictions.kept) if self.next_token else math.nan,
            effective_positions=heads.median(),
            heads_without=heads.without(),
        )

    def chance(self) -> dict[str, float]:
        """What a model would get that knows nothing: agreement of nearest sentences or loss of next tokens."""
        if self.next_token:
            return {"loss": math.log(self.vocabulary)}
        sentences = sum(len(batch["input_ids"]) for batch in self.batches)
        return {"agreement": 1 / (sentences - 1)}


def _check_finite(observed: Observed, c: float) -> None:
    for name, tensor in (("last representations", observed.states), ("logits", observed.logits)):
        if tensor is not None and not tensor.isfinite().all(-1)[observed.real].all():
            raise OverflowError(f"the {name} are not finite in {tensor.dtype} at c = {c:g}. {advice(tensor.dtype)}")


def _nearest(pooled: Tensor) -> Tensor:
    """For each of some vectors ``(n, dim)`` the number of the other one of the largest cosine, ``(n,)``.

    A vector that is 0 is nearest to none, and no other to it: −1 for each.
    """
    unit = _unit(pooled)
    if unit.isnan().any():
        return torch.full((len(unit),), -1, device=unit.device)
    return (unit @ unit.mT).fill_diagonal_(-math.inf).argmax(-1)


class _Predictions:
    """Most likely next tokens, how many of them are right, and logits as the best temperature needs them."""

    def __init__(self, stride: int):
        """``stride``: the logits of every so many'th position are kept."""
        self.stride = stride
        self.best: list[Tensor] = []
        self.right = 0
        self.count = 0
        self.kept: list[Gaps] = []
        self.unit: float | None = None

    def add(self, observed: Observed) -> None:
        """Take the predictions of a batch."""
        assert observed.logits is not None
        best = observed.logits.argmax(-1)
        self.best.append(best[observed.real])
        for logits, chosen, tokens, real in zip(observed.logits, best, observed.tokens, observed.real, strict=True):
            followed = real[1:].nonzero()[:, 0]
            target = tokens[1:][followed]
            self.right += int((chosen[followed] == target).sum())
            numbers = torch.arange(self.count, self.count + len(target), device=target.device)
            self.count += len(target)
            kept = numbers % self.stride == 0
            if kept.any():
                of_sentence, self.unit = gaps(logits[followed[kept]], target[kept], self.unit)
                self.kept.append(of_sentence)


class _HeadPositions:
    """Mean effective positions of each head."""

    def __init__(self, is_causal: bool):
        self.is_causal = is_causal
        self.total = torch.zeros(())
        self.queries = torch.zeros(())

    def add(self, layers: Sequence[Heads]) -> None:
        """Take the attention of a batch."""
        if not layers:
            return
        of_layers = [_effective_positions(layer.weights, self._queries(layer)) for layer in layers]
        self.total = self.total + torch.cat([total for total, _ in of_layers])
        self.queries = self.queries + torch.cat([count for _, count in of_layers])

    def median(self) -> float:
        """Over the heads that have a query that counts; of an even number, the mean of the middle two."""
        of_heads = self.total / self.queries  # NaN without such a query
        return float(of_heads.nanquantile(0.5))

    def without(self) -> float:
        """Share of heads of which no query counts; NaN without heads."""
        return float((self.queries == 0).double().mean()) if self.queries.ndim else math.nan

    def _queries(self, layer: Heads) -> Tensor:
        """Which queries of a layer may attend to ``FEWEST_POSITIONS`` or more, bool, ``(batch, T)``."""
        is_causal = self.is_causal and not layer.of_encoder
        positions = layer.real.cumsum(1) if is_causal else layer.real.sum(1, keepdim=True).expand_as(layer.real)
        return layer.real & (positions >= FEWEST_POSITIONS)


def effective_positions(weights: Tensor) -> Tensor:
    """exp(entropy) of the attention weights ``(batch, heads, T, keys)`` of each query, ``(batch, heads, T)``, float64.

    What is missing from 1 in a row lies on a sink, which counts as a position.

    >>> effective_positions(torch.full((1, 1, 1, 4), 0.2)).round(decimals=6)  # and a sink with 0.2
    tensor([[[5.]]], dtype=torch.float64)
    """
    weights = weights.double()
    rest = (1 - weights.sum(-1)).clamp(min=0)
    entropy = torch.special.entr(weights).sum(-1) + torch.special.entr(rest)
    return entropy.exp()


def _effective_positions(weights: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of effective positions over some queries, bool ``(batch, T)``, and their number, both ``(heads,)``."""
    positions = effective_positions(weights)
    counted = queries[:, None].expand_as(positions)
    return positions.where(counted, 0.0).sum((0, 2)), counted.sum((0, 2)).double()
