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

    from nbutils.training import Run

DRAWS = 9  # independent repetitions of one seed: a population


def own_seed(seed: int, draw: int) -> int:
    """The seed of one repetition: no two of all seeds and draws share one.

    Blocks of a thousand: seeds 0 to 999 have 0 to 8,999 for their nine draws, seeds 1000 to 1999 the next 9,000.

    >>> [own_seed(seed, draw) for seed in (7, 1007) for draw in (0, 1, 8)]
    [7, 1007, 8007, 9007, 10007, 17007]
    """
    return 1000 * (DRAWS * (seed // 1000) + draw) + seed % 1000


def t5(draw: int = 0, *, null: bool = False, profile: str, seed: int, device: str) -> Run:
    """T5's baselines, in rows of one length: Adafactor with rate 1/√max(t, warm-up), tied embeddings, no dropout.

    Each step is recorded by layer, of noise by parameter: there each matrix is a walk of its own. Text is the standard
    library's, since it is on every machine.

    Args:
        draw: number of an independent repetition, 0 to 8: other initial values, batches and noise.
        null: the same network fed pure noise in the place of its gradients.

    Returns:
        A run whose ``measures`` are the ``path`` of its parameters at evenly spaced steps.

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
    parts, size = profiles.choose(profile, smoke=(8, 200_000), book=(32, 2_000_000), gpu=(32, 8_000_000))
    own = own_seed(seed, draw)
    model = small_t5(vocab, dim, layers, heads=heads, seed=own)
    batches: Iterable[dict[str, Tensor]] = ()
    if not null:
        corpus = text.corpus(size)
        sentinels = min(100, vocab // 16)  # T5 has 100
        tokenizer = text.bpe(corpus, vocab, sentinels=sentinels)
        ids = range(tokenizer.get_vocab_size())[: -sentinels - 1 : -1]  # the first is the last id
        tokens = text.tokens(corpus.train, tokenizer)
        batches = text.span_batches(tokens, batch, length, devices.generator(own, "cpu"), ids)
    snapshots: dict[int, dict[str, Tensor]] = {}

    def look(step: int) -> None:
        if step % (steps // parts) == 0:
            snapshots[step] = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}

    run = training.train(
        model,
        batches,
        steps=steps,
        optimizer="adafactor",
        schedule=optimizers.inverse_sqrt(1.0, warmup=warmup),
        gradients="noise" if null else "loss",
        by=str if null else layer_of,
        look=look,
        device=device,
        seed=own,  # the weights' too: T5 draws them in another order than the noise, so the two are not parallel
    )
    return replace(run, measures=path(snapshots), settings=run.settings | {"warmup": warmup})


RECIPES: Mapping[str, Callable[..., Run]] = {
    "t5-own": t5,
    **{f"t5-own-{draw + 1}": partial(t5, draw) for draw in range(1, DRAWS)},
    "t5-null": partial(t5, null=True),
}


def path(snapshots: Mapping[int, Mapping[str, Tensor]]) -> pd.DataFrame:
    """Points, ``x0``, ``x1``, … and ``step``, with the lengths and angles of a run's n snapshots.

    n points and the origin span at most n dimensions, so the inner products say all, and those are summed tensor by
    tensor in float64: memory is n times the largest tensor. The embedding, which is tied, is left out. Distances
    are right to about 1e-7 of the largest norm.

    >>> import torch
    >>> runs = {step: {"shared.weight": torch.ones(9), "w": torch.tensor([3.0, 4.0]) * step} for step in (20, 10)}
    >>> points = path(runs)
    >>> points["step"].tolist(), np.linalg.norm(points[["x0", "x1"]], axis=1).round(6).tolist()
    ([10, 20], [50.0, 100.0])
    """
    import pandas as pd

    steps = sorted(snapshots)
    inner = np.zeros((len(steps), len(steps)))
    for name in (name for name in snapshots[steps[0]] if not name.startswith("shared.")):
        rows = np.stack([snapshots[step][name].double().numpy().ravel() for step in steps])
        inner += rows @ rows.T
    sizes, axes = np.linalg.eigh(inner)
    points = axes * np.sqrt(np.maximum(sizes, 0))
    return pd.DataFrame(points, columns=[f"x{i}" for i in range(len(steps))]).assign(step=steps)


def small_t5(vocab: int, dim: int, layers: int, *, heads: int = 4, seed: int = 0) -> nn.Module:
    """A T5 of ``layers`` encoder and ``layers`` decoder layers, new, from a configuration: nothing is downloaded.

    ``transformers`` draws its weights from torch's global generator; here that happens under a fork of it, seeded with
    ``seed``, which leaves the caller's as it was. Embeddings start with deviation 1 and are tied, as in T5. Padding and
    decoder start are token 0, the end is token 1. ReLU layers are four times as wide as ``dim``.

    >>> model = small_t5(32, 8, 1, heads=2)
    >>> model.lm_head.weight is model.shared.weight, model.config.d_ff
    (True, 32)
    """
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    settings = T5Config(
        vocab_size=vocab, d_model=dim, d_ff=4 * dim, d_kv=dim // heads, num_heads=heads, num_layers=layers,
        dropout_rate=0.0, pad_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    settings.decoder_start_token_id = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return T5ForConditionalGeneration(settings)
