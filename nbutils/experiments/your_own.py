"""A small series of checkpoints of a GPT-2, trained on the sources of Python and saved as a ``Trainer`` saves them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nbutils import text, training
from nbutils.devices import generator


def gpt2(vocab: int, width: int, layers: int, seed: int) -> Any:
    """A ``GPT2LMHeadModel`` with four heads and 64 positions, without dropout, at the initial values of ``seed``.

    Used in ``your-own``.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab,
        n_positions=64,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def series(
    folder: Path,
    device: str = "cpu",
    *,
    width: int,
    layers: int,
    steps: int,
    seed: int,
    lr: float = 2e-3,
    decay: float = 0.0,
) -> pd.DataFrame:
    """Train a ``gpt2``, save checkpoints, and return the history of every step, as in ``training.TrainingRun``.

    Checkpoints are saved at step 0 and at ``steps``, half of it, a quarter of it and so on, as long as the number is
    whole, so that points of growth like √t are evenly spaced on a logarithmic axis.

    Used in ``your-own``.

    Args:
        folder: gets a folder ``checkpoint-<step>`` for every saved step, with model and tokenizer.
        device: on which the model is trained.
        width: of the model; a multiple of four, the number of heads.
        layers: of the model.
        steps: number of steps.
        seed: of the initial values and of the batches.
        lr: learning rate of AdamW, η.
        decay: its weight decay, λ.
    """
    from transformers import PreTrainedTokenizerFast

    corpus = text.corpus(400_000)
    bpe = text.bpe(corpus, 512)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")
    model = gpt2(bpe.get_vocab_size(), width, layers, seed).to(device)

    saved_steps = [0, steps]  # for 12 steps: 0, 12, 6, 3
    while saved_steps[-1] % 2 == 0 and saved_steps[-1] > 0:
        saved_steps.append(saved_steps[-1] // 2)

    def save(step: int) -> None:
        if step not in saved_steps:
            return
        logging.disable(logging.WARNING)  # saving imports DeepSpeed where it is installed, and DeepSpeed logs to stdout
        try:
            model.save_pretrained(folder / f"checkpoint-{step}")
            tokenizer.save_pretrained(folder / f"checkpoint-{step}")
        finally:
            logging.disable(logging.NOTSET)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return training.batch_loss(lambda ids: model(ids).logits, batch)

    run = training.train(
        model,
        text.random_windows(text.tokens(corpus.train, bpe), 8, 33, generator(seed, "cpu")),
        steps=steps,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay),
        loss=loss,
        callback=save,
        device=device,
    )
    return run.history
