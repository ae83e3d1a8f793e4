"""Weights on disk, tensor by tensor and in blocks: no model is built, and a file may be larger than memory."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from nbutils.checkpoints import layouts, pickles
from nbutils.checkpoints.tensors import BLOCK, FLOATS, ReadError, Tensor, why_constant, why_left_out

ITEM = dict(zip(FLOATS, (8, 4, 2, 2), strict=True))  # bytes of a value

_WRAPPER = re.compile(
    r"^(?:module\.)+|(?:(?<=^)|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
OTHER_FILES = re.compile(
    r"^(?!model_optim_rng)(?:.*)(?:optim|scheduler|training_args|rng_state|random_states|scaler|adapter)", re.I
)

MERGE = "merge it into its model first (merge_and_unload)"
ONLY_ADAPTER = f"only an adapter: {MERGE}"
_ADAPTER = re.compile(  # of PEFT
    r"(?:^|\.)(?:base_layer|modules_to_save|lora_\w+|ia3_l|vera_\w+|hada_\w+|lokr_\w+|b?oft_[Rs]|ranknum|trainable_tokens_"
    r"\w+)(?:\.|$)"
)
_AVERAGE = re.compile(r"^(?:module\.|model\.)*(?:ema|ema_model|model_ema|averaged_model|swa_model)\.(?:module\.)*")


class Weights:
    """The parameters of one checkpoint: a file, or a folder with one or several files. Use it in a ``with`` statement.

    Attributes:
        parameters: tensors by name, without buffers; wrappers' prefixes such as ``module.`` are cut off.
        left_out: name and reason of what is stored and is no parameter.

    Raises:
        ReadError: nothing there, shards missing, a truncated or corrupt file, an unknown dtype, an unsafe pickle, only
            an adapter or one that is not merged, a quantised model, parts of ZeRO-3, FSDP or Megatron, another format,
            or tensors of which it cannot be told that they are the weights.

    >>> import tempfile
    >>> from safetensors.numpy import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"w": np.ones(2), "attn.masked_bias": np.zeros(1)}, f"{folder}/model.safetensors")
    ...     with Weights(Path(folder)) as weights:
    ...         list(weights.parameters), weights.left_out
    (['w'], {'attn.masked_bias': 'buffer'})
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.parameters: dict[str, Tensor] = {}
        self.left_out: dict[str, str] = {}
        self._open: list[Any] = []
        try:
            for file in weight_files(place):
                stored = self._safetensors(file) if file.suffix == ".safetensors" else self._pickled(file)
                for raw_name, tensor in stored.items():
                    self._add(file, _WRAPPER.sub("", raw_name), tensor)
            self._leave_out_averages()
            if not self.parameters:
                raise ReadError(f"{place}: holds no parameters")
            if why := layouts.why_empty({name: tensor.shape for name, tensor in self.parameters.items()}):
                raise ReadError(f"{place}: {why}")
        except OSError as error:
            self.close()
            raise ReadError(f"{error.filename or place}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def _add(self, file: Path, name: str, tensor: Tensor) -> None:
        if name in self.parameters or name in self.left_out:
            raise ReadError(f"{file}: tensor {name} is there twice")
        if _ADAPTER.search(name):
            raise ReadError(f"{file}: {name} belongs to an adapter that is not merged: {MERGE}")
        whole = tensor.dtype.removeprefix("torch.").lower().startswith(("i", "u"))
        if whole and name.endswith(("weight", "weight_packed")):
            why = "a quantised model; its norm cannot be read from the file"
            raise ReadError(f"{file}: {name} is {tensor.dtype}: {why}")
        reason = why_left_out(name, tensor.dtype, tensor.shape)
        if reason:
            self.left_out[name] = reason
        elif tensor.dtype not in FLOATS:
            raise ReadError(f"{file}: tensor {name} has dtype {tensor.dtype}; known are {', '.join(FLOATS)}")
        elif reason := why_constant(name, tensor):
            self.left_out[name] = reason
        else:
            self.parameters[name] = tensor

    def _leave_out_averages(self) -> None:
        """Averages of weights that are there too, named as these after ``ema.`` or so; some without dots."""
        copies = {name: _AVERAGE.sub("", name).replace(".", "") for name in self.parameters if _AVERAGE.match(name)}
        others = [name.split(".") for name in self.parameters if name not in copies]
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}  # by what the names begin with, then by the rest
        for parts in others:
            for i in range(len(parts)):
                below = shapes.setdefault(".".join(parts[:i]), {})
                below["".join(parts[i:])] = self.parameters[".".join(parts)].shape
        wanted = [(copy, shape) for name, copy in copies.items() if (shape := self.parameters[name].shape)]
        same = any(all(below.get(copy) == shape for copy, shape in wanted) for below in shapes.values())
        if wanted and not (same and 2 * len(wanted) >= len(others)):
            why = "may be an average of weights or a weight, which cannot be told; save model.state_dict() alone"
            raise ReadError(f"{self.place}: {next(iter(copies))} {why}")
        for name in copies:
            del self.parameters[name]
            self.left_out[name] = "an average of the weights"

    def close(self) -> None:
        for file in self._open:
            file.close()
        self._open.clear()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _safetensors(self, path: Path) -> dict[str, Tensor]:
        file = path.open("rb", buffering=0)
        self._open.append(file)
        header, start = safetensors_header(path)
        room = threading.local()  # a buffer for each thread

        def tensor(name: str, entry: Mapping[str, Any]) -> Tensor:
            dtype, at = str(entry["dtype"]), start + entry["data_offsets"][0]

            def read(first: int, out: NDArray[np.float64]) -> None:
                if not hasattr(room, "raw"):
                    room.raw = np.empty(BLOCK * 8, dtype=np.uint8)
                part = room.raw[: len(out) * ITEM[dtype]]
                try:
                    complete = os.preadv(file.fileno(), [memoryview(part)], at + first * ITEM[dtype]) == len(part)
                except OSError as error:
                    raise ReadError(f"{path}: {error.strerror} in tensor {name}") from error
                if not complete:
                    raise ReadError(f"{path}: ends within tensor {name}")
                decode(part, dtype, out)

            return Tensor(dtype, tuple(entry["shape"]), read)

        return {name: tensor(name, entry) for name, entry in header.items()}

    def _pickled(self, path: Path) -> dict[str, Tensor]:
        """A file of ``torch.save``. What shares storage is tied."""
        loaded = pickles.load(path)
        try:
            state, beside = pickles.weights(loaded)
            found, ties = pickles.stored(state)
        except ReadError as error:
            raise ReadError(f"{path}: {error}") from None
        self.left_out |= beside | {_WRAPPER.sub("", name): why for name, why in ties.items()}
        return found


def decode(raw: NDArray[np.uint8], dtype: str, out: NDArray[np.float64]) -> None:
    """Little-endian bytes of a safetensors dtype to float64, in place; every value is exact.

    >>> out = np.empty(1)
    >>> decode(np.array([0x80, 0x3F], dtype=np.uint8), "BF16", out)  # a bfloat16 is the upper half of a float32
    >>> out
    array([1.])
    """
    if dtype == "BF16":
        bits = raw.view("<u2").astype("<u4")
        bits <<= 16
        np.copyto(out, bits.view("<f4"))
    else:
        np.copyto(out, raw.view(f"<f{ITEM[dtype]}"))


def safetensors_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Entries of a safetensors file by name, and where its data begin; the library of the format says if it is sound.

    Raises:
        ReadError: it is not.

    >>> import tempfile
    >>> from safetensors.numpy import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"w": np.ones(2)}, f"{folder}/w.safetensors")
    ...     safetensors_header(Path(folder, "w.safetensors"))[0]["w"]
    {'dtype': 'F64', 'shape': [2], 'data_offsets': [0, 16]}
    """
    with path.open("rb") as file:
        first = file.read(8)
        if first == b"version ":
            raise ReadError(f"{path}: a Git LFS pointer, not the weights (git lfs pull fetches them)")
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            said = str(error).removeprefix("Error while deserializing header: ")
            raise ReadError(f"{path}: cut short, damaged, or no safetensors file ({said})") from None
        length = int.from_bytes(first, "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def weight_files(place: Path) -> list[Path]:
    """The files that hold a checkpoint's weights: safetensors before pickles, one file before shards.

    Raises:
        ReadError: none there, only an adapter, missing shards, or several files and no index.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("model.safetensors", "pytorch_model.bin", "optimizer.pt"):
    ...         Path(folder, name).touch()
    ...     [file.name for file in weight_files(Path(folder))]
    ['model.safetensors']
    """
    if place.is_file():
        if why := layouts.other_format([place.name]) or layouts.in_parts([place.name]):
            raise ReadError(f"{place}: {why}")
        return [place]
    try:
        listed = sorted(place.iterdir())
    except OSError as error:
        raise ReadError(f"{place}: {error.strerror}") from error
    names = {f.name for f in listed}
    whole = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"}
    if not names & whole and (why := layouts.in_parts(names)):
        raise ReadError(f"{place}: {why}")
    for single in ("model.safetensors", "pytorch_model.bin"):
        for suffix in (".safetensors",) if single.startswith("model") else (".bin", ".pt", ".pth", ".ckpt"):
            files = [f for f in listed if f.suffix == suffix and not OTHER_FILES.search(f.name)]
            indices = [f for f in listed if f.name.endswith(f"{suffix}.index.json") and not OTHER_FILES.search(f.name)]
            if place / single in files:
                return [place / single]
            if indices:
                return _indexed(indices[0])
            if files:
                return _complete(place, files)
    if any(f.name.startswith("adapter_model.") for f in listed):
        raise ReadError(f"{place}: {ONLY_ADAPTER}")
    if why := layouts.other_format(names):
        raise ReadError(f"{place}: {why}")
    raise ReadError(f"{place}: {'no .safetensors, .bin, .pt, .pth or .ckpt file in it' if listed else 'empty folder'}")


def _indexed(index: Path) -> list[Path]:
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        plain = all(shard == Path(shard).name for shard in shards)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReadError(f"{index}: corrupt: no weight_map") from error
    if not plain or not shards:
        raise ReadError(f"{index}: shards must be files of the same folder")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise ReadError(f"{index}: names {missing[0]}, which is not there ({len(missing)} of {len(shards)} missing)")
    return [index.parent / shard for shard in shards]


def _complete(place: Path, files: list[Path]) -> list[Path]:
    """Shards without an index: all must be there by their numbers."""
    parts = [part for file in files if (part := re.search(r"-(\d+)-of-(\d+)\.", file.name))]
    if len(files) == 1 and not parts:
        return files
    if len(parts) < len(files):
        raise ReadError(f"{place}: {len(files)} weight files and no index: {', '.join(f.name for f in files[:3])}")
    total = max(int(part[2]) for part in parts)
    missing = sorted(set(range(1, total + 1)) - {int(part[1]) for part in parts})
    if missing or len(files) != total:
        raise ReadError(f"{place}: {len(files)} of {total} shards; missing {', '.join(map(str, missing))}")
    return files
