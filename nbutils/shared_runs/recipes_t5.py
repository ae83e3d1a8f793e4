"""Shared trainings of a small T5, with its optimizer and schedule, and their null models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from nbutils.training import TrainingRun

DRAWS = 9  # independent repetitions for a seed: a population


def draw_seed(seed: int, draw: int) -> int:
    """The seed of one repetition; no two pairs of a seed and a draw have the same.

    Seeds come in blocks of a thousand: the nine draws of seeds 0 to 999 have the seeds 0 to 8,999, those of seeds 1000
    to 1999 the next 9,000.

    >>> [draw_seed(seed, draw) for seed in (7, 1007) for draw in (0, 1, 8)]
    [7, 1007, 8007, 9007, 10007, 17007]
    """
    return 1000 * (DRAWS * (seed // 1000) + draw) + seed % 1000


def t5(draw: int = 0, *, null: bool = False, profile: str, seed: int, device: str) -> TrainingRun:
    """Train a small T5 with T5's recipe: Adafactor with rate 1/√max(t, warm-up), tied embeddings, no dropout.

    Rows have one length. The text is that of Python's standard library, which is on every machine. Steps are recorded
    by layer, and in the null model by parameter: with noise each matrix is a random walk of its own.

    Args:
        draw: number of the repetition, 0 to 8; each has its own initial values, batches and noise.
        null: the null model, the same network with noise in place of its gradients.

    Returns:
        A run whose ``measures`` are the ``path_coordinates`` of its parameters at evenly spaced steps.

    >>> history = t5(null=True, profile="smoke", seed=0, device="cpu").history
    >>> round(float(history["step_norm"][1] / history["norm"][0]), 3)  # relative steps, a warm-up of 16: 1/√16
    0.25
    """
    from nbutils import devices, optimizers, profiles, text, training
    from normgrowth.layers import layer_of

    dim, layers, heads = profiles.choose(profile, smoke=(32, 2, 2), book=(64, 2, 4), gpu=(256, 2, 8))
    batch, length, vocab = profiles.choose(profile, smoke=(4, 32, 512), book=(8, 64, 1024), gpu=(16, 128, 4096))
    # T5: 524,288 and 10,000. A GPU is as fast as kernels start, so `gpu` is wider, not deeper: maintenance/plan.py
    steps, warmup = profiles.choose(profile, smoke=(128, 16), book=(640, 80), gpu=(384, 48))
    text_bytes = profiles.choose(profile, smoke=200_000, book=2_000_000, gpu=8_000_000)
    snapshot_every = steps // profiles.choose(profile, smoke=8, book=32, gpu=32)
    run_seed = draw_seed(seed, draw)
    model = small_t5(vocab, dim, layers, heads=heads, seed=run_seed)
    batches: Iterable[dict[str, Tensor]] = ()
    if not null:
        corpus = text.corpus(text_bytes)
        sentinels = min(100, vocab // 16)  # T5 has 100
        tokenizer = text.bpe(corpus, vocab, sentinels=sentinels)
        last_id = tokenizer.get_vocab_size() - 1
        sentinel_ids = range(last_id, last_id - sentinels, -1)  # the first sentinel is the last id
        tokens = text.tokens(corpus.train, tokenizer)
        batches = text.span_batches(tokens, batch, length, devices.generator(run_seed, "cpu"), sentinel_ids)
    snapshots: dict[int, dict[str, Tensor]] = {}

    def save_snapshot(step: int) -> None:
        if step % snapshot_every == 0:
            snapshots[step] = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}

    run = training.train(
        model,
        batches,
        steps=steps,
        optimizer="adafactor",
        schedule=optimizers.inverse_sqrt(1.0, warmup=warmup),
        gradients="noise" if null else "loss",
        by=str if null else layer_of,
        callback=save_snapshot,
        device=device,
        seed=run_seed,  # also that of the weights; T5 draws them in another order, so the noise is not parallel to them
    )
    return replace(run, measures=path_coordinates(snapshots), settings=run.settings | {"warmup": warmup})


RECIPES: Mapping[str, Callable[..., TrainingRun]] = {
    "t5-own": t5,
    **{f"t5-own-{draw + 1}": partial(t5, draw) for draw in range(1, DRAWS)},
    "t5-null": partial(t5, null=True),
}


def path_coordinates(snapshots: Mapping[int, Mapping[str, Tensor]]) -> pd.DataFrame:
    """Points with the same lengths and angles as the n snapshots of a run: columns ``x0``, ``x1``, … and ``step``.

    The n snapshots and the origin span at most n dimensions, so their inner products determine all lengths and angles.
    The products are summed tensor by tensor in float64, which needs n times the memory of the largest tensor. The tied
    embedding is left out. Distances are right to about 1e-7 of the largest norm.

    >>> import torch
    >>> runs = {step: {"shared.weight": torch.ones(9), "w": torch.tensor([3.0, 4.0]) * step} for step in (20, 10)}
    >>> points = path_coordinates(runs)
    >>> points["step"].tolist(), np.linalg.norm(points[["x0", "x1"]], axis=1).round(6).tolist()
    ([10, 20], [50.0, 100.0])
    """
    import pandas as pd

    steps = sorted(snapshots)
    gram = np.zeros((len(steps), len(steps)))  # inner products of the snapshots
    for name in snapshots[steps[0]]:
        if not name.startswith("shared."):
            rows = np.stack([snapshots[step][name].double().numpy().ravel() for step in steps])
            gram += rows @ rows.T
    eigenvalues, eigenvectors = np.linalg.eigh(gram)
    points = eigenvectors * np.sqrt(np.maximum(eigenvalues, 0))
    return pd.DataFrame(points, columns=[f"x{i}" for i in range(len(steps))]).assign(step=steps)


def small_t5(vocab: int, dim: int, layers: int, *, heads: int = 4, seed: int = 0) -> nn.Module:
    """A new T5 with ``layers`` encoder and ``layers`` decoder layers, made from a configuration without a download.

    ``transformers`` draws the weights from torch's global generator, which is seeded with ``seed`` here and restored
    afterwards. As in T5, embeddings start with standard deviation 1 and are tied. Token 0 is padding and starts the
    decoder; token 1 ends a text. ReLU layers are four times as wide as ``dim``.

    >>> model = small_t5(32, 8, 1, heads=2)
    >>> model.lm_head.weight is model.shared.weight, model.config.d_ff
    (True, 32)
    """
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocab, d_model=dim, d_ff=4 * dim, d_kv=dim // heads, num_heads=heads, num_layers=layers,
        dropout_rate=0.0, pad_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return T5ForConditionalGeneration(config)
