"""Attention scores and weights of models, scaled by c, and the heads of every layer over many sentences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normgrowth.heads.masks import Mask, allowed_positions
from normgrowth.heads.summary import HeadSummary, HeadSums, means, sums_of
from normgrowth.saturation import Batch, check_unpadded, forward, real_tokens
from normgrowth.saturation.scaling import advice, mode, scaled


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
                f"scores of layer {number} are not finite in {scores.dtype} at c = {c:g}. {advice(scores.dtype)}"
            )
    return layers


def summaries(
    model: nn.Module,
    batches: Sequence[Batch],
    c: float = 1.0,
    *,
    masks: Sequence[Mask],
    dtype: torch.dtype | None = None,
) -> list[HeadSummary]:
    """:class:`HeadSummary` of every layer of a model of ``transformers`` over several batches, scaled by ``c`` once.

    The attention weights of one batch are in memory at a time, for all layers.

    Args:
        masks: which positions each layer sees.

    Raises:
        ValueError: the model gives no attention, or that of other layers than ``masks`` names.
        OverflowError: weights are not finite; see also ``scaling.scaled``.
    """
    sums: list[HeadSums] = []
    with mode(model), scaled(model, c, dtype=dtype):
        for batch in batches:
            of_batch = _sums_by_layer(model, batch, c, masks)
            if sums:
                of_batch = [HeadSums(*map(torch.add, a, b)) for a, b in zip(sums, of_batch, strict=True)]
            sums = of_batch
    return [means(layer) for layer in sums]


def _sums_by_layer(model: nn.Module, batch: Batch, c: float, masks: Sequence[Mask]) -> list[HeadSums]:
    """The sums of each layer over one batch. Raises as ``summaries`` does; ``c`` is only named."""
    layers = attention_weights(model, batch)
    if len(layers) != len(masks):
        raise ValueError(f"{type(model).__name__} has attention in {len(layers)} layers, not in {len(masks)}")
    sums = []
    for number, ((weights, tokens), mask) in enumerate(zip(layers, masks, strict=True), start=1):
        allowed = allowed_positions(tokens, causal=mask.causal, window=mask.window)
        is_finite = weights.isfinite().all(-1)
        counts = allowed.any(-1)
        if not (is_finite | ~counts).all():
            raise OverflowError(
                f"attention of layer {number} is not finite in {weights.dtype} at c = {c:g}. {advice(weights.dtype)}"
            )
        sums.append(sums_of(weights, allowed))
    return sums


def _log_probabilities(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Logarithms of the attention weights of every layer; −∞ in the rows of padding queries."""
    return [
        weights.masked_fill(~real_tokens(tokens)[:, None, :, None], 0).log()
        for weights, tokens in attention_weights(model, batch)
    ]


def attention_weights(model: nn.Module, batch: Batch) -> list[tuple[Tensor, Batch]]:
    """Attention weights of every layer of a model of ``transformers``, ``(batch, heads, T, T)``, and the tokens read.

    Layers of an encoder–decoder are those of its encoder, followed by the decoder's self-attention if the batch has
    ``decoder_input_ids``. Where a row sums to less than 1, the rest lies on a sink, which becomes the last key.

    Raises:
        ValueError: the model gives no attention, or weights that do not lie between its tokens.
    """
    output = forward(model, batch, output_attentions=True)
    layers: list[tuple[Tensor | None, Batch]]
    if hasattr(output, "decoder_attentions"):
        decoder = {"input_ids": batch["decoder_input_ids"]}
        if "decoder_attention_mask" in batch:
            decoder["attention_mask"] = batch["decoder_attention_mask"]
        layers = [(weights, batch) for weights in output.encoder_attentions or ()]
        layers += [(weights, decoder) for weights in output.decoder_attentions or ()]
    else:
        layers = [(weights, batch) for weights in getattr(output, "attentions", None) or ()]
    kind = type(model).__name__
    if not layers and getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager":
        raise ValueError(f"{kind} has no attention between positions: there are no heads to measure")
    has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    if not layers or any(weights is None for weights, _ in layers):
        raise ValueError(f'{kind} gives no attention: load it with attn_implementation="eager"')
    complete = []
    for weights, tokens in layers:
        assert weights is not None
        length = tokens["input_ids"].shape[1]
        if weights.ndim != 4 or weights.shape[-2:] != (length, length):
            shape = tuple(weights.shape)
            raise ValueError(f"{kind} gives attention of shape {shape}, not (batch, heads, {length}, {length})")
        complete.append((_with_sink(weights, has_sinks), tokens))
    return complete


def _with_sink(weights: Tensor, has_sinks: bool) -> Tensor:
    """Weights with a sink as the last key, if the model has sinks or some row sums to less than 1 beyond rounding."""
    rest = 1 - weights.double().sum(-1, keepdim=True)
    unmasked_rows = weights.sum(-1) > 0
    if not has_sinks and not (rest.squeeze(-1)[unmasked_rows] > 2e-2).any():
        return weights
    return torch.cat([weights, rest.clamp(min=0).to(weights.dtype)], -1)
