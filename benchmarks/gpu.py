"""The language model of chapter 6 on a GPU: tokens/s, model FLOP utilisation, and what bf16 and compilation change.

Rows only where CUDA is. Each has the exponent of the norm measured in the same training, so that a faster way that
measures something else is seen.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.growth import Exponent, exponent
from benchmarks.timing import Row, row
from nbutils import models, training
from nbutils.device import cuda_count, generator, hardware
from nbutils.trainings import recipes_lm

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # FLOP/s, dense bfloat16, from the makers' data sheets
WAYS = {"full": {}, "bf16": {"precision": "bf16"}, "bf16, compiled": {"precision": "bf16", "compile": True}}


class Throughput(NamedTuple):
    """One timed training."""

    seconds: float
    tokens_per_s: float
    flops: float  # FLOP/s by 6 per parameter and token, forward and backward; attention scores not counted
    norm: Exponent  # of ‖θ_t‖, over the last nine tenths of the steps


def throughput(size: recipes_lm.Size, *, steps: int, device: str, warmup: int = 3, **options: object) -> Throughput:
    """Train the pre-norm language model on random tokens and time it; the first steps, and compilation, do not count.

    N counts the embedding once: it is the output layer too, and looking up a row costs nothing.

    Raises:
        ValueError: fewer than 30 steps, too few for an exponent.
    """
    if steps < 30:
        raise ValueError(f"{steps} steps: an exponent of the norm needs 30 or more")
    net = models.CausalLM(size.vocab, size.dim, size.depth, size.heads, size.length, generator=generator(0, "cpu"))
    batch = torch.randint(size.vocab, (size.batch, size.length + 1), generator=generator(1, "cpu"))
    given = {"schedule": 1e-3, "every": 10, "device": device, "progress": False, **options}
    training.train(net, [batch], steps=warmup, **given)
    wait(device)
    start = time.perf_counter()
    history = training.train(net, [batch], steps=steps, **given).history
    wait(device)
    seconds = time.perf_counter() - start
    rate = steps * size.batch * size.length / seconds
    late = history[history.step >= steps / 10]
    return Throughput(seconds, rate, 6 * parameters(net) * rate, exponent(late.step, late.norm))


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def utilisation(flops: float, name: str) -> float | None:
    """Share of the peak of a GPU of this name; None where its peak is not listed.

    >>> utilisation(494.5e12, "NVIDIA H100 80GB HBM3")
    0.5
    """
    return next((flops / peak for key, peak in PEAK.items() if key in name), None)


def rows(steps: int = 100, turns: int = 3) -> list[Row]:
    """Each way against full precision, by turns; no rows without a GPU."""
    if not cuda_count():
        return []
    size = recipes_lm.size("gpu")
    runs = {way: [] for way in WAYS}
    for _ in range(turns):
        for way, options in WAYS.items():
            runs[way].append(throughput(size, steps=steps, device="cuda", **options))
    made = []
    for way, of in runs.items():
        what = f"language model, {size.depth} layers of width {size.dim}, on a GPU: {way}, against full precision"
        each = row(what, [one.seconds for one in of], [one.seconds for one in runs["full"]], 1) | {"clock": "wall"}
        best = max(of, key=lambda one: one.tokens_per_s)
        each |= {"tokens_per_s": best.tokens_per_s, "mfu": utilisation(best.flops, torch.cuda.get_device_name())}
        made.append(
            each
            | {"norm_exponent": best.norm.p, "low": best.norm.low, "high": best.norm.high}
            | {"hardware": hardware("cuda")}
        )
    return made
