"""PyTorch's distributed checkpoints, read by torch's own reader, one tensor at a time.

FSDP2, torchtitan, OLMo-core, Lightning, accelerate and Megatron-Core write them. Torch itself unpickles ``.metadata``,
and would run code in it; here it is read without any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from normgrowth.checkpoints import containers, optimizers
from normgrowth.checkpoints.containers import Contents
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.tensors import Tensor, of_torch
from normgrowth.checkpoints.unpickler import Inert, Unpickler

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
_SAFETENSORS = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
_OF_TRAINING = re.compile(r"(?:\w*optim\w*|\w*sched\w*|dataloader|train_state|rng\w*)(?:\.|$)", re.I)


def is_distributed(names: Iterable[str]) -> bool:
    """Whether a folder with these files is a distributed checkpoint."""
    return any(name == METADATA or name.endswith(".distcp") or _SAFETENSORS.fullmatch(name) for name in names)


def read(folder: Path) -> Contents:
    """The tensors of a checkpoint, whole, whichever ranks hold their parts.

    Raises:
        ReadError: ``.metadata`` is missing or damaged, or names files that are not in the folder.
    """
    reader, metadata = _of_safetensors(folder) if not (folder / METADATA).is_file() else _of_metadata(folder)
    tensors = {
        name: _tensor(name, entry, reader, folder)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    tree = _nested(tensors, metadata.planner_data or {})
    chosen = containers.weights(tree)
    keys = [".".join(path) for path in _paths(tensors, metadata.planner_data or {})]
    return Contents(chosen.tensors, set(), chosen.left_out, optimizers.trained_names(keys))


def _of_metadata(folder: Path) -> tuple[Any, Metadata]:
    from torch.distributed.checkpoint import FileSystemReader

    metadata = read_metadata(folder / METADATA)
    files = {info.relative_path for info in metadata.storage_data.values()}
    outside = [name for name in files if name != Path(name).name]
    missing = sorted(name for name in files if not (folder / name).is_file())
    if outside:
        raise ReadError(f"{METADATA} names {outside[0]}, which is not a file of the same folder")
    if missing:
        count = f"{len(missing)} of {len(files)} missing"
        raise ReadError(f"{METADATA} names {missing[0]}, which is not there ({count})")

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata

    return Reader(folder), metadata


def _of_safetensors(folder: Path) -> tuple[Any, Metadata]:
    """The reader for distributed checkpoints in safetensors, whose headers hold what ``.metadata`` does elsewhere."""
    if not any(_SAFETENSORS.fullmatch(file.name) for file in folder.iterdir()):
        raise ReadError(f"a distributed checkpoint without its {METADATA}")
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(folder))
    try:
        return reader, reader.read_metadata()
    except Exception as error:  # torch and safetensors raise many kinds
        raise ReadError(f"a distributed checkpoint in safetensors, damaged ({error})") from error


def read_metadata(path: Path) -> Metadata:
    """What ``.metadata`` says, made of its plain values alone; no object of the pickle is used."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

    try:
        with path.open("rb") as file:
            stored = Unpickler(file).load()
        entries = {str(name): _entry(entry) for name, entry in stored["state_dict_metadata"].items()}
        storage: dict[Any, Any] = {}
        for index, info in stored["storage_data"].items():
            offset = index.get("offset")
            place = MetadataIndex(str(index["fqn"]), None if offset is None else tuple(map(int, offset)))
            transforms = tuple(map(str, info.get("transform_descriptors") or ()))
            storage[place] = _StorageInfo(
                str(info["relative_path"]), int(info["offset"]), int(info["length"]), transforms or None
            )
        planner_data = {str(name): path for name, path in (stored.get("planner_data") or {}).items()}
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises many kinds
        raise ReadError(f"{METADATA} is damaged ({type(error).__name__})") from error
    return Metadata(entries, planner_data, storage, StorageMeta())


def _entry(entry: Any) -> Any:
    """What is stored under a name: a tensor in chunks, or bytes."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    if not (isinstance(entry, Inert) and "chunks" in entry):
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in entry["chunks"]]
    properties = entry["properties"]
    dtype = getattr(properties, "state", (properties.get("dtype"),))[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("no dtype")
    return TensorStorageMetadata(TensorProperties(dtype), _size(entry["size"]), chunks)


def _size(lengths: Iterable[int]) -> Any:
    import torch

    return torch.Size(map(int, lengths))


def _tensor(name: str, entry: Any, reader: Any, folder: Path) -> Tensor:
    def load() -> NDArray[Any]:
        import torch
        from torch.distributed.checkpoint import load as load_into

        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            load_into({name: whole}, storage_reader=reader, no_dist=True)
        except Exception as error:  # torch raises many kinds for a damaged file
            reason = str(error).strip().partition("\n")[0]
            raise ReadError(f"{folder}: {name} cannot be read ({type(error).__name__}: {reason})") from error
        return of_torch(whole).load()

    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return Tensor(tuple(entry.size), dtype, load, is_mapped=False)


def _paths(tensors: Mapping[str, Tensor], planner_data: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The keys of the dictionaries in which each tensor was saved."""
    paths = []
    for name in tensors:
        path = planner_data.get(name)
        paths.append(tuple(map(str, path)) if isinstance(path, tuple | list) and path else (name,))
    return paths


def _nested(tensors: Mapping[str, Tensor], planner_data: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionaries that were saved, but for what a trainer stores under names with dots."""
    tree: dict[str, Any] = {}
    for path, tensor in zip(_paths(tensors, planner_data), tensors.values(), strict=True):
        if len(path) == 1 and _OF_TRAINING.match(path[0]):
            continue
        inside = tree
        for key in path[:-1]:
            inside = inside.setdefault(key, {})
        inside[path[-1]] = tensor
    return tree


