# mypy: ignore-errors
"""What profile ``gpu`` asks of a GPU, counted on the pretend one: launches, FLOPs, bytes, memory, an estimate of time.

Three steps of each training are made at the profile's own sizes, and each further step is taken to cost as much as the
third. Measurements of the shared language models are likewise made once, and repeated only in the counts. All other
code runs in full, on the results of these shortened trainings. An estimated time is the longest of three times at the
rates in ``CARDS`` (launches one after another, arithmetic, memory traffic) plus the time of this machine's own work on
one core. ``book/gpu.json`` has what a GPU measured.
"""

from __future__ import annotations

import argparse
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any, NamedTuple
from unittest.mock import patch

import pandas as pd
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from maintenance import pretend
from nbutils import ensembles, shared_runs, training
from nbutils.shared_runs import recipes_lm
from workflow import book

STEPS = 3  # of each training that are made


class Card(NamedTuple):
    """The rates of a GPU."""

    flops: float  # per second in float32 without tensor cores, of which half is reached
    bytes: float  # per second of memory traffic, of which 0.7 is reached
    launch: float  # seconds for one operation


CARDS = {
    "T4": Card(8.1e12, 300e9, 12e-6),
    "A100": Card(19.5e12, 1555e9, 8e-6),
    "H100": Card(67e12, 3350e9, 6e-6),
}
MEMORY = 15.0  # GB of a T4, as Colab offers it

DEVICE_WORK = ("launches", "flops", "bytes")
# ``DEVICE_WORK``, and seconds: "cpu" in operations on CPU tensors, "pretending" in the bookkeeping of pretend tensors,
# "torch" in trainings outside these two, which launches stand for, and "skipped cpu" in steps that were not made.
counts: Counter[str] = Counter()
tensors_in_storage: Counter[int] = Counter()  # live pretend tensors by address of their storage
memory: Counter[str] = Counter()  # bytes on the device: "now" and "peak"
measurements: dict[torch.Size, tuple[dict[str, float], dict[str, float]]] = {}  # by shape of windows: values, counts

# The originals of what ``cost`` replaces.
run_operator = pretend.run_operator
train = training.train
train_ensemble = ensembles.train
measure = recipes_lm.measure
zero_grad = torch.optim.Optimizer.zero_grad


def counted_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``pretend.run_operator``, with its work added to ``counts`` and its results to ``memory``."""
    start = time.process_time()
    launches_before = pretend.launches.total()
    leaves = tree_leaves((args, kwargs))
    if not any(_is_on_device(x) for x in leaves):
        ready = time.process_time()
        result = func(*args, **kwargs)
        counts.update(cpu=time.process_time() - ready, pretending=ready - start)
        return result
    result = run_operator(func, args, kwargs)
    results = [x for x in tree_leaves(result) if isinstance(x, pretend.Pretend)]
    if pretend.launches.total() > launches_before:
        count_flops = flop_registry.get(func.overloadpacket)
        operands = [x for x in leaves if isinstance(x, torch.Tensor)]
        counts["launches"] += 1
        counts["flops"] += count_flops(*args, **kwargs, out_val=result) if count_flops else 0
        counts["bytes"] += sum(x.numel() * x.element_size() for x in operands + results)
    for x in results:
        _track_memory(x)
    memory["peak"] = max(memory["peak"], memory["now"])
    counts["pretending"] += time.process_time() - start
    return result


def _is_on_device(x: Any) -> bool:
    """Whether an argument is a pretend tensor or the pretend device."""
    return isinstance(x, pretend.Pretend) or (isinstance(x, torch.device) and pretend.is_pretend_device(x))


def _track_memory(x: pretend.Pretend) -> None:
    """Add the storage of a tensor to the memory in use until the last tensor in that storage is gone."""
    storage = x.elem.untyped_storage()
    if not tensors_in_storage[storage._cdata]:
        memory["now"] += storage.nbytes()
    tensors_in_storage[storage._cdata] += 1
    weakref.finalize(x, _release, storage._cdata, storage.nbytes())


def _release(storage: int, size: int) -> None:
    tensors_in_storage[storage] -= 1
    if not tensors_in_storage[storage]:
        memory["now"] -= size


def counted(work: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, float]]:
    """The result of ``work``, and what it added to ``counts``.

    Time that is neither the CPU's own work nor bookkeeping is torch's for the pretend device, and goes to "torch".
    """
    counts_before = counts.copy()
    start = time.process_time()
    result = work(*args)
    added = {key: counts[key] - counts_before[key] for key in (*DEVICE_WORK, "cpu", "pretending")}
    counts["torch"] += time.process_time() - start - added["cpu"] - added["pretending"]
    return result, added


def repeat(added: Mapping[str, float], times: int) -> None:
    """Count work that was counted once as if it were done ``times`` more times."""
    counts.update({key: added[key] * times for key in DEVICE_WORK})
    counts["skipped cpu"] += added["cpu"] * times


def train_ensemble_briefly(theta, gradients, make_optimizer, steps: int, **options: Any) -> Iterator[ensembles.Step]:
    """``ensembles.train``, whose first ``STEPS`` steps are made; each further one yields the last of them again."""
    run = train_ensemble(theta, gradients, make_optimizer, min(steps, STEPS), **options)
    for t in range(steps):
        if t < STEPS:
            step, added = counted(next, run)
        else:
            repeat(added, 1)
        yield step


def train_briefly(
    model, batches, *, steps: int, every: int = 1, callback=lambda step: None, **options: Any
) -> training.TrainingRun:
    """``training.train``, whose first ``STEPS`` steps are made; the rows of the others repeat the last of them."""
    made = min(steps, STEPS)
    options["every"] = every if every <= made else 1
    counts_at_steps = []

    def mark_step(*args: Any, **kwargs: Any) -> None:
        counts_at_steps.append(counts.copy())
        zero_grad(*args, **kwargs)

    with patch.object(torch.optim.Optimizer, "zero_grad", mark_step):
        run, _ = counted(lambda: train(model, batches, steps=made, callback=callback, **options))
    before, after = counts_at_steps[-2:]
    repeat({key: after[key] - before[key] for key in (*DEVICE_WORK, "cpu")}, steps - made)

    skipped = range(made + 1, steps + 1)
    tables = []
    for table in (run.history, run.layers):
        last = table[table["step"] == made] if len(table) else table
        tables.append(pd.concat([table, *[last.assign(step=step) for step in skipped]], ignore_index=True))
    with torch.no_grad():
        for step in skipped:
            list(model.parameters())[-1].mul_(1.01)  # no two steps alike, since chapters divide by distances
            callback(step)
    return training.TrainingRun(*tables, settings=run.settings | {"steps": steps})


def measure_once(model, windows: torch.Tensor) -> dict[str, float]:
    """``recipes_lm.measure``, made once for each shape of windows; later calls return the same values."""
    if windows.shape in measurements:
        repeat(measurements[windows.shape][1], 1)
    else:
        measurements[windows.shape] = counted(measure, model, windows)
    return measurements[windows.shape][0]


def cost(name: str, work: Callable[[], Any]) -> dict[str, Any]:
    """A row of the table: what ``work`` asks of a device, and how long it would take on each card."""
    for counter in (counts, tensors_in_storage, memory):
        counter.clear()
    start = time.process_time()
    with ExitStack() as stack:
        pretend.install_device(stack)
        stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(patch.object(pretend, "run_operator", counted_operator))
        stack.enter_context(patch.object(training, "train", train_briefly))
        stack.enter_context(patch.object(ensembles, "train", train_ensemble_briefly))
        stack.enter_context(patch.object(recipes_lm, "measure", measure_once))
        work()
    cpu = time.process_time() - start - counts["pretending"] - counts["torch"] + counts["skipped cpu"]
    row = {
        "name": name,
        "launches": counts["launches"],
        "GFLOP": counts["flops"] / 1e9,
        "GB moved": counts["bytes"] / 1e9,
        "peak GB": memory["peak"] / 1e9,
        "CPU s": cpu,
    }
    for card_name, card in CARDS.items():
        seconds = {
            "launches": counts["launches"] * card.launch,
            "arithmetic": counts["flops"] / card.flops / 0.5,
            "memory": counts["bytes"] / card.bytes / 0.7,
        }
        bound = max(seconds, key=seconds.get)
        row[f"{card_name} s"] = seconds[bound] + cpu
        row[f"{card_name} by"] = bound if seconds[bound] > cpu else "the CPU"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="chapters (with their shared trainings) or shared trainings; or all")
    options = parser.parse_args()
    pretend.prepare_process("plan")
    rows = []
    for name in options.names or book.chapters():
        make = shared_runs.RECIPES.get(name) or partial(pretend.execute, name)
        rows.append(cost(name, partial(make, profile="gpu", seed=0, device="cuda")))
        table = pd.DataFrame(rows[-1:])
        print(table.to_csv(sep="\t", index=False, header=len(rows) == 1, float_format="%.1f"), end="")
    return int(any(row["peak GB"] > MEMORY for row in rows))


if __name__ == "__main__":
    sys.exit(main())
