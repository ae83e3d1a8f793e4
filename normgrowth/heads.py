"""What a saturated attention head attends to, and how to tell heads that pick one position from heads that average.

Scores are the arguments of the softmax, shape ``(..., T, T)``, queries before keys; a score of −∞ is masked. As scores
are multiplied by c → ∞, the softmax of a row puts equal weight on its maximal scores and none elsewhere. Only
differences within a row matter, so log probabilities serve as scores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from normgrowth.saturation import Batch, check_unpadded, forward, real_tokens
from normgrowth.saturation.scaling import mode, scaled


class HeadSummary(NamedTuple):
    """Means over sentences and queries, for each head: shapes ``(heads,)``, float64."""

    positions: Tensor  # number of attended positions
    share: Tensor  # mean number of attended positions / mean number of allowed positions
    normalised_entropy: Tensor  # entropy / log(number of allowed positions), over queries with at least two of them
    masked_mass: Tensor  # weight on positions that are not allowed
    sink: Tensor  # weight on the sink: the last key if there is one key more than there are queries; otherwise 0


# ---- saturated attention ----


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


def causal_mask(scores: Tensor) -> Tensor:
    """Scores with −∞ for future keys, which the softmax turns into weight 0."""
    return scores.masked_fill(~_past(scores), -torch.inf)


def multiplicative_mask(scores: Tensor) -> Tensor:
    """Scores with those of future keys multiplied by 0, as in the paper's released code: the softmax still sees them.

    A score of 0 exceeds every negative score. Where all scores of past keys are negative, the saturated head therefore
    attends to the whole future, uniformly: to (T − 1)/2 + 1/T positions on average, the last query included.

    >>> saturated(multiplicative_mask(torch.full((3, 3), -1.0)))[0]  # the first query, its own key at −1
    tensor([0.0000, 0.5000, 0.5000])
    """
    return scores.where(_past(scores), 0.0)


def _past(scores: Tensor) -> Tensor:
    """Which keys are not later than the query, bool, ``(T, T)``."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()


# ---- measures ----


def windows(model: Any) -> list[int | None]:
    """Length of the attention window of each layer of a model of ``transformers``; None for all positions.

    The window of a query ends at its own position, which counts.

    Raises:
        ValueError: the model has layers of an unknown kind.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is None:
        window_of_all = window if getattr(config, "use_sliding_window", True) else None
        return [window_of_all] * config.num_hidden_layers
    unknown = set(kinds) - {"sliding_attention", "full_attention", "local", "global"}
    if unknown:
        raise ValueError(f"layers of kind {', '.join(sorted(unknown))}: which positions they see is not known here")
    return [window if kind in ("sliding_attention", "local") else None for kind in kinds]


def allowed_positions(batch: Batch, *, causal: bool, window: int | None = None) -> Tensor:
    """Which keys each query may attend to, bool, ``(batch, 1, T, T)``: real tokens, and if ``causal`` none later.

    A padding query may attend to nothing, so ``summarise`` leaves it out. In a layer with a sliding ``window`` (see
    ``windows``) only the last ``window`` positions are allowed.

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

    >>> scores = causal_mask(torch.zeros(1, 1, 4, 4))
    >>> summary = summarise(saturated(scores), scores > -torch.inf)  # 1, 2, 3 and 4 positions: all that are allowed
    >>> summary.positions.item(), summary.share.item()
    (2.5, 1.0)
    """
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
    if not queries.any((0, 2)).all():
        raise ValueError("no query has a key that it may attend to")

    def mean(x: Tensor, selected: Tensor = queries) -> Tensor:
        """Mean over the selected queries of all sentences, for each head."""
        return (x.double().where(selected, 0.0).sum((0, 2)) / selected.sum((0, 2))).cpu()

    attended = positions(weights)
    entropy = torch.special.entr(weights.double()).sum(-1)
    weight_on_last_key = weights[..., -1]
    return HeadSummary(
        positions=mean(attended),
        # A mean of ratios would be large for any head, since the first queries may attend to few positions.
        share=mean(attended) / mean(count),
        normalised_entropy=mean(entropy / count.double().log(), count > 1),
        masked_mass=mean(weights.double().masked_fill(allowed, 0).sum(-1)),
        sink=mean(weight_on_last_key if has_sink else torch.zeros_like(weight_on_last_key)),
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


# ---- models ----


def attention_scores(
    model: nn.Module, batch: Batch, c: float = 1.0, *, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Scores of every layer, ``(batch, heads, T, T)``, −∞ where masked, in the model scaled by ``c``. Dropout is off.

    A model with a method ``attentions(tokens)``, as the book's own models, returns its scores from it. A model of
    ``transformers`` returns probabilities p. Then log p are its scores up to a constant for each row, with the same
    order and ties within precision: a p that underflows to 0 counts as masked, and gaps below the precision of p count
    as ties. Where a row sums to less than 1, as in gpt-oss, the rest is the weight of a sink, which becomes the last
    key: ``(batch, heads, T, T + 1)``. Layers of an encoder–decoder are those of its encoder, followed by the decoder's
    self-attention if the batch has ``decoder_input_ids``.

    Raises:
        ValueError: the model gives no attention: load it with ``attn_implementation="eager"``.
        OverflowError: scores are not finite; see also ``scaling.scaled``.

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
        attentions = getattr(model, "attentions", None)
        if callable(attentions) and not isinstance(attentions, nn.Module):  # XLM's attribute is a list of modules
            check_unpadded(batch)
            layers = attentions(batch["input_ids"])
        else:
            layers = _log_probabilities(model, batch)
    for number, scores in enumerate(layers, start=1):
        if not (scores < torch.inf).all():
            raise OverflowError(
                f"scores of layer {number} are not finite in {scores.dtype} at c = {c:g}: "
                "take a smaller c, or dtype=torch.float64"
            )
    return layers


def _log_probabilities(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Logarithms of the attention weights of every layer of a model of ``transformers``."""
    output = forward(model, batch, output_attentions=True)
    if hasattr(output, "attentions"):
        layers = output.attentions
    else:
        layers = (*(output.encoder_attentions or ()), *(output.decoder_attentions or ()))
    if not layers or any(weights is None for weights in layers):
        raise ValueError(f'{type(model).__name__} gives no attention: load it with attn_implementation="eager"')
    has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    return [_with_sink(weights, has_sinks).log() for weights in layers]


def _with_sink(weights: Tensor, has_sinks: bool) -> Tensor:
    """Weights with a sink as the last key, if the model has sinks or some row sums to less than 1 beyond rounding."""
    rest = 1 - weights.double().sum(-1, keepdim=True)
    unmasked_rows = weights.sum(-1) > 0
    if not has_sinks and not (rest.squeeze(-1)[unmasked_rows] > 2e-2).any():
        return weights
    return torch.cat([weights, rest.clamp(min=0).to(weights.dtype)], -1)
