"""A plain training loop that measures its steps, and the record that it returns.

Row t of a history describes the step δ from θ_{t−1} to θ_t, as in ``norms.NormTracker``: ‖θ_t‖ is taken after the step,
loss, learning rate and θ·∇L at θ_{t−1}. Row 0 is the start, where only the norm is known.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from tqdm.auto import tqdm

from nbutils import devices, optimizers
from normgrowth.norms import NormTracker

__all__ = ["TrainingRun", "batch_loss", "endless", "noise_gradients", "to_device", "train"]

Batch = Any  # tokens (B, T + 1), a pair (inputs, targets), or a mapping of tensors for a transformers model
COLUMNS = ["step", "loss", "lr", "norm", "step_norm", "inner", "alignment", "projection", "grad_norm"]
FILE = "run.pt"  # name of a saved training
TABLES = ("history", "layers", "measures")  # the data frames of a saved training


@dataclass(frozen=True)
class TrainingRun:
    """The record of a training; a table that was not recorded is empty.

    Args:
        history: one row per recorded step: ``step`` (steps done), ``loss``, ``lr`` (of the optimizer's first group),
            ``norm`` ‖θ‖, ``step_norm`` ‖δ‖, ``inner`` θ·δ, ``alignment`` cos(θ, δ), ``projection`` θ·∇L and
            ``grad_norm`` ‖∇L‖.
        layers: the same quantities for every layer, except loss and lr, with a column ``layer``.
        snapshots: step → name → parameters, on the CPU.
        measures: the measurements of a recipe of ``nbutils.shared_runs``, with a column ``step``.
        settings: the options of the training.
    """

    history: pd.DataFrame = field(default_factory=pd.DataFrame)
    layers: pd.DataFrame = field(default_factory=pd.DataFrame)
    snapshots: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    measures: pd.DataFrame = field(default_factory=pd.DataFrame)
    settings: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write ``run.pt`` into a folder, new or not. An older file is replaced only by a complete one."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = {name: getattr(self, name).to_dict("list") for name in TABLES}
        incomplete = folder / f"{FILE}.part"
        torch.save(tables | {"snapshots": self.snapshots, "settings": self.settings}, incomplete)
        os.replace(incomplete, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> TrainingRun:
        """Read the file that ``save`` wrote. Numbers come back to the last bit.

        Raises:
            FileNotFoundError: the folder has no ``run.pt``.
        """
        saved = torch.load(folder / FILE, weights_only=True)
        tables = {name: pd.DataFrame(saved[name]) for name in TABLES}
        return cls(**saved | tables)


def batch_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Mean cross-entropy of a batch, in nats.

    If the batch is a tensor of tokens ``(B, T + 1)``, the targets are the next tokens. If it is a pair
    ``(inputs, targets)``, the model is applied to the inputs. If it is a mapping, the loss is the ``loss`` of a
    ``transformers`` model. Targets of −100 do not count.

    >>> def uniform(inputs):  # 8 classes, all logits 0
    ...     return torch.zeros(*inputs.shape, 8)
    >>> round(float(batch_loss(uniform, torch.zeros(2, 5, dtype=torch.long))), 4)  # ln 8
    2.0794
    """
    if isinstance(batch, Mapping):
        return model(**batch).loss
    if isinstance(batch, Tensor):
        inputs, targets = batch[:, :-1], batch[:, 1:]
    else:
        inputs, targets = batch
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())  # it ignores targets of −100


def noise_gradients(parameters: Iterable[Tensor], generator: torch.Generator) -> None:
    """Replace every gradient by independent normal noise of standard deviation 1."""
    for parameter in parameters:
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device=generator.device)
            # with the parameter's own strides, which fused optimizers on CPU assume for its gradient
            parameter.grad = torch.empty_like(parameter).copy_(noise)


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    steps: int,
    optimizer: str | Optimizer = "adamw",
    schedule: float | optimizers.Schedule | None = None,
    loss: Callable[[nn.Module, Batch], Tensor] = batch_loss,
    gradients: str = "loss",
    every: int = 1,
    by: Callable[[str], str] | None = None,
    callback: Callable[[int], object] = lambda step: None,
    device: str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> TrainingRun:
    """Train ``model`` in place and record norms, steps and their angles.

    Args:
        model: returns logits, unless ``loss`` expects another output. It is moved to the device.
        batches: one batch per step, in a form of ``batch_loss``; a list is repeated as often as needed.
        steps: number of steps.
        optimizer: a name of ``nbutils.optimizers``, or an optimizer over the model's parameters, which keeps its rates.
        schedule: learning rate of an optimizer given by name, or a function of the steps done; 1e-3 by default.
        loss: from the model and a batch to the loss, a scalar.
        gradients: ``loss``, or ``noise`` for the null model: the same loop with noise of standard deviation 1 in place
            of ∇L. The batches are then not used, the loss is not computed, and ``projection`` is θ·noise.
        every: the start and every ``every``-th step are recorded.
        by: from a parameter's name to its layer, such as ``layers.layer_of``. Without it no layers are recorded.
        callback: called with the number of steps done, at the start and after each step.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of the noise, drawn on the CPU, and of dropout, drawn on the device. Choose another seed than that of the
            weights, or the noise is parallel to some of them. Torch's global generators are restored afterwards.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a name is unknown, the batches end early, or a schedule is given with a ready-made optimizer.
        RuntimeError: the device is ``cuda``, and torch finds no CUDA device.

    >>> net, batches = nn.Linear(2, 1, bias=False), [torch.tensor([[3.0, 4.0]])]
    >>> options = {"optimizer": "sgd", "schedule": 0.1, "device": "cpu", "progress": False}
    >>> run = train(net, batches, steps=2, loss=lambda net, x: net(x).sum(), **options)
    >>> run.history["step_norm"].round(6).tolist()  # the gradient is x, of length 5
    [nan, 0.5, 0.5]
    """
    if gradients not in ("loss", "noise"):
        raise ValueError(f"unknown gradients {gradients!r}: choose one of loss, noise")
    torch_device = torch.device(devices.resolve(device))
    model.to(torch_device)
    if isinstance(optimizer, str):
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = optimizers.optimizer(optimizer, trainable)
    elif schedule is not None:
        raise ValueError("a ready-made optimizer keeps the rates of its groups: leave schedule out")
    stream = endless(batches)
    noise_generator = devices.generator(seed, "cpu")
    tracker = NormTracker(model, every=every, by=by, gradients=True)
    loss_value = torch.tensor(torch.nan, device=torch_device)  # at the start, and always with noise
    losses = [loss_value]  # tensors until the end, since reading a number would wait for the GPU
    rates = [torch.nan]
    with torch.random.fork_rng(devices=[torch_device] if torch_device.type == "cuda" else []):
        torch.manual_seed(seed)
        model.train()
        callback(0)
        for t in tqdm(range(steps), desc="training", disable=not progress):
            optimizer.zero_grad()
            if gradients == "noise":
                noise_gradients(model.parameters(), noise_generator)
            else:
                loss_value = loss(model, to_device(next(stream), torch_device))
                loss_value.backward()
            tracker.before()
            if schedule is not None:
                for group in optimizer.param_groups:
                    group["lr"] = schedule(t) if callable(schedule) else schedule
            optimizer.step()
            tracker.after(stepped=True)
            if tracker.steps % every == 0:
                losses.append(loss_value.detach())
                rates.append(optimizer.param_groups[0]["lr"])
            callback(t + 1)
    optimizer.zero_grad()
    table = tracker.history().drop(columns="cos_similarity")
    is_total = table["layer"] == "total"
    history = table[is_total].reset_index(drop=True).assign(loss=torch.stack(losses).tolist(), lr=rates)
    layers = table[~is_total].reset_index(drop=True)
    settings = {"optimizer": type(optimizer).__name__, "gradients": gradients, "steps": steps, "every": every}
    settings |= {"seed": seed, "device": torch_device.type}
    return TrainingRun(history[COLUMNS], layers, settings=settings)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch, in a form of ``batch_loss``, to a device, with contiguous tensors."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True).contiguous()  # T5 views its labels
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    return tuple(to_device(part, device) for part in batch)


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Repeat a list without end; pass an iterator through.

    Raises:
        ValueError: a batch is requested after the end of the iterator, or of an empty list.
    """
    if isinstance(batches, Sequence):
        yield from itertools.cycle(batches)
    else:
        yield from batches
    raise ValueError("the batches have ended: give one for each step, or a list, which is repeated")
