"""Tensors as files store them, and their values in float64, block by block. They need numpy alone, and no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 15  # values converted to float64 at a time: blocks of two tensors fit into the processor's cache
FLOATS = ("float64", "float32", "float16", "bfloat16")
Shape = tuple[int, ...]


class Memory(NamedTuple):
    """Where the values of a tensor lie: the address of its first byte, and the bytes from one value to the next."""

    begin: int
    shape: Shape
    strides: Shape
    width: int  # of a value, in bytes

    @property
    def end(self) -> int:
        steps = ((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))
        return self.begin + sum(steps) + self.width

    @property
    def is_dense(self) -> bool:
        """Whether there is no gap between the values, in whatever order they lie."""
        return math.prod(self.shape) * self.width == self.end - self.begin

    def addresses(self) -> NDArray[np.int64]:
        """The address of each value, flat."""
        places = np.array([self.begin])
        for length, stride in zip(self.shape, self.strides, strict=True):
            places = np.add.outer(places, np.arange(length) * stride).ravel()
        return places


class Joined:
    """Flat arrays one after the other, as one: a slice is a view where it lies in one of them."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self.arrays = arrays
        self.ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, place: slice) -> NDArray[Any]:
        start, stop, _ = place.indices(len(self))
        views = []
        for array, end in zip(self.arrays, self.ends, strict=True):
            begin = end - len(array)
            if start < end and stop > begin:
                views.append(array[max(start - begin, 0) : stop - begin])
        if len(views) == 1:
            return views[0]
        return np.concatenate(views) if views else self.arrays[0][:0]


@dataclass(frozen=True, eq=False)
class Tensor:
    """A stored tensor, whose values are read when they are needed.

    ``load`` gives all values, flat, in the dtype of the file; those of bfloat16 as the 16 bits of each, uint16.
    """

    shape: Shape
    dtype: str  # as torch names it
    load: Callable[[], NDArray[Any] | Joined]
    memory: Memory | None = None  # which tensors of one file may share
    is_mapped: bool = True  # whether ``load`` costs nothing; otherwise it reads the whole tensor

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether two dimensions or more have more than one entry."""
        return sum(length > 1 for length in self.shape) > 1

    def first(self, count: int) -> NDArray[Any]:
        """The first values, flat."""
        return _as_numbers(self.load()[:count], self.dtype)

    def array(self) -> NDArray[Any]:
        """All values in the tensor's shape."""
        return _as_numbers(self.load()[:], self.dtype).reshape(self.shape)


def of_torch(tensor: Any) -> Tensor:
    """A dense tensor of torch, whose memory is shared."""
    import torch

    tensor = tensor.detach().resolve_neg()

    def load() -> NDArray[Any]:
        flat = tensor.reshape(-1)
        if flat.dtype == torch.bfloat16:
            return flat.view(torch.int16).numpy().view(np.uint16)
        return flat.numpy()

    shape = tuple(tensor.shape)
    strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
    memory = Memory(tensor.data_ptr(), shape, strides, tensor.element_size()) if tensor.numel() else None
    return Tensor(shape, str(tensor.dtype).removeprefix("torch."), load, memory)


def blocks(*tensors: Tensor) -> Iterator[NDArray[np.float64]]:
    """Values of tensors of one size, flat and in float64, block by block: arrays ``(tensors, values)``.

    Each block is overwritten by the next.
    """
    flat = [tensor.load() for tensor in tensors]
    size = len(flat[0])
    room = np.empty((len(flat), min(BLOCK, size)))
    for start in range(0, size, BLOCK):
        block = room[:, : size - start]
        for row, values, tensor in zip(block, flat, tensors, strict=True):
            row[:] = _as_numbers(values[start : start + BLOCK], tensor.dtype)
        yield block


def _as_numbers(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values as numpy knows them: bfloat16 is the upper half of float32."""
    if dtype != "bfloat16":
        return values
    wide = values.astype(np.uint32)
    np.left_shift(wide, 16, out=wide)
    return wide.view(np.float32)
