"""Parameters as flat pieces beside their last values: what a tracker reads at every step, in few calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from nbutils.norms.shards import local, of_same_shards

if TYPE_CHECKING:
    from torch import Tensor

SMALL = 1 << 14  # elements: tensors up to here are gathered by layer, since every call of torch has its price


class Pieces:
    """Parameters of one dtype as flat pieces, and a copy of them cut alike: the large one by one, the small by layer.

    Args:
        members: parameters of one dtype on one device, each with the number of its layer; of a DTensor the part here.
        weight: of each sum in a sum over all processes.

    ``layers`` says for each piece in which layer all of it is; ``copy`` is the copy, flat, and ``old`` its pieces. What
    is in the copy is the caller's business. All sums are float64, one for each piece, shape (pieces,): on CPU by
    ``nbutils.norms.loops``, else by torch. Half types are read as float32.
    """

    def __init__(self, members: list[tuple[Tensor, int]], weight: float = 1.0) -> None:
        import torch

        self.weight = weight
        large = [(layer, [p]) for p, layer in members if local(p).numel() > SMALL]
        small = sorted((m for m in members if local(m[0]).numel() <= SMALL), key=lambda m: m[1])
        runs = large + [(layer, [p for p, _ in run]) for layer, run in groupby(small, key=lambda m: m[1])]
        self._runs = [run for _, run in runs]
        self.layers = [layer for layer, _ in runs]
        first, self._sizes = self.parameters[0], [sum(local(p).numel() for p in run) for run in self._runs]
        self._half = first.dtype not in (torch.float32, torch.float64)
        self._compiled = first.device.type == "cpu"
        self._flat: list[list[Tensor]] = []
        self._pointers: list[int] | None = None
        self.copy = torch.empty(sum(self._sizes), dtype=first.dtype, device=first.device)
        self.old = self.copy.split(self._sizes)
        self._kept: tuple[Tensor, ...] = ()

    @property
    def parameters(self) -> list[Tensor]:
        return [local(p) for run in self._runs for p in run]

    def now(self) -> list[Tensor]:
        """Pieces of the parameters as they are; flat views are made again only where a storage has changed."""
        pointers = [p.data_ptr() for p in self.parameters]
        if pointers != self._pointers:
            self._flat = self._flattened(local)
            views = [x.data_ptr() for run in self._flat for x in run] == pointers
            self._pointers = pointers if views else None  # else copies, as of every second column: again next time
        return _pieces(self._flat)

    def refresh(self) -> None:
        """The copy becomes the parameters as they are."""
        for now, old in zip(self.now(), self.old, strict=True):
            old.copy_(now)

    def snapshot(self) -> None:
        """Keep the copy as it is now, for ``advance``."""
        self._kept = self.copy.clone().split(self._sizes)

    def advance(self) -> list[Tensor]:
        """θ·δ and ‖δ‖² with θ in the copy and θ + δ in the parameters; the copy moves on to θ + δ.

        After ``snapshot()`` also the inner product of θ + δ with the snapshot.
        """
        import torch

        if self._compiled:
            from nbutils.norms import loops

            pieces = zip(self.now(), self.old, self._kept or [self.copy[:0]] * len(self.old), strict=True)
            found = [loops.advance(*(self._wide(x).numpy() for x in each)) for each in pieces]
            if self._half:  # what moved on was read from the copy
                self.refresh()
            return list(torch.tensor(found, dtype=torch.float64).T[: 3 if self._kept else 2])
        inner, square = [], []
        for now, old in zip(self.now(), self.old, strict=True):
            theta = self._wide(now)
            back = self._wide(old).sub_(theta)  # −δ, in the copy's place or in its float32 form
            inner.append(_dot(theta, back))
            square.append(_dot(back, back))
            old.copy_(now)
        # θ·δ = (θ + δ)·δ − ‖δ‖²
        sums = [-torch.stack(inner) - torch.stack(square), torch.stack(square)]
        return [*sums, self.dot(self._kept)] if self._kept else sums

    def dot(self, pieces: Iterable[Tensor]) -> Tensor:
        """θ·x with θ in the copy and x in ``pieces``, cut alike."""
        return self._sums(zip(self.old, pieces, strict=True))

    def squares(self) -> Tensor:
        """‖θ‖² of the parameters as they are, not of the copy."""
        now = self.now()
        return self._sums(zip(now, now, strict=True))

    def gradient(self) -> list[Tensor]:
        """θ·∇L and ‖∇L‖² with θ in the copy."""
        grad = _pieces(self._flattened(_gradient))
        return [self.dot(grad), self._sums(zip(grad, grad, strict=True))]

    def _sums(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        import torch

        if self._compiled:
            from nbutils.norms import loops

            found = [loops.dot(self._wide(a).numpy(), self._wide(b).numpy()) for a, b in pairs]
            return torch.tensor(found, dtype=torch.float64)
        return torch.stack([_dot(self._wide(a), self._wide(b)) for a, b in pairs])

    def _flattened(self, of: Callable[[Tensor], Tensor]) -> list[list[Tensor]]:
        return [[_flat(of(p).detach(), local(p)) for p in run] for run in self._runs]

    def _wide(self, piece: Tensor) -> Tensor:
        """The piece itself, or of half types a float32 copy."""
        return piece.float() if self._half else piece


def _pieces(runs: list[list[Tensor]]) -> list[Tensor]:
    """Flat tensors, those of a run in one."""
    import torch

    return [run[0] if len(run) == 1 else torch.cat(run) for run in runs]


def _gradient(p: Tensor) -> Tensor:
    import torch

    grad = local(of_same_shards(torch.zeros_like(p) if p.grad is None else p.grad, p))
    return grad.to_dense() if grad.is_sparse else grad


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Flat, in the order in which ``like`` lies in memory: a view for every tensor without gaps, else a copy.

    With gaps, as of every second column, a flat view may exist, but then the elements do not lie side by side.
    """
    strides = like.stride()
    return tensor.permute(sorted(range(like.ndim), key=lambda axis: -strides[axis])).reshape(-1).contiguous()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """a·b of two flat pieces, summed in float64."""
    import torch

    return (a * b).sum(dtype=torch.float64)
