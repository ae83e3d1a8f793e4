"""A small series of checkpoints for chapter 17, as any trainer leaves one: a GPT-2 trained on Python's own sources."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from nbutils import norms, text
from nbutils.devices import generator


def gpt2(vocab: int, width: int, layers: int, seed: int) -> Any:
    """A ``GPT2LMHeadModel`` of four heads and 64 positions, without dropout; initial values drawn from ``seed``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends: Any = {"bos_token_id": 1, "eos_token_id": 1}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = GPT2Config(vocab_size=vocab, n_positions=64, n_embd=width, n_layer=layers, n_head=4, **rates, **ends)
        return GPT2LMHeadModel(config)


def train(model: Any, ids: Tensor, tracker: norms.NormTracker, steps: int, seed: int) -> Iterator[int]:
    """A plain training loop with a tracker in it; gives the number of each step once it is done."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    tracker.attach(optimizer)
    batches = text.batches(ids, 8, 32, generator(seed, "cpu"))
    for step, (inputs, targets) in zip(range(1, steps + 1), batches, strict=False):
        logits = model(input_ids=inputs).logits  # (batch, T, vocab)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step


def series(
    folder: Path, device: torch.device | str = "cpu", *, width: int, layers: int, steps: int, seed: int
) -> norms.NormTracker:
    """Train the model; save it at step 0 and, doubling up to ``steps``, while the number is whole.

    Steps double so that growth like √t is sampled evenly on a logarithmic axis. Returns the tracker of every step.
    """
    from transformers import PreTrainedTokenizerFast

    corpus = text.corpus(400_000)
    bpe = text.bpe(corpus, 512)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")
    model = gpt2(bpe.get_vocab_size(), width, layers, seed).to(device)
    tracker = norms.NormTracker(model.named_parameters(), by=None)
    ids = text.tokens(corpus.train, bpe).to(device)
    _save(folder / "checkpoint-0", model, tokenizer)
    for step in tqdm(train(model, ids, tracker, steps, seed), total=steps, desc="training"):
        if steps % step == 0 and (steps // step).bit_count() == 1:  # 3, 6, 12, …
            _save(folder / f"checkpoint-{step}", model, tokenizer)
    return tracker


def _save(folder: Path, *parts: Any) -> None:
    logging.disable(logging.WARNING)  # where DeepSpeed is installed, saving imports it, and it logs to stdout
    try:
        for part in parts:
            part.save_pretrained(folder)
    finally:
        logging.disable(logging.NOTSET)
