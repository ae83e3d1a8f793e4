"""Norms of a series of checkpoints against building the models."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch

from maintenance.benchmarks.timing import Row, compare
from nbutils.devices import generator
from normgrowth import checkpoints


@contextmanager
def saved_series(steps: int = 3) -> Iterator[Path]:
    """Checkpoints of a GPT-2 of 22 M parameters (87 MB each), weights random, as transformers saves them."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    rng = generator(0, "cpu")
    net = GPT2LMHeadModel(
        GPT2Config(vocab_size=5000, n_embd=512, n_layer=6, n_head=8, n_positions=512, bos_token_id=0, eos_token_id=0)
    )
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for step in range(steps):
            for parameter in net.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=0.02)
            net.save_pretrained(Path(folder) / f"checkpoint-{step}")
        yield Path(folder)


def built(folder: Path) -> pd.DataFrame:
    """Each model built: its norm, and cosine and displacement against the one before, as ours gives."""
    from transformers import GPT2LMHeadModel

    rows, before = [], None
    for checkpoint in sorted(folder.iterdir()):
        net = GPT2LMHeadModel.from_pretrained(checkpoint)
        theta = torch.cat([p.detach().flatten() for p in net.parameters()]).double()
        rows.append({"norm": float(theta.norm())})
        if before is not None:
            delta = theta - before
            rows[-1] |= {"displacement_sq": float(delta @ delta), "inner": float(2 * before @ delta)}
            rows[-1] |= {"cos_similarity": float(theta @ before) / rows[-1]["norm"] / rows[-2]["norm"]}
        before = theta
    return pd.DataFrame(rows)


def against_models() -> Row:
    """Norms, cosines and norm budget of three checkpoints; both sides must agree."""
    with saved_series() as folder:
        mine, theirs = checkpoints.series(folder).table, built(folder)
        pd.testing.assert_frame_equal(mine[list(theirs.columns)], theirs, rtol=1e-9, check_dtype=False)
        what = "norms, cosines and budget against the same from built models, 3 checkpoints of 87 MB"
        return compare(what, lambda: checkpoints.series(folder).table, lambda: built(folder), 5)


PAIRS = (against_models,)
