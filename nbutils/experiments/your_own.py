"""A small series of checkpoints for chapter 24, as any trainer leaves one: a GPT-2 trained on Python's own sources."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nbutils import text, training
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


def series(folder: Path, device: str = "cpu", *, width: int, layers: int, steps: int, seed: int) -> pd.DataFrame:
    """Train the model; save it at step 0 and, doubling up to ``steps``, while the number is whole.

    Steps double so that growth like √t is sampled evenly on a logarithmic axis. Returns the history of every step.
    """
    from transformers import PreTrainedTokenizerFast

    corpus = text.corpus(400_000)
    bpe = text.bpe(corpus, 512)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")
    model = gpt2(bpe.get_vocab_size(), width, layers, seed).to(device)

    whole = {0, *(s for s in range(1, steps + 1) if steps % s == 0 and (steps // s).bit_count() == 1)}  # 3, 6, 12, …

    def save(step: int) -> None:
        if step not in whole:
            return
        logging.disable(logging.WARNING)  # where DeepSpeed is installed, saving imports it, and it logs to stdout
        try:
            for part in (model, tokenizer):
                part.save_pretrained(folder / f"checkpoint-{step}")
        finally:
            logging.disable(logging.NOTSET)

    return training.train(
        model,
        text.random_windows(text.tokens(corpus.train, bpe), 8, 33, generator(seed, "cpu")),
        steps=steps,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0),
        loss=lambda model, batch: training.batch_loss(lambda ids: model(ids).logits, batch),
        look=save,
        device=device,
    ).history
