"""Norms of a series of checkpoints against building the models, and against reading the same files by hand.

weightwatcher 0.7.7 takes 42 s for eight checkpoints of 49 M parameters, of which it reads the matrices, weightlens 28 s
for all tensors; by hand, and here, it is about 2 s.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch

from maintenance.benchmarks.timing import Row, compare, row
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


OURS = "import sys; from normgrowth import checkpoints; print(*checkpoints.series(sys.argv[1]).table.norm)"
BY_HAND = """
import sys, pathlib
import numpy as np
from safetensors import safe_open
before = None
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir(), key=lambda folder: int(folder.name[4:])):
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        theta = {name: file.get_tensor(name) for name in file.keys()}
    square = displacement_sq = inner = 0.0
    for name, values in theta.items():
        after = values.astype(np.float64).ravel()
        square += after @ after
        if before is not None:
            earlier = before[name].astype(np.float64).ravel()
            delta = after - earlier
            displacement_sq += delta @ delta
            inner += 2 * earlier @ delta
    before = theta
    print(square**0.5, end=" ")
"""


def seconds_alone(code: str, folder: Path) -> tuple[float, list[float]]:
    """CPU time of a process of its own, with its start, and the norms that it prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, [float(word) for word in done.stdout.split()]


def tensors(width: int, layers: int) -> dict[str, torch.Tensor]:
    """The tensors of a Transformer, random."""
    rng = generator(0, "cpu")
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (20 * width, width)}
    for i in range(layers):
        for name, rows, columns in (("q", 1, 1), ("k", 1, 1), ("v", 1, 1), ("o", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes[f"h.{i}.{name}.weight"] = (rows * width, columns * width)
            shapes[f"h.{i}.{name}.bias"] = (rows * width,)
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def write_steps(folder: Path, state: dict[str, torch.Tensor], steps: int, in_parts: bool = False) -> None:
    """A series in safetensors, or in PyTorch's distributed format; every step changes all values."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    for step in range(1, steps + 1):
        place = folder / f"step{step}"
        place.mkdir(parents=True)
        scaled = {name: value * (1 + 0.01 * step) for name, value in state.items()}
        if in_parts:
            dcp.save({"model": scaled}, checkpoint_id=place)
        else:
            save_file(scaled, place / "model.safetensors")


def against_reading_by_hand(what: str, width: int, layers: int, steps: int, bound: float) -> Row:
    """A series in a process of its own against a script of safetensors and numpy; both print the same norms."""
    with tempfile.TemporaryDirectory() as root:
        write_steps(Path(root), tensors(width, layers), steps)
        turns = [(seconds_alone(OURS, Path(root)), seconds_alone(BY_HAND, Path(root))) for _ in range(3)]
    assert all(torch.tensor(ours[1]).allclose(torch.tensor(plain[1])) for ours, plain in turns)
    return row(what, [ours[0] for ours, _ in turns], [plain[0] for _, plain in turns], bound)


def large_against_reading_by_hand() -> Row:
    what = "three checkpoints of 400 MB against safetensors and numpy, with the start of Python"
    return against_reading_by_hand(what, 768, 12, 3, 1 / 0.7)


def small_against_reading_by_hand() -> Row:
    what = "eight checkpoints of 190 MB against safetensors and numpy, with the start of Python"
    return against_reading_by_hand(what, 512, 13, 8, 1 / 1.2)


def in_parts_against_safetensors() -> Row:
    """A distributed checkpoint against the same tensors in safetensors, both by ours."""
    with tempfile.TemporaryDirectory() as root:
        whole = Path(root, "whole")
        parts = Path(root, "parts")
        state = tensors(768, 8)
        write_steps(whole, state, 3)
        write_steps(parts, state, 3, in_parts=True)
        turns = [(seconds_alone(OURS, parts), seconds_alone(OURS, whole)) for _ in range(3)]
    assert all(ours[1] == plain[1] for ours, plain in turns)
    what = "three distributed checkpoints of 270 MB against the same in safetensors"
    return row(what, [ours[0] for ours, _ in turns], [plain[0] for _, plain in turns], 1 / 1.5)


PAIRS = (
    against_models,
    large_against_reading_by_hand,
    small_against_reading_by_hand,
    in_parts_against_safetensors,
)
