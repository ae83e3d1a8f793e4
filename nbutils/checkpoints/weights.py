"""Weights on disk, tensor by tensor and in blocks: no model is built, and a file may be larger than memory."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from nbutils.checkpoints.foreign import ADAPTER, AVERAGED, GATHER, why_foreign
from nbutils.checkpoints.tensors import BLOCK, FLOATS, Tensor, why_constant, why_left_out
from nbutils.names import originals_first

ITEM = dict(zip(FLOATS, (8, 4, 2, 2), strict=True))  # bytes of a value

_WRAPPER = re.compile(
    r"^(?:module\.)+|(?:(?<=^)|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_OTHER_FILES = re.compile(r"optim|scheduler|training_args|rng_state|model_rng|random_states|scaler|adapter", re.I)

_STATE = re.compile(
    r"optim|sched|scaler|rng|random|callback|loop|hparam|hyper|config|args|metric|history|ema|averag|shadow", re.I
)
_COPY = re.compile(r"ema|averag|shadow", re.I)
ONLY_ADAPTER = "only an adapter: merge it into its model first (merge_and_unload)"


class ReadError(ValueError):
    """A checkpoint that cannot be used; the message names the file and says why."""


class Weights:
    """The parameters of one checkpoint: a file, or a folder with one or several files. Use it in a ``with`` statement.

    Attributes:
        parameters: tensors by name, without buffers; wrappers' prefixes such as ``module.`` are cut off.
        left_out: name and reason of what is stored and is no parameter.

    Raises:
        ReadError: nothing there, shards missing, a truncated or corrupt file, an unknown dtype, an unsafe pickle, an
            adapter alone or not merged, a quantised model, a layout that another tool must convert, tensors in places
            that are not read.

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
            if not self.parameters:
                raise ReadError(f"{place}: holds no parameters")
            self._leave_out_copies()
        except OSError as error:
            self.close()
            raise ReadError(f"{error.filename or place}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def _leave_out_copies(self) -> None:
        """Averages of the weights that stand beside them; alone they are the weights."""
        copies = [name for name in self.parameters if AVERAGED.search(name)]
        if len(copies) < len(self.parameters):
            for name in copies:
                self.left_out[name] = "an averaged copy"
                del self.parameters[name]

    def _add(self, file: Path, name: str, tensor: Tensor) -> None:
        if ADAPTER.search(name):
            raise ReadError(f"{file}: {name} is of an adapter that is not merged: merge_and_unload, and save again")
        if name in self.parameters or name in self.left_out:
            raise ReadError(f"{file}: tensor {name} is there twice")
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
        elif tensor.shape == (0,):
            raise ReadError(f"{file}: {name} has no elements, as DeepSpeed ZeRO-3 leaves sharded weights: {GATHER}")
        else:
            self.parameters[name] = tensor

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
        """A file of ``torch.save``, through ``weights_only``: no code of the file runs. What shares storage is tied."""
        import torch

        options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
        try:
            try:
                loaded = torch.load(str(path), mmap=True, **options)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                loaded = torch.load(str(path), **options)  # torch's format before 1.6 cannot be mapped
        except Exception as error:  # torch raises many kinds for a broken file
            held = re.search(r"Unsupported (?:global: GLOBAL|class) ([\w.]+)", str(error))
            if held:
                why = (
                    f"unsafe, refused: holds Python objects, {held[1]}, that would run code; save the state_dict alone"
                )
            elif "DTensor" in str(error):
                why = "holds DTensors, shards of FSDP2 or tensor parallelism: save the full_tensor() of each"
            else:
                said = (str(error).strip().splitlines() or ["Weights only"])[0]
                kind = type(error).__name__ if said.startswith("Weights only") else said  # a page of advice
                why = f"damaged, or not from torch.save ({kind})"
            raise ReadError(f"{path}: {why}") from error
        stored = {name: value for name, value in self._state(path, loaded).items() if torch.is_tensor(value)}
        for name, value in stored.items():
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise ReadError(f"{path}: {name} is a {type(value).__name__}, one shard: save the full state_dict")
            if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_complex():
                kind = "quantised" if value.is_quantized else "meta" if value.is_meta else str(value.dtype)
                kind = kind if value.layout is torch.strided else "sparse"
                raise ReadError(f"{path}: tensor {name} is {kind}; save it dense, real and with its values")
        names = {
            getattr(torch, t): n for t, n in zip(("float64", "float32", "float16", "bfloat16"), FLOATS, strict=True)
        }
        seen: dict[object, str] = {}
        found = {}
        for name in sorted(stored, key=lambda n: (bool(AVERAGED.search(n)), originals_first(n))):
            value = stored[name].detach()
            storage = (value.data_ptr(), value.shape, value.stride())
            if value.numel() and storage in seen:
                self.left_out[_WRAPPER.sub("", name)] = f"tied to {seen[storage]}"
                continue
            seen[storage] = name
            other = "F?" if value.is_floating_point() else str(value.dtype)
            found[name] = Tensor(names.get(value.dtype, other), tuple(value.shape), _torch_reader(value))
        return found

    def _state(self, path: Path, loaded: Any) -> dict[str, Any]:
        """The state dict in what ``torch.save`` wrote. Tensors in other places are told, or the file is refused."""
        if not isinstance(loaded, dict):
            raise ReadError(f"{path}: holds a {type(loaded).__name__}, no state_dict: save model.state_dict()")
        for key in ("state_dict", "model_state_dict", "model", "module"):
            if isinstance(loaded.get(key), dict):
                beside, loaded = {k: v for k, v in loaded.items() if k != key}, loaded[key]
                for name, value in beside.items():
                    if _tensors_in(value) and (_COPY.search(str(name)) or not _STATE.search(str(name))):
                        copy = _COPY.search(str(name))
                        self.left_out[str(name)] = "an averaged copy" if copy else f"not read: stands beside {key!r}"
                break
        nested = [str(k) for k, v in loaded.items() if not _STATE.search(str(k)) and _tensors_in(v)]
        if nested:
            raise ReadError(
                f"{path}: tensors in nested entries that are not read ({', '.join(nested[:3])}): save the state_dict "
                "alone, or under 'state_dict' or 'model'"
            )
        return loaded


def _tensors_in(value: Any) -> bool:
    """Whether a container holds tensors with more than one number, at any depth."""
    import torch

    if isinstance(value, dict | list | tuple):
        return any(
            (torch.is_tensor(x) and x.numel() > 1) or _tensors_in(x)
            for x in (value.values() if isinstance(value, dict) else value)
        )
    return False


def _torch_reader(value: Any) -> Callable[[int, NDArray[np.float64]], None]:
    @cache
    def flat() -> Any:
        return value.reshape(-1)  # a copy for a transposed tensor: once, and only if it is read

    def read(first: int, out: NDArray[np.float64]) -> None:
        np.copyto(out, flat()[first : first + len(out)].double().numpy())

    return read


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
        if why := why_foreign(place):
            raise ReadError(f"{place}: {why}")
        return [place]
    try:
        listed = sorted(place.iterdir())
    except OSError as error:
        raise ReadError(f"{place}: {error.strerror}") from error
    for single in ("model.safetensors", "pytorch_model.bin"):
        for suffix in (".safetensors",) if single.startswith("model") else (".bin", ".pt", ".pth", ".ckpt"):
            files = [f for f in listed if f.suffix == suffix and not _OTHER_FILES.search(f.name)]
            indices = [f for f in listed if f.name.endswith(f"{suffix}.index.json") and not _OTHER_FILES.search(f.name)]
            if place / single in files:
                return [place / single]
            if indices:
                return _indexed(indices[0])
            if files:
                return _complete(place, files)
    if any(f.name.startswith("adapter_model.") for f in listed):
        raise ReadError(f"{place}: {ONLY_ADAPTER}")
    if why := why_foreign(place):
        raise ReadError(f"{place}: {why}")
    held = [
        f.name for f in listed if f.is_dir() and any(g.suffix in (".safetensors", ".bin", ".pt") for g in f.iterdir())
    ]
    none = f"weights in several folders ({', '.join(held[:3])}): give one model" if len(held) > 1 else None
    none = none or "no .safetensors, .bin, .pt, .pth or .ckpt file in it"
    raise ReadError(f"{place}: {none if listed else 'empty folder'}")


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
