"""The parts of tensors in the files of a distributed checkpoint, mapped.

Each part is a file of ``torch.save`` inside a larger file. Torch's reader copies it three times; here its values stay
where they are. What is not stored plainly is left to torch's reader.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normgrowth.checkpoints.unpickler import Unpickler, Wrapped

_CODES = {  # of dtypes in numpy; bfloat16 as its 16 bits
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8", "int32": "<i4",
    "int16": "<i2", "int8": "i1", "uint8": "u1", "bool": "?",
}  # fmt: skip


class _View(NamedTuple):
    """A tensor as torch stores it: which storage, and which of its values."""

    storage: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _view(storage: str, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: object) -> _View:
    return _View(storage, int(offset), tuple(map(int, size)), tuple(map(int, stride)))


class _Recorder(Unpickler):
    """Reads what a file of one tensor says of it, without torch and without its values."""

    plain: ClassVar[Mapping[tuple[str, str], Any]] = {
        ("torch._utils", "_rebuild_tensor_v2"): Wrapped(_view),
        ("torch._utils", "_rebuild_parameter"): Wrapped(lambda view, *rest: view),
    }

    def of_torch(self, module: str, name: str) -> Any:
        return None

    def persistent_load(self, identity: Any) -> str:
        return str(identity[2])


class _Slice(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: io.BufferedReader, begin: int, length: int) -> None:
        self._file = file
        self._begin = begin
        self._length = length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        self._place = max(0, start + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._place))
        self._file.seek(self._begin + self._place)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def mapped(path: Path, begin: int, length: int, dtype: str, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """The tensor that ``torch.save`` has written into a part of a file, or None if it is not stored plainly."""
    code = _CODES.get(dtype)
    if code is None:
        return None
    try:
        with path.open("rb") as file, zipfile.ZipFile(io.BufferedReader(_Slice(file, begin, length))) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            view = _Recorder(archive.open(names["data.pkl"])).load()
            if not isinstance(view, _View) or view.size != shape:
                return None
            info = archive.getinfo(names[f"data/{view.storage}"])
            if info.compress_type != zipfile.ZIP_STORED or not _is_little(archive, names):
                return None
            start = _start_of(file, begin + info.header_offset)
    except Exception:  # a damaged archive raises many kinds; torch's reader says what is wrong
        return None
    if not info.file_size:
        return np.empty(shape, code)
    values = np.memmap(path, mode="r", offset=start, shape=(info.file_size,)).view(code)
    return _strided(values, view)


def _is_little(archive: zipfile.ZipFile, names: Mapping[str, str]) -> bool:
    return "byteorder" not in names or archive.read(names["byteorder"]) == b"little"


def _start_of(file: io.BufferedReader, header: int) -> int:
    """Where the values begin of an entry whose local header begins at ``header``."""
    file.seek(header)
    fields = file.read(30)
    return header + 30 + int.from_bytes(fields[26:28], "little") + int.from_bytes(fields[28:30], "little")


def _strided(values: NDArray[Any], view: _View) -> NDArray[Any] | None:
    """The values of a view in its shape, or None if they would lie outside the storage."""
    last = view.offset + sum((length - 1) * stride for length, stride in zip(view.size, view.stride, strict=True))
    if min(view.stride, default=0) < 0 or view.offset < 0 or (0 not in view.size and last >= len(values)):
        return None
    strides = [stride * values.itemsize for stride in view.stride]
    return np.lib.stride_tricks.as_strided(values[view.offset :], view.size, strides, writeable=False)
