"""One plain training loop that measures its own steps, and the record it leaves.

Row t of a history belongs to the step δ from θ_{t−1} to θ_t, as in ``norms.NormTracker``: ‖θ_t‖ after it, ‖δ‖ and θ·δ,
and loss, learning rate and θ·∇L, which are at θ_{t−1}. Row 0 is the start and has the norm alone.

Under ``accelerate launch --multi_gpu`` the same script trains on several GPUs: each process takes its share of every
batch, and the history is that of one process, to rounding. Without GPUs the processes are CPU processes; accelerate's
``--cpu`` starts only one, whatever number is asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from tqdm.auto import tqdm

from nbutils import device as devices
from nbutils import optimizers
from nbutils.names import layer_of
from nbutils.norms import NormTracker

if TYPE_CHECKING:
    from accelerate import Accelerator

Batch = Any  # tokens (B, T + 1), a pair (inputs, targets), or a mapping of tensors for a transformers model
IGNORED = -100  # the target that cross_entropy leaves out
COLUMNS = ("step", "loss", "lr", "norm", "step_norm", "inner", "alignment", "projection", "grad_norm")


@dataclass(frozen=True)
class Run:
    """What a training left behind.

    Args:
        history: one row per recorded step: ``step`` (steps done), ``loss``, ``lr`` (NaN where parameters have
            different ones), ``norm`` ‖θ‖, ``step_norm`` ‖δ‖, ``inner`` θ·δ, ``alignment`` cos(θ, δ), ``projection``
            θ·∇L and ``grad_norm`` ‖∇L‖, before clipping.
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
    logits = model(inputs)
    return cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def gradient_scales(
    model: nn.Module, batch: Batch, *, loss: Callable[[nn.Module, Batch], Tensor] = batch_loss
) -> dict[str, float]:
    """Root mean square of each parameter's gradient, by name: the scale of noise that SGD can be compared with.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> gradient_scales(net, torch.tensor([[1.0, 7.0]]), loss=lambda net, x: net(x).sum())  # ∇ = x: √((1 + 49)/2)
    {'weight': 5.0}
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss(model, batch), parameters.values(), allow_unused=True)
    return {
        name: 0.0 if g is None else float(g.double().square().mean().sqrt())
        for name, g in zip(parameters, gradients, strict=True)
    }


def noise_gradients(model: nn.Module, generator: torch.Generator, *, scale: float | Mapping[str, float] = 1.0) -> None:
    """Put independent normal noise in the place of every gradient; ``scale`` is its deviation, for all or by name.

    >>> net = nn.Linear(100, 100)
    >>> noise_gradients(net, torch.Generator().manual_seed(0), scale={"weight": 0.5, "bias": 0.0})
    >>> round(float(net.weight.grad.std()), 1), float(net.bias.grad.abs().max())
    (0.5, 0.0)
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            std = scale[name] if isinstance(scale, Mapping) else scale
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device=generator.device)
            parameter.grad = std * drawn.to(parameter.device)


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    steps: int,
    optimizer: str | Optimizer = "adamw",
    schedule: float | optimizers.Schedule | None = None,
    loss: Callable[[nn.Module, Batch], Tensor] = batch_loss,
    gradients: str = "loss",
    noise_scale: float | Mapping[str, float] = 1.0,
    clip: float | None = None,
    every: int = 1,
    projections: bool = True,
    by_layer: bool | Callable[[str], str] = False,
    snapshots: Iterable[int] = (),
    on_snapshot: Callable[[int, nn.Module], Mapping[str, float] | None] | None = None,
    device: str = "auto",
    precision: str = "full",
    compile: bool = False,
    seed: int = 0,
    progress: bool = True,
    accelerator: Any = None,
) -> Run:
    """Train ``model`` in place and record norms, steps and their angles.

    Args:
        batches: whole batches (``batch_loss`` has the forms); a list is gone through again and again.
        optimizer: a name of ``nbutils.optimizers``, or one made over the model's parameters.
        schedule: learning rate, or a function of the number of steps done (``nbutils.optimizers.schedule``), for all
            parameters. Without it an optimizer made before keeps its rates, and one made here from a name has 1e-3.
        gradients: ``noise`` is the null model: the same loop fed pure noise of deviation ``noise_scale`` (for all, or
            by parameter as ``gradient_scales`` gives it) in the place of ∇L. The batches are then not used, the loss is
            not computed, and ``projection`` is θ·noise.
        clip: largest norm of the gradient.
        every: record every n-th step, and the start.
        projections: record θ·∇L and ‖∇L‖ too, for one more reading of the parameters.
        by_layer: record each layer too; a function from a parameter's name to its part makes other parts.
        snapshots: steps at which the parameters are kept, of 0 … ``steps``. With ``on_snapshot`` that is called
            instead, in eval mode without gradients; what it returns goes to ``measures``.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: ``bf16`` is autocast, on CUDA only; parameters and sums keep their type.
        compile: ``torch.compile``, on CUDA only.
        seed: of noise and dropout. The one that drew the weights gives noise parallel to some of them: choose another.
            Torch's global generators are as before afterwards.
        accelerator: an ``accelerate.Accelerator``; made here under ``accelerate launch``.

    Raises:
        ValueError: an unknown name, a setting that needs CUDA, too few batches, one schedule for parameter groups of
            different rates.

    >>> net, batches = nn.Linear(2, 1, bias=False), [torch.tensor([[3.0, 4.0]])]
    >>> options = {"optimizer": "sgd", "schedule": 0.1, "device": "cpu", "progress": False}
    >>> run = train(net, batches, steps=2, loss=lambda net, x: net(x).sum(), **options)
    >>> run.history["step_norm"].round(6).tolist()  # the gradient is x, of length 5
    [nan, 0.5, 0.5]
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
    wanted, kept, measures = set(snapshots), {}, []
    if outside := sorted(step for step in wanted if not 0 <= step <= steps):
        raise ValueError(f"snapshots at {', '.join(map(str, outside))} are outside of 0 … {steps}")
    model.to(place)
    if isinstance(optimizer, str):
        optimizer = optimizers.optimizer(optimizer, [p for p in model.parameters() if p.requires_grad])
        schedule = 1e-3 if schedule is None else schedule
    elif schedule is not None and len(own := dict.fromkeys(g["lr"] for g in optimizer.param_groups)) > 1:
        given = ", ".join(map(str, own))
        raise ValueError(
            f"the optimizer's groups have rates {given} and schedule would set all to one: leave schedule out, and "
            "they keep theirs"
        )
    rate = schedule if schedule is None or callable(schedule) else lambda t: schedule
    forward = accelerator.prepare_model(model) if accelerator else model
    forward = torch.compile(forward) if compile else forward
    autocast = torch.autocast("cuda", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    noise = devices.generator(seed, place.type) if gradients == "noise" else None
    source = endless(batches) if noise is None else itertools.repeat(None)
    tracker = NormTracker(
        model.named_parameters(),
        every=every,
        by=layer_of if by_layer is True else by_layer or None,
        gradients=projections,
    )
    rows = [{"step": 0, "loss": float("nan"), "lr": float("nan")}]

    with _dropout_seed(seed + (accelerator.process_index if accelerator else 0), place):
        model.train()
        first = not accelerator or accelerator.is_main_process
        for t in (bar := tqdm(range(steps), desc="training", disable=not (progress and first))):
            if t in wanted:
                _snapshot(t, model, kept, measures, on_snapshot)
            optimizer.zero_grad()
            if noise is None:
                batch, weight = _share(next_batch(source, t, steps), accelerator)
                with autocast:
                    value = loss(forward, to_device(batch, place)) * weight
                value.backward()
            else:
                noise_gradients(model, noise, scale=noise_scale)
            tracker.before()  # here the gradient is still whole
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for group in optimizer.param_groups if rate else ():
                group["lr"] = rate(t)
            optimizer.step()
            tracker.after()
            if tracker.steps % every == 0:
                # a tensor until the end: a GPU is not waited for
                mean = float("nan") if noise is not None else _mean(value, accelerator)
                rows.append({"step": tracker.steps, "loss": mean, "lr": _rate(optimizer)})
                if not bar.disable:
                    bar.set_postfix(loss=f"{float(mean):.3f}", refresh=False)
        if steps in wanted:
            _snapshot(steps, model, kept, measures, on_snapshot)
    optimizer.zero_grad()
    measured = tracker.history().drop(columns="cos_similarity")
    total = measured["layer"] == "total"
    rows = [row | {"loss": float(row["loss"])} for row in rows]
    history = pd.DataFrame(rows).merge(measured[total], on="step")[list(COLUMNS)]
    layers = measured[~total].reset_index(drop=True)
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
        "rank": accelerator.process_index if accelerator else 0,
    }
    return Run(history, layers if by_layer else pd.DataFrame(), kept, pd.DataFrame(measures), settings)


def _accelerator(device: str) -> Accelerator | None:
    """The accelerator of a process that ``accelerate launch`` started, else none."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    from accelerate import Accelerator

    return Accelerator(cpu=devices.resolve(device) == "cpu")


def _share(batch: Batch, accelerator: Accelerator | None) -> tuple[Batch, float]:
    """This process's rows of a batch, and the weight that makes the mean over processes that of the whole batch.

    Rows without a target have the loss 0/0, which no weight mends: their process takes another's rows with weight 0.
    It must not stay idle, for the others wait for its gradient.
    """
    if accelerator is None or accelerator.num_processes == 1:
        return batch, 1.0
    rank, world = accelerator.process_index, accelerator.num_processes
    shares = [_map(batch, lambda x, first=first: x[first::world]) for first in range(world)]
    targets = [_targets(share) for share in shares]
    if not any(targets):
        raise ValueError(f"a batch has no target: all are {IGNORED}, which do not count; leave it out")
    lent = max(range(world), key=targets.__getitem__)
    return shares[rank if targets[rank] else lent], targets[rank] * world / sum(targets)


def _targets(batch: Batch) -> int:
    labels = batch["labels"] if isinstance(batch, Mapping) else batch if isinstance(batch, Tensor) else batch[1]
    if len(labels) == 0:
        raise ValueError("a batch has fewer rows than there are processes")
    return int((labels != IGNORED).sum())


def _rate(optimizer: Optimizer) -> float:
    """The learning rate of all parameters; NaN if their groups have different ones, or find their own."""
    rates = {group["lr"] for group in optimizer.param_groups}
    rate = rates.pop()
    return float("nan") if rates or rate is None else float(rate)


def _mean(value: Tensor, accelerator: Accelerator | None) -> Tensor:
    value = value.detach()
    return accelerator.reduce(value, "mean") if accelerator else value


def _map(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: function(value) for key, value in batch.items()}
    return tuple(function(part) for part in batch)


def to_device(batch: Batch, place: torch.device) -> Batch:
    """A batch on a device, its tensors contiguous.

    >>> to_device({"labels": torch.ones(2, 3).mT}, torch.device("cpu"))["labels"].is_contiguous()
    True
    """
    return _map(batch, lambda x: x.to(place, non_blocking=True).contiguous())  # T5 views its labels


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """A list again and again; an iterator as it is.

    >>> list(itertools.islice(endless([1, 2]), 5))
    [1, 2, 1, 2, 1]
    """
    return itertools.cycle(batches) if isinstance(batches, Sequence) else iter(batches)


def next_batch(source: Iterator[Batch], t: int, steps: int) -> Batch:
    """The batch of step ``t`` of ``steps``.

    Raises:
        ValueError: the batches have ended.

    >>> next_batch(iter([]), 3, 10)
    Traceback (most recent call last):
    ValueError: the batches ended after 3 of 10 steps
    """
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
    """Write tables as CSV, settings as JSON and snapshots as safetensors. All or nothing: an old folder is replaced.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_run(Run(pd.DataFrame({"step": [0], "norm": [3.0]})), Path(folder, "run"))
    ...     sorted(file.name for file in Path(folder, "run").iterdir())
    ['history.csv', 'settings.json', 'snapshots']
    """
    folder = Path(folder)
    part, old = (folder.with_name(f"{folder.name}.{word}{os.getpid()}") for word in ("part", "old"))
    try:
        (part / "snapshots").mkdir(parents=True)
        for name in ("history", "layers", "measures"):
            if len((table := getattr(run, name)).columns):
                table.to_csv(part / f"{name}.csv", index=False)
        for step, parameters in run.snapshots.items():
            tensors = {key: value.contiguous() for key, value in parameters.items()}
            safetensors.torch.save_file(tensors, part / f"snapshots/{step}.safetensors")
        (part / "settings.json").write_text(json.dumps(run.settings, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            os.replace(folder, old)
        os.replace(part, folder)
    finally:
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def load_run(folder: Path | str) -> Run:
    """Read what ``save_run`` wrote; numbers come back to the last bit.

    Raises:
        FileNotFoundError: no run there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_run(Run(pd.DataFrame({"step": [0], "norm": [0.1 + 0.2]})), Path(folder, "run"))
    ...     load_run(Path(folder, "run")).history["norm"].tolist()
    [0.30000000000000004]
    """
    folder = Path(folder)
    if not (folder / "history.csv").is_file():
        raise FileNotFoundError(f"{folder} has no history.csv: it is not a saved run")
    tables = {
        name: _read_table(folder / f"{name}.csv")
        for name in ("history", "layers", "measures")
        if (folder / f"{name}.csv").is_file()
    }
    files = sorted((folder / "snapshots").glob("*.safetensors"), key=lambda file: int(file.stem))
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    return Run(
        **tables, snapshots={int(file.stem): safetensors.torch.load_file(file) for file in files}, settings=settings
    )


def _read_table(file: Path) -> pd.DataFrame:
    """A table as it was written: through Python's ``float``, since pandas rounds the last bit in some versions."""
    table = pd.read_csv(file, dtype=str, keep_default_na=False)
    return table.apply(
        lambda x: x if x.name == "layer" else x.astype("int64") if x.name == "step" else x.replace("", "nan").map(float)
    )
