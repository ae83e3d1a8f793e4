"""What an attention head attends to once it is saturated, and how to tell a head that picks from one that averages.

Scores are what goes into the softmax, shape ``(..., T, T)``, queries before keys; −∞ is masked. Multiplied by c → ∞, a
row puts equal weight on all its maximal scores and none elsewhere. Only differences within a row matter, so log
probabilities serve as scores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from normgrowth.saturation import Batch, check_unpadded, forward, real_tokens
from normgrowth.saturation.scaling import mode, scaled


class HeadSummary(NamedTuple):
    """Means over the sentences and queries of each head, shapes ``(heads,)``, float64."""

    positions: Tensor  # positions attended
    share: Tensor  # mean of positions attended / mean of positions allowed
    normalised_entropy: Tensor  # entropy / log(positions allowed), over queries with at least two
    masked_mass: Tensor  # weight on positions that are not allowed
    sink: Tensor  # weight on the sink, the last key where there is one key more than queries; else 0


# ---- saturated attention ----


def saturated(scores: Tensor, *, rtol: float = 0.0) -> Tensor:
    """Attention in the limit of scores times c → ∞: equal weight on the maximal scores of each row.

    Args:
        scores: shape ``(..., T, T)``, −∞ where masked. A row that is all masked gets no weight at all.
        rtol: scores within ``rtol`` times the largest magnitude of the row count as tied with the maximum. By default
            ties are exact. Rounding may break the ties of an exact computation: of the order of 1e-6 mends that in
            float32, and may tie what is only close. With ``rtol`` > 0 a shift of the row moves the threshold.

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
    open_ = scores != -torch.inf
    size = scores.abs().masked_fill(~open_, 0).amax(-1, keepdim=True)
    chosen = open_ & (scores >= scores.amax(-1, keepdim=True) - rtol * size)
    return chosen.to(scores.dtype) / chosen.sum(-1, keepdim=True).clamp(min=1)


def causal_mask(scores: Tensor) -> Tensor:
    """Scores with those of future keys at −∞: the mask that the softmax turns into weight 0."""
    return scores.masked_fill(~_past(scores), -torch.inf)


def multiplicative_mask(scores: Tensor) -> Tensor:
    """Scores with those of future keys times 0, as the paper's released code masks: the softmax still sees them.

    A score of 0 beats every negative one. Where all scores of the past are negative, the saturated head therefore
    attends to the whole future, uniformly: (T − 1)/2 + 1/T positions on average, the last query among them.

    >>> saturated(multiplicative_mask(torch.full((3, 3), -1.0)))[0]  # the first query, its own key at −1
    tensor([0.0000, 0.5000, 0.5000])
    """
    return scores.where(_past(scores), 0.0)


def _past(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()


# ---- measures ----


def windows(model: Any) -> list[int | None]:
    """How many positions back each layer of a model of ``transformers`` sees, itself among them; None for all.

    Raises:
        ValueError: layers of a kind that is not known.
    """
    config = model.config.get_text_config()
    size = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is None:
        everywhere = size if getattr(config, "use_sliding_window", True) else None
        return [everywhere] * config.num_hidden_layers
    if unknown := set(kinds) - {"sliding_attention", "full_attention", "local", "global"}:
        raise ValueError(f"layers of kind {', '.join(sorted(unknown))}: which positions they see is not known here")
    return [size if kind in ("sliding_attention", "local") else None for kind in kinds]


def allowed_positions(batch: Batch, *, causal: bool, window: int | None = None) -> Tensor:
    """Which key each query may attend to: real ones, and for ``causal`` no later ones. Bool, ``(batch, 1, T, T)``.

    A padding query may attend to nothing, which leaves it out of ``summarise``. Of a layer with a sliding ``window``
    (see ``windows``) only the last so many are allowed.

    >>> batch = {"input_ids": torch.zeros(1, 3), "attention_mask": torch.tensor([[1, 1, 0]])}
    >>> allowed_positions(batch, causal=True).sum(-1).tolist()
    [[[1, 2, 0]]]
    """
    real = real_tokens(batch)
    pairs = real[:, None, :, None] & real[:, None, None, :]
    if window is not None:
        pairs = pairs & torch.ones_like(pairs).triu(1 - window)
    return pairs & _past(pairs) if causal else pairs


def positions(weights: Tensor) -> Tensor:
    """Number of keys with at least half of the largest weight of the row, shape ``(..., T)``.

    In saturated attention all attended keys have the same weight: these are exactly the ties.

    Raises:
        ValueError: rows that neither sum to 1 nor are all 0.

    >>> positions(torch.tensor([[0.5, 0.3, 0.2], [0.0, 1.0, 0.0]]))
    tensor([2, 1])
    """
    wide = weights.double()
    total = wide.sum(-1)
    off = torch.minimum((total - 1).abs(), total.abs())
    if not ((wide >= 0).all() and (off < 1e-2).all()):  # 1e-2: float16 and bfloat16 rows
        raise ValueError("weights are not probabilities: each row must be at least 0 and sum to 1 (or be all 0)")
    return ((wide > 0) & (wide >= 0.5 * wide.amax(-1, keepdim=True))).sum(-1)


def summarise(weights: Tensor, allowed: Tensor | None = None) -> HeadSummary:
    """Means over sentences and queries for each head of ``weights`` ``(batch, heads, T, T)``.

    Queries without an allowed key do not count. Give ``saturated(scores)`` or ``scores.softmax(-1)``. One key more than
    queries is a sink, which may always be attended to and counts as a position.

    Raises:
        ValueError: another shape; weights that are no probabilities; no query left.

    >>> scores = causal_mask(torch.zeros(1, 1, 4, 4))
    >>> summary = summarise(saturated(scores), scores > -torch.inf)  # 1, 2, 3 and 4 positions: all that there are
    >>> summary.positions.item(), summary.share.item()
    (2.5, 1.0)
    """
    if weights.ndim != 4:
        raise ValueError(f"weights have shape {tuple(weights.shape)}: give (batch, heads, T, T)")
    sink = weights.shape[-1] == weights.shape[-2] + 1
    if allowed is None:
        allowed = torch.ones_like(weights)
    elif sink:
        allowed = torch.cat([allowed.bool(), allowed.any(-1, keepdim=True)], -1)
    allowed = allowed.bool().expand_as(weights)
    count = allowed.sum(-1)
    queries = count > 0
    if not queries.any((0, 2)).all():
        raise ValueError("no query has a key that it may attend to")

    def mean(x: Tensor, which: Tensor = queries) -> Tensor:
        return (x.double().where(which, 0.0).sum((0, 2)) / which.sum((0, 2))).cpu()

    attended = positions(weights)
    wide = weights.double()
    entropy = torch.special.entr(wide).sum(-1)
    return HeadSummary(
        positions=mean(attended),
        share=mean(attended) / mean(count),  # the mean of the ratios would be large for any head: first queries see few
        normalised_entropy=mean(entropy / count.double().log(), count > 1),
        masked_mass=mean(wide.masked_fill(allowed, 0).sum(-1)),
        sink=mean(weights[..., -1] if sink else torch.zeros_like(weights[..., -1])),
    )


def classify(summary: HeadSummary) -> list[str]:
    """``sink``, ``argmax-like``, ``mean-like`` or ``other`` for each head, from where it attends on average.

    The rule, in this order: at least half of the weight on a sink: sink. At most 1.5 positions: argmax-like. At least
    a quarter of the positions allowed: mean-like. Anything else: other. On short inputs argmax-like and mean-like
    overlap and the first wins: use T ≥ 12.
    A head that averages over one of a few token types is mean-like by this rule.

    >>> one, all_of_them = torch.eye(12), torch.full((12, 12), 1 / 12)
    >>> classify(summarise(torch.stack([one, all_of_them])[None]))
    ['argmax-like', 'mean-like']
    """
    rules = (summary.sink >= 0.5, summary.positions <= 1.5, summary.share >= 0.25)
    return np.select([rule.numpy() for rule in rules], ["sink", "argmax-like", "mean-like"], "other").tolist()


# ---- models ----


def attention_scores(
    model: nn.Module, batch: Batch, c: float = 1.0, *, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Scores of every layer, ``(batch, heads, T, T)``, −∞ where masked, in the model scaled by ``c``. Dropout is off.

    A model with ``attentions(tokens)`` (ours) gives its scores as they are. A model of ``transformers`` gives
    probabilities p; log p are its scores up to a constant for each row, with the same order and ties, as far as the
    precision goes: what underflows to p = 0 reads as masked, and gaps below the precision of p read as ties. Where a
    row sums to less than 1, as in gpt-oss, the rest lies on a sink: the last key, ``(batch, heads, T, T + 1)``. An
    encoder–decoder gives its encoder, then, if the batch has ``decoder_input_ids``, the decoder's self-attention.

    Raises:
        ValueError: the model gives no attention: load it with ``attn_implementation="eager"``.
        OverflowError: scores that are not finite; see also ``scaling.scaled``.

    >>> class Head(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding = nn.Parameter(torch.eye(2))
    ...         self.key = nn.Parameter(torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
    ...     def attentions(self, tokens):
    ...         x = self.embedding[tokens]
    ...         return [(x @ self.key @ x.mT)[:, None]]
    >>> (scores,) = attention_scores(Head(), {"input_ids": torch.tensor([[0, 1]])}, c=2.0)
    >>> scores[0, 0].tolist()  # of degree 3 in the parameters: 2³ times as large
    [[0.0, 8.0], [0.0, 24.0]]
    """
    with mode(model), scaled(model, c, dtype=dtype):
        own = getattr(model, "attentions", None)
        if callable(own) and not isinstance(own, nn.Module):  # XLM's are a list of layers
            check_unpadded(batch)
            found = own(batch["input_ids"])
        else:
            found = _transformers(model, batch)
    for number, scores in enumerate(found, start=1):
        if not (scores < torch.inf).all():
            raise OverflowError(
                f"scores of layer {number} are not finite in {scores.dtype} at c = {c:g}: "
                "take a smaller c, or dtype=torch.float64"
            )
    return found


def _transformers(model: nn.Module, batch: Batch) -> list[Tensor]:
    out = forward(model, batch, output_attentions=True)
    if hasattr(out, "attentions"):
        found = out.attentions
    else:
        found = (*(out.encoder_attentions or ()), *(out.decoder_attentions or ()))
    if not found or any(layer is None for layer in found):
        raise ValueError(f'{type(model).__name__} gives no attention: load it with attn_implementation="eager"')
    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    return [_with_sink(layer, sinks).log() for layer in found]


def _with_sink(weights: Tensor, known: bool) -> Tensor:
    """Rows that sum to less than 1, by a ``known`` sink or by more than rounding: the rest is a last key."""
    rest = 1 - weights.double().sum(-1, keepdim=True)
    rows = weights.sum(-1) > 0
    if not known and not (rest.squeeze(-1)[rows] > 2e-2).any():
        return weights
    return torch.cat([weights, rest.clamp(min=0).to(weights.dtype)], -1)
