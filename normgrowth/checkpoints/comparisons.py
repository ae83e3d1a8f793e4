"""Comparisons of stored tensors, block by block: which are equal, which are tied, and sums over a difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.tensors import Tensor, blocks
from normgrowth.layers import layer_of, originals_first


def tied(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Aliases of tied embeddings and output layers that are stored twice: ``{alias: original}``.

    Only embeddings and output layers are compared, value by value. At the start of training all layer norms are equal,
    although none is tied.
    """
    aliases: dict[str, str] = {}
    originals: list[str] = []
    candidates = [name for name in parameters if layer_of(name) in ("embeddings", "head")]
    for name in sorted(candidates, key=originals_first):
        original = _original(name, originals, parameters)
        if original:
            aliases[name] = original
        else:
            originals.append(name)
    return aliases


def _original(name: str, originals: Sequence[str], parameters: Mapping[str, Tensor]) -> str | None:
    """The first of ``originals`` that has the values of the tensor ``name``."""
    tensor = parameters[name]
    if len(tensor.shape) < 2:  # biases are zero at the start of training: only a known pair may be tied
        originals = [original for original in originals if original == name.replace(".decoder.bias", ".bias")]
    return next((original for original in originals if same(parameters[original], tensor)), None)


def in_one_memory(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Tensors of one file whose values are all values of another one as well: ``{alias: original}``.

    Such are tied weights, transposed ones too, and the parts of a matrix or of a flat buffer that is stored with them.

    Raises:
        ReadError: two share some values only.
    """
    places = {name: tensor.memory for name, tensor in tensors.items() if tensor.memory}
    aliases: dict[str, str] = {}
    originals: list[str] = []  # that reach beyond the beginning of the next one
    for name in sorted(places, key=lambda name: (places[name].begin, -places[name].end, originals_first(name))):
        place = places[name]
        originals = [other for other in originals if places[other].end > place.begin]
        for other in list(originals):
            whole = places[other]
            if whole == place or (whole.is_dense and place.end <= whole.end):
                aliases[name] = other
                break
            if place.is_dense and (place.begin, place.end) == (whole.begin, whole.end):
                aliases[other] = name
                originals.remove(other)
            elif not np.isin(place.addresses(), whole.addresses()).any():
                continue
            else:
                raise ReadError(f"{name} and {other} share a part of their memory: save clones, each parameter once")
        else:
            originals.append(name)
    return aliases


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same shape and values, whatever their dtypes."""
    return x.shape == y.shape and all(
        np.array_equal(a, b) or np.array_equal(a, b, equal_nan=True) for a, b in blocks(x, y)
    )


class Sums(NamedTuple):
    """Float64 sums over a tensor θ' and its predecessor θ, with Δ = θ' − θ."""

    square: float  # ‖θ'‖²
    displacement_sq: float = 0.0  # ‖Δ‖²
    dot: float = 0.0  # θ·Δ


def sums(current: Tensor, previous: Tensor | None = None) -> Sums:
    """``Sums`` of one tensor, block by block. The difference is taken value by value, so nothing cancels."""
    with np.errstate(all="ignore"):  # the caller refuses values that are not finite
        if previous is None:
            return _sums_alone(current)
        return _sums_against(current, previous)


def _sums_alone(current: Tensor) -> Sums:
    square = 0.0
    for (theta,) in blocks(current):
        square += _dot(theta, theta)
    return Sums(square)


def _sums_against(current: Tensor, previous: Tensor) -> Sums:
    square = 0.0
    displacement_sq = 0.0
    dot = 0.0
    for after, before in blocks(current, previous):
        square += _dot(after, after)
        delta = np.subtract(after, before, out=after)  # in place: ``after`` is not needed any more
        displacement_sq += _dot(delta, delta)
        dot += _dot(before, delta)
    return Sums(square, displacement_sq, dot)


def _dot(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """x·y without BLAS, whose threads cost several times the work itself on blocks of this size."""
    return float(np.einsum("i,i->", x, y))


def is_infinite_constant(tensor: Tensor, before: Tensor | None) -> bool:
    """Whether a tensor that is not finite is a constant of its model, such as a mask or a bound, and no weight.

    −∞ as the only value that is not finite is none of weights, which diverge to NaN or to both signs. Of a single
    number any infinity is.
    """
    values = [block[~np.isfinite(block)] for (block,) in blocks(tensor)]
    unusual = np.concatenate(values)
    if not len(unusual) or (before is not None and not same(tensor, before)):
        return False
    is_single_bound = tensor.size == 1 and bool(np.isinf(unusual).all())
    return is_single_bound or bool((unusual == -np.inf).all())
