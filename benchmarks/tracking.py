"""Tracking norms at every step against the plain way, and against the step itself."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from benchmarks import timing
from nbutils import norms
from nbutils.device import generator


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
def tracked_steps(snapshot: bool, steps: int = 40) -> dict[str, np.ndarray]:
    """CPU times of training steps, and of each way to measure the same steps: norm, ‖δ‖ and θ·δ by layer.

    With ``snapshot`` also the cosine with one, which is one more reading of as many numbers.

    ``traffic`` is one subtraction in place of as many numbers: it reads θ' and the copy and writes the copy once, which
    no way to take ‖δ‖ can avoid.
    """
    model, loss_and_gradient = language_model()
    named = dict(model.named_parameters())
    optimizer, tracker = torch.optim.AdamW(named.values(), lr=1e-3), norms.NormTracker(named.items())
    if snapshot:
        tracker.snapshot()
    first = {name: p.detach().clone() for name, p in named.items()}
    old, squares = {}, np.zeros(4)

    def plain_before() -> None:
        old.update((name, p.detach().clone()) for name, p in named.items())

    def plain_after() -> None:
        squares[:] = 0
        for name, p in named.items():
            delta = p.detach() - old[name]
            squares[:3] += p.detach().norm().item() ** 2, delta.norm().item() ** 2, (old[name] * delta).sum().item()
            if snapshot:
                squares[3] += (first[name] * p.detach()).sum().item()

    work = {"train": (loss_and_gradient, optimizer.step), "plain": (plain_before, plain_after)}
    work["ours"] = (tracker.before, tracker.after)
    theta, copy = (torch.zeros(sum(p.numel() for p in named.values())) for _ in "ab")
    work["traffic"] = (lambda: None, lambda: copy.sub_(theta))
    times = {side: np.zeros(steps) for side in work}
    turns = [(i, side, part) for i in range(steps) for part in (0, 1) for side in work]
    with timing.no_collection():
        for i, side, part in turns:
            start = time.process_time()
            work[side][part]()
            times[side][i] += time.process_time() - start
    total = tracker.history().iloc[-1]
    length = float(np.sqrt(sum(float(x.double().square().sum()) for x in first.values())))
    beside = total.cos_similarity * total.norm * length if snapshot else 0.0
    ours = np.array([total.norm**2, total.step_norm**2, total.inner, beside])
    size = np.array([ours[0], ours[1], total.norm * total.step_norm, total.norm * length])
    exact = np.zeros(4)
    for name, p in named.items():
        before, after = old[name].double(), p.detach().double()
        delta, since = after - before, (first[name].double() * after).sum() if snapshot else torch.zeros(())
        exact += [float(x) for x in ((after**2).sum(), (delta**2).sum(), (before * delta).sum(), since)]
    assert (np.abs(ours - exact) < 1e-6 * size).all(), f"ours is not the sum in float64: {ours} and {exact}"
    assert (np.abs(squares - exact) < 1e-3 * size).all(), f"plain, in float32, is far off: {squares} and {exact}"
    return times


def norm_tracking() -> dict[str, object]:
    """Ours against clone, subtract, and a norm and an inner product for each tensor by ``.item()``."""
    return _row("norm, ‖δ‖ and θ·δ of a step, 10 M parameters", "plain", bound=2)


def share_of_a_step() -> dict[str, object]:
    """Tracking every step against the step itself: at most 1 %."""
    return _row("the same against the training step itself, batch 8 × 128", "train", bound=100)


def with_a_snapshot() -> dict[str, object]:
    """The cosine with a snapshot as well, on both sides."""
    return _row("norm, ‖δ‖, θ·δ and the cosine with a snapshot", "plain", bound=2, snapshot=True)


def share_with_a_snapshot() -> dict[str, object]:
    """The same share with one more reading of all parameters."""
    return _row("with the snapshot, against the training step itself", "train", bound=100, snapshot=True)


def _row(what: str, side: str, bound: float, *, snapshot: bool = False) -> dict[str, object]:
    """The ratio of the medians over steps, with the quartiles of the other side's steps and the share of the checks.

    Ours is steady from step to step; the step itself, which fills new memory, is not. ``also`` has the mean of ours,
    in which every 32nd step reads all again to check itself, and one subtraction of as many numbers.
    """
    times = tracked_steps(snapshot)
    ours, (low, middle, high) = np.median(times["ours"]), np.quantile(times[side], [0.25, 0.5, 0.75])
    mean, traffic = times["ours"].mean() / ours, np.median(times["traffic"]) / ours
    made = {"what": what, "ours_s": float(ours), "plain_s": float(middle), "bound": bound}
    made |= {"ratio_min": float(low / ours), "ratio_max": float(high / ours), "turns": len(times[side])}
    return made | {"also": f"quartiles; ours on average × {mean:.2f}, one subtraction × {traffic:.2f}"}


PAIRS = (norm_tracking, share_of_a_step, with_a_snapshot, share_with_a_snapshot)
