"""Inner products of flat tensors, each in one reading, with float64 sums: compiled by numba on CPU, elsewhere by torch.

numba compiles at the first call, and gives numbers; torch multiplies in the tensors' own type, and gives tensors of one
element, for which nothing waits.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Sums = tuple[float | Tensor, ...]
Real = NDArray[np.float32] | NDArray[np.float64]
# vector instructions need sums in another order and fused multiply-adds; NaN and infinity stay what they are
_compiled = numba.njit(nogil=True, fastmath={"reassoc", "contract"})


def products(a: Tensor, b: Tensor) -> Sums:
    """a·b and ‖b‖² of two tensors of one length."""
    if _has_loops(a):
        return _products(a.numpy(), b.numpy())
    return _dot(a, b), _dot(b, b)


def advance(now: Tensor, old: Tensor, kept: Tensor) -> Sums:
    """θ·δ, ‖δ‖², ‖θ + δ‖² and (θ + δ)·``kept``, for θ in ``old`` and θ + δ in ``now``; ``old`` becomes ``now``.

    An empty ``kept`` gives 0.
    """
    if _has_loops(now):
        return _advance(now.numpy(), old.numpy(), kept.numpy())
    delta = now - old
    sums = _dot(old, delta), _dot(delta, delta), _dot(now, now), _dot(now[: len(kept)], kept)
    old.copy_(now)
    return sums


@_compiled
def _products(a: Real, b: Real) -> tuple[float, float]:
    product, square = 0.0, 0.0
    for i in range(b.size):
        factor = np.float64(b[i])
        product += np.float64(a[i]) * factor
        square += factor * factor
    return product, square


@_compiled
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


def _has_loops(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dtype=torch.float64)
