"""Our training loop against the transformers Trainer, and tracking norms at every step against the plain way."""

from __future__ import annotations

import collections
import copy
import functools
import tempfile
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from maintenance.benchmarks.timing import Row, compare, cpu_seconds, row
from nbutils import ensembles, models, training
from nbutils.devices import generator
from normgrowth import norms
from normgrowth.norms import kernels


@functools.cache
def tracked_steps(steps: int = 40) -> dict[str, list[float]]:
    """CPU times of steps of a language model of 10 M parameters on 8 × 128 tokens, and of each way to measure them.

    Plain is clone, subtract, and norms and an inner product of each tensor by ``.item()``, in float32. Ours is a
    tracker with numba, and by blocks a second one without it.
    """
    model = models.CausalLM(8000, 256, 10, 8, 128, generator=generator(0, "cpu"))
    tokens = torch.randint(8000, (8, 129), generator=generator(1, "cpu"))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    tracker = norms.NormTracker(model)
    tracker_by_blocks = norms.NormTracker(model)
    old: list[torch.Tensor] = []
    sums = np.zeros(3)  # ‖θ‖², ‖δ‖², θ·δ

    def loss_and_gradient() -> None:
        model.zero_grad()
        training.batch_loss(model, tokens).backward()

    def plain_before() -> None:
        old[:] = [p.detach().clone() for p in parameters]

    def plain_after() -> None:
        sums[:] = 0
        for before, p in zip(old, parameters, strict=True):
            delta = p.detach() - before
            sums[:] += p.detach().norm().item() ** 2, delta.norm().item() ** 2, (before * delta).sum().item()

    def after_by_blocks() -> None:
        with mock.patch.object(kernels, "loops", lambda: kernels.BY_BLOCKS):
            tracker_by_blocks.after()

    work = {"train": (loss_and_gradient, optimizer.step), "plain": (plain_before, plain_after)}
    work["ours"] = (tracker.before, tracker.after)
    work["by blocks"] = (tracker_by_blocks.before, after_by_blocks)
    times = {side: [0.0] * steps for side in work}
    for step, part, side in ((step, part, side) for step in range(steps) for part in (0, 1) for side in work):
        times[side][step] += cpu_seconds(work[side][part])
    quantities = ["norm", "step_norm", "inner", "alignment"]
    compiled, by_blocks = (made.history()[quantities] for made in (tracker, tracker_by_blocks))
    assert np.allclose(compiled, by_blocks, rtol=1e-9, atol=1e-12, equal_nan=True), "they differ with and without numba"
    last = tracker.history().iloc[-1]
    ours = np.array([last.norm**2, last.step_norm**2, last.inner])
    size = np.array([ours[0], ours[1], last.norm * last.step_norm])
    assert (abs(sums - ours) < 1e-3 * size).all(), f"they disagree beyond float32: {ours} and {sums}"
    return times


def norm_tracking() -> Row:
    times = tracked_steps()
    return row("norm, ‖δ‖ and θ·δ of a step, 10 M parameters", times["ours"], times["plain"], 2)


def norm_tracking_without_numba() -> Row:
    """At most four times the CPU time of the compiled loops, which wait for memory alone."""
    times = tracked_steps()
    return row("norm, ‖δ‖ and θ·δ without numba, against the same with it", times["by blocks"], times["ours"], 0.25)


def share_of_a_step() -> Row:
    """At most 1 % of the step itself."""
    times = tracked_steps()
    return row("the same against the training step itself, batch 8 × 128", times["ours"], times["train"], 100)


small_model = functools.partial(models.CausalLM, 1000, 64, 2, 4, 32)  # of one seed


def trainer(tokens: torch.Tensor, steps: int, folder: str) -> Any:
    """A Trainer on one batch, without gradient clipping, files, reports and bars."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class WithOurLoss(Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
            return training.batch_loss(model, inputs["rows"])

    arguments = TrainingArguments(
        folder, save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=10, use_cpu=True,
        learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=0.0,
        per_device_train_batch_size=len(tokens), train_sampling_strategy="sequential", max_steps=steps,
    )  # fmt: skip
    rows: Any = list(tokens) * steps  # a list of rows does for a data set
    made = WithOurLoss(small_model(), arguments, train_dataset=rows, data_collator=lambda xs: {"rows": torch.stack(xs)})
    made.remove_callback(PrinterCallback)
    return made


def against_the_trainer(steps: int = 100, turns: int = 5) -> Row:
    """Both train the same model on the same batch with the same optimizer and must end at the same bits.

    Both log the loss of every tenth step; ours measures norms and projections there too.
    """
    tokens = torch.randint(1000, (8, 33), generator=generator(0, "cpu"))
    ended: dict[str, torch.Tensor] = {}

    def ours() -> None:
        net = small_model()
        training.train(net, [tokens], steps=steps, schedule=1e-3, every=10, device="cpu", progress=False)
        ended["ours"] = nn.utils.parameters_to_vector(net.parameters())

    def plain() -> None:
        one = next(ready)
        one.train()
        ended["plain"] = nn.utils.parameters_to_vector(one.model.parameters())

    with tempfile.TemporaryDirectory() as folder:
        ready = iter([trainer(tokens, steps, folder) for _ in range(turns)])  # making it is not timed
        what = f"{steps} training steps of a small language model, norms tracked, against the transformers Trainer"
        made = compare(what, ours, plain, 1, repeats=turns)
    assert torch.equal(ended["ours"], ended["plain"]), "they end at different parameters"
    return made


def at_once(width: int = 32, networks: int = 32, steps: int = 20) -> Row:
    """Networks trained together against one after another, both by SGD on one batch: the same to 1e-5."""
    tokens, sgd = torch.randint(100, (4, 9), generator=generator(0, "cpu")), functools.partial(torch.optim.SGD, lr=0.1)
    made = [
        models.CausalLM(100, width, 2, 2, 8, init_std="standard", generator=generator(i, "cpu"))
        for i in range(networks)
    ]
    ended: dict[str, list[torch.Tensor]] = {}

    def ours() -> None:
        theta = ended["ours"] = ensembles.stack(made)
        gradients = ensembles.loss_gradients(made[0], [tokens], shared=True)
        collections.deque(ensembles.train(theta, gradients, sgd, steps), maxlen=0)

    def plain() -> None:
        nets = copy.deepcopy(made)
        for net, optimizer in ((net, sgd(net.parameters())) for net in nets):
            for _ in range(steps):
                optimizer.zero_grad()
                training.batch_loss(net, tokens).backward()
                optimizer.step()
        ended["plain"] = ensembles.stack(nets)

    row = compare(f"{networks} language models of width {width} trained together, against one by one", ours, plain, 3)
    gap = max(float((a - b).detach().abs().max()) for a, b in zip(*ended.values(), strict=True))
    assert gap < 1e-5, f"they disagree by {gap:.2g}"
    return row


PAIRS = (norm_tracking, share_of_a_step, norm_tracking_without_numba, against_the_trainer, at_once)
