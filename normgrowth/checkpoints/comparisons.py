"""Stored tensors against each other, block by block: equal, tied, and the sums over their difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from normgrowth.checkpoints.weights import blocks
from normgrowth.layers import layer_of, originals_first


def tied(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Aliases of tied embeddings and output layers that are stored twice: ``{alias: original}``.

    Only embeddings and output layers are compared, value by value: at the start of training all layer norms are equal
    and none is tied.
    """
    aliases: dict[str, str] = {}
    names = [n for n in parameters if layer_of(n) in ("embeddings", "head")]
    originals: list[str] = []
    for name in sorted(names, key=originals_first):
        vector = parameters[name].dim() < 2  # zero at the start: only a known pair may be tied
        options = [n for n in originals if not vector or n == name.replace(".decoder.bias", ".bias")]
        original = next((n for n in options if same(parameters[n], parameters[name])), None)
        if original:
            aliases[name] = original
        else:
            originals.append(name)
    return aliases


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same shape and values, whatever their dtypes."""
    return x.shape == y.shape and all(np.array_equal(a, b) for a, b in blocks(x, y))


class Sums(NamedTuple):
    """Float64 sums over a tensor θ' and its predecessor θ, with Δ = θ' − θ."""

    square: float  # ‖θ'‖²
    displacement_sq: float = 0.0  # ‖Δ‖²
    dot: float = 0.0  # θ·Δ


def sums(current: Tensor, previous: Tensor | None = None) -> Sums:
    """``Sums`` of one tensor, block by block: the difference is taken value by value, so nothing cancels."""
    square = displacement_sq = dot = 0.0
    with np.errstate(all="ignore"):  # what is not finite the caller refuses
        for y, *before in blocks(current) if previous is None else blocks(current, previous):
            square += _dot(y, y)
            for x in before:
                np.subtract(y, x, out=y)
                displacement_sq += _dot(y, y)
                dot += _dot(x, y)
    return Sums(square, displacement_sq, dot)


def _dot(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """x·y without BLAS: on blocks of this size its threads cost several times what they do."""
    return float(np.einsum("i,i->", x, y))
