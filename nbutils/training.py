"""One plain training loop that measures its own steps, and the record it leaves.

Row t of a history belongs to the step δ from θ_{t−1} to θ_t, as in ``norms.NormTracker``: ‖θ_t‖ after it, ‖δ‖ and θ·δ,
and loss, learning rate and θ·∇L, which are at θ_{t−1}. Row 0 is the start and has the norm alone.
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

Batch = Any  # tokens (B, T + 1), a pair (inputs, targets), or a mapping of tensors for a transformers model
COLUMNS = ["step", "loss", "lr", "norm", "step_norm", "inner", "alignment", "projection", "grad_norm"]
FILE, TABLES = "run.pt", ("history", "layers", "measures")  # of a saved run


@dataclass(frozen=True)
class Run:
    """What a training left behind; what was not recorded is empty.

    Args:
        history: one row per recorded step: ``step`` (steps done), ``loss``, ``lr`` (of the optimizer's first group),
            ``norm`` ‖θ‖, ``step_norm`` ‖δ‖, ``inner`` θ·δ, ``alignment`` cos(θ, δ), ``projection`` θ·∇L and
            ``grad_norm`` ‖∇L‖.
        layers: the same by layer without loss and lr, with a column ``layer``.
        snapshots: parameters by name, by step, on the CPU.
        measures: what a recipe of ``nbutils.shared_runs`` measured, by ``step``.
        settings: how it was made.
    """

    history: pd.DataFrame = field(default_factory=pd.DataFrame)
    layers: pd.DataFrame = field(default_factory=pd.DataFrame)
    snapshots: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    measures: pd.DataFrame = field(default_factory=pd.DataFrame)
    settings: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write ``run.pt`` into a folder; an old one is replaced when the new one is whole."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = {name: getattr(self, name).to_dict("list") for name in TABLES}
        part = folder / f"{FILE}.part"
        torch.save(tables | {"snapshots": self.snapshots, "settings": self.settings}, part)
        os.replace(part, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Run:
        """Read what ``save`` wrote; numbers come back to the last bit."""
        found = torch.load(folder / FILE, weights_only=True)
        return cls(**found | {name: pd.DataFrame(found[name]) for name in TABLES})


def batch_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Mean cross-entropy of a batch, in nats.

    Tokens ``(B, T + 1)``: of the next token. A pair ``(inputs, targets)``: of ``model(inputs)``. A mapping: the
    ``loss`` of a ``transformers`` model. Targets of −100 do not count.

    >>> def uniform(inputs):  # 8 classes, all logits 0
    ...     return torch.zeros(*inputs.shape, 8)
    >>> round(float(batch_loss(uniform, torch.zeros(2, 5, dtype=torch.long))), 4)  # ln 8
    2.0794
    """
    if isinstance(batch, Mapping):
        return model(**batch).loss
    inputs, targets = (batch[:, :-1], batch[:, 1:]) if isinstance(batch, Tensor) else batch
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())  # which leaves −100 out


def noise_gradients(parameters: Iterable[Tensor], generator: torch.Generator) -> None:
    """Put independent normal noise of deviation 1 in the place of every gradient."""
    for parameter in parameters:
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device=generator.device)
            # in the parameter's own strides: fused optimizers on CPU read memory as if a gradient had them
            parameter.grad = torch.empty_like(parameter).copy_(drawn)


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
    look: Callable[[int], object] = lambda step: None,
    device: str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> Run:
    """Train ``model`` in place and record norms, steps and their angles.

    Args:
        batches: whole batches (``batch_loss`` has the forms); a list is gone through again and again.
        optimizer: a name of ``nbutils.optimizers``, or one made over the model's parameters, which keeps its rates.
        schedule: learning rate of an optimizer made here from its name, or a function of the number of steps done
            (``optimizers.inverse_sqrt``); 1e-3 if it is not given.
        gradients: ``noise`` is the null model: the same loop fed pure noise of deviation 1 in the place of ∇L. The
            batches are then not used, the loss is not computed, and ``projection`` is θ·noise.
        every: record every so many steps, and the start.
        by: from a parameter's name to its layer, such as ``layers.layer_of``, to record each layer too.
        look: called with the number of steps done, at the start and after each step.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of noise, drawn on the CPU, and of dropout, drawn on the device. The one that drew the weights gives noise
            parallel to some of them: choose another. Torch's global generators are as before afterwards.

    Raises:
        ValueError: an unknown name, too few batches, a schedule for an optimizer that has its rates.

    >>> net, batches = nn.Linear(2, 1, bias=False), [torch.tensor([[3.0, 4.0]])]
    >>> options = {"optimizer": "sgd", "schedule": 0.1, "device": "cpu", "progress": False}
    >>> run = train(net, batches, steps=2, loss=lambda net, x: net(x).sum(), **options)
    >>> run.history["step_norm"].round(6).tolist()  # the gradient is x, of length 5
    [nan, 0.5, 0.5]
    """
    if gradients not in ("loss", "noise"):
        raise ValueError(f"unknown gradients {gradients!r}: choose one of loss, noise")
    place = torch.device(devices.resolve(device))
    model.to(place)
    if isinstance(optimizer, str):
        optimizer = optimizers.optimizer(optimizer, [p for p in model.parameters() if p.requires_grad])
    elif schedule is not None:
        raise ValueError("an optimizer that is made already keeps the rates of its groups: leave schedule out")
    source, noise = endless(batches), devices.generator(seed, "cpu")
    tracker = NormTracker(model, every=every, by=by, gradients=True)
    value = torch.tensor(torch.nan, device=place)  # of no step, and of noise
    losses, rates = [value], [torch.nan]  # tensors until the end: a GPU is not waited for
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(seed)
        model.train()
        look(0)
        for t in tqdm(range(steps), desc="training", disable=not progress):
            optimizer.zero_grad()
            if gradients == "noise":
                noise_gradients(model.parameters(), noise)
            else:
                value = loss(model, to_device(next(source), place))
                value.backward()
            tracker.before()
            if schedule is not None:
                for group in optimizer.param_groups:
                    group["lr"] = schedule(t) if callable(schedule) else schedule
            optimizer.step()
            tracker.after(stepped=True)
            if tracker.steps % every == 0:
                losses.append(value.detach())
                rates.append(optimizer.param_groups[0]["lr"])
            look(t + 1)
    optimizer.zero_grad()
    measured = tracker.history().drop(columns="cos_similarity")
    total = measured["layer"] == "total"
    history, layers = (measured[rows].reset_index(drop=True) for rows in (total, ~total))
    history = history.assign(loss=torch.stack(losses).tolist(), lr=rates)[COLUMNS]
    settings = {"optimizer": type(optimizer).__name__, "gradients": gradients, "steps": steps, "every": every}
    return Run(history, layers, settings=settings | {"seed": seed, "device": place.type})


def to_device(batch: Batch, place: torch.device) -> Batch:
    """A batch on a device, its tensors contiguous."""
    if isinstance(batch, Tensor):
        return batch.to(place, non_blocking=True).contiguous()  # T5 views its labels
    if isinstance(batch, Mapping):
        return {key: to_device(value, place) for key, value in batch.items()}
    return tuple(to_device(part, place) for part in batch)


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """A list again and again; an iterator as it is.

    Raises:
        ValueError: the iterator has ended, or the list is empty.
    """
    yield from itertools.cycle(batches) if isinstance(batches, Sequence) else batches
    raise ValueError("the batches have ended: give one for each step, or a list, which is repeated")
