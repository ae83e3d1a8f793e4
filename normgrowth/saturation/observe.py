"""One forward pass with all that the ray asks for: logits, last representations, and attention weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normgrowth.saturation.batches import Batch, check_unpadded, real_tokens


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


def why_no_next_token(model: nn.Module, batch: Batch, observed: Observed) -> str:
    """Why the logits are not those of next tokens; empty if they are.

    These have a column for each token of the vocabulary, and stay as they are when the latter half of a sentence
    changes. A difference in float32 or less may be lost to rounding: give the model in float64.

    Raises:
        ValueError: there are logits, but no later token.
    """
    logits = observed.logits
    if logits is None:
        return "the model returns no logits"
    if logits.ndim != 3 or logits.shape[:2] != observed.tokens.shape:
        return f"its logits, of shape {tuple(logits.shape)}, are not one row for each token"
    sizes = _vocabularies(model)
    if sizes and logits.shape[-1] not in sizes:
        known = " or ".join(map(str, sorted(sizes)))
        return f"its logits have {logits.shape[-1]} columns, and the vocabulary {known} tokens"
    if logits.shape[1] < 2:
        raise ValueError("no sentence has two tokens: there is no next one to predict")
    middle = (logits.shape[1] + 1) // 2
    name = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    changed = batch[name].clone()
    changed[:, middle:] = (changed[:, middle:] == 0).to(changed.dtype)  # 1 in place of 0, and 0 of any other token
    other = observe(model, {**batch, name: changed}).logits
    assert other is not None
    units = 1e3 if logits.dtype == torch.float64 else 8.0  # of rounding; in float64 there is room for more
    tolerance = units * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    largest = float((logits[:, :middle] - other[:, :middle]).abs().max())
    return "" if largest <= tolerance else "its logits depend on later tokens"


def _vocabularies(model: nn.Module) -> set[int]:
    """How many tokens a model knows, by its configuration and its tables; of an encoder and a decoder maybe two."""
    network: Any = model
    if not hasattr(model, "config"):
        return _table_sizes(model)
    sizes = {getattr(network.config.get_text_config(decoder=True), "vocab_size", None)}
    sizes.add(getattr(network.get_input_embeddings(), "num_embeddings", None))
    of_decoder = _table_sizes(network.get_decoder()) if network.config.is_encoder_decoder else set()
    return of_decoder | {size for size in sizes if isinstance(size, int)}


def _table_sizes(model: nn.Module) -> set[int]:
    return {table.num_embeddings for table in model.modules() if isinstance(table, nn.Embedding)}
