# mypy: ignore-errors
"""What a profile asks of a GPU, counted on the pretend one: launches, FLOPs, bytes, peak memory, and an estimate of time.

Each training makes its first steps at the profile's own sizes; the others are taken to cost what the last of these did.
All else runs in full. A time is the longest of three: launches one after another, arithmetic, and memory traffic, at
the rates in ``CARDS``; the CPU's own work is timed here, one core, and added. No GPU was measured.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
import weakref
from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import pandas as pd
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from maintenance import pretend
from nbutils import profiles, together, training, trainings
from workflow import BUILD, book, sources

STEPS = 3  # of each training that are made
# FLOP/s of float32 without tensor cores, bytes/s, seconds a launch. Half of the first and 0.7 of the second is reached.
CARDS = {"T4": (8.1e12, 300e9, 12e-6), "A100": (19.5e12, 1555e9, 8e-6), "H100": (67e12, 3350e9, 6e-6)}
MEMORY = 15e9  # of a T4, as Colab gives it

count: Counter[str] = Counter()  # launches, flops, bytes, and seconds spent on counting, which are not the CPU's own
live: Counter[int] = Counter()  # wrappers of each memory
held = {"now": 0, "peak": 0}
operate, train, train_together = pretend.operate, training.train, together.train_together


def counted(func, args, kwargs):
    began, before = time.process_time(), pretend.launched.total()
    out = operate(func, args, kwargs)
    made = [x for x in tree_leaves(out) if isinstance(x, pretend.Pretend)]
    if pretend.launched.total() > before:
        moved = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)] + made
        flops = flop_registry.get(func.overloadpacket)
        count.update(launches=1, flops=flops(*args, **kwargs, out_val=out) if flops else 0)
        count["bytes"] += sum(x.numel() * x.element_size() for x in moved)
    for x in made:
        memory = x.elem.untyped_storage()
        key, size = memory._cdata, memory.nbytes()
        held["now"] += 0 if live[key] else size
        live[key] += 1
        weakref.finalize(x, release, key, size)
    held["peak"] = max(held["peak"], held["now"])
    if made or pretend.launched.total() > before:
        count["seconds"] += time.process_time() - began
    return out


def release(key, size):
    live[key] -= 1
    if not live[key]:
        held["now"] -= size
        del live[key]


def repeated(before, after, times):
    """Add a step's cost as often as it was left out."""
    for what in ("launches", "flops", "bytes"):
        count[what] += (after[what] - before[what]) * times


def some_together(theta, gradients, optimizer, steps, **options):
    run = train_together(theta, gradients, optimizer, min(steps, STEPS), **options)
    for _ in range(min(steps, STEPS)):
        before = count.copy()
        step = next(run)
        after = count.copy()
        yield step
    repeated(before, after, steps - STEPS)
    for _ in range(steps - STEPS):
        yield step


def some_steps(model, batches, *, steps, record=training.Record(), **options):
    wanted, made = set(record.snapshots), min(steps, STEPS)
    few = training.Record(record.every if record.every <= made else 1, record.by_layer, {made} & wanted or ())
    befores = []
    step = torch.optim.Optimizer.zero_grad
    with patch.object(
        torch.optim.Optimizer, "zero_grad", lambda *a, **k: (befores.append(count.copy()), step(*a, **k))
    ):
        run = train(model, batches, steps=made, record=few, **options)
    repeated(befores[-2], befores[-1], steps - made)
    rest = range(made + 1, steps + 1)
    history = pd.concat([run.history, *[run.history.tail(1).assign(step=s) for s in rest]], ignore_index=True)
    layers = run.layers
    if len(layers):
        last = layers[layers["step"] == made]
        layers = pd.concat([layers, *[last.assign(step=s) for s in rest]], ignore_index=True)
    kept, rows = {}, []
    weights = {name: p.detach().cpu() for name, p in model.named_parameters() if p.requires_grad}
    for s in sorted(wanted):
        kept[s] = weights
        if record.on_snapshot:
            with torch.no_grad():
                rows.append({"step": s} | dict(record.on_snapshot(s, model) or {}))
    return training.Run(history, layers, {} if record.on_snapshot else kept, pd.DataFrame(rows), run.settings)


def cost(name, work):
    """A row: what ``work`` asks of a device, and how long each card would take."""
    count.clear(), live.clear()
    held.update(now=0, peak=0)
    began = time.process_time()
    with ExitStack() as stack:
        pretend.device(stack)
        for place, what, other in (
            (pretend, "operate", counted),
            (training, "train", some_steps),
            (together, "train_together", some_together),
        ):
            stack.enter_context(patch.object(place, what, other))
        try:
            work()
        except Exception:
            traceback.print_exc()
            name += " (broken off)"
    cpu = time.process_time() - began - count["seconds"]
    row = {"what": name, "launches": count["launches"], "GFLOP": count["flops"] / 1e9, "GB moved": count["bytes"] / 1e9,
           "peak GB": held["peak"] / 1e9, "CPU s": cpu}  # fmt: skip
    for card, (flops, traffic, launch) in CARDS.items():
        parts = {"launches": count["launches"] * launch, "arithmetic": count["flops"] / flops / 0.5,
                 "memory": count["bytes"] / traffic / 0.7}  # fmt: skip
        bound = max(parts, key=parts.get)
        row |= {f"{card} s": parts[bound] + cpu, f"{card} bound by": bound if parts[bound] > cpu else "the CPU"}
    return row


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m maintenance plan", description=__doc__)
    parser.add_argument("names", nargs="*", help="chapters and shared trainings; all of them if none is named")
    parser.add_argument("--profile", default="gpu", choices=profiles.PROFILES)
    options = parser.parse_args(argv)
    (BUILD / "plan").mkdir(parents=True, exist_ok=True)
    os.chdir(BUILD / "plan")
    os.environ |= {"MPLBACKEND": "agg", "NBUTILS_BOOK": "1", "NBUTILS_RESULTS": os.getcwd()}
    rows = []
    for name in options.names or [*trainings.names(), *book.chapters()]:
        one = {"profile": options.profile, "seed": 0}
        if name in trainings.RECIPES:
            rows.append(cost(name, lambda: trainings.make(name, **one, device="cuda")))
        else:
            rows.append(cost(name, lambda: pretend.execute(name, **one)))
        print(
            pd.DataFrame(rows[-1:]).to_string(index=False, header=len(rows) == 1, float_format="{:,.1f}".format),
            flush=True,
        )
    return int(any(row["peak GB"] > MEMORY / 1e9 for row in rows))
