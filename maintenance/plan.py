# mypy: ignore-errors
"""What profile ``gpu`` asks of a GPU, counted on the pretend one: launches, FLOPs, bytes, memory, an estimate of time.

Three steps of each training are made at the profile's own sizes, and the rest is taken to cost what the third did; so
it is with the measurements of the shared language models. All else runs in full, on what such trainings leave. A time
is the longest of three, at the rates in ``CARDS``: launches one after another, arithmetic, and memory traffic; and this
machine's own work on one core, added. What a GPU measured: ``book/gpu.json``.
"""

from __future__ import annotations

import argparse
import sys
import time
import weakref
from collections import Counter
from contextlib import ExitStack, redirect_stdout
from functools import partial
from io import StringIO
from unittest.mock import patch

import pandas as pd
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from maintenance import pretend
from nbutils import ensembles, shared_runs, training
from nbutils.shared_runs import recipes_lm
from workflow import book

STEPS = 3
# float32 without tensor cores, half of it reached; bytes/s, of which 0.7; seconds a launch
CARDS = {"T4": (8.1e12, 300e9, 12e-6), "A100": (19.5e12, 1555e9, 8e-6), "H100": (67e12, 3350e9, 6e-6)}
MEMORY = 15.0  # GB of a T4, as Colab gives it
COUNTED = ("launches", "flops", "bytes", "cpu")

count: Counter[str] = Counter()  # of these, and seconds: of pretending, of torch itself, of the CPU's work left out
live: Counter[int] = Counter()  # tensors by memory
held = Counter()
operate, train, train_ensemble = pretend.operate, training.train, ensembles.train
measured, zero_grad = recipes_lm.measure, torch.optim.Optimizer.zero_grad


def counting(func, args, kwargs):
    began, before = time.process_time(), pretend.launched.total()
    leaves = tree_leaves((args, kwargs))
    if not any(isinstance(x, pretend.Pretend) or (isinstance(x, torch.device) and pretend._on(x)) for x in leaves):
        ready = time.process_time()
        out = func(*args, **kwargs)
        done = time.process_time()
        count.update(cpu=done - ready, pretending=ready - began)
        return out
    out = operate(func, args, kwargs)
    made = [x for x in tree_leaves(out) if isinstance(x, pretend.Pretend)]
    if pretend.launched.total() > before:
        flops = flop_registry.get(func.overloadpacket)
        count.update(launches=1, flops=flops(*args, **kwargs, out_val=out) if flops else 0)
        moved = [x for x in leaves if isinstance(x, torch.Tensor)] + made
        count["bytes"] += sum(x.numel() * x.element_size() for x in moved)
    for x in made:
        memory = x.elem.untyped_storage()
        held["now"] += 0 if live[memory._cdata] else memory.nbytes()
        live[memory._cdata] += 1
        weakref.finalize(x, release, memory._cdata, memory.nbytes())
    held["peak"] = max(held["peak"], held["now"])
    count["pretending"] += time.process_time() - began
    return out


def release(memory, size):
    live[memory] -= 1
    held["now"] -= 0 if live[memory] else size


def apart(work, *args):
    """What is done apart from the CPU's own work, which here is torch's on a pretend device; and what it counted."""
    before, began = count.copy(), time.process_time()
    result = work(*args)
    spent = {what: count[what] - before[what] for what in (*COUNTED, "pretending")}
    count["torch"] += time.process_time() - began - spent["cpu"] - spent["pretending"]
    return result, spent


def repeat(spent, times):
    count.update({what: spent[what] * times for what in COUNTED[:3]} | {"again": spent["cpu"] * times})


def some_together(theta, gradients, optimizer, steps, **options):
    run = train_ensemble(theta, gradients, optimizer, min(steps, STEPS), **options)
    for t in range(steps):
        if t < STEPS:
            step, spent = apart(next, run)
        else:
            repeat(spent, 1)
        yield step


def some_steps(model, batches, *, steps, every=1, callback=lambda step: None, **options):
    made, marks = min(steps, STEPS), []
    options["every"] = every if every <= made else 1
    with patch.object(
        torch.optim.Optimizer, "zero_grad", lambda *a, **k: (marks.append(count.copy()), zero_grad(*a, **k))
    ):
        run, _ = apart(lambda: train(model, batches, steps=made, callback=callback, **options))
    repeat({what: marks[-1][what] - marks[-2][what] for what in COUNTED}, steps - made)
    rest, tables = range(made + 1, steps + 1), []
    for table in (run.history, run.layers):
        last = table[table["step"] == made] if len(table) else table
        tables.append(pd.concat([table, *[last.assign(step=s) for s in rest]], ignore_index=True))
    with torch.no_grad():
        for s in rest:
            list(model.parameters())[-1].mul_(1.01)  # no two alike: somebody divides by distances
            callback(s)
    return training.TrainingRun(*tables, settings=run.settings | {"steps": steps})


def measured_once(model, windows, *, found={}):  # noqa: B006
    if windows.shape in found:
        repeat(found[windows.shape][1], 1)
    else:
        found[windows.shape] = apart(measured, model, windows)
    return found[windows.shape][0]


def cost(name, work):
    """A row: what ``work`` asks of a device, and how long each card would take."""
    for counter in (count, live, held):
        counter.clear()
    began = time.process_time()
    with ExitStack() as stack:
        pretend.device(stack)
        stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(patch.object(pretend, "operate", counting))
        stack.enter_context(patch.object(training, "train", some_steps))
        stack.enter_context(patch.object(ensembles, "train", some_together))
        stack.enter_context(patch.object(recipes_lm, "measure", measured_once))
        work()
    cpu = time.process_time() - began - count["pretending"] - count["torch"] + count["again"]
    row = {"of": name, "launches": count["launches"], "GFLOP": count["flops"] / 1e9, "GB moved": count["bytes"] / 1e9}
    row |= {"peak GB": held["peak"] / 1e9, "CPU s": cpu}
    for card, (flops, traffic, launch) in CARDS.items():
        parts = {"launches": count["launches"] * launch, "arithmetic": 2 * count["flops"] / flops}
        parts["memory"] = count["bytes"] / traffic / 0.7
        bound = max(parts, key=parts.get)
        row |= {f"{card} s": parts[bound] + cpu, f"{card} by": bound if parts[bound] > cpu else "the CPU"}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="chapters, each with its shared trainings, or one of those; or all")
    options, rows = parser.parse_args(), []
    pretend.quietly("plan")
    for name in options.names or book.chapters():
        make = shared_runs.RECIPES.get(name) or partial(pretend.execute, name)
        rows.append(cost(name, partial(make, profile="gpu", seed=0, device="cuda")))
        print(pd.DataFrame(rows[-1:]).to_csv(sep="\t", index=False, header=len(rows) == 1, float_format="%.1f"), end="")
    return int(any(row["peak GB"] > MEMORY for row in rows))


if __name__ == "__main__":
    sys.exit(main())
