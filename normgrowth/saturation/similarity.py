"""A network against its saturated counterpart: how representations change when every parameter is scaled by c.

Figure 4 of the paper compares each layer's representation f(x; θ) with f(x; cθ), c = 1000, by cosine. A high cosine
says little where all tokens look alike, so :class:`Similarity` also has the anisotropy and the mean-centred cosine.
Works on the models of ``transformers`` and on any model with a method ``hidden_states(tokens)`` that returns a list of
``(batch, T, dim)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normgrowth.saturation.batches import Batch, batches_by_length, check_unpadded, forward, real_tokens
from normgrowth.saturation.scaling import advice, mode, scaled


class Similarity(NamedTuple):
    """Numbers for each layer, shapes ``(n_layers + 1,)``, float64, on the CPU; the embedding is layer 0."""

    raw: Tensor  # mean cos(h, h'): h of the network, h' of the scaled one
    common: Tensor  # the part of raw from the common direction: mean of h/‖h‖ times mean of h'/‖h'‖
    centred: Tensor  # mean cos(h, h') after subtracting from h its mean over all tokens, and from h' the mean of h'
    anisotropy: Tensor  # mean cosine of two different tokens in h
    anisotropy_scaled: Tensor  # mean cosine of two different tokens in h'


class Layer(NamedTuple):
    """Representations ``(batch, T, dim)`` of one layer and which of them belong to real tokens, ``(batch, T)``."""

    states: Tensor
    real: Tensor


# ---- representations ----


def layers(model: nn.Module, batch: Batch) -> list[Layer]:
    """Representations of every layer, the embedding first.

    An encoder–decoder of ``transformers`` runs its encoder alone, unless the batch has ``decoder_input_ids``: then the
    decoder's layers, its embedding first, follow those of the encoder. The decoder's real tokens are those of
    ``decoder_attention_mask``, or all tokens if the batch does not have it. A model with ``hidden_states`` takes no
    attention mask, so its sentences must all have one length.

    Raises:
        ValueError: a sentence consists of padding alone, or a batch for a model without a mask is padded.
        TypeError: the model gives no representations.
    """
    real = real_tokens(batch)
    if not real.any(1).all():
        raise ValueError(f"sentence {int((~real.any(1)).nonzero()[0])} of the batch has no real token")
    hidden_states = getattr(model, "hidden_states", None)
    if callable(hidden_states):
        check_unpadded(batch)
        return [Layer(states, real) for states in hidden_states(batch["input_ids"])]
    output = forward(model, {"attention_mask": real.long(), **batch}, output_hidden_states=True)
    if hasattr(output, "hidden_states"):
        return [_between_tokens(model, Layer(states, real)) for states in output.hidden_states]
    real_in_decoder = batch.get("decoder_attention_mask", torch.ones_like(batch["decoder_input_ids"])).bool()
    encoder_layers = [Layer(states, real) for states in output.encoder_hidden_states]
    decoder_layers = [Layer(states, real_in_decoder) for states in output.decoder_hidden_states]
    return encoder_layers + decoder_layers


def _between_tokens(model: nn.Module, layer: Layer) -> Layer:
    """The same layer, if it has a representation for each token. Raises ValueError otherwise."""
    if layer.states.shape[:2] != layer.real.shape:
        positions = layer.states.shape[1]
        raise ValueError(
            f"{type(model).__name__} gives {positions} representations for sentences of {layer.real.shape[1]} tokens, "
            "as a model with a learned prompt does: measure the model inside it"
        )
    return layer


def pairs(
    model: nn.Module,
    batches: Sequence[Batch],
    c: float = 1000.0,
    *,
    average: str = "sentences",
    dropout: bool = False,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    scaling: Callable[..., AbstractContextManager[Any]] = scaled,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each layer: weights of the real tokens ``(n,)``, their representations ``(n, dim)``, and those at scale c.

    Args:
        batches: inputs of the model: ``input_ids`` ``(batch, T)`` and ``attention_mask``, on the model's device.
        average: ``sentences`` weighs all sentences alike (the paper's "mean over 100 sentences", as we read it),
            ``tokens`` weighs all tokens alike. Only ratios of weights matter.
        dropout: leave dropout on in both runs, with draws from ``seed``; off by default. The model's mode is restored.
        dtype: compute in another precision; the model's own by default.
        scaling: the context manager that multiplies the parameters, called as ``scaled`` is, which copies all of them.

    Raises:
        OverflowError: a parameter or a representation is not finite at ``c``, or a square in front of it overflows, so
            that a norm takes it for 0; names it.
        ValueError: as in ``layers``; ``average`` is unknown; the representation of a token is 0.

    >>> class Embedding(nn.Embedding):
    ...     def hidden_states(self, tokens):
    ...         return [self(tokens)]
    >>> weights, h, h_scaled = pairs(Embedding(10, 8), [{"input_ids": torch.tensor([[1, 2, 3]])}])[0]
    >>> h.shape, torch.allclose(h_scaled, 1000 * h)  # an embedding only gets longer
    (torch.Size([3, 8]), True)
    """
    if average not in ("sentences", "tokens"):
        raise ValueError(f"unknown average {average!r}: choose one of sentences, tokens")
    runs: list[list[list[Layer]]] = []
    with mode(model, dropout=dropout, seed=seed):
        for scale in (1.0, c):
            with scaling(model, scale, dtype=dtype):
                layers_of_batches = [layers(model, batch) for batch in batches]
            for layers_of_batch in layers_of_batches:  # only now: ``scaling`` has the true reason of an overflow
                _check_directions(layers_of_batch, scale)
            runs.append(layers_of_batches)
    layers_at_1 = zip(*runs[0], strict=True)  # for each layer, its states in all batches
    layers_at_c = zip(*runs[1], strict=True)
    return [
        (
            torch.cat([_weights(layer.real, average) for layer in at_1]),
            torch.cat([layer.states[layer.real] for layer in at_1]),
            torch.cat([layer.states[layer.real] for layer in at_c]),
        )
        for at_1, at_c in zip(layers_at_1, layers_at_c, strict=True)
    ]


def _check_directions(layers: list[Layer], c: float) -> None:
    """Raise if a real token has no direction in some layer, because its representation is 0 or not finite."""
    largest_before = 0.0  # magnitude in the layers before
    for number, (states, real) in enumerate(layers):
        magnitude = states[real].abs().amax(-1)
        where = f"layer {number} of {len(layers) - 1}"
        if not magnitude.isfinite().all():
            raise OverflowError(f"{where} is not finite in {states.dtype} at c = {c:g}. {advice(states.dtype)}")
        if (magnitude == 0).any():
            squared_in = torch.promote_types(states.dtype, torch.float32)  # by a norm
            if largest_before > math.sqrt(torch.finfo(squared_in).max / states.shape[-1]):
                raise OverflowError(
                    f"{where} is 0 at c = {c:g}, since a vector before it has magnitude {largest_before:.3g}, whose "
                    f"square overflows {squared_in}. {advice(squared_in)}"
                )
            raise ValueError(f"{where} has a token at c = {c:g} whose representation is 0: it has no direction")
        largest_before = max(largest_before, float(magnitude.max()))


def _weights(real: Tensor, average: str) -> Tensor:
    """Weight of each real token of a batch, up to a constant factor, shape ``(n_tokens,)``, float64."""
    lengths = real.sum(1, keepdim=True).expand_as(real)[real].double()
    return 1 / lengths if average == "sentences" else torch.ones_like(lengths)


# ---- similarity ----


def compare(model: nn.Module, batches: Sequence[Batch], c: float = 1000.0, **options: Any) -> Similarity:
    """:class:`Similarity` over several batches at once, so that the model is scaled once. ``options`` as in ``pairs``.

    Means and pairs of tokens are over all batches, whose representations are held in memory at both scales. Anisotropy
    is NaN if there is a single token.

    >>> class Embedding(nn.Embedding):
    ...     def hidden_states(self, tokens):
    ...         return [self(tokens)]
    >>> model = Embedding.from_pretrained(torch.eye(3, 4))
    >>> measured = compare(model, [{"input_ids": torch.tensor([[0, 1, 2]])}])
    >>> round(float(measured.raw[0]), 4), round(float(measured.common[0]), 4)  # mean of three orthogonal: ‖·‖² = 1/3
    (1.0, 0.3333)
    """
    rows = []
    for weights, h, h_scaled in pairs(model, batches, c, **options):
        unit = _unit(h)
        unit_scaled = _unit(h_scaled)
        raw = _mean_cosine(unit, unit_scaled, weights)
        common = ((weights @ unit) @ (weights @ unit_scaled)).cpu() / weights.sum().cpu() ** 2
        centred = _mean_cosine(_unit(_centre(h)), _unit(_centre(h_scaled)), weights)
        rows.append(torch.stack([raw, common, centred, _pair_cosine(unit), _pair_cosine(unit_scaled)]))
    return Similarity(*torch.stack(rows, dim=1))


def _unit(x: Tensor) -> Tensor:
    """Rows of length 1, in float64, where squares of float32 magnitudes do not overflow."""
    x = x.double()
    return x / x.norm(dim=-1, keepdim=True)


def _pair_cosine(unit: Tensor) -> Tensor:
    """Mean cosine of two different rows, by one sum: Σ_{i≠j} û_i·û_j = ‖Σ û_i‖² − n."""
    n = len(unit)
    number_of_pairs = n * (n - 1)
    return (unit.sum(0).square().sum().cpu() - n) / (number_of_pairs if number_of_pairs else math.nan)


def _centre(x: Tensor) -> Tensor:
    """Rows of ``(n, dim)`` minus their mean, in float64; exactly 0 where the difference is only rounding of ``x``."""
    rows = x.double()
    centred = rows - rows.mean(0)
    rounding = 8 * torch.finfo(x.dtype).eps * rows.norm(dim=1, keepdim=True)
    return torch.where(centred.norm(dim=1, keepdim=True) > rounding, centred, 0.0)


def _mean_cosine(unit: Tensor, other: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of the cosines of rows, over rows with a direction in both; NaN if there are none."""
    cosines = (unit * other).sum(-1)
    has_direction = ~cosines.isnan()
    return ((weights * cosines)[has_direction].sum() / weights[has_direction].sum()).cpu()


def similarity(
    model: nn.Module,
    sentences: Sequence[Sequence[int]],
    c: float = 1000.0,
    *,
    decoder: Sequence[Sequence[int]] | None = None,
    max_tokens: int = 4096,
    padding: bool = True,
    **options: Any,
) -> Similarity:
    """:class:`Similarity` over sentences of token ids, in batches by length; ``options`` as in ``pairs``.

    ``max_tokens`` and ``padding`` are those of ``batches_by_length``.

    ``decoder`` has the token ids that the decoder of an encoder–decoder reads with each sentence; the decoder's layers
    then follow those of the encoder. Without ``decoder`` the encoder alone is measured. For a model with
    ``hidden_states`` all sentences must have one length.
    """
    pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    batches = batches_by_length(
        sentences,
        decoder=decoder,
        max_tokens=max_tokens,
        padding=padding,
        pad=0 if pad is None else pad,
        device=next(model.parameters()).device,
    )
    return compare(model, batches, c, **options)
