"""Run all pairs: ``python -m benchmarks``. Writes ``_build/bench.json`` and prints the table.

A pair is timed by CPU time of one thread, three times a side; the medians are compared. Both sides must agree on a
result that they share.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn
from tqdm import tqdm

from nbutils import norms, walks
from nbutils.device import generator

RESULT = Path(__file__).resolve().parent.parent / "_build" / "bench.json"


def cpu_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median CPU time of a call."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def stepwise(n: int, steps: int, count: int, seed: int) -> torch.Tensor:
    """The plain way: every step of every walk. Norms after the last step, shape (count,)."""
    rng, theta = generator(seed, "cpu"), torch.zeros(count, n)
    for _ in range(steps):
        theta += torch.randn(count, n, generator=rng)
    return theta.norm(dim=1)


def random_walk() -> dict[str, object]:
    """n = 10⁵, t = 10⁶, 100 walks. The plain side is timed over 20 steps; its cost is linear in t."""
    shared = walks.walk_norms(
        walks.gaussian, n=1000, times=np.array([1, 300]), walks=200, generator=generator(1, "cpu")
    )[:, -1]
    plain_mean = float(stepwise(1000, 300, 200, 2).mean())
    assert abs(shared.mean() / plain_mean - 1) < 0.02, f"the two sides disagree: {shared.mean()} and {plain_mean}"
    times = walks.log_times(10**6, per_decade=4)

    def ours() -> None:
        walks.walk_norms(walks.gaussian, n=10**5, times=times, walks=100, generator=generator(0, "cpu"))

    plain = cpu_seconds(lambda: stepwise(10**5, 20, 100, 0)) / 20 * 10**6
    return {
        "what": "random walk, n = 10⁵, t = 10⁶, 100 walks",
        "ours_s": cpu_seconds(ours),
        "plain_s": plain,
        "bound": 1000,
    }


def language_model(blocks: int = 10, d: int = 256, vocabulary: int = 8000) -> tuple[nn.ModuleDict, Callable[[], None]]:
    """A causal language model of 10 M parameters; forward and backward over a batch of 8 × 128 tokens."""
    layer = nn.TransformerEncoderLayer(d, 8, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(vocabulary, d),
            "h": nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False).layers,
        }
    )
    tokens = torch.randint(vocabulary, (8, 129), generator=generator(0, "cpu"))
    mask = nn.Transformer.generate_square_subsequent_mask(128)

    def loss_and_gradient() -> None:
        model.zero_grad()
        x = model["embedding"](tokens[:, :-1])
        for block in model["h"]:
            x = block(x, src_mask=mask, is_causal=True)
        logits = x @ model["embedding"].weight.T
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    return model, loss_and_gradient


@functools.cache
def tracked_steps(steps: int = 7) -> dict[str, float]:
    """Median CPU time of a training step, and of each way to measure the same steps: norm, ‖δ‖ and θ·δ by layer."""
    model, loss_and_gradient = language_model()
    named = dict(model.named_parameters())
    optimizer, tracker = torch.optim.AdamW(named.values(), lr=1e-3), norms.NormTracker(named.items())
    old, squares = {}, np.zeros(3)

    def plain_before() -> None:
        old.update((name, p.detach().clone()) for name, p in named.items())

    def plain_after() -> None:
        squares[:] = 0
        for name, p in named.items():
            delta = p.detach() - old[name]
            measured = p.detach().norm().item() ** 2, delta.norm().item() ** 2, (old[name] * delta).sum().item()
            squares[:] += measured

    work = {"train": (loss_and_gradient, optimizer.step), "plain": (plain_before, plain_after)}
    work["ours"] = (tracker.before, tracker.after)
    times = {side: np.zeros(steps) for side in work}
    for i in range(steps):
        order = [("train", 0), ("plain", 0), ("ours", 0), ("train", 1), ("plain", 1), ("ours", 1)]
        for side, part in order:
            start = time.process_time()
            work[side][part]()
            times[side][i] += time.process_time() - start
    total = tracker.history().iloc[-1]
    ours = np.array([total.norm**2, total.step_norm**2, total.inner])
    size = np.array([ours[0], ours[1], total.norm * total.step_norm])
    assert (np.abs(ours - squares) < 1e-4 * size).all(), f"the two sides disagree: {ours} and {squares}"
    return {side: float(np.median(seconds)) for side, seconds in times.items()}


def norm_tracking() -> dict[str, object]:
    """Ours against clone, subtract, and a norm and an inner product for each tensor by ``.item()``."""
    seconds = tracked_steps()
    what = "norm, ‖δ‖ and θ·δ of a step, 10 M parameters"
    return {"what": what, "ours_s": seconds["ours"], "plain_s": seconds["plain"], "bound": 2}


def share_of_a_step() -> dict[str, object]:
    """Tracking every step against the step itself: at most 1 %."""
    seconds = tracked_steps()
    what = "the same against the training step itself, batch 8 × 128"
    return {"what": what, "ours_s": seconds["ours"], "plain_s": seconds["train"], "bound": 100}


PAIRS: tuple[Callable[[], dict[str, object]], ...] = (random_walk, norm_tracking, share_of_a_step)


def main() -> int:
    torch.set_num_threads(1)
    rows = []
    for pair in tqdm(PAIRS, desc="pairs"):
        row = pair()
        row["ratio"] = row["plain_s"] / row["ours_s"]
        row["holds"] = bool(row["ratio"] >= row["bound"])
        rows.append(row)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(pd.DataFrame(rows).to_markdown(index=False, floatfmt=".4g"))
    print("CPU seconds; the plain side may be extrapolated from a shorter run. holds: the ratio is at least the bound.")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
