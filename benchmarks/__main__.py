"""Run all pairs: ``python -m benchmarks``. Writes ``_build/bench.json`` and prints the table.

A pair is timed by CPU time of one thread, three times a side; the medians are compared. Both sides must agree on a
result that they share.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file
from tqdm import tqdm

from nbutils import checkpoints, walks
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


def plain_read(folder: Path) -> list[float]:
    """Each file through safetensors, each tensor squared in float64: norms alone, no neighbours."""
    norms = []
    for file in sorted(folder.glob("*/model.safetensors")):
        square = sum(float(tensor.double().square().sum()) for tensor in load_file(file).values())
        norms.append(square**0.5)
    return norms


def built_models(folder: Path) -> list[float]:
    """Each model built, its parameters concatenated; cosine and displacement against the one before, as ours gives."""
    from transformers import GPT2LMHeadModel

    norms, before = [], None
    for checkpoint in sorted(folder.iterdir()):
        net = GPT2LMHeadModel.from_pretrained(checkpoint)
        theta = torch.cat([p.detach().flatten() for p in net.parameters()]).double()
        norms.append(float(theta.norm()))
        if before is not None:
            delta = theta - before
            float(delta @ delta), float(2 * before @ delta), float(torch.cosine_similarity(theta, before, dim=0))
        before = theta
    return norms


def checkpoint_series(plain: Callable[[Path], list[float]], what: str, bound: float) -> dict[str, object]:
    """Three checkpoints of 87 MB; ours gives norms, cosines and the norm budget."""
    with saved_series() as folder:
        np.testing.assert_allclose(checkpoints.series(folder).table.norm, plain(folder), rtol=1e-9)
        return {
            "what": f"series of checkpoints, 3 × 87 MB, against {what}",
            "ours_s": cpu_seconds(lambda: checkpoints.series(folder)),
            "plain_s": cpu_seconds(lambda: plain(folder)),
            "bound": bound,
        }


def checkpoints_read() -> dict[str, object]:
    return checkpoint_series(plain_read, "reading the files and their norms alone", 1 / 1.2)


def checkpoints_built() -> dict[str, object]:
    return checkpoint_series(built_models, "building each model, the same numbers", 5)


PAIRS: tuple[Callable[[], dict[str, object]], ...] = (random_walk, checkpoints_read, checkpoints_built)


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
