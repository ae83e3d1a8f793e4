"""Parameters as flat pieces, each with a copy of its last values, so that a tracker needs few calls of torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from normgrowth.norms import kernels, shards
from normgrowth.norms.kernels import Sums
from normgrowth.norms.shards import local

SMALL = 1 << 14  # elements; tensors up to this size are joined by layer, since every call of torch has a fixed cost


class Pieces:
    """Parameters on one device as flat pieces, and a copy of each piece; the caller keeps the copy current.

    A large parameter is a piece by itself; small ones of a layer form one piece. Half types are read as float32, and
    only this process's shard of a DTensor. Methods return float64 sums by layer, over all processes: ``(layers,)`` for
    one sum, ``(sums, layers)`` for several.

    Args:
        members: pairs of a parameter and the name of its layer; at least one.

    Raises:
        ValueError: parameters on several device meshes.
    """

    def __init__(self, members: Sequence[tuple[Tensor, str]]) -> None:
        self.parameters = [parameter for parameter, _ in members]
        self.layers = list(dict.fromkeys(layer for _, layer in members))
        self._mesh = shards.mesh_of(self.parameters)
        groups: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter, layer in members:
            alone = id(parameter) if local(parameter).numel() > SMALL else None
            key = (layer, shards.weight(parameter, self._mesh), parameter.dtype, alone)
            groups.setdefault(key, []).append(parameter)
        self._groups = list(groups.values())
        self._copies = [torch.empty_like(piece) for piece in self._pieces()]
        self._snapshots = [copy[:0] for copy in self._copies]  # empty until there is a snapshot
        device = self.parameters[0].device
        self._layer_of_piece = torch.tensor([self.layers.index(layer) for layer, *_ in groups], device=device)
        self._weights = torch.tensor([weight for _, weight, *_ in groups], dtype=torch.float64, device=device)

    def refresh(self) -> Tensor:
        """Copy the parameters as they are now, and return their ‖θ‖²."""
        for piece, copy in zip(self._pieces(), self._copies, strict=True):
            copy.copy_(piece)
        return self.squares()

    def snapshot(self) -> None:
        """Store the present copy as the snapshot that ``advance`` multiplies with."""
        self._snapshots = [copy.clone() for copy in self._copies]

    def advance(self) -> Tensor:
        """θ·δ, ‖δ‖², ‖θ + δ‖² and the product of θ + δ with the snapshot (0 without one).

        The copy holds θ and the parameters hold θ + δ. Afterwards the copy holds θ + δ as well.
        """
        sums = []
        for piece, copy, snapshot in zip(self._pieces(), self._copies, self._snapshots, strict=True):
            theta = _wide(copy)
            sums.append(kernels.advance(_wide(piece), theta, _wide(snapshot)))
            if theta is not copy:  # the kernel overwrote a float32 version, not the copy itself
                copy.copy_(piece)
        return self._by_layer(sums)

    def squares(self) -> Tensor:
        """‖θ‖² of the parameters as they are now, not of the copy."""
        pieces = self._pieces()
        return self._products(pieces, pieces)[1]

    def gradient(self) -> Tensor:
        """θ·∇L and ‖∇L‖², with θ as in the copy: the gradient was taken there."""
        return self._products(self._copies, [_flat(map(_gradient, group)) for group in self._groups])

    def _pieces(self) -> list[Tensor]:
        """The parameters as they are now, piece by piece."""
        return [_flat(map(local, group)) for group in self._groups]

    def _products(self, left: Iterable[Tensor], right: Iterable[Tensor]) -> Tensor:
        """``left``·``right`` and ‖``right``‖² by layer, ``(2, layers)``."""
        return self._by_layer([kernels.products(_wide(a), _wide(b)) for a, b in zip(left, right, strict=True)])

    def _by_layer(self, sums: list[Sums]) -> Tensor:
        """Add up by layer what a kernel returned for every piece: ``(sums, layers)``."""
        values: list[Any] = list(itertools.chain.from_iterable(sums))
        flat = torch.stack(values) if torch.is_tensor(values[0]) else torch.tensor(values, dtype=torch.float64)
        by_piece = flat.view(len(sums), -1).T  # (sums, pieces)
        zeros = by_piece.new_zeros(len(by_piece), len(self.layers))
        by_layer = zeros.index_add(1, self._layer_of_piece, by_piece * self._weights)
        return shards.summed(by_layer, self._mesh)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """All elements side by side in one tensor: a view of a single contiguous tensor, otherwise a copy."""
    flat = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _wide(piece: Tensor) -> Tensor:
    """The piece itself, or a float32 copy if it is of a half type."""
    return piece.float() if piece.element_size() < 4 else piece


def _gradient(parameter: Tensor) -> Tensor:
    """The dense gradient of this process's shard of a parameter; zeros for a parameter without a gradient."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    shard = local(shards.sharded_like(gradient, parameter))
    return shard.to_dense() if shard.is_sparse else shard
