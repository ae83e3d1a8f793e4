"""Tensors of a safetensors file, mapped: nothing is read before its values are needed, and nothing is copied."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.tensors import Tensor

# The names of dtypes in a file, as torch and as numpy have them. Of others only shape and name are known.
_DTYPES = {
    "F64": ("float64", "<f8"), "F32": ("float32", "<f4"), "F16": ("float16", "<f2"), "BF16": ("bfloat16", "<u2"),
    "I64": ("int64", "<i8"), "I32": ("int32", "<i4"), "I16": ("int16", "<i2"), "I8": ("int8", "i1"),
    "U64": ("uint64", "<u8"), "U32": ("uint32", "<u4"), "U16": ("uint16", "<u2"), "U8": ("uint8", "u1"),
    "BOOL": ("bool", "?"), "F8_E4M3": ("float8_e4m3fn", "u1"), "F8_E5M2": ("float8_e5m2", "u1"),
    "C64": ("complex64", "<c8"),
}  # fmt: skip


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, in the order of the file.

    Raises:
        ReadError: the file is damaged.
    """
    header, start = _header(path)
    data = np.memmap(path, mode="r")[start:] if path.stat().st_size > start else np.empty(0, np.uint8)
    return {name: _tensor(entry, data) for name, entry in header.items() if name != "__metadata__"}


def metadata(path: Path) -> dict[str, str]:
    """What the file says of itself beside its tensors."""
    return dict(_header(path)[0].get("__metadata__", {}))


def _header(path: Path) -> tuple[dict[str, dict], int]:
    """The header of a file, which the library has found sound, and where the values begin."""
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(length)), 8 + length
    except SafetensorError as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise ReadError(f"cut short, damaged, or no safetensors file ({why})") from None


def _tensor(entry: dict, data: np.ndarray) -> Tensor:
    begin, end = entry["data_offsets"]
    dtype, code = _DTYPES.get(entry["dtype"], (entry["dtype"], "u1"))
    return Tensor(tuple(entry["shape"]), dtype, lambda: data[begin:end].view(code))
