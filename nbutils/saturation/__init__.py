"""A network against its saturated counterpart: what scaling every parameter by c does to representations.

Figure 4 of the paper compares each layer's representation f(x; θ) with f(x; cθ), c = 1000, by cosine. A high cosine
says little where all tokens look alike: :class:`Similarity` carries anisotropy and the mean-centred cosine beside it.
Works on the models of ``transformers`` and on any model with ``hidden_states(tokens)``, a list of ``(batch, T, dim)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nbutils.saturation.scaling import mode as mode
from nbutils.saturation.scaling import scaled as scaled

Batch = Mapping[str, Tensor]
AVERAGES = ("sentences", "tokens")


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


def check_tokens(model: nn.Module, batch: Batch) -> None:
    """Raise ValueError if a token has no row in the embedding of a model of ``transformers``.

    >>> from types import SimpleNamespace
    >>> model = SimpleNamespace(get_input_embeddings=lambda: nn.Embedding(10, 2))
    >>> check_tokens(model, {"input_ids": torch.tensor([[3, 12]])})
    Traceback (most recent call last):
    ValueError: token 12 is beyond the 10 rows of the embedding: the tokenizer is not that of this model
    """
    table = model.get_input_embeddings() if callable(getattr(model, "get_input_embeddings", None)) else None
    rows = getattr(table, "num_embeddings", None)
    for name in ("input_ids", "decoder_input_ids"):
        if rows is not None and name in batch and (largest := int(batch[name].max())) >= rows:
            raise ValueError(
                f"token {largest} is beyond the {rows} rows of the embedding: the tokenizer is not that of this model"
            )


def layers(model: nn.Module, batch: Batch) -> list[Layer]:
    """Representations of every layer, the embedding first.

    An encoder–decoder of ``transformers`` runs its encoder alone, unless the batch has ``decoder_input_ids``: then the
    decoder's layers, its embedding first, follow those of the encoder; its real tokens are those of
    ``decoder_attention_mask``, or all. A model with ``hidden_states`` has no attention mask, so its sentences must all
    have one length.

    Raises:
        ValueError: no ``input_ids``; padding for a model that takes no mask; a sentence without a real token.
        TypeError: a model that gives no representations.

    >>> from nbutils.models import CausalLM
    >>> model = CausalLM(10, 8, depth=2, heads=2, length=4)
    >>> [tuple(layer.states.shape) for layer in layers(model, {"input_ids": torch.tensor([[1, 2, 3]])})]
    [(1, 3, 8), (1, 3, 8), (1, 3, 8)]
    """
    if "input_ids" not in batch:
        raise ValueError(
            f"the batch needs input_ids, and attention_mask if padded; it has {', '.join(batch) or 'nothing'}"
        )
    ids = batch["input_ids"]
    real = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(ids, dtype=torch.bool)
    if not real.any(1).all():
        raise ValueError(f"sentence {int((~real.any(1)).nonzero()[0])} of the batch has no real token")
    if callable(getattr(model, "hidden_states", None)):
        if not real.all():
            raise ValueError("this model takes no attention mask: give it sentences of one length, without padding")
        return [Layer(states, real) for states in model.hidden_states(ids)]
    config = getattr(model, "config", None)
    if config is None:
        raise TypeError(f"{type(model).__name__} is no model of transformers and has no method hidden_states(tokens)")
    check_tokens(model, batch)
    inputs: dict[str, Any] = {"attention_mask": real.long(), **batch, "output_hidden_states": True, "return_dict": True}
    if not getattr(config, "is_encoder_decoder", False):
        return [Layer(states, real) for states in model(**inputs).hidden_states]
    if "decoder_input_ids" not in batch:
        return [Layer(states, real) for states in model.get_encoder()(**inputs).hidden_states]
    decoder_ids = batch["decoder_input_ids"]
    seen = batch.get("decoder_attention_mask", torch.ones_like(decoder_ids)).bool()
    out = model(**inputs)
    return [Layer(states, real) for states in out.encoder_hidden_states] + [
        Layer(states, seen) for states in out.decoder_hidden_states
    ]


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


def _at(model: nn.Module, batch: Batch, c: float, dtype: torch.dtype | None) -> list[Layer]:
    if c == 1 and dtype is None:
        return _checked(layers(model, batch), c)
    with scaled(model, c, dtype=dtype):
        return _checked(layers(model, batch), c)


def _unit(x: Tensor) -> Tensor:
    """Rows in float64 at length 1; float32 magnitudes can be squared there."""
    x = x.double()
    return x / x.norm(dim=-1, keepdim=True)


# ---- similarity ----


def similarity(
    model: nn.Module,
    batch: Batch,
    c: float = 1000.0,
    *,
    average: str = "sentences",
    dropout: bool = False,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Mean cosine of each layer's representation with that of the model scaled by ``c``, over real tokens only.

    The cosine is of one token's representation. ``average="sentences"`` takes the mean over the tokens of a sentence,
    then over sentences (the paper's "mean over 100 sentences", as we read it); ``"tokens"`` weighs all tokens alike.

    Args:
        batch: what the model takes: ``input_ids`` ``(batch, T)`` and ``attention_mask``, on the model's device.
        dropout: leave it on in both runs, with draws from ``seed``; off by default. The model's mode comes back.
        dtype: compute in another precision; that of the model if not given.

    Returns:
        Shape ``(n_layers + 1,)``, float64, on the CPU.

    Raises:
        OverflowError: a parameter or a representation is not finite at ``c``; says which.
        ValueError: see ``layers``; also a token whose representation is 0.

    >>> from nbutils.models import CausalLM
    >>> model = CausalLM(10, 8, depth=1, heads=2, length=4)
    >>> found = similarity(model, {"input_ids": torch.tensor([[1, 2, 3]])})
    >>> round(float(found[0]), 6)  # the embedding only gets longer
    1.0
    """
    pairs = _pairs(model, [batch], c, average=average, dropout=dropout, seed=seed, dtype=dtype)
    return torch.stack([_mean_cosine(_unit(h), _unit(h_scaled), weights) for weights, h, h_scaled in pairs])


def anisotropy(model: nn.Module, batch: Batch, c: float = 1.0, *, dtype: torch.dtype | None = None) -> Tensor:
    """Mean cosine of two different tokens' representations in the model scaled by ``c``, by layer.

    The mean is over all pairs of real tokens of the batch, by one sum: Σ_{i≠j} û_i·û_j = ‖Σ û_i‖² − n.

    Returns:
        Shape ``(n_layers + 1,)``, float64, on the CPU. NaN where there is a single token.

    >>> from nbutils.models import CausalLM
    >>> model = CausalLM(3, 4, depth=1, heads=2, length=3, positions=False)
    >>> model.embedding.weight.data = torch.eye(3, 4)
    >>> round(float(anisotropy(model, {"input_ids": torch.tensor([[0, 0, 1]])})[0]), 4)  # one pair of three is alike
    0.3333
    """
    with mode(model):
        return torch.stack([mean_pair_cosine(states[real]) for states, real in _at(model, batch, c, dtype)])


def mean_pair_cosine(states: Tensor) -> Tensor:
    """Mean cosine over all pairs of different rows of ``(n, dim)``, float64; NaN for n = 1.

    >>> mean_pair_cosine(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]))  # 0, 1 and 0
    tensor(0.3333, dtype=torch.float64)
    """
    return _pair_cosine(_unit(states))


def _pair_cosine(unit: Tensor) -> Tensor:
    n = len(unit)
    return (unit.sum(0).square().sum().cpu() - n) / (n * (n - 1) or math.nan)


def compare(model: nn.Module, batches: Sequence[Batch], c: float = 1000.0, **options: Any) -> Similarity:
    """:class:`Similarity` over several batches at once: the model is scaled once. ``options`` as in ``similarity``.

    Centres and pairs are over the tokens of all batches, whose representations are held in memory at both scales.

    >>> from nbutils.models import CausalLM
    >>> model = CausalLM(3, 4, depth=1, heads=2, length=3, positions=False)
    >>> model.embedding.weight.data = torch.eye(3, 4)
    >>> found = compare(model, [{"input_ids": torch.tensor([[0, 1, 2]])}])
    >>> round(float(found.raw[0]), 4), round(float(found.common[0]), 4)  # the mean of three orthogonal: ‖·‖² = 1/3
    (1.0, 0.3333)
    """
    rows = []
    for weights, h, h_scaled in _pairs(model, batches, c, **options):
        unit, unit_scaled = _unit(h), _unit(h_scaled)
        raw = _mean_cosine(unit, unit_scaled, weights)
        common = ((weights @ unit) @ (weights @ unit_scaled)).cpu() / weights.sum().cpu() ** 2
        centred = _mean_cosine(_unit(_centre(h)), _unit(_centre(h_scaled)), weights)
        rows.append(torch.stack([raw, common, centred, _pair_cosine(unit), _pair_cosine(unit_scaled)]))
    return Similarity(*torch.stack(rows, dim=1))


def _pairs(
    model: nn.Module,
    batches: Sequence[Batch],
    c: float,
    *,
    average: str = "sentences",
    dropout: bool = False,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each layer: weights of the real tokens ``(n,)``, their representations ``(n, dim)``, and those at ``c``."""
    if average not in AVERAGES:
        raise ValueError(f"unknown average {average!r}: choose one of {', '.join(AVERAGES)}")
    if not batches:
        raise ValueError("no batch to compare on")
    runs: list[list[list[Layer]]] = []
    with mode(model, dropout=dropout, seed=seed):
        for scale in (1.0, c):
            with ExitStack() as stack:
                if scale != 1 or dtype is not None:
                    stack.enter_context(scaled(model, scale, dtype=dtype))
                runs.append([_checked(layers(model, batch), scale) for batch in batches])
    plain, saturated = (
        [torch.cat([x.states[x.real] for x in layer]) for layer in zip(*run, strict=True)] for run in runs
    )
    weights = [torch.cat([_weights(x.real, average) for x in layer]) for layer in zip(*runs[0], strict=True)]
    return list(zip(weights, plain, saturated, strict=True))


def _weights(real: Tensor, average: str) -> Tensor:
    """Weight of each real token of a batch, up to a constant, shape ``(n_tokens,)``."""
    lengths = real.sum(1, keepdim=True).expand_as(real)[real].double()
    return 1 / lengths if average == "sentences" else torch.ones_like(lengths)


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


# ---- many sentences ----


def batches_by_length(
    sentences: Sequence[Sequence[int]],
    *,
    max_tokens: int = 4096,
    pad: int = 0,
    padding: bool = True,
    device: torch.device | str = "cpu",
) -> list[dict[str, Tensor]]:
    """Pack sentences of token numbers into batches of at most ``max_tokens``, those of like length together.

    Padding is on the right and counts. ``padding=False`` puts only sentences of equal length together, for models
    without an attention mask. A sentence longer than ``max_tokens`` is a batch of its own.

    Raises:
        ValueError: no sentence, or an empty one.

    >>> [batch["input_ids"].shape for batch in batches_by_length([[1, 2, 3], [4], [5, 6]], max_tokens=4)]
    [torch.Size([2, 2]), torch.Size([1, 3])]
    """
    if not sentences:
        raise ValueError("no sentence to batch")
    if empty := [i for i, sentence in enumerate(sentences) if not len(sentence)]:
        raise ValueError(f"sentence {empty[0]} has no token (has the folder a tokenizer?)")
    groups: list[list[Sequence[int]]] = []
    for sentence in sorted(sentences, key=len):
        group = groups[-1] if groups else []
        fits = group and (len(group) + 1) * len(sentence) <= max_tokens and (padding or len(group[0]) == len(sentence))
        if fits:
            group.append(sentence)
        else:
            groups.append([sentence])
    batches = []
    for group in groups:
        width = len(group[-1])  # the longest, by the order
        ids = torch.tensor([[*sentence, *[pad] * (width - len(sentence))] for sentence in group])
        real = torch.arange(width) < torch.tensor([[len(sentence)] for sentence in group])
        batches.append({"input_ids": ids.to(device), "attention_mask": real.long().to(device)})
    return batches


def similarity_many(
    model: nn.Module,
    sentences: Sequence[Sequence[int]],
    c: float = 1000.0,
    *,
    max_tokens: int = 4096,
    decoder: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> Similarity:
    """:class:`Similarity` over encoded sentences, in batches by length; ``options`` as in ``compare``.

    ``decoder`` has what an encoder–decoder's decoder reads for each sentence: then its layers follow, and sentences go
    one at a time. Without it the encoder alone is measured.

    With ``average="sentences"`` its ``raw`` is the mean of ``similarity`` over the sentences one at a time.

    >>> from nbutils.models import CausalLM
    >>> model, sentences = CausalLM(10, 8, depth=1, heads=2, length=4), [[1, 2, 3], [4, 5]]
    >>> alone = [similarity(model, {"input_ids": torch.tensor([ids])}) for ids in sentences]
    >>> torch.allclose(similarity_many(model, sentences).raw, torch.stack(alone).mean(0))
    True
    """
    config, device = getattr(model, "config", None), next(model.parameters()).device
    if decoder is not None:
        pairs = zip(sentences, decoder, strict=True)
        both = [(torch.tensor([ids], device=device), torch.tensor([out], device=device)) for ids, out in pairs]
        return compare(model, [{"input_ids": ids, "decoder_input_ids": out} for ids, out in both], c, **options)
    batches = batches_by_length(
        sentences,
        max_tokens=max_tokens,
        pad=getattr(config, "pad_token_id", None) or 0,
        padding=not callable(getattr(model, "hidden_states", None)),
        device=device,
    )
    return compare(model, batches, c, **options)
