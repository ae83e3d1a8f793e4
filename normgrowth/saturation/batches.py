"""What a model reads: batches of sentences, the real tokens in them, and the forward pass of models of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

Batch = Mapping[str, Tensor]


def real_tokens(batch: Batch) -> Tensor:
    """Which tokens of ``input_ids`` are no padding, bool, ``(batch, T)``."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def check_unpadded(batch: Batch) -> None:
    """Raise ValueError if a batch for a model without an attention mask has padding."""
    if not real_tokens(batch).all():
        raise ValueError("this model takes no attention mask: give it sentences of one length, without padding")


def forward(model: nn.Module, batch: Batch, **outputs: bool) -> Any:
    """Output of a model of ``transformers``; of an encoder–decoder without ``decoder_input_ids``, of its encoder.

    Raises:
        ValueError: a token has no row in the embedding.
        TypeError: another model.
    """
    part: Any = model
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(
            f"{type(model).__name__} is no model of transformers: for saturation give it a method "
            "hidden_states(tokens), for heads attentions(tokens)"
        )
    rows = getattr(part.get_input_embeddings(), "num_embeddings", None)
    for name in ("input_ids", "decoder_input_ids"):
        if rows is not None and name in batch and (largest := int(batch[name].max())) >= rows:
            raise ValueError(
                f"token {largest} is beyond the {rows} rows of the embedding: the tokenizer is not that of this model"
            )
    if part.config.is_encoder_decoder and "decoder_input_ids" not in batch:
        part = part.get_encoder()
    return part(**batch, **outputs, return_dict=True)


def batches_by_length(
    sentences: Sequence[Sequence[int]],
    *,
    decoder: Sequence[Sequence[int]] | None = None,
    max_tokens: int = 4096,
    pad: int = 0,
    device: torch.device | str = "cpu",
) -> list[dict[str, Tensor]]:
    """Pack sentences of token numbers into batches of at most ``max_tokens``, those of like length together.

    Padding is on the right and counts. A sentence longer than ``max_tokens`` is a batch of its own. ``decoder`` has
    what the decoder of an encoder–decoder reads for each sentence.

    Raises:
        ValueError: no sentence, or an empty one.

    >>> [batch["input_ids"].shape for batch in batches_by_length([[1, 2, 3], [4], [5, 6]], max_tokens=4)]
    [torch.Size([2, 2]), torch.Size([1, 3])]
    """
    if not sentences:
        raise ValueError("no sentence to batch")
    texts = {"": sentences} if decoder is None else {"": sentences, "decoder_": decoder}
    rows = list(zip(*texts.values(), strict=True))
    if empty := [i for i, row in enumerate(rows) if not all(map(len, row))]:
        raise ValueError(f"sentence {empty[0]} has no token (has the folder a tokenizer?)")
    groups: list[list[tuple[Sequence[int], ...]]] = []
    for row in sorted(rows, key=lambda row: max(map(len, row))):
        if groups and (len(groups[-1]) + 1) * max(map(len, row)) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    batches = []
    for group in groups:
        batch: dict[str, Tensor] = {}
        for name, column in zip(texts, zip(*group, strict=True), strict=True):
            ids = pad_sequence([torch.tensor(sentence) for sentence in column], True, pad)
            real = pad_sequence([torch.ones(len(sentence), dtype=torch.long) for sentence in column], True)
            batch |= {f"{name}input_ids": ids.to(device), f"{name}attention_mask": real.to(device)}
        batches.append(batch)
    return batches
