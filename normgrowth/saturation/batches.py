"""Batches of sentences, their tokens without padding, and the forward pass of models of ``transformers``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

Batch = Mapping[str, Tensor]


def real_tokens(batch: Batch) -> Tensor:
    """Which tokens of ``input_ids`` are not padding, bool, ``(batch, T)``."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def check_unpadded(batch: Batch) -> None:
    """Raise ValueError if a batch for a model without an attention mask has padding."""
    if not real_tokens(batch).all():
        raise ValueError("this model takes no attention mask: give it sentences of one length, without padding")


def forward(model: nn.Module, batch: Batch, **outputs: bool) -> Any:
    """Output of a model of ``transformers``.

    An encoder–decoder runs its encoder alone, unless the batch has ``decoder_input_ids``. ``outputs`` are the model's
    own switches, such as ``output_hidden_states=True``.

    Raises:
        ValueError: a token has no row in the embedding.
        TypeError: the model is not one of ``transformers``.
    """
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(
            f"{type(model).__name__} is not a model of transformers: for saturation give it a method "
            "hidden_states(tokens), for heads attentions(tokens)"
        )
    network: Any = _without_output_layer(model)
    vocabulary = getattr(network.get_input_embeddings(), "num_embeddings", None)
    for name in ("input_ids", "decoder_input_ids"):
        if vocabulary is None or name not in batch:
            continue
        largest = int(batch[name].max())
        if largest >= vocabulary:
            raise ValueError(
                f"token {largest} is beyond the {vocabulary} rows of the embedding: the tokenizer is not that of this "
                "model"
            )
    if network.config.is_encoder_decoder and "decoder_input_ids" not in batch:
        network = network.get_encoder()
    return network(**batch, **outputs, return_dict=True)


def _without_output_layer(model: nn.Module) -> Any:
    """The network of a model of ``transformers`` that gives representations; a model that wraps one stays itself."""
    from transformers import PreTrainedModel

    return model.base_model if isinstance(model, PreTrainedModel) else model


def batches_by_length(
    sentences: Sequence[Sequence[int]],
    *,
    decoder: Sequence[Sequence[int]] | None = None,
    max_tokens: int = 4096,
    max_pairs: float = math.inf,
    padding: bool = True,
    pad: int = 0,
    device: torch.device | str = "cpu",
) -> list[dict[str, Tensor]]:
    """Pack sentences, sorted by length, into batches of at most ``max_tokens`` tokens and ``max_pairs`` pairs of them.

    Padding is on the right. A sentence beyond these bounds is a batch of its own.

    Args:
        sentences: token ids of each sentence.
        decoder: for an encoder–decoder, the token ids that its decoder reads with each sentence.
        max_tokens: tokens of a batch including padding, in the encoder or in the decoder, whichever has more.
        max_pairs: queries times keys of a batch including padding, which attention weights are proportional to.
        padding: pack sentences of unlike length together. Some models let padding change real tokens, whatever the
            mask says, as FNet does; without padding each batch has sentences of one length.
        pad: token id of the padding.
        device: where the batches are put.

    Returns:
        Batches with ``input_ids`` and ``attention_mask``, int64, ``(batch, T)``; with ``decoder`` also
        ``decoder_input_ids`` and ``decoder_attention_mask``.

    Raises:
        ValueError: there are no sentences, a sentence is empty, or ``decoder`` is not as long as ``sentences``.

    >>> [batch["input_ids"].shape for batch in batches_by_length([[1, 2, 3], [4], [5, 6]], max_tokens=4)]
    [torch.Size([2, 2]), torch.Size([1, 3])]
    """
    if not sentences:
        raise ValueError("no sentence to batch")
    examples: list[tuple[Sequence[int], ...]]
    if decoder is None:
        examples = [(sentence,) for sentence in sentences]
    else:
        examples = list(zip(sentences, decoder, strict=True))
    for number, example in enumerate(examples):
        if not all(len(ids) for ids in example):
            raise ValueError(f"sentence {number} has no token (does the folder have a tokenizer?)")

    def length(example: tuple[Sequence[int], ...]) -> int:
        return max(len(ids) for ids in example)

    groups: list[list[tuple[Sequence[int], ...]]] = []
    for example in sorted(examples, key=length):
        tokens = (len(groups[-1]) + 1) * length(example) if groups else 0
        same_length = bool(groups) and list(map(len, groups[-1][0])) == list(map(len, example))
        if groups and (padding or same_length) and tokens <= max_tokens and tokens * length(example) <= max_pairs:
            groups[-1].append(example)
        else:
            groups.append([example])
    batches = []
    for group in groups:
        batch = _padded([example[0] for example in group], pad, device)
        if decoder is not None:
            of_decoder = _padded([example[1] for example in group], pad, device)
            batch |= {f"decoder_{name}": tensor for name, tensor in of_decoder.items()}
        batches.append(batch)
    return batches


def _padded(sentences: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> dict[str, Tensor]:
    """One batch of sentences, padded on the right: ``input_ids`` and ``attention_mask``, int64, ``(batch, T)``."""
    ids = [torch.tensor(sentence) for sentence in sentences]
    real = [torch.ones(len(sentence), dtype=torch.long) for sentence in sentences]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad).to(device),
        "attention_mask": pad_sequence(real, batch_first=True).to(device),
    }
