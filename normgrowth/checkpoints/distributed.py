"""PyTorch's distributed checkpoints: tensors in parts, of several ranks, read one tensor at a time.

FSDP2, torchtitan, OLMo-core, Lightning, accelerate and Megatron-Core write them. Torch itself unpickles ``.metadata``,
and would run code in it; here it is read without any.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normgrowth.checkpoints import chunks, containers, mapped, optimizers
from normgrowth.checkpoints.containers import Contents
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.tensors import Joined, Shape, Tensor
from normgrowth.checkpoints.unpickler import Unpickler, Wrapped

METADATA = ".metadata"
_SAFETENSORS = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
_OF_TRAINING = re.compile(r"(?:(?:chained_\d+\.)?\w*optim\w*|\w*sched\w*|dataloader|train_state|rng\w*)(?:\.|$)", re.I)
_SHARDING = "DCP_SHARDING_INFO"  # where torch keeps, in a header of safetensors, the place of each part


class Part(NamedTuple):
    """A part of a tensor: where it lies in the tensor, and in which file."""

    offsets: Shape
    sizes: Shape
    file: str
    begin: int
    length: int


class Stored(NamedTuple):
    """A tensor in parts, and the keys of the dictionaries in which it was saved."""

    shape: Shape
    dtype: str
    parts: list[Part]
    path: tuple[str, ...]


def is_distributed(names: Iterable[str]) -> bool:
    """Whether a folder with these files is a distributed checkpoint."""
    return any(name == METADATA or name.endswith(".distcp") or _SAFETENSORS.fullmatch(name) for name in names)


def read(folder: Path) -> Contents:
    """The tensors of a checkpoint, whole, whichever ranks hold their parts.

    Raises:
        ReadError: ``.metadata`` is missing or damaged, or names files that are not in the folder.
    """
    if (folder / METADATA).is_file():
        stored = read_metadata(folder / METADATA)
        _refuse_missing(folder, stored)
        tensors = {name: _tensor(folder, name, entry) for name, entry in stored.items()}
    else:
        stored, tensors = _of_safetensors(folder)
    chosen = containers.weights(_nested(tensors, stored))
    keys = [".".join(entry.path) for entry in stored.values()]
    return Contents(chosen.tensors, set(), chosen.left_out, optimizers.trained_names(keys))


class _Metadata(Unpickler):
    """Reads ``.metadata`` without torch: sizes are tuples, and dtypes their names."""

    plain: ClassVar[Mapping[tuple[str, str], Any]] = {
        ("torch", "Size"): Wrapped(tuple),
        **{("torch", name): name for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16")},
        **{("torch", name): name for name in ("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "complex64")},
    }

    def of_torch(self, module: str, name: str) -> Any:
        return None


def read_metadata(path: Path) -> dict[str, Stored]:
    """The tensors that ``.metadata`` describes, made of its plain values alone."""
    try:
        with path.open("rb") as file:
            content = _Metadata(file).load()
        places = {}
        for index, info in content["storage_data"].items():
            offset = index.get("offset")
            key = str(index["fqn"]), None if offset is None else _shape(offset)
            places[key] = str(info["relative_path"]), int(info["offset"]), int(info["length"])
        paths = content.get("planner_data") or {}
        tensors = {}
        for name, entry in content["state_dict_metadata"].items():
            if "chunks" in entry:
                path_of = paths.get(name) if isinstance(paths, dict) else None
                tensors[str(name)] = _stored(str(name), entry, places, path_of)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises many kinds
        raise ReadError(f"{METADATA} is damaged ({type(error).__name__})") from error
    return tensors


def _stored(name: str, entry: Mapping[str, Any], places: Mapping[Any, Any], path: Any) -> Stored:
    properties = entry["properties"]
    dtype = getattr(properties, "state", (properties.get("dtype"),))[0]
    parts = []
    for chunk in entry["chunks"]:
        offsets = _shape(chunk["offsets"])
        file, begin, length = places[name, offsets] if (name, offsets) in places else places[name, None]
        parts.append(Part(offsets, _shape(chunk["sizes"]), file, begin, length))
    keys = tuple(map(str, path)) if isinstance(path, tuple | list) and path else (name,)
    return Stored(_shape(entry["size"]), str(dtype), parts, keys)


def _shape(lengths: Iterable[Any]) -> Shape:
    return tuple(int(length) for length in lengths)


def _refuse_missing(folder: Path, stored: Mapping[str, Stored]) -> None:
    """Raise ReadError unless all parts lie in files of the folder."""
    files = sorted({part.file for entry in stored.values() for part in entry.parts})
    outside = [name for name in files if name != Path(name).name]
    missing = [name for name in files if not (folder / name).is_file()]
    if outside:
        raise ReadError(f"{METADATA} names {outside[0]}, which is not a file of the same folder")
    if missing:
        count = f"{len(missing)} of {len(files)} missing"
        raise ReadError(f"{METADATA} names {missing[0]}, which is not there ({count})")


def _tensor(folder: Path, name: str, entry: Stored) -> Tensor:
    views: list[NDArray[Any]] = []  # once they are made

    def load() -> NDArray[Any] | Joined:
        if not views:
            made = [
                chunks.mapped(folder / part.file, part.begin, part.length, entry.dtype, part.sizes)
                for part in entry.parts
            ]
            if not made or any(view is None for view in made):
                return _by_torch(folder, name, entry)
            views.extend(view for view in made if view is not None)
        return _joined(entry, views)

    return Tensor(entry.shape, entry.dtype, load, is_mapped=False)


def _joined(entry: Stored, views: list[NDArray[Any]]) -> NDArray[Any] | Joined:
    """All values of a tensor, flat, from its parts; nothing is copied if these are rows, one after the other."""
    covered = sum(view.size for view in views)
    if covered != math.prod(entry.shape):
        raise ReadError(f"parts of {covered} values make no tensor of {math.prod(entry.shape)}")
    pairs = sorted(zip(entry.parts, views, strict=True), key=lambda pair: pair[0].offsets)
    are_rows = all(not any(part.offsets[1:]) and part.sizes[1:] == entry.shape[1:] for part, _ in pairs)
    if are_rows and all(view.flags.c_contiguous for view in views):
        return Joined([view.reshape(-1) for _, view in pairs])
    whole = np.empty(entry.shape, views[0].dtype)
    for part, view in pairs:
        place = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes, strict=True))
        whole[place] = view
    return whole.reshape(-1)


def _by_torch(folder: Path, name: str, entry: Stored) -> NDArray[Any] | Joined:
    """The values of a tensor by torch's own reader, given what has been read of ``.metadata`` without code."""
    import torch
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader
    from torch.distributed.checkpoint import load as load_into
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from normgrowth.checkpoints.tensors import of_torch

    dtype = getattr(torch, entry.dtype)
    pieces = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in entry.parts]
    described = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry.shape), pieces)
    places = {
        MetadataIndex(name, part.offsets): _StorageInfo(part.file, part.begin, part.length) for part in entry.parts
    }

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return Metadata({name: described}, None, places)

    whole = torch.empty(entry.shape, dtype=dtype)
    try:
        load_into({name: whole}, storage_reader=Reader(folder), no_dist=True)
    except (Exception, CheckpointException) as error:  # torch raises many kinds for a damaged file
        raise ReadError(f"{folder}: {name} cannot be read ({type(error).__name__})") from error
    return of_torch(whole).load()


def _of_safetensors(folder: Path) -> tuple[dict[str, Stored], dict[str, Tensor]]:
    """Distributed checkpoints in safetensors, whose headers hold what ``.metadata`` does elsewhere."""
    files = sorted(file for file in folder.iterdir() if _SAFETENSORS.fullmatch(file.name))
    if not files:
        raise ReadError(f"a distributed checkpoint without its {METADATA}")
    found: dict[str, list[tuple[Shape, Tensor]]] = {}
    for file in files:
        try:
            sharding = json.loads(mapped.metadata(file).get(_SHARDING, "{}"))
        except ValueError:
            raise ReadError(f"{file.name}: its header does not say where its parts belong") from None
        for name, tensor in mapped.tensors(file).items():
            offsets = _shape(sharding.get(name, {}).get("saved_offsets") or [0] * len(tensor.shape))
            found.setdefault(name, []).append((offsets, tensor))
    stored = {}
    tensors = {}
    for name, pieces in found.items():
        shape = tuple(max(o[i] + t.shape[i] for o, t in pieces) for i in range(len(pieces[0][0])))
        parts = [Part(offsets, tensor.shape, "", 0, 0) for offsets, tensor in pieces]
        stored[name] = Stored(shape, pieces[0][1].dtype, parts, (name,))
        tensors[name] = _of_pieces(stored[name], [tensor for _, tensor in pieces])
    return stored, tensors


def _of_pieces(entry: Stored, pieces: list[Tensor]) -> Tensor:
    def load() -> NDArray[Any] | Joined:
        return _joined(entry, [piece.load()[:].reshape(piece.shape) for piece in pieces])

    return Tensor(entry.shape, entry.dtype, load, is_mapped=len(pieces) == 1)


def _nested(tensors: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> dict[str, Any]:
    """The dictionaries that were saved, but for what a trainer stores under names with dots."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        path = stored[name].path
        if len(path) == 1 and _OF_TRAINING.match(path[0]):
            continue
        inside = tree
        for key in path[:-1]:
            inside = inside.setdefault(key, {})
        inside[path[-1]] = tensor
    return tree
