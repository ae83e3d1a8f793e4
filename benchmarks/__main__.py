"""Run all pairs: ``python -m benchmarks``. Writes ``_build/bench.json`` and prints the table.

A pair is timed by CPU time of one thread, three times a side; the medians are compared. Both sides must agree on a
result that they share.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from nbutils import saturation, walks
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


def representation_similarity() -> dict[str, object]:
    """100 sentences of 8 to 39 tokens at c = 1000, a new BERT of 4 layers and width 64.

    The plain side is ``similarity``, sentence by sentence; it scales the model each time, ours does so once. Ours also
    computes the centred similarity and the anisotropy.
    """
    import transformers

    size = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(vocab_size=2000, **size))
    rng = generator(0, "cpu")
    lengths = torch.randint(8, 40, (100,), generator=rng).tolist()
    sentences = [torch.randint(5, 2000, (length,), generator=rng).tolist() for length in lengths]

    def plain() -> torch.Tensor:
        single = [saturation.similarity(model, {"input_ids": torch.tensor([sentence])}) for sentence in sentences]
        return torch.stack(single).mean(0)

    def ours() -> torch.Tensor:
        return saturation.similarity_many(model, sentences).raw

    gap = float((plain() - ours()).abs().max())
    assert gap < 1e-5, f"the two sides disagree by {gap:.2g}"
    return {
        "what": "representation similarity, 100 sentences, against one at a time",
        "ours_s": cpu_seconds(ours),
        "plain_s": cpu_seconds(plain),
        "bound": 5,
    }


PAIRS: tuple[Callable[[], dict[str, object]], ...] = (random_walk, representation_similarity)


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
