"""Stored tensors against each other, block by block: equal, tied, and the sums over their difference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nbutils.checkpoints.tensors import BLOCK, Tensor
from nbutils.checkpoints.weights import Weights
from nbutils.names import layer_of, originals_first


def tied(weights: Weights) -> dict[str, str]:
    """Aliases of tied embeddings and output layers that are stored twice: ``{alias: original}``.

    Only embeddings and output layers are compared, value by value: at the start of training all layer norms are equal
    and none is tied.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from safetensors.numpy import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"wte.weight": np.eye(2), "lm_head.weight": np.eye(2)}, f"{folder}/model.safetensors")
    ...     with Weights(Path(folder)) as weights:
    ...         tied(weights)
    {'lm_head.weight': 'wte.weight'}
    """
    aliases: dict[str, str] = {}
    names = [n for n in weights.parameters if layer_of(n) in ("embeddings", "head")]
    originals: list[str] = []
    for name in sorted(names, key=originals_first):
        partner = name.replace(".decoder.bias", ".bias")
        vector = len(weights.parameters[name].shape) < 2  # zero at the start: only a known pair may be tied
        options = [n for n in originals if n == partner] if vector else originals
        same_as = next((n for n in options if same(weights, n, weights, name)), None)
        if same_as:
            aliases[name] = same_as
        else:
            originals.append(name)
    return aliases


def same(a: Weights, name_a: str, b: Weights, name_b: str) -> bool:
    """Whether two tensors have the same shape and values, whatever their dtypes.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from safetensors.numpy import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"a": np.ones(2, np.float16), "b": np.ones(2)}, f"{folder}/model.safetensors")
    ...     with Weights(Path(folder)) as weights:
    ...         same(weights, "a", weights, "b")
    True
    """
    x, y = a.parameters[name_a], b.parameters[name_b]
    if x.shape != y.shape:
        return False
    left, right = np.empty(BLOCK), np.empty(BLOCK)
    for start in range(0, x.size, BLOCK):
        n = min(BLOCK, x.size - start)
        x.read(start, left[:n])
        y.read(start, right[:n])
        if not np.array_equal(left[:n], right[:n]):
            return False
    return True


class Sums(NamedTuple):
    """Float64 sums over a tensor θ' and its predecessor θ, with Δ = θ' − θ."""

    square: float  # ‖θ'‖²
    displacement_sq: float = 0.0  # ‖Δ‖²
    dot: float = 0.0  # θ·Δ


def sums(current: Tensor, previous: Tensor | None) -> Sums:
    """``Sums`` of one tensor, block by block: the difference is taken value by value, so nothing cancels.

    >>> def stored(*x):
    ...     return Tensor("F64", (len(x),), lambda start, out: np.copyto(out, x[start : start + len(out)]))
    >>> sums(stored(6.0, 8.0), stored(3.0, 4.0))  # 100 = 25 + 25 + 2 · 25
    Sums(square=100.0, displacement_sq=25.0, dot=25.0)
    """
    buffer = np.empty((2, min(BLOCK, max(current.size, 1))))
    square = displacement_sq = dot = 0.0
    with np.errstate(all="ignore"):  # what is not finite is told by the caller
        for start in range(0, current.size, BLOCK):
            y, x = buffer[:, : min(BLOCK, current.size - start)]
            current.read(start, y)
            square += _dot(y, y)
            if previous is not None:
                previous.read(start, x)
                np.subtract(y, x, out=y)
                displacement_sq += _dot(y, y)
                dot += _dot(x, y)
    return Sums(square, displacement_sq, dot)


def _dot(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """x·y without BLAS: on blocks of this size its threads cost several times what they do."""
    return float(np.einsum("i,i->", x, y))
