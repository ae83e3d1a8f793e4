"""Which positions a head may see: masks of scores, and the windows of models of ``transformers``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normgrowth.saturation import Batch, real_tokens

WINDOWED = ("sliding_attention", "local", "hybrid_sliding")  # kinds of layers in configurations of transformers
WHOLE = ("full_attention", "global", "attention", "hybrid")
WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")


class Mask(NamedTuple):
    """Which real tokens the queries of a layer see: all, or those that ``causal`` and ``window`` leave."""

    causal: bool = False  # none that is later than the query
    window: int | None = None  # as in ``allowed_positions``


def causal_mask(scores: Tensor) -> Tensor:
    """Scores with −∞ for future keys, which the softmax turns into weight 0."""
    return scores.masked_fill(~_past(scores), -torch.inf)


def multiplicative_mask(scores: Tensor) -> Tensor:
    """Scores with those of future keys multiplied by 0, as in the paper's released code: the softmax still sees them.

    A score of 0 exceeds every negative score. Where all scores of past keys are negative, the saturated head therefore
    attends to the whole future, uniformly: to (T − 1)/2 + 1/T positions on average, the last query included.

    >>> from normgrowth.heads import saturated
    >>> saturated(multiplicative_mask(torch.full((3, 3), -1.0)))[0]  # the first query, its own key at −1
    tensor([0.0000, 0.5000, 0.5000])
    """
    return scores.where(_past(scores), 0.0)


def _past(scores: Tensor) -> Tensor:
    """Which keys are not later than the query, bool, ``(T, T)``."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()


def windows(model: Any) -> list[int | None]:
    """Length of the attention window of each layer of a model of ``transformers``; None for all positions.

    The window of a query in a causal model ends at its own position, which counts; in a model that sees later positions
    too, the window reaches so many positions to both sides. Layers without attention are left out.

    Raises:
        ValueError: the model has layers of an unknown kind, or none with attention.
    """
    config = model.config.get_text_config()
    return windows_of(config)


def windows_of(config: Any) -> list[int | None]:
    """``windows`` from the configuration of a model's text, encoder or decoder."""
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is None:
        window_of_all = window if getattr(config, "use_sliding_window", True) else None
        return [window_of_all] * config.num_hidden_layers
    with_attention = [kind for kind in kinds if kind not in WITHOUT_ATTENTION]
    unknown = set(with_attention).difference(WINDOWED, WHOLE)
    if unknown:
        raise ValueError(f"layers of kind {', '.join(sorted(unknown))}: which positions they see is not known here")
    if not with_attention:
        raise ValueError(f"all layers are of kind {', '.join(sorted(set(kinds)))}: there is no attention, and no head")
    return [window if kind in WINDOWED else None for kind in with_attention]


def allowed_positions(batch: Batch, *, causal: bool, window: int | None = None) -> Tensor:
    """Which keys each query may attend to, bool, ``(batch, 1, T, T)``: real tokens, and if ``causal`` none later.

    A padding query may attend to nothing, so ``summarise`` leaves it out. In a layer with a sliding ``window`` (see
    ``windows``) only the last ``window`` positions are allowed, or without ``causal`` those at most ``window`` away.

    >>> batch = {"input_ids": torch.zeros(1, 3), "attention_mask": torch.tensor([[1, 1, 0]])}
    >>> allowed_positions(batch, causal=True).sum(-1).tolist()
    [[[1, 2, 0]]]
    """
    real = real_tokens(batch)
    pairs = real[:, None, :, None] & real[:, None, None, :]
    if window is None:
        return pairs & _past(pairs) if causal else pairs
    if causal:
        return pairs & _past(pairs) & torch.ones_like(pairs).triu(1 - window)
    return pairs & torch.ones_like(pairs).triu(-window).tril(window)
