"""Parameters as flat pieces beside their last values: what a tracker reads at every step, in few calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from normgrowth.norms import kernels, shards
from normgrowth.norms.kernels import Sums
from normgrowth.norms.shards import local

SMALL = 1 << 14  # elements: tensors up to here are gathered by layer, since every call of torch has its price


class Pieces:
    """Parameters on one device as flat pieces, and a copy of them cut alike: the large one by one, the small by layer.

    Args:
        members: each parameter with its layer; of a DTensor the part here counts.

    What is in the copy is the caller's business. All sums are float64 by layer, over all processes, shape (…, layers).
    Half types are read as float32.
    """

    def __init__(self, members: Sequence[tuple[Tensor, str]]) -> None:
        self.parameters = [p for p, _ in members]
        self.layers = list(dict.fromkeys(layer for _, layer in members))
        self._mesh = shards.mesh_of(self.parameters)
        runs: dict[tuple[Any, ...], list[Tensor]] = {}
        for p, layer in members:
            alone = id(p) if local(p).numel() > SMALL else None
            runs.setdefault((layer, shards.weight(p, self._mesh), p.dtype, alone), []).append(p)
        self._runs = list(runs.values())
        self._copy = [torch.empty_like(now) for now in self._now()]
        self._kept = [copy[:0] for copy in self._copy]
        device = self.parameters[0].device
        self._layers = torch.tensor([self.layers.index(layer) for layer, *_ in runs], device=device)
        self._weights = torch.tensor([weight for _, weight, *_ in runs], dtype=torch.float64, device=device)

    def refresh(self) -> Tensor:
        """The copy becomes the parameters as they are. Returns their ‖θ‖²."""
        for now, copy in zip(self._now(), self._copy, strict=True):
            copy.copy_(now)
        return self.squares()

    def snapshot(self) -> None:
        """Keep the copy as it is now, for ``advance``."""
        self._kept = [copy.clone() for copy in self._copy]

    def advance(self) -> Tensor:
        """θ·δ, ‖δ‖², ‖θ + δ‖² and the product of θ + δ with the snapshot, if there is one.

        θ is in the copy, θ + δ in the parameters. The copy moves on to θ + δ.
        """
        sums = []
        for now, copy, kept in zip(self._now(), self._copy, self._kept, strict=True):
            theta = _wide(copy)
            sums.append(kernels.advance(_wide(now), theta, _wide(kept)))
            if theta is not copy:  # a float32 form of it moved on
                copy.copy_(now)
        return self._by_layer(sums)

    def squares(self) -> Tensor:
        """‖θ‖² of the parameters as they are, not of the copy."""
        now = self._now()
        return self._products(now, now)[1]

    def gradient(self) -> Tensor:
        """θ·∇L and ‖∇L‖² with θ in the copy."""
        return self._products(self._copy, [_flat(map(_gradient, run)) for run in self._runs])

    def _now(self) -> list[Tensor]:
        return [_flat(map(local, run)) for run in self._runs]

    def _products(self, left: Iterable[Tensor], right: Iterable[Tensor]) -> Tensor:
        return self._by_layer([kernels.products(_wide(a), _wide(b)) for a, b in zip(left, right, strict=True)])

    def _by_layer(self, sums: list[Sums]) -> Tensor:
        """Sums of each piece to sums of layers."""
        numbers: list[Any] = [number for each in sums for number in each]
        flat = torch.stack(numbers) if torch.is_tensor(numbers[0]) else torch.tensor(numbers, dtype=torch.float64)
        of_pieces = flat.view(len(sums), -1).T
        zero = of_pieces.new_zeros(len(of_pieces), len(self.layers))
        return shards.summed(zero.index_add(1, self._layers, of_pieces * self._weights), self._mesh)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """All elements side by side in one tensor: a view of a single one without gaps, else a copy."""
    flat = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _wide(piece: Tensor) -> Tensor:
    """The piece itself, or of half types a float32 copy."""
    return piece.float() if piece.element_size() < 4 else piece


def _gradient(p: Tensor) -> Tensor:
    grad = local(shards.of_same_shards(torch.zeros_like(p) if p.grad is None else p.grad, p))
    return grad.to_dense() if grad.is_sparse else grad
