"""One plain training loop that measures its own steps, and the record it leaves.

A step is δ = θ' − θ. Row t of a history is about the step from θ_t to θ_{t+1}: the loss and θ·∇L at θ_t, its norm, and
‖δ‖ and θ·δ, so that ρ² of the next row is ρ² + ‖δ‖² + 2θ·δ when every step is recorded.

Under ``accelerate launch`` the same script trains on several GPUs: each process takes its share of every batch, and the
history is that of one process, to rounding.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from tqdm.auto import tqdm

from nbutils import device as devices
from nbutils import optimizers

if TYPE_CHECKING:
    from accelerate import Accelerator

Batch = Any  # tokens (B, T + 1), a pair (inputs, targets), or a mapping of tensors for a transformers model
IGNORED = -100  # the target that cross_entropy leaves out
COLUMNS = ("step", "loss", "lr", "norm", "step_norm", "inner", "alignment", "projection")


@dataclass(frozen=True)
class Run:
    """What a training left behind.

    Attributes:
        history: one row per recorded step: ``step`` (steps done before), ``loss``, ``lr``, ``norm`` ‖θ‖, ``step_norm``
            ‖δ‖, ``inner`` θ·δ, ``alignment`` cos(θ, δ), ``projection`` θ·∇L. The last row, at the end, has the norm alone.
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


def batch_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of a batch, in nats.

    Tokens ``(B, T + 1)``: of the next token. A pair ``(inputs, targets)``: of ``model(inputs)``. A mapping: the ``loss``
    of a ``transformers`` model. Targets of −100 do not count.
    """
    if isinstance(batch, Mapping):
        return model(**batch).loss
    inputs, targets = (batch[:, :-1], batch[:, 1:]) if isinstance(batch, Tensor) else batch
    logits = model(inputs)
    return cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, or its first part.

    >>> layer_of("encoder.block.3.layer.0.SelfAttention.q.weight"), layer_of("embedding.weight")
    ('encoder.block.3', 'embedding')
    """
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered[1] if numbered else name.split(".")[0]


def gradient_scales(model: nn.Module, batch: Batch, *, loss: Callable[[nn.Module, Batch], Tensor] = batch_loss) -> dict:
    """Root mean square of each parameter's gradient, by name: the scale of noise that SGD can be compared with."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss(model, batch), parameters.values(), allow_unused=True)
    return {
        name: 0.0 if g is None else float(g.double().square().mean().sqrt())
        for name, g in zip(parameters, gradients, strict=True)
    }


def noise_gradients(
    model: nn.Module, generator: torch.Generator, *, scale: float | Mapping[str, float] = 1.0
) -> None:
    """Put independent normal noise in the place of every gradient; ``scale`` is its deviation, for all or by name."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            std = scale[name] if isinstance(scale, Mapping) else scale
            drawn = torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype, device=generator.device
            )
            parameter.grad = std * drawn.to(parameter.device)


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    steps: int,
    optimizer: str | Optimizer = "adamw",
    schedule: float | optimizers.Schedule = 1e-3,
    loss: Callable[[nn.Module, Batch], Tensor] = batch_loss,
    gradients: str = "loss",
    noise_scale: float | Mapping[str, float] = 1.0,
    clip: float | None = None,
    every: int = 1,
    by_layer: bool = False,
    snapshots: Iterable[int] = (),
    on_snapshot: Callable[[int, nn.Module], Mapping[str, float] | None] | None = None,
    device: str = "auto",
    precision: str = "full",
    compile: bool = False,
    seed: int = 0,
    progress: bool = True,
    accelerator: Accelerator | None = None,
) -> Run:
    """Train ``model`` in place and record norms, steps and their angles.

    Args:
        batches: whole batches (``batch_loss`` has the forms); a list is gone through again and again.
        optimizer: a name of ``nbutils.optimizers``, or one made over the model's parameters.
        schedule: learning rate, or a function of the number of steps done (``nbutils.optimizers.schedule``).
        gradients: ``noise`` is the null model: the same loop fed pure noise of deviation ``noise_scale`` (for all, or
            by parameter as ``gradient_scales`` gives it) in the place of ∇L. The batches are then not used, the loss is
            not computed, and ``projection`` is θ·noise.
        clip: largest norm of the gradient.
        every: record every n-th step, always the first.
        by_layer: record each layer too.
        snapshots: steps at which the parameters are kept, of 0 … ``steps``. With ``on_snapshot`` that is called
            instead, in eval mode without gradients; what it returns goes to ``measures``.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: ``bf16`` is autocast, on CUDA only; parameters and sums keep their type.
        compile: ``torch.compile``, on CUDA only.
        seed: of noise and dropout. Torch's global generators are as before afterwards.
        accelerator: made here under ``accelerate launch``.

    Raises:
        ValueError: an unknown name, a setting that needs CUDA, too few batches.
    """
    if gradients not in ("loss", "noise"):
        raise ValueError(f"unknown gradients {gradients!r}: choose one of loss, noise")
    if precision not in ("full", "bf16"):
        raise ValueError(f"unknown precision {precision!r}: choose one of full, bf16")
    accelerator = accelerator or _accelerator(device)
    place = accelerator.device if accelerator else torch.device(devices.resolve(device))
    if place.type != "cuda" and (precision == "bf16" or compile):
        asked = "precision='bf16'" if precision == "bf16" else "compile=True"
        raise ValueError(f"{asked} is for CUDA and this run is on {place.type}: leave it out, or use device='cuda'")
    model.to(place)
    if isinstance(optimizer, str):
        optimizer = optimizers.optimizer(optimizer, [p for p in model.parameters() if p.requires_grad])
    rate = schedule if callable(schedule) else lambda t: schedule
    forward = accelerator.prepare_model(model) if accelerator else model
    forward = torch.compile(forward) if compile else forward
    autocast = torch.autocast("cuda", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    noise = devices.generator(seed, "cpu") if gradients == "noise" else None
    wanted, kept, measures = set(snapshots), {}, []
    steps_seen = _Steps(model, by_layer)
    source = endless(batches) if noise is None else itertools.repeat(None)

    with _dropout_seed(seed + (accelerator.process_index if accelerator else 0), place):
        model.train()
        first = not accelerator or accelerator.is_main_process
        for t in (bar := tqdm(range(steps), desc="training", disable=not (progress and first))):
            if t in wanted:
                _snapshot(t, model, kept, measures, on_snapshot)
            recorded = t % every == 0
            optimizer.zero_grad()
            if noise is None:
                batch, weight = _share(next_batch(source, t, steps), accelerator)
                with autocast:
                    value = loss(forward, to_device(batch, place)) * weight
                value.backward()
            else:
                noise_gradients(model, noise, scale=noise_scale)
            if recorded:
                steps_seen.before()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for group in optimizer.param_groups:
                group["lr"] = rate(t)
            optimizer.step()
            if recorded:
                mean = float("nan") if noise is not None else _mean(value, accelerator)
                steps_seen.after({"step": t, "loss": mean, "lr": rate(t)})
                bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
        if steps in wanted:
            _snapshot(steps, model, kept, measures, on_snapshot)
    optimizer.zero_grad()
    history, layers = steps_seen.end(steps)
    settings = {
        "optimizer": type(optimizer).__name__,
        "steps": steps,
        "gradients": gradients,
        "clip": clip,
        "every": every,
        "precision": precision,
        "seed": seed,
        "device": place.type,
        "processes": accelerator.num_processes if accelerator else 1,
    }
    return Run(history, layers, kept, pd.DataFrame(measures), settings)


class _Steps:
    """Norms of θ and δ and their products, in float64, in total and by layer."""

    def __init__(self, model: nn.Module, by_layer: bool) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.layer = [layer_of(name) for name in self.parameters]
        self.by_layer, self.rows, self.layers = by_layer, [], []
        self.old: list[Tensor] = []

    @torch.no_grad()
    def before(self) -> None:
        """Between the backward pass and the step."""
        self.old = [p.detach().clone() for p in self.parameters.values()]
        self.products = [
            (_dot(p, p), 0.0 if p.grad is None else _dot(p, p.grad)) for p in self.parameters.values()
        ]

    @torch.no_grad()
    def after(self, row: dict[str, float]) -> None:
        """After the step."""
        sums: dict[str, list[float]] = {}
        for p, old, (square, slope), layer in zip(
            self.parameters.values(), self.old, self.products, self.layer, strict=True
        ):
            delta = p - old
            for key in (layer, "total"):
                total = sums.setdefault(key, [0.0] * 4)
                for i, x in enumerate((square, _dot(delta, delta), _dot(old, delta), slope)):
                    total[i] += x
        self.rows.append(row | _row(*sums.pop("total")))
        if self.by_layer:
            self.layers += [{"step": row["step"], "layer": layer} | _row(*values) for layer, values in sums.items()]

    @torch.no_grad()
    def end(self, step: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        squares: dict[str, float] = {}
        for p, layer in zip(self.parameters.values(), self.layer, strict=True):
            squares[layer] = squares.get(layer, 0.0) + _dot(p, p)
        self.rows.append({"step": step, "norm": sum(squares.values()) ** 0.5})
        if self.by_layer:
            self.layers += [{"step": step, "layer": key, "norm": value**0.5} for key, value in squares.items()]
        return pd.DataFrame(self.rows, columns=list(COLUMNS)), pd.DataFrame(self.layers)


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _row(square: float, step_square: float, inner: float, projection: float) -> dict[str, float]:
    norm, step = square**0.5, step_square**0.5
    alignment = inner / (norm * step) if norm * step else float("nan")
    return {"norm": norm, "step_norm": step, "inner": inner, "alignment": alignment, "projection": projection}


def _accelerator(device: str) -> Accelerator | None:
    """The accelerator of a process that ``accelerate launch`` started, else none."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    from accelerate import Accelerator

    return Accelerator(cpu=devices.resolve(device) == "cpu")


def _share(batch: Batch, accelerator: Accelerator | None) -> tuple[Batch, float]:
    """This process's rows of a batch, and the weight that makes the mean over processes that of the whole batch."""
    if accelerator is None or accelerator.num_processes == 1:
        return batch, 1.0
    rank, world = accelerator.process_index, accelerator.num_processes
    mine = _map(batch, lambda x: x[rank::world])
    return mine, _targets(mine) * world / _targets(batch)


def _targets(batch: Batch) -> int:
    labels = batch["labels"] if isinstance(batch, Mapping) else batch if isinstance(batch, Tensor) else batch[1]
    if len(labels) == 0:
        raise ValueError("a batch has fewer rows than there are processes")
    return int((labels != IGNORED).sum())


def _mean(value: Tensor, accelerator: Accelerator | None) -> float:
    value = value.detach()
    return float(accelerator.reduce(value, "mean") if accelerator else value)


def _map(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: function(value) for key, value in batch.items()}
    return tuple(function(part) for part in batch)


def to_device(batch: Batch, place: torch.device) -> Batch:
    return _map(batch, lambda x: x.to(place, non_blocking=True))


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    return itertools.cycle(batches) if isinstance(batches, Sequence) else iter(batches)


def next_batch(source: Iterator[Batch], t: int, steps: int) -> Batch:
    try:
        return next(source)
    except StopIteration:
        raise ValueError(f"the batches ended after {t} of {steps} steps") from None


@contextlib.contextmanager
def _dropout_seed(seed: int, place: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def _snapshot(
    step: int,
    model: nn.Module,
    kept: dict[int, dict[str, Tensor]],
    measures: list[dict[str, float]],
    on_snapshot: Callable[[int, nn.Module], Mapping[str, float] | None] | None,
) -> None:
    if on_snapshot is None:
        kept[step] = {n: p.detach().cpu().clone() for n, p in model.named_parameters() if p.requires_grad}
        return
    model.eval()
    measures.append({"step": step} | dict(on_snapshot(step, model) or {}))
    model.train()


def save_run(run: Run, folder: Path | str) -> None:
    """Write tables as CSV, settings as JSON and snapshots as safetensors. All or nothing: an old folder is replaced."""
    from safetensors.torch import save_file

    folder = Path(folder)
    part, old = (folder.with_name(f"{folder.name}.{word}{os.getpid()}") for word in ("part", "old"))
    (part / "snapshots").mkdir(parents=True)
    for name in ("history", "layers", "measures"):
        table = getattr(run, name)
        if len(table.columns):
            table.to_csv(part / f"{name}.csv", index=False)
    for step, parameters in run.snapshots.items():
        save_file({key: value.contiguous() for key, value in parameters.items()}, part / f"snapshots/{step}.safetensors")
    (part / "settings.json").write_text(json.dumps(run.settings, indent=1) + "\n", encoding="utf-8")
    if folder.exists():
        os.replace(folder, old)
    os.replace(part, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_run(folder: Path | str) -> Run:
    """Read what ``save_run`` wrote; numbers come back to the last bit.

    Raises:
        FileNotFoundError: no run there.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    if not (folder / "history.csv").is_file():
        raise FileNotFoundError(f"{folder} has no history.csv: it is not a saved run")
    tables = {
        name: pd.read_csv(folder / f"{name}.csv", float_precision="round_trip")
        for name in ("history", "layers", "measures")
        if (folder / f"{name}.csv").is_file()
    }
    files = sorted((folder / "snapshots").glob("*.safetensors"), key=lambda file: int(file.stem))
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    return Run(**tables, snapshots={int(file.stem): load_file(file) for file in files}, settings=settings)
