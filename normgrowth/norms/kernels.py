"""Inner products of flat tensors, each in one reading, with float64 sums.

On CPU differences and products are float64 too, and the sums are numbers. Where numba is installed its loops give
them: they are compiled at the first call, and read memory as fast as it can be read. Elsewhere numpy gives them block
by block, in about three times the CPU time. On other devices torch multiplies in the tensors' own type, and the sums
are tensors of one element, for which nothing waits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Sums = tuple[float | Tensor, ...]
Real = NDArray[np.float32] | NDArray[np.float64]
BLOCK = 1 << 16  # elements: larger blocks leave the cache; of smaller ones the calls cost more


class Loops(NamedTuple):
    """How the sums of arrays are computed on CPU; both change arrays as ``products`` and ``advance`` change tensors."""

    products: Callable[[Real, Real], tuple[float, float]]
    advance: Callable[[Real, Real, Real], tuple[float, float, float, float]]


def products(a: Tensor, b: Tensor) -> Sums:
    """a·b and ‖b‖² of two tensors of one length."""
    if _is_on_cpu(a):
        return loops().products(a.numpy(), b.numpy())
    return _dot(a, b), _dot(b, b)


def advance(now: Tensor, old: Tensor, kept: Tensor) -> Sums:
    """θ·δ, ‖δ‖², ‖θ + δ‖² and (θ + δ)·``kept``, for θ in ``old`` and θ + δ in ``now``; ``old`` becomes ``now``.

    An empty ``kept`` gives 0.
    """
    if _is_on_cpu(now):
        return loops().advance(now.numpy(), old.numpy(), kept.numpy())
    delta = now - old
    sums = _dot(old, delta), _dot(delta, delta), _dot(now, now), _dot(now[: len(kept)], kept)
    old.copy_(now)
    return sums


@functools.cache
def loops() -> Loops:
    """The loops of this process: compiled by numba where it is installed, else by blocks. numba is imported here."""
    try:
        import numba
    except ImportError:
        return BY_BLOCKS
    # vector instructions need sums in another order and fused multiply-adds; NaN and infinity stay what they are
    compiled = numba.njit(nogil=True, fastmath={"reassoc", "contract"})
    return Loops(compiled(_products), compiled(_advance))


def _products(a: Real, b: Real) -> tuple[float, float]:
    product, square = 0.0, 0.0
    for i in range(b.size):
        factor = np.float64(b[i])
        product += np.float64(a[i]) * factor
        square += factor * factor
    return product, square


def _advance(now: Real, old: Real, kept: Real) -> tuple[float, float, float, float]:
    inner, step, square, beside = 0.0, 0.0, 0.0, 0.0
    for i in range(now.size):
        theta, after = np.float64(old[i]), np.float64(now[i])
        delta = after - theta
        inner += theta * delta
        step += delta * delta
        square += after * after
        if kept.size:
            beside += after * np.float64(kept[i])
        old[i] = now[i]
    return inner, step, square, beside


class _Buffers(threading.local):
    """Three float64 blocks, which a thread uses again and again: new memory costs as much as the sums."""

    def __init__(self) -> None:
        self.blocks = np.empty((3, BLOCK))


_buffers = _Buffers()


@np.errstate(all="ignore")  # NaN and infinity are results, as in the compiled loops
def _products_by_blocks(a: Real, b: Real) -> tuple[float, float]:
    product, square = 0.0, 0.0
    for start in range(0, b.size, BLOCK):
        block = slice(start, start + BLOCK)
        left, right, _ = _buffers.blocks[:, : b[block].size]
        left[:] = a[block]
        right[:] = b[block]
        product += float(left.dot(right))
        square += float(right.dot(right))
    return product, square


@np.errstate(all="ignore")
def _advance_by_blocks(now: Real, old: Real, kept: Real) -> tuple[float, float, float, float]:
    inner, step, square, beside = 0.0, 0.0, 0.0, 0.0
    for start in range(0, now.size, BLOCK):
        block = slice(start, start + BLOCK)
        after, theta, snapshot = _buffers.blocks[:, : now[block].size]
        after[:] = now[block]
        theta[:] = old[block]
        old[block] = now[block]
        square += float(after.dot(after))
        if kept.size:
            snapshot[:] = kept[block]
            beside += float(after.dot(snapshot))
        delta = np.subtract(after, theta, out=after)
        inner += float(theta.dot(delta))
        step += float(delta.dot(delta))
    return inner, step, square, beside


BY_BLOCKS = Loops(_products_by_blocks, _advance_by_blocks)


def _is_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dtype=torch.float64)
