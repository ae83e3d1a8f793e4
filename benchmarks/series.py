"""Norms of a series of checkpoints against reading the files, and against building the models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file

from benchmarks.timing import Row, compare
from nbutils import checkpoints
from nbutils.devices import generator


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


def read(folder: Path) -> pd.DataFrame:
    """Each file through safetensors, each tensor squared in float64: norms alone, no neighbours."""
    files = (load_file(file) for file in sorted(folder.glob("*/model.safetensors")))
    return pd.DataFrame(
        {"norm": [sum(float(x.double().square().sum()) for x in file.values()) ** 0.5 for file in files]}
    )


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


def pair(plain: Callable[[Path], pd.DataFrame], what: str, bound: float) -> Row:
    """Norms, cosines and norm budget of three checkpoints. What both sides give must agree."""
    with saved_series() as folder:
        mine, theirs = checkpoints.series(folder).table, plain(folder)
        pd.testing.assert_frame_equal(mine[list(theirs.columns)], theirs, rtol=1e-9, check_dtype=False)
        what = f"norms, cosines and budget against {what}, 3 checkpoints of 87 MB"
        return compare(what, lambda: checkpoints.series(folder).table, lambda: plain(folder), bound)


def from_models() -> Row:
    return pair(built, "the same from built models", 5)


def from_safetensors() -> Row:
    return pair(read, "safetensors and the norms alone", 1 / 1.2)


PAIRS = {made: ["nbutils.checkpoints"] for made in (from_models, from_safetensors)}
