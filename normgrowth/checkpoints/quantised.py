"""Integer tensors that are weights: then the checkpoint is quantised, and its norm cannot be read from the file."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.tensors import Tensor

_INDEX = re.compile(r"mask|index|indices|idx|ids?(?:$|[_.])|position|perm|count|tril|triu|enabled|step|tracked", re.I)
_SAMPLE = 1 << 20  # values that are compressed


def refuse(
    integers: Mapping[str, Tensor], floats: Mapping[str, Tensor], is_buffer: Callable[[str], bool] = lambda name: False
) -> None:
    """Raise ReadError for an integer tensor that is as large as a matrix and no table of indices and no mask.

    Args:
        is_buffer: whether the model's class, if it is known, calls a tensor a buffer.
    """
    matrices = [tensor.size for tensor in floats.values() if tensor.is_matrix and tensor.size]
    smallest = min(matrices, default=2)
    largest = max((length for tensor in floats.values() for length in tensor.shape), default=0)
    for name, tensor in integers.items():
        if tensor.dtype == "bool":
            continue
        is_named = name.endswith(("weight", "weight_packed"))
        is_large = tensor.size >= smallest
        if is_named or (is_large and not _is_table(name, tensor, largest) and not is_buffer(name)):
            raise ReadError(f"{name} is torch.{tensor.dtype}: a quantised model; its norm cannot be read from the file")


def _is_table(name: str, tensor: Tensor, largest: int) -> bool:
    """Whether integers are indices, counts or a mask.

    Indices of 32 or 64 bits stay below what they may point into: the table's own size, or a dimension of a weight.
    Fewer bits are what quantised weights have: these are indices if their name or their order says so.
    """
    values = tensor.load()[:]
    is_small = np.iinfo(values.dtype).bits < 32
    if not is_small:
        is_counts = len(tensor.shape) < 2 and tensor.dtype not in ("int32", "uint32")
        low, high = int(values.min()), int(values.max())
        is_in_range = max(high, -low) <= max(tensor.size, largest)
        return is_counts or (is_in_range and (bool(_INDEX.search(name)) or _is_in_order(values)))
    is_binary = bool(((values == 0) | (values == 1)).all())
    is_square = len(tensor.shape) > 1 and tensor.shape[-1] == tensor.shape[-2]
    return bool(_INDEX.search(name)) or (is_binary and is_square) or (not is_binary and _is_in_order(values))


def _is_in_order(values: NDArray) -> bool:
    """Whether values follow a rule: rows of positions need less room, compressed, than when shuffled; permutations."""
    sample = np.ascontiguousarray(values[:_SAMPLE])
    if len(sample) == len(values) and np.array_equal(np.sort(sample), np.arange(len(sample))):
        return True
    if (sample[1:] >= sample[:-1]).all():
        return True
    shuffled = np.random.default_rng(0).permutation(sample)
    sizes = [len(zlib.compress(part.tobytes(), 1)) for part in (sample, shuffled)]
    return sizes[0] < 0.75 * sizes[1]
