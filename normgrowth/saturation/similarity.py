"""A network against its saturated counterpart: what scaling every parameter by c does to representations.

Figure 4 of the paper compares each layer's representation f(x; θ) with f(x; cθ), c = 1000, by cosine. A high cosine
says little where all tokens look alike: :class:`Similarity` carries anisotropy and the mean-centred cosine beside it.
Works on the models of ``transformers`` and on any model with ``hidden_states(tokens)``, a list of ``(batch, T, dim)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normgrowth.saturation.batches import Batch, batches_by_length, check_unpadded, forward, real_tokens
from normgrowth.saturation.scaling import mode, scaled


class Similarity(NamedTuple):
    """One number a layer, shapes ``(n_layers + 1,)``, float64, on the CPU; the embedding is layer 0."""

    raw: Tensor  # mean cos(h, h'): h of the network, h' of the scaled one
    common: Tensor  # the part of raw from the common direction: mean of h/‖h‖ times mean of h'/‖h'‖
    centred: Tensor  # the same after the mean over all tokens is taken from h, and that of h' from h'
    anisotropy: Tensor  # mean cosine of two different tokens, in h
    anisotropy_scaled: Tensor  # and in h'


class Layer(NamedTuple):
    """Representations ``(batch, T, dim)`` of one layer and which of them belong to real tokens, ``(batch, T)``."""

    states: Tensor
    real: Tensor


# ---- representations ----


def layers(model: nn.Module, batch: Batch) -> list[Layer]:
    """Representations of every layer, the embedding first.

    An encoder–decoder of ``transformers`` runs its encoder alone, unless the batch has ``decoder_input_ids``: then the
    decoder's layers, its embedding first, follow those of the encoder; its real tokens are those of
    ``decoder_attention_mask``, or all. A model with ``hidden_states`` has no attention mask, so its sentences must all
    have one length.

    Raises:
        ValueError: a sentence of padding alone, or padding for a model that takes no mask.
        TypeError: a model that gives no representations.
    """
    real = real_tokens(batch)
    if not real.any(1).all():
        raise ValueError(f"sentence {int((~real.any(1)).nonzero()[0])} of the batch has no real token")
    if callable(own := getattr(model, "hidden_states", None)):
        check_unpadded(batch)
        return [Layer(states, real) for states in own(batch["input_ids"])]
    out = forward(model, {"attention_mask": real.long(), **batch}, output_hidden_states=True)
    if hasattr(out, "hidden_states"):
        return [Layer(states, real) for states in out.hidden_states]
    seen = batch.get("decoder_attention_mask", torch.ones_like(batch["decoder_input_ids"])).bool()
    parts = ((out.encoder_hidden_states, real), (out.decoder_hidden_states, seen))
    return [Layer(states, which) for part, which in parts for states in part]


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
    """Of each layer: weights of the real tokens ``(n,)``, their representations ``(n, dim)``, and those at ``c``.

    Args:
        batches: what the model takes: ``input_ids`` ``(batch, T)`` and ``attention_mask``, on the model's device.
        average: ``sentences`` weighs all sentences alike (the paper's "mean over 100 sentences", as we read it),
            ``tokens`` all tokens. Only ratios of weights matter.
        dropout: leave it on in both runs, with draws from ``seed``; off by default. The model's mode comes back.
        dtype: compute in another precision; that of the model if not given.
        scaling: what multiplies the parameters, with the arguments of ``scaled``, which copies all of them.

    Raises:
        OverflowError: a parameter or a representation is not finite at ``c``; names it.
        ValueError: as ``layers``; another ``average``; a token whose representation is 0.

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
                runs.append([_checked(layers(model, batch), scale) for batch in batches])
    found = []
    for plain, saturated in zip(*(zip(*run, strict=True) for run in runs), strict=True):  # layer by layer
        weights = torch.cat([_weights(layer.real, average) for layer in plain])
        h, h_scaled = (torch.cat([layer.states[layer.real] for layer in each]) for each in (plain, saturated))
        found.append((weights, h, h_scaled))
    return found


def _checked(found: list[Layer], c: float) -> list[Layer]:
    """The layers again, if every real token has a direction."""
    for number, (states, real) in enumerate(found):
        size = states[real].abs().amax(-1)
        if not size.isfinite().all():
            raise OverflowError(
                f"layer {number} of {len(found) - 1} is not finite in {states.dtype} at c = {c:g}: "
                "take a smaller c, or dtype=torch.float64"
            )
        if (size == 0).any():
            raise ValueError(f"layer {number} at c = {c:g} has a token whose representation is 0: it has no direction")
    return found


def _weights(real: Tensor, average: str) -> Tensor:
    """Weight of each real token of a batch, up to a constant, shape ``(n_tokens,)``."""
    lengths = real.sum(1, keepdim=True).expand_as(real)[real].double()
    return 1 / lengths if average == "sentences" else torch.ones_like(lengths)


# ---- similarity ----


def compare(model: nn.Module, batches: Sequence[Batch], c: float = 1000.0, **options: Any) -> Similarity:
    """:class:`Similarity` over several batches at once: the model is scaled once. ``options`` as in ``pairs``.

    Centres and pairs are over the tokens of all batches, whose representations are held in memory at both scales.
    Anisotropy is NaN where there is a single token.

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
        unit, unit_scaled = _unit(h), _unit(h_scaled)
        raw = _mean_cosine(unit, unit_scaled, weights)
        common = ((weights @ unit) @ (weights @ unit_scaled)).cpu() / weights.sum().cpu() ** 2
        centred = _mean_cosine(_unit(_centre(h)), _unit(_centre(h_scaled)), weights)
        rows.append(torch.stack([raw, common, centred, _pair_cosine(unit), _pair_cosine(unit_scaled)]))
    return Similarity(*torch.stack(rows, dim=1))


def _unit(x: Tensor) -> Tensor:
    """Rows in float64 at length 1; float32 magnitudes can be squared there."""
    x = x.double()
    return x / x.norm(dim=-1, keepdim=True)


def _pair_cosine(unit: Tensor) -> Tensor:
    """Mean cosine of two different rows, by one sum: Σ_{i≠j} û_i·û_j = ‖Σ û_i‖² − n."""
    n = len(unit)
    return (unit.sum(0).square().sum().cpu() - n) / (n * (n - 1) or math.nan)


def _centre(x: Tensor) -> Tensor:
    """Rows of ``(n, dim)`` less their mean in float64; exactly 0 where only the rounding of ``x`` is left."""
    wide = x.double()
    rest = wide - wide.mean(0)
    noise = 8 * torch.finfo(x.dtype).eps * wide.norm(dim=1, keepdim=True)
    return torch.where(rest.norm(dim=1, keepdim=True) > noise, rest, 0.0)


def _mean_cosine(unit: Tensor, other: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of the rows' cosines, over those that have a direction in both; NaN without any."""
    cosines = (unit * other).sum(-1)
    good = ~cosines.isnan()
    return ((weights * cosines)[good].sum() / weights[good].sum()).cpu()


def similarity(
    model: nn.Module,
    sentences: Sequence[Sequence[int]],
    c: float = 1000.0,
    *,
    decoder: Sequence[Sequence[int]] | None = None,
    max_tokens: int = 4096,
    **options: Any,
) -> Similarity:
    """:class:`Similarity` over encoded sentences, in batches by length; ``options`` as in ``pairs``.

    ``decoder`` has what an encoder–decoder's decoder reads for each sentence: then its layers follow. Without it the
    encoder alone is measured. For a model with ``hidden_states`` all sentences must have one length.
    """
    batches = batches_by_length(
        sentences,
        decoder=decoder,
        max_tokens=max_tokens,
        pad=getattr(getattr(model, "config", None), "pad_token_id", None) or 0,
        device=next(model.parameters()).device,
    )
    return compare(model, batches, c, **options)
