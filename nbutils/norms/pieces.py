"""Parameters as flat pieces beside their last values: what a tracker reads at every step, in few calls."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from nbutils.norms.shards import local, of_same_shards

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 16  # elements: two blocks of half types as float64 fit a core's L2 cache
SMALL = 1 << 14  # elements: tensors up to here are gathered by layer, since every call of torch has its price


class Pieces:
    """Parameters of one dtype as flat pieces, and a copy of them cut alike: the large one by one, the small by layer.

    Args:
        members: parameters of one dtype on one device, each with the number of its layer; of a DTensor the part here.
        weight: of each sum in a sum over all processes.

    ``lengths`` and ``layers`` say for each piece how many elements it has and in which layer they all are; ``copy`` is
    the copy, flat, and ``old`` its pieces. What is in the copy is the caller's business. All sums are float64, one for
    each piece, shape (pieces,): by ``nbutils.norms.loops`` for float32 and float64 on CPU, else by torch.
    """

    def __init__(self, members: list[tuple[Tensor, int]], weight: float = 1.0) -> None:
        import torch

        self.weight = weight
        large = [m for m in members if local(m[0]).numel() > SMALL]
        small = sorted((m for m in members if local(m[0]).numel() <= SMALL), key=lambda m: m[1])
        self._given, self._large = [p for p, _ in large + small], len(large)
        self._spread = any(local(p) is not p for p in self._given)
        runs = [(local(p).numel(), layer) for p, layer in large]
        runs += [(sum(local(p).numel() for p, _ in run), layer) for layer, run in groupby(small, key=lambda m: m[1])]
        first = local(self._given[0])
        on_cpu = first.device.type == "cpu"
        self._half = first.dtype not in (torch.float32, torch.float64)
        # CUDA: whole tensors, since each kernel has its fixed price
        block = BLOCK if on_cpu and self._half else max(max(size for size, _ in runs), 1)
        cut = [[min(block, size - at) for at in range(0, max(size, 1), block)] for size, _ in runs]
        self.layers = [layer for (_, layer), lengths in zip(runs, cut, strict=True) for _ in lengths]
        together = [[size for lengths in cut[len(large) :] for size in lengths]] if small else []
        self._cuts = [*cut[: len(large)], *together]  # of each large tensor; of the small ones in one
        self.lengths = [size for lengths in self._cuts for size in lengths]
        self.copy = _large_pages(sum(self.lengths), first)
        self.old = self.copy.split(self.lengths)
        self._buffers = torch.empty(2 * self._half, max(self.lengths), dtype=torch.float64, device=first.device)
        self._compiled = on_cpu and not self._half
        self._kept: tuple[Tensor, ...] = ()
        self._pointers: list[int] | None = None

    @property
    def parameters(self) -> list[Tensor]:
        return [local(p) for p in self._given] if self._spread else self._given

    def now(self) -> list[Tensor]:
        """Pieces of the parameters as they are; views are made again only where a storage has changed."""
        import torch

        parameters = self.parameters
        pointers = [p.data_ptr() for p in parameters]
        if pointers != self._pointers:
            flat = [_flat(p.detach(), p) for p in parameters]
            self._small = flat[self._large :]
            self._gathered = torch.cat(self._small) if self._small else None
            self._now = self._cut(flat[: self._large], self._gathered)
            views = all(x.data_ptr() == at for x, at in zip(flat, pointers, strict=True))
            self._pointers = pointers if views else None  # None: a copy, as of every second column; again next time
        elif self._small:
            torch.cat(self._small, out=self._gathered)
        return self._now

    def refresh(self) -> None:
        """The copy becomes the parameters as they are."""
        for now, old in zip(self.now(), self.old, strict=True):
            old.copy_(now)

    def snapshot(self) -> None:
        """Keep the copy as it is now, for ``advance``."""
        self._kept = self.copy.clone().split(self.lengths)

    def advance(self) -> list[Tensor]:
        """θ·δ and ‖δ‖² with θ in the copy and θ + δ in the parameters; the copy moves on to θ + δ.

        After ``snapshot()`` also the inner product of θ + δ with the snapshot.
        """
        import torch

        if self._compiled:
            from nbutils.norms import loops

            move = loops.advance_beside if self._kept else loops.advance
            pieces = zip(self.now(), self.old, *([self._kept] if self._kept else []), strict=True)
            return list(torch.tensor([move(*(x.numpy() for x in each)) for each in pieces], dtype=torch.float64).T)
        inner, square = [], []
        for now, old in zip(self.now(), self.old, strict=True):
            theta = self._widen(now, 0)
            back = self._widen(old, 1).sub_(theta)  # −δ, in the copy's place or in its float64 form
            inner.append(_dot(theta, back))
            square.append(_dot(back, back))
            old.copy_(now)
        # θ·δ = (θ + δ)·δ − ‖δ‖²
        sums = [-torch.stack(inner) - torch.stack(square), torch.stack(square)]
        return [*sums, self.dot(self._kept)] if self._kept else sums

    def dot(self, pieces: Iterable[Tensor]) -> Tensor:
        """θ·x with θ in the copy and x in ``pieces``, cut alike."""
        return self._sums((old, x) for old, x in zip(self.old, pieces, strict=True))

    def squares(self) -> Tensor:
        """‖θ‖² of the parameters as they are, not of the copy."""
        return self._sums((now, now) for now in self.now())

    def gradient(self) -> list[Tensor]:
        """θ·∇L and ‖∇L‖² with θ in the copy."""
        grad = self._grad()
        return [self.dot(grad), self._sums((g, g) for g in grad)]

    def _sums(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        import torch

        if self._compiled:
            from nbutils.norms import loops

            return torch.tensor([loops.dot(a.numpy(), b.numpy()) for a, b in pairs], dtype=torch.float64)
        return torch.stack([_dot(self._widen(a, 0), self._widen(b, 1)) for a, b in pairs])

    def _grad(self) -> list[Tensor]:
        """Pieces of the gradients, cut alike."""
        import torch

        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._given]
        if self._spread:
            grads = [local(of_same_shards(grad, p)) for grad, p in zip(grads, self._given, strict=True)]
        grads = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        flat = [_flat(grad.detach(), p) for grad, p in zip(grads, self.parameters, strict=True)]
        return self._cut(flat[: self._large], torch.cat(flat[self._large :]) if flat[self._large :] else None)

    def _cut(self, large: list[Tensor], small: Tensor | None) -> list[Tensor]:
        """Flat tensors and the small ones in one, as pieces of ``lengths``."""
        whole = [*large, *([] if small is None else [small])]
        return [piece for flat, lengths in zip(whole, self._cuts, strict=True) for piece in flat.split(lengths)]

    def _widen(self, block: Tensor, place: int) -> Tensor:
        """The block itself, or for half types a float64 copy in one of the two buffers."""
        return self._buffers[place, : block.numel()].copy_(block) if self._half else block


def _large_pages(size: int, like: Tensor) -> Tensor:
    """Room for ``size`` elements. On Linux numpy asks for large pages, torch does not: streaming takes a fifth less."""
    import torch

    if like.device.type != "cpu":
        return torch.empty(size, dtype=like.dtype, device=like.device)
    room = torch.from_numpy(np.empty(size * like.element_size() + 64, dtype=np.uint8))
    start = -room.data_ptr() % 64
    return room[start : start + size * like.element_size()].view(like.dtype)


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Flat, in the order in which ``like`` lies in memory: a view for every tensor without gaps, else a copy.

    With gaps, as of every second column, a flat view may exist, but then the elements do not lie side by side.
    """
    order = sorted(range(like.ndim), key=lambda axis: -like.stride(axis))
    return tensor.permute(order).reshape(-1).contiguous()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """a·b of two flat pieces, summed in float64."""
    import torch

    return (a * b).sum(dtype=torch.float64)
