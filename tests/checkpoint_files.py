"""Checkpoints made for tests, and what vectors in memory say of them."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file


def model(seed, width=8, layers=2, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    shapes = {"transformer.wte.weight": (11, width), "transformer.ln_f.weight": (width,)}
    for i in range(layers):
        shapes |= {f"transformer.h.{i}.mlp.weight": (width, 4 * width), f"transformer.h.{i}.mlp.bias": (4 * width,)}
    return {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}


def save(state, folder, name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file({key: value.clone().contiguous() for key, value in state.items()}, folder / name)
    else:
        torch.save(state, folder / name)


def make(root, steps=(0, 10, 20, 30), label="step{}", **options):
    """A random walk of a small model: states by step, saved below ``root``."""
    states, state = {}, model(0, **options)
    for step in steps:
        states[step] = state
        save(state, root / label.format(step))
        state = {name: value + 0.1 * other for (name, value), other in zip(
            state.items(), model(step + 1, **options).values(), strict=True)}  # fmt: skip
    return states


def flat(state):
    return np.concatenate([value.double().numpy().ravel() for value in state.values()])


def assert_is(table, states):
    """The rows of the whole network are what vectors in memory say."""
    total = table[table.layer == "total"].reset_index(drop=True)
    vectors = [flat(states[step]) for step in sorted(states)]
    assert list(total.step) == sorted(states)
    np.testing.assert_allclose(total.norm, [np.linalg.norm(v) for v in vectors], rtol=1e-13)
    assert total.iloc[0, 3:].isna().all()
    for row, (before, after) in zip(total[1:].itertuples(), itertools.pairwise(vectors), strict=True):
        delta = after - before
        assert row.displacement_sq == pytest.approx(delta @ delta, rel=1e-12)
        assert row.inner == pytest.approx(2 * before @ delta, rel=1e-9)
        cosine = before @ after / np.linalg.norm(before) / np.linalg.norm(after)
        assert row.cos_similarity == pytest.approx(cosine, rel=1e-13)


def shard(folder, state, parts=2):
    names, files = list(state), {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        mine = names[i::parts]
        save({name: state[name] for name in mine}, folder, file)
        files |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def cut(path, to):
    path.write_bytes(path.read_bytes()[:to])


MEASURED = """
import sys, threading, time
import tqdm
from normgrowth import checkpoints
def own():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024
def watch():
    while True:
        seen.append(own())
        time.sleep(0.002)
seen = [own()]
threading.Thread(target=watch, daemon=True).start()
table = checkpoints.series(sys.argv[1]).table
print(max(seen) - seen[0], *table.norm)
"""


def measured_alone(folder):
    """In a process of its own: the most memory that is not the files' pages, in MB above the start; and the norms."""
    if sys.platform != "linux":
        pytest.skip("memory that is not the files' pages is read from Linux's /proc")
    done = subprocess.run([sys.executable, "-c", MEASURED, str(folder)], capture_output=True, text=True, check=True)
    return map(float, done.stdout.split())
