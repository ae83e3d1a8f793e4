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
from nbutils.device import generator


@contextmanager
def saved_series(steps: int = 3) -> Iterator[Path]:
    """Checkpoints of a GPT-2 of 22 M parameters (87 MB each), weights random, as transformers saves them."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    rng = generator(0, "cpu")
    config = GPT2Config(
        vocab_size=5000, n_embd=512, n_layer=6, n_head=8, n_positions=512, bos_token_id=0, eos_token_id=0
    )
    net = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for step in range(steps):
            for parameter in net.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=0.02)
            net.save_pretrained(Path(folder) / f"checkpoint-{step}")
        yield Path(folder)


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/model.safetensors"))


def new_bytes(folder: Path) -> int:
    """All bytes, each file into memory of its own."""
    return sum(len(file.read_bytes()) for file in weights(folder))


def one_buffer(folder: Path) -> int:
    """All bytes through one buffer of 1 MB: nothing is kept, no memory is new."""
    buffer, total = memoryview(bytearray(2**20)), 0
    for file in weights(folder):
        with open(file, "rb", buffering=0) as stream:
            while read := stream.readinto(buffer):
                total += read
    return total


def plain_read(folder: Path) -> pd.DataFrame:
    """Each file through safetensors, each tensor squared in float64: norms alone, no neighbours."""
    norms = []
    for file in weights(folder):
        square = sum(float(tensor.double().square().sum()) for tensor in load_file(file).values())
        norms.append(square**0.5)
    return pd.DataFrame({"norm": norms})


def built_models(folder: Path) -> pd.DataFrame:
    """Each model built, its parameters concatenated; cosine and displacement against the one before, as ours gives."""
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


def built_norms(folder: Path) -> pd.DataFrame:
    """Each model built, and the norm of its parameters, concatenated, in float64."""
    from transformers import GPT2LMHeadModel

    nets = (GPT2LMHeadModel.from_pretrained(checkpoint) for checkpoint in sorted(folder.iterdir()))
    return pd.DataFrame(
        {"norm": [float(torch.cat([p.detach().flatten() for p in net.parameters()]).double().norm()) for net in nets]}
    )


def whole(folder: Path) -> pd.DataFrame:
    """Ours: norms, cosines and the norm budget."""
    return checkpoints.series(folder).table


def each_alone(folder: Path) -> pd.DataFrame:
    """Ours without neighbours: norms alone."""
    return pd.concat([checkpoints.series(one).table for one in sorted(folder.iterdir())], ignore_index=True)


Side = Callable[[Path], pd.DataFrame]


def checkpoint_series(ours: Side, plain: Side, what: str, bound: float) -> Row:
    """Three checkpoints of 87 MB. What both sides give must agree."""
    with saved_series() as folder:
        mine, theirs = ours(folder), plain(folder)
        pd.testing.assert_frame_equal(mine[list(theirs.columns)], theirs, rtol=1e-9, check_dtype=False)
        return compare(f"{what}, 3 checkpoints of 87 MB", lambda: ours(folder), lambda: plain(folder), bound)


def against_bytes(ours: Side, read: Callable[[Path], int], what: str) -> Row:
    """Reading alone, from the page cache on both sides."""
    with saved_series() as folder:
        assert read(folder) == sum(file.stat().st_size for file in weights(folder))
        return compare(f"{what}, 3 checkpoints of 87 MB", lambda: ours(folder), lambda: read(folder), 1 / 1.2)


def built() -> Row:
    return checkpoint_series(each_alone, built_norms, "norms against `from_pretrained` and the norm of all", 5)


def built_the_same() -> Row:
    return checkpoint_series(whole, built_models, "norms, cosines and budget against the same from built models", 5)


def opened() -> Row:
    what = "norms, cosines and budget against safetensors and the norms alone"
    return checkpoint_series(whole, plain_read, what, 1 / 1.2)


def norms_against_bytes() -> Row:
    return against_bytes(each_alone, new_bytes, "norms against reading the bytes into new memory")


def all_against_bytes() -> Row:
    return against_bytes(whole, new_bytes, "norms, cosines and budget against reading the bytes into new memory")


def all_against_a_buffer() -> Row:
    return against_bytes(whole, one_buffer, "norms, cosines and budget against reading the bytes through one buffer")


PAIRS = (built, built_the_same, opened, norms_against_bytes, all_against_bytes, all_against_a_buffer)
