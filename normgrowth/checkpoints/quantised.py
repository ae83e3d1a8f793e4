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
_MOST = 1 << 50  # a count is less


def refuse(
    integers: Mapping[str, Tensor], floats: Mapping[str, Tensor], is_buffer: Callable[[str], bool] = lambda name: False
) -> None:
    """Raise ReadError for an integer tensor that is as large as a matrix and no table of indices and no mask.

    Args:
        is_buffer: whether the model's class, if it is known, calls a tensor a buffer.
    """
    least = _least_size(floats)
    largest = max((length for tensor in floats.values() for length in tensor.shape), default=0)
    for name, tensor in integers.items():
        if tensor.dtype == "bool":
            continue
        is_named = name.endswith(("weight", "weight_packed"))
        is_large = tensor.size >= least
        if not is_named and not (is_large and _is_weight(name, tensor, floats, largest)):
            continue
        if is_named or not is_buffer(name):
            raise ReadError(f"{name} is torch.{tensor.dtype}: a quantised model; its norm cannot be read from the file")


def _least_size(floats: Mapping[str, Tensor]) -> int:
    """The least size of a quantised matrix: that of the smallest matrix, or more than that of the longest vector.

    Often the embeddings are the only matrix that is stored as numbers. Norms, scales and zero points have the length of
    a side of a matrix, which has more values than that even where several are packed into one.
    """
    sizes = [tensor.size for tensor in floats.values() if tensor.is_matrix and tensor.size]
    lengths = [tensor.size for tensor in floats.values() if not tensor.is_matrix and tensor.size > 1]
    return min([*sizes, max(lengths) + 1] if lengths else sizes, default=2)


def _is_weight(name: str, tensor: Tensor, floats: Mapping[str, Tensor], largest: int) -> bool:
    return not _is_table(name, tensor, largest) or _points_into_codebook(name, tensor, floats)


def _is_table(name: str, tensor: Tensor, largest: int) -> bool:
    """Whether integers are indices, counts or a mask.

    Indices of 32 or 64 bits stay below what they may point into: the table's own size, or a dimension of a weight.
    Fewer bits are what quantised weights have, whatever their name: these are a mask, or indices in an order.
    """
    values = tensor.load()[:]
    is_small = np.iinfo(values.dtype).bits < 32
    if not is_small:
        is_counts = len(tensor.shape) < 2 and tensor.dtype not in ("int32", "uint32") and _are_counts(values)
        low, high = int(values.min()), int(values.max())
        is_in_range = max(high, -low) <= max(tensor.size, largest)
        return is_counts or (is_in_range and (bool(_INDEX.search(name)) or _is_in_order(values)))
    is_binary = bool(((values == 0) | (values == 1)).all())
    is_square = len(tensor.shape) > 1 and tensor.shape[-1] == tensor.shape[-2]
    return (is_binary and (is_square or bool(_INDEX.search(name)))) or (not is_binary and _is_in_order(values))


def _are_counts(values: NDArray) -> bool:
    """Whether integers of 64 bits are small enough to count something: packed bits fill all of them."""
    return bool((np.abs(values.astype(np.float64)) < _MOST).all())


def _points_into_codebook(name: str, tensor: Tensor, floats: Mapping[str, Tensor]) -> bool:
    """Whether integers without an order choose, many times over, among the rows of a table of their own module."""
    module = name.rpartition(".")[0]
    rows = [table.shape[0] for other, table in floats.items() if other.rpartition(".")[0] == module and table.shape]
    values = tensor.load()[:]
    low, high = int(values.min()), int(values.max())
    is_pointer = low >= 0 and any(high < count < tensor.size for count in rows)
    return is_pointer and high > 0 and not _is_of_distances(values.reshape(tensor.shape)) and not _is_in_order(values)


def _is_of_distances(values: NDArray) -> bool:
    """Whether a square table may choose a bias by relative position: every place has the same distance to itself.

    The first place may be a token without a position.
    """
    is_square = values.ndim == 2 and values.shape[0] == values.shape[1]
    return is_square and len(set(values.diagonal()[1:].tolist())) == 1


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
