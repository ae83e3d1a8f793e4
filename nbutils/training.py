"""One plain training loop that measures its own steps, and the record it leaves.

Row t of a history belongs to the step δ from θ_{t−1} to θ_t, as in ``norms.NormTracker``: ‖θ_t‖ after it, ‖δ‖ and θ·δ,
and loss, learning rate and θ·∇L, which are at θ_{t−1}. Row 0 is the start and has the norm alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from tqdm.auto import tqdm

from nbutils import devices, optimizers
from nbutils.layers import layer_of
from nbutils.norms import NormTracker

Batch = Any  # tokens (B, T + 1), a pair (inputs, targets), or a mapping of tensors for a transformers model
COLUMNS = ("step", "loss", "lr", "norm", "step_norm", "inner", "alignment", "projection", "grad_norm")


@dataclass(frozen=True)
class Record:
    """What ``train`` writes down.

    Args:
        every: n for every n-th step, and the start.
        by_layer: each layer too; a function from a parameter's name to its part makes other parts.
        snapshots: steps of 0 … ``steps`` at which the parameters are kept. With ``on_snapshot`` that is called instead,
            in eval mode without gradients; what it returns goes to ``measures``.
    """

    every: int = 1
    by_layer: bool | Callable[[str], str] = False
    snapshots: Iterable[int] = ()
    on_snapshot: Callable[[int, nn.Module], Mapping[str, float] | None] | None = None


@dataclass(frozen=True)
class Run:
    """What a training left behind.

    Args:
        history: one row per recorded step: ``step`` (steps done), ``loss``, ``lr`` (NaN where parameters have
            different ones), ``norm`` ‖θ‖, ``step_norm`` ‖δ‖, ``inner`` θ·δ, ``alignment`` cos(θ, δ), ``projection``
            θ·∇L and ``grad_norm`` ‖∇L‖.
        layers: the same by layer without loss and lr, with a column ``layer``; empty unless asked for.
        snapshots: parameters by name, by step, on the CPU.
        measures: what ``on_snapshot`` returned, with its ``step``.
        settings: how it was made.
    """

    history: pd.DataFrame
    layers: pd.DataFrame = field(default_factory=pd.DataFrame)
    snapshots: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    measures: pd.DataFrame = field(default_factory=pd.DataFrame)
    settings: dict[str, Any] = field(default_factory=dict)


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


def noise_gradients(model: nn.Module, generator: torch.Generator) -> None:
    """Put independent normal noise of deviation 1 in the place of every gradient."""
    for parameter in model.parameters():
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
    record: Record = Record(),
    device: str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> Run:
    """Train ``model`` in place and record norms, steps and their angles.

    Args:
        batches: whole batches (``batch_loss`` has the forms); a list is gone through again and again.
        optimizer: a name of ``nbutils.optimizers``, or one made over the model's parameters.
        schedule: learning rate, or a function of the number of steps done (``optimizers.inverse_sqrt``), for all
            parameters. Without it an optimizer made before keeps its rates, and one made here from a name has 1e-3.
        gradients: ``noise`` is the null model: the same loop fed pure noise of deviation 1 in the place of ∇L. The
            batches are then not used, the loss is not computed, and ``projection`` is θ·noise.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of noise, drawn on the CPU, and of dropout, drawn on the device. The one that drew the weights gives noise
            parallel to some of them: choose another. Torch's global generators are as before afterwards.

    Raises:
        ValueError: an unknown name, too few batches, one schedule for parameter groups of different rates.

    >>> net, batches = nn.Linear(2, 1, bias=False), [torch.tensor([[3.0, 4.0]])]
    >>> options = {"optimizer": "sgd", "schedule": 0.1, "device": "cpu", "progress": False}
    >>> run = train(net, batches, steps=2, loss=lambda net, x: net(x).sum(), **options)
    >>> run.history["step_norm"].round(6).tolist()  # the gradient is x, of length 5
    [nan, 0.5, 0.5]
    """
    place = torch.device(devices.resolve(device))
    wanted, null = set(record.snapshots), gradients != "loss"
    _check(steps, gradients, wanted)
    model.to(place)
    optimizer, rate = _optimizer(model, optimizer, schedule)
    source, noise = endless(batches), devices.generator(seed, "cpu")
    by = layer_of if record.by_layer is True else record.by_layer or None
    tracker = NormTracker(model.named_parameters(), every=record.every, by=by, gradients=True)
    rows: list[dict[str, float]] = [{"step": 0, "lr": float("nan")}]
    losses: list[Tensor] = []
    kept: dict[int, dict[str, Tensor]] = {}
    measures: list[dict[str, float]] = []

    @torch.no_grad()
    def look(step: int) -> None:
        if step not in wanted:
            return
        if record.on_snapshot is None:
            kept[step] = {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}
            return
        model.eval()
        measures.append({"step": step} | dict(record.on_snapshot(step, model) or {}))
        model.train()

    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(seed)
        model.train()
        look(0)
        for t in tqdm(range(steps), desc="training", disable=not progress):
            optimizer.zero_grad()
            if null:
                noise_gradients(model, noise)
            else:
                batch = to_device(next(source), place)
                value = loss(model, batch)
                value.backward()
            tracker.before()
            if rate is not None:
                for group in optimizer.param_groups:
                    group["lr"] = rate(t)
            optimizer.step()
            tracker.after(stepped=True)
            if tracker.steps % record.every == 0:
                rows.append({"step": tracker.steps, "lr": _rate(optimizer)})
                losses += [] if null else [value.detach()]  # tensors until the end: a GPU is not waited for
            look(t + 1)
    optimizer.zero_grad()
    measured = tracker.history().drop(columns="cos_similarity")
    total = measured["layer"] == "total"
    of_steps = torch.stack(losses).flatten().tolist() if losses else [float("nan")] * (len(rows) - 1)
    rows = [row | {"loss": value} for row, value in zip(rows, [float("nan"), *of_steps], strict=True)]
    history = pd.DataFrame(rows).merge(measured[total], on="step")[list(COLUMNS)]
    layers = measured[~total].reset_index(drop=True) if record.by_layer else pd.DataFrame()
    settings = {"optimizer": type(optimizer).__name__, "steps": steps, "gradients": "noise" if null else "loss"}
    settings |= {"every": record.every, "seed": seed, "device": place.type}
    return Run(history, layers, kept, pd.DataFrame(measures), settings)


def _check(steps: int, gradients: str, snapshots: set[int]) -> None:
    """Refuse what cannot be, before a training begins."""
    if gradients not in ("loss", "noise"):
        raise ValueError(f"unknown gradients {gradients!r}: choose one of loss, noise")
    if outside := sorted(step for step in snapshots if not 0 <= step <= steps):
        raise ValueError(f"snapshots at {', '.join(map(str, outside))} are outside of 0 … {steps}")


def _optimizer(
    model: nn.Module, optimizer: str | Optimizer, schedule: float | optimizers.Schedule | None
) -> tuple[Optimizer, optimizers.Schedule | None]:
    """The optimizer, made here from a name, and the learning rate of all its parameters; None keeps its own."""
    if isinstance(optimizer, str):
        optimizer = optimizers.optimizer(optimizer, [p for p in model.parameters() if p.requires_grad])
        schedule = 1e-3 if schedule is None else schedule
    elif schedule is not None and len(own := dict.fromkeys(g["lr"] for g in optimizer.param_groups)) > 1:
        given = ", ".join(map(str, own))
        raise ValueError(
            f"the optimizer's groups have rates {given} and schedule would set all to one: leave schedule out, and "
            "they keep theirs"
        )
    return optimizer, schedule if schedule is None or callable(schedule) else lambda t: schedule


def _rate(optimizer: Optimizer) -> float:
    """The learning rate of all parameters; NaN if their groups have different ones, or find their own."""
    rates = {group["lr"] for group in optimizer.param_groups}
    rate = rates.pop()
    return float("nan") if rates or rate is None else float(rate)


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
    given = 0
    for batch in itertools.cycle(batches) if isinstance(batches, Sequence) else batches:
        yield batch
        given += 1
    raise ValueError(f"the batches ended after {given} steps: give one for each, or a list, which is repeated")
