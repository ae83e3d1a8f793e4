"""Our training loop against the transformers Trainer, and many trainings at once against one after another."""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from torch import nn

from benchmarks.timing import Row, interleaved, row
from nbutils import models, optimizers, training
from nbutils.chapters import ensemble
from nbutils.device import generator


def against_the_trainer(steps: int = 100) -> Row:
    """Training with ours and with the transformers Trainer.

    Both train the same model on the same batch with the same optimizer and end at the same bits. Both log
    the loss of every tenth step; ours measures norms and projections there too (at every step that is 2 ms more, and
    the two are level). What differs is what surrounds the arithmetic. That shows at the size of the book's models; at
    10 M parameters and 8 × 128 tokens both take the same time, within 5 %.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments

    tokens = torch.randint(1000, (8, 33), generator=generator(0, "cpu"))
    ended: dict[str, torch.Tensor] = {}

    class WithLoss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": training.batch_loss(self.model, rows)}

    def model() -> nn.Module:
        return models.CausalLM(1000, 64, 2, 4, 32, generator=generator(1, "cpu"))

    def ours() -> None:
        net = model()
        training.train(net, [tokens], steps=steps, schedule=1e-3, every=10, device="cpu", progress=False)
        ended["ours"] = nn.utils.parameters_to_vector(net.parameters())

    def theirs(trainer: Trainer) -> None:
        trainer.train()
        ended["plain"] = nn.utils.parameters_to_vector(trainer.model.parameters())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=10,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )

        def trainer() -> Trainer:
            made = Trainer(
                WithLoss(model()),
                arguments,
                train_dataset=list(tokens) * steps,
                data_collator=lambda rows: {"rows": torch.stack(rows)},
            )
            made.remove_callback(PrinterCallback)
            return made

        ready = iter([trainer() for _ in range(5)])  # making it is not timed; making our model is
        seconds = interleaved({"ours": ours, "plain": lambda: theirs(next(ready))})
    assert torch.equal(ended["ours"], ended["plain"]), "the two sides end at different parameters"
    what = f"{steps} training steps of a small language model, norms tracked, against the transformers Trainer"
    return row(what, seconds["ours"], seconds["plain"], 1)


def small_map() -> Row:
    """The size of chapter 6 in ``smoke``, and more trainings."""
    return learning_rate_map(16, 8)


def chapters_map() -> Row:
    """The width of chapter 6 in ``book``."""
    return learning_rate_map(32, 4)


def learning_rate_map(width: int, rates: int, steps: int = 20) -> Row:
    """``rates`` learning rates × as many weight decays, as one batched ensemble and one training after another.

    The gain is the fixed cost of each operation, so it ends where arithmetic begins.
    """
    batches = [torch.randint(64, (8, 17), generator=generator(i, "cpu")) for i in range(4)]
    members = ensemble.grid(np.geomspace(1e-4, 1e-2, rates), np.geomspace(0.01, 1, rates))
    ended: dict[str, np.ndarray] = {}

    def model(seed: int) -> nn.Module:
        return models.CausalLM(64, width, 2, 2, 16, generator=generator(seed, "cpu"))

    def ours() -> None:
        history, *_ = ensemble.train_ensemble(
            model, batches, members, steps=steps, every=steps, device="cpu", progress=False
        )
        ended["ours"] = history.loc[history.step == steps, "norm"].to_numpy()

    def plain() -> None:
        norm = []
        for member in members:
            net = model(member.seed)
            adam = optimizers.optimizer("adamw", net.parameters(), weight_decay=member.weight_decay)
            options = {"every": steps, "device": "cpu", "projections": False, "progress": False}
            done = training.train(net, batches, steps=steps, optimizer=adam, schedule=member.lr, **options)
            norm.append(done.history["norm"].iloc[-1])
        ended["plain"] = np.array(norm)

    seconds = interleaved({"ours": ours, "plain": plain}, repeats=3)
    gap = np.abs(ended["ours"] / ended["plain"] - 1).max()
    assert gap < 1e-4, f"the two sides disagree by {gap}"
    what = f"learning rate × weight decay, {len(members)} trainings of width {width}, against one after another"
    return row(what, seconds["ours"], seconds["plain"], 3)


PAIRS = (against_the_trainer, small_map, chapters_map)
