"""Readings of trained models and of their controls: how near they are to their saturated forms, by sentence and layer.

A reading has one network, and its representations at two lengths of its ray; a control has the same shape, and its
parameters are drawn, permuted or given other norms. One network is in memory at a time, and is read in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from nbutils.experiments import pretrained
from normgrowth import saturation
from normgrowth.norms import norm
from normgrowth.precision import float64_throughout

RAW, COMMON, OWN, CENTRED = range(4)  # rows of a reading
MASSIVE = 10  # times the median length of a layer

Result = TypeVar("Result")


class Text(NamedTuple):
    """Sentences as a model reads them.

    Used in ``not-saturated``.
    """

    batch: dict[str, Tensor]  # token ids and mask, (sentences, positions)
    sentence: Tensor  # of each token, its sentence, (tokens,)


def encode(loaded: pretrained.LoadedModel, strings: Sequence[str], device: torch.device | str = "cpu") -> Text:
    """Sentences for one model, cut at 512 tokens as in the paper; for an encoder–decoder, for both of its parts.

    Used in ``not-saturated``.
    """
    config: Any = loaded.model.config
    ids = loaded.tokenizer(strings, truncation=True, max_length=512)["input_ids"]
    (batch,) = saturation.batches_by_length(ids, max_tokens=10**6, pad=config.pad_token_id or 0, device=device)
    if config.is_encoder_decoder:  # T5: its decoder, as in the figure
        batch |= {f"decoder_{name}": tensor for name, tensor in batch.items()}
    return Text(batch, batch["attention_mask"].nonzero()[:, 0])


# ---- a network at one length ----


@contextmanager
def multiplied(model: nn.Module, factor: float | Callable[[str], float]) -> Iterator[nn.Module]:
    """Each parameter times a factor, or times ``factor(name)``, in evaluation mode and in float64 throughout.

    The model is one of ``transformers``, in float64, whose modules compute with their own parameters.

    Used in ``not-saturated``, ``survives`` and ``today``.

    >>> layer = nn.Linear(1, 1).double()
    >>> with multiplied(layer, lambda name: 0.0 if name == "bias" else 2.0):
    ...     twice = layer(torch.ones(1).double())
    >>> bool(twice == 2 * layer.weight)
    True
    """
    with saturation.mode(model), float64_throughout(), pretrained.scaled_by_module(model, factor):
        yield model


def representations(model: nn.Module, text: Text, c: float = 1.0) -> Tensor:
    """Of all tokens at cθ, behind each layer, ``(layers, tokens, d)``, float64; of an encoder–decoder its decoder's.

    Used in ``not-saturated``.
    """
    config: Any = model.config
    with multiplied(model, c):
        layers = saturation.layers(model, text.batch)
    if config.is_encoder_decoder:
        layers = layers[len(layers) // 2 :]
    return torch.stack([layer.states[layer.real] for layer in layers[1:]])


def massive(h: Tensor) -> Tensor:
    """Which tokens of ``(layers, tokens, d)`` are ``MASSIVE`` times as long as the median, bool, ``(layers, tokens)``.

    Used in ``not-saturated``.

    >>> massive(torch.tensor([[[1.0], [1.0], [1.0], [11.0]]])).tolist()
    [[False, False, False, True]]
    """
    length = h.norm(dim=-1)
    return length > MASSIVE * length.median(1, keepdim=True).values


# ---- two lengths of one ray ----


def compare(h: Tensor, h_scaled: Tensor, sentence: Tensor) -> np.ndarray:
    """Similarity of the same tokens at two lengths, a mean over those of each sentence.

    Args:
        h, h_scaled: representations, ``(layers, tokens, d)``.
        sentence: of each token, its sentence, ``(tokens,)``.

    Returns:
        ``(4, sentences, layers)``. The rows: raw cosine; its common part, from the mean directions of all tokens, each
        sentence of equal weight; the tokens' own part, as a share of the most that it could be (``saturation.own``);
        and the cosine after the mean over all tokens is subtracted.

    Used in ``not-saturated``.

    >>> h = torch.eye(3, dtype=torch.float64)[None]  # one layer, three tokens at right angles
    >>> compare(h, 1000 * h, torch.tensor([0, 0, 0]))[:, 0, 0].round(4).tolist()
    [1.0, 0.3333, 1.0, 1.0]
    """
    member = torch.nn.functional.one_hot(sentence).double()
    member = member[:, member.any(0)]
    means = member / member.sum(0)  # over the tokens of each sentence, (tokens, sentences)
    weights = means.mean(1, keepdim=True)
    u, v = _unit(h), _unit(h_scaled)
    mean_u = (weights * u).sum(1, keepdim=True)
    mean_v = (weights * v).sum(1, keepdim=True)
    room = ((1 - mean_u.square().sum(-1)) * (1 - mean_v.square().sum(-1))).sqrt()
    raw = (u * v).sum(-1)
    common = (mean_u * mean_v).sum(-1).expand_as(raw)
    own = ((u - mean_u) * (v - mean_v)).sum(-1) / room
    centred = torch.cosine_similarity(_centred(h), _centred(h_scaled), dim=-1)
    return np.array([(x @ means).T.cpu().numpy() for x in (raw, common, own, centred)])


def _unit(vectors: Tensor) -> Tensor:
    """Vectors divided by their lengths."""
    return vectors / vectors.norm(dim=-1, keepdim=True)


def _centred(h: Tensor) -> Tensor:
    """Representations ``(layers, tokens, d)`` less their mean over tokens."""
    return h - h.mean(1, keepdim=True)


def to_saturated(model: nn.Module, text: Text, lengths: Sequence[float] = (1.0,)) -> np.ndarray:
    """Readings of a model, at some lengths along its ray, against 1000θ: ``(lengths, 4, sentences, layers)``.

    Used in ``not-saturated``.
    """
    saturated = representations(model, text, 1000.0)
    return np.array([compare(representations(model, text, c), saturated, text.sentence) for c in lengths])


# ---- controls ----


def of_untrained(
    config: Any,
    seeds: Sequence[int],
    read: Callable[[nn.Module], Result],
    *,
    with_logits: bool = False,
    device: torch.device | str = "cpu",
) -> list[Result]:
    """What ``read`` gives for networks of a configuration as ``transformers`` draws them, in float64.

    Used in ``not-saturated`` and ``survives``.

    >>> config = pretrained.configuration("bert-base-cased", width=8, depth=1, heads=2, vocab=10)
    >>> first, other = of_untrained(config, [0, 1], norms)
    >>> first["pooler.dense.bias"], first["pooler.dense.weight"] == other["pooler.dense.weight"]
    (0.0, False)
    """
    results = []
    for seed in tqdm(seeds, "untrained"):
        network = pretrained.random_model(config, seed, with_logits=with_logits).double().to(device)
        results.append(read(network))
        del network  # before the next one is drawn
    return results


def of_permuted(
    model: nn.Module, number: int, rng: torch.Generator, read: Callable[[nn.Module], Result]
) -> list[Result]:
    """What ``read`` gives for a model with its entries in random order, some times; the model stays so.

    Used in ``not-saturated``.
    """
    results = []
    for _ in tqdm(range(number), "permuted"):
        pretrained.permute_entries(model, rng)
        results.append(read(model))
    return results


@contextmanager
def changeable(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
    """Within a ``with`` block a model has copies of its parameters, which may be written to; it is restored after it.

    Args:
        dtype: the precision of the copies, and of the buffers; the model's own by default.

    Used in ``not-saturated``.

    >>> layer = nn.Linear(1, 1)
    >>> before = layer.weight.item()
    >>> with changeable(layer, torch.float64):
    ...     layer.weight.data *= 2
    ...     layer.weight.dtype
    torch.float64
    >>> layer.weight.item() == before
    True
    """
    floating = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    originals = [(tensor, tensor.data) for tensor in floating]
    try:
        for tensor, values in originals:
            tensor.data = values.to(dtype, copy=True)
        yield model
    finally:
        for tensor, values in originals:
            tensor.data = values


def norms(model: nn.Module) -> dict[str, float]:
    """Norm of each parameter tensor, by its name.

    Used in ``not-saturated``.
    """
    return {name: float(parameter.data.norm()) for name, parameter in model.named_parameters()}


def set_norms(model: nn.Module, tensor_norms: Mapping[str, float]) -> None:
    """Give each parameter tensor a norm of its own, in place; one that is 0, as a bias may be, stays 0.

    Used in ``not-saturated``.

    >>> layer = nn.Linear(2, 2)
    >>> set_norms(layer, {"weight": 3.0, "bias": 0.0})
    >>> [round(norm, 5) for norm in norms(layer).values()]
    [3.0, 0.0]
    """
    for name, parameter in model.named_parameters():
        parameter.data *= tensor_norms[name] / parameter.data.norm().clamp_min(1e-30)


def block_norms(tensor_norms: Mapping[str, float]) -> np.ndarray:
    """Norm of each block, ``(layers,)``: of the tensors that have its number in their names.

    Used in ``not-saturated``.

    >>> block_norms({"layer.0.weight": 3.0, "layer.0.bias": 4.0, "layer.1.weight": 1.0, "embedding": 9.0}).tolist()
    [5.0, 1.0]
    """
    squares: dict[int, float] = {}
    for name, length in tensor_norms.items():
        number = next((int(word) for word in name.split(".") if word.isdigit()), None)
        if number is not None:
            squares[number] = squares.get(number, 0.0) + length**2
    return np.sqrt([squares[number] for number in sorted(squares)])


def grow_blocks(model: nn.Module, stacks: Sequence[str], factors: Sequence[float], part: str = "") -> None:
    """Multiply the norm of each block by a factor, in place: its parameters with ``part`` in their names grow alone.

    Args:
        stacks: paths of lists of blocks in the model, which ``factors`` go along.

    Used in ``not-saturated``.

    >>> model = nn.ModuleDict({"layer": nn.ModuleList([nn.Linear(3, 3)])})
    >>> before = norms(model)["layer.0.bias"], block_norms(norms(model))[0]
    >>> grow_blocks(model, ["layer"], [2.0], part="weight")
    >>> norms(model)["layer.0.bias"] == before[0], round(float(block_norms(norms(model))[0] / before[1]), 5)
    (True, 2.0)
    """
    for stack in stacks:
        for block, factor in zip(cast(nn.ModuleList, model.get_submodule(stack)), factors, strict=True):
            growing = [parameter for name, parameter in block.named_parameters() if part in name]
            rest = (norm(block) / norm(growing)) ** 2  # 1 if all grow
            for parameter in growing:
                parameter.data *= (1 + rest * (factor**2 - 1)) ** 0.5
