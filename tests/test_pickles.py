"""No code of a pickle runs, whatever it asks for; and whatever is broken in a file ends in one line."""

import collections
import copyreg
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from kinds import Net, matrices, write
from pickle_corpus import WRAPPINGS, corpus

from normgrowth.checkpoints import series, unpickler

pytestmark = pytest.mark.filterwarnings("ignore")
WATCHED = (torch._utils._rebuild_tensor_v2, torch.FloatStorage, torch.Tensor, collections.OrderedDict, os.system)


def state_of_process():
    """What a pickle might change in this process."""
    marks = [
        (getattr(x, "__defaults__", None), sorted(vars(type(x))), sorted(getattr(x, "__dict__", ()))) for x in WATCHED
    ]
    return marks, "antigravity" in sys.modules, sorted(vars(unpickler)), sorted(vars(unpickler.Inert))


@pytest.fixture
def extension():
    """A registered extension that calls."""
    copyreg.add_extension("os", "system", 1)
    yield
    copyreg.remove_extension("os", "system", 1)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_no_opcode_of_a_pickle_calls_anything(tmp_path, extension, wrapping):
    mark = tmp_path / "ran"
    before = state_of_process()
    read = 0
    for name, body in corpus(mark):
        (tmp_path / "step1.pt").write_bytes(WRAPPINGS[wrapping](body))
        with pytest.raises(ValueError) as error:
            series(tmp_path / "step1.pt")
        assert not mark.exists(), name
        assert len(str(error.value).splitlines()) == 2, name  # the first says that none could be read
        assert state_of_process() == before, name
        read += 1
    assert read > 400 and sorted(os.listdir(tmp_path)) == ["step1.pt"]


def test_the_corpus_would_run_in_a_plain_unpickler(tmp_path):
    """Otherwise that it leaves no trace would say nothing."""
    mark = tmp_path / "ran"
    by_name = dict(corpus(mark))
    runs = [name for name in by_name if name.startswith(("os.system: ", "mkdir: "))]
    assert len(runs) > 40
    code = (
        "import pickle, sys, copyreg; copyreg.add_extension('os', 'system', 1); pickle.loads(sys.stdin.buffer.read())"
    )
    ran = set()
    for opcode in ("REDUCE", "OBJ", "INST", "EXT1", "a chain", "getattr", "apply, by map", "REDUCE, STACK_GLOBAL"):
        subprocess.run([sys.executable, "-c", code], input=by_name[f"os.system: {opcode}"], capture_output=True)
        if mark.exists():
            ran.add(opcode)
            mark.unlink()
    assert len(ran) == 8, ran


@pytest.mark.parametrize("place", ["step1/.metadata", "step1/__0_0.distcp", "step1/optimizer.pt"])
def test_nor_does_what_lies_beside_weights(tmp_path, extension, place):
    mark = tmp_path / "ran"
    for name, body in list(corpus(mark))[:60]:
        folder = tmp_path / "run"
        (folder / "step1").mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(body if place.endswith(".metadata") else WRAPPINGS["zip"](body))
        if place.endswith("optimizer.pt"):
            write(matrices(), folder / "step1" / "model.safetensors")
            series(folder)
        else:
            with pytest.raises(ValueError):
                series(folder)
        assert not mark.exists(), name


def files(folder):
    """Sound files of each format."""
    net = Net()
    torch.save({"model": net.state_dict(), "args": object, "epoch": 3}, folder / "zip.pt")
    torch.save(net.state_dict(), folder / "legacy.pt", _use_new_zipfile_serialization=False)
    write(net.state_dict(), folder / "plain.safetensors")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("seed", range(3))
def test_a_file_with_wrong_bytes_ends_in_one_line(tmp_path, seed):
    """In a process of its own, which must not crash either."""
    rng = np.random.default_rng(seed)
    sound = tmp_path / "sound"
    sound.mkdir()
    place = tmp_path / "broken"
    place.mkdir()
    for path in files(sound):
        original = path.read_bytes()
        for number in range(60):
            data = bytearray(original)
            for _ in range(int(rng.integers(1, 6))):
                data[int(rng.integers(0, min(len(data), 1500)))] = int(rng.integers(256))
            if number % 4 == 0:
                del data[int(rng.integers(len(data))) :]
            (place / f"{path.stem}-step{number}{path.suffix}").write_bytes(bytes(data))
    code = """
import sys
from pathlib import Path
from normgrowth.checkpoints import series
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        series(path)
    except ValueError as error:
        assert len(str(error).splitlines()) == 2, str(error)
print("all")
"""
    done = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("all\n"), done.stderr[-1500:]
