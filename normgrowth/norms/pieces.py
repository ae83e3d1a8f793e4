"""Parameters as flat pieces, each with a copy of its last values, so that a tracker needs few calls of torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normgrowth.norms import kernels, shards
from normgrowth.norms.kernels import Sums
from normgrowth.norms.shards import local

SMALL = 1 << 14  # elements; tensors up to this size are joined by layer, since every call of torch has a fixed cost
SAMPLE = 4  # pieces that are looked at before a step for writes that torch does not show …
RUN = 64  # … and elements of each


class Member(NamedTuple):
    """A parameter, and where its elements lie in the copy of its piece."""

    parameter: Tensor
    piece: int
    start: int


class Pieces:
    """Parameters on one device as flat pieces, and a copy of each piece.

    A large parameter is a piece by itself; small ones of a layer form one piece. Half types are read as float32, and
    only this process's shard of a DTensor. Methods return float64 sums of this process by piece, ``(pieces,)`` for one
    sum, ``(sums, pieces)`` for several; ``by_layer`` adds them up by layer, over all processes.

    Args:
        members: pairs of a parameter and the name of its layer; at least one.

    Attributes:
        squares: ‖θ‖² of the copies, ``(pieces,)``.
        beside: product of the copies with the snapshots, ``(pieces,)``; NaN without a snapshot.
        snapshot_squares: ‖s‖² of the snapshots, ``(pieces,)``; NaN without one.
        resized: parameters that have had another size since their copy was made.

    Raises:
        ValueError: parameters on several device meshes.
    """

    squares: Tensor
    beside: Tensor
    snapshot_squares: Tensor
    _layer_of_piece: Tensor
    _weights: Tensor
    _versions: list[tuple[int, int, int]]  # as in ``_now``, when the copies were made

    def __init__(self, members: Sequence[tuple[Tensor, str]]) -> None:
        parameters = [parameter for parameter, _ in members]
        self.layers = list(dict.fromkeys(layer for _, layer in members))
        self._mesh = shards.mesh_of(parameters)
        groups: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter, layer in members:
            alone = id(parameter) if local(parameter).numel() > SMALL else None
            key = (layer, shards.weight(parameter, self._mesh), parameter.dtype, alone)
            groups.setdefault(key, []).append(parameter)
        self._groups = list(groups.values())
        self.layer_of = [layer for layer, *_ in groups]
        self._arrange()
        self.resized: list[Tensor] = []
        self._copies = [torch.empty_like(piece) for piece in map(self._piece, self.all)]
        self._snapshots = [copy[:0] for copy in self._copies]  # empty until there is a snapshot
        self._to(self.parameters[0].device, [weight for _, weight, *_ in groups])
        self._copy_all()

    @property
    def device(self) -> torch.device:
        return self.squares.device

    def members(self, ids: Collection[int]) -> list[list[Member]]:
        """The parameters with these ids, piece by piece; pieces without any are left out."""
        chosen = []
        for k, group in enumerate(self._groups):
            sizes = [local(parameter).numel() for parameter in group]
            starts = itertools.accumulate(sizes, initial=0)
            there = [Member(p, k, start) for p, start in zip(group, starts, strict=False) if id(p) in ids]
            if there:
                chosen.append(there)
        return chosen

    def are_mixed(self, ids: Collection[int]) -> bool:
        """Whether some parameters have these ids and others of their piece have not."""
        return bool(ids) and bool(self._mixed(ids))

    def separate(self, ids: Collection[int]) -> list[int]:
        """Split pieces of which some parameters have these ids and some have not, and put the new pieces at the end.

        Returns for each new piece the one that it was part of.
        """
        mixed = self._mixed(ids)
        versions = dict(zip(map(id, self.parameters), self._versions, strict=True))
        for k in mixed:
            sizes = [versions[id(parameter)][2] for parameter in self._groups[k]]  # as in the copies
            chosen = [id(parameter) in ids for parameter in self._groups[k]]
            for values in (self._copies, self._snapshots):
                inside, outside = _split(values[k], sizes, chosen)
                values[k] = inside
                values.append(outside)
            group = self._groups[k]
            self._groups[k] = [parameter for parameter, is_in in zip(group, chosen, strict=True) if is_in]
            self._groups.append([parameter for parameter, is_in in zip(group, chosen, strict=True) if not is_in])
            self.layer_of.append(self.layer_of[k])
        if mixed:
            self._arrange()
            self._versions = [versions[id(parameter)] for parameter in self.parameters]
            self._sum_again(mixed)
        return mixed

    def _mixed(self, ids: Collection[int]) -> list[int]:
        return [k for k in self.all if {id(parameter) in ids for parameter in self._groups[k]} == {True, False}]

    def _sum_again(self, parents: Sequence[int]) -> None:
        """What is stored by piece, after these pieces have been split."""
        parents = list(parents)
        has_snapshot = ~self.snapshot_squares.isnan()
        self._weights = torch.cat([self._weights, self._weights[parents]])
        self._layer_of_piece = torch.cat([self._layer_of_piece, self._layer_of_piece[parents]])
        has_snapshot = torch.cat([has_snapshot, has_snapshot[parents]])
        pairs = [(_wide(copy), _wide(snapshot)) for copy, snapshot in zip(self._copies, self._snapshots, strict=True)]
        self.squares = self._table([kernels.products(copy, copy) for copy, _ in pairs])[1]
        beside = self._table([kernels.products(copy[: len(kept)], kept) for copy, kept in pairs])
        self.beside, self.snapshot_squares = torch.where(has_snapshot, beside, torch.nan)

    def _arrange(self) -> None:
        """Put the parameters in the order of the pieces."""
        self.parameters = [parameter for group in self._groups for parameter in group]
        self.all = range(len(self._groups))
        ends = list(itertools.accumulate(map(len, self._groups), initial=0))
        self._bounds = [slice(start, end) for start, end in itertools.pairwise(ends)]  # of pieces in ``parameters``

    def rewritten(self, pieces: Sequence[int] | None = None) -> list[int]:
        """The pieces that have been written to since their copy was made, as far as torch shows it.

        A write in place raises a tensor's version, and a new storage has a new address. Fused optimizers, and writes
        to ``p.data``, show neither.
        """
        chosen = self.all if pieces is None else pieces
        if len(chosen) == len(self.all) and self._now() == self._versions:
            return []
        return [k for k in chosen if self._now(self._bounds[k]) != self._versions[self._bounds[k]]]

    def unlike(self) -> list[int]:
        """The pieces whose elements are not those of their copies. On other devices than a CPU this waits."""
        return [k for k in self.all if not _equal(self._piece(k), self._copies[k])]

    def sample_is_unlike(self, turn: int) -> bool:
        """Whether a few elements differ from their copies; others at each turn. For parameters on a CPU."""
        count = min(SAMPLE, len(self.all))
        return any(self._run_is_unlike((turn * count + i) % len(self.all), turn) for i in range(count))

    def distance(self, piece: int) -> tuple[float, float]:
        """‖θ − copy‖² over ‖copy‖² of a piece, 0 where the two differ by rounding, and ‖θ‖², of parameters as now."""
        now, copy = self._piece(piece), self._copies[piece]
        square = float(now.double().square().sum())
        if now.shape != copy.shape:
            return math.inf, square
        old = copy.double()
        move = float((now.to(old) - old).square().sum())
        relative = move / max(float(self.squares[piece]), torch.finfo(torch.float64).tiny)
        return relative if relative > rounding(copy.dtype) ** 2 else 0.0, square

    def refresh(self, pieces: Sequence[int] | None = None) -> Tensor:
        """Copy pieces as they are now, by default all. Returns ‖θ − copy‖² over ‖copy‖²; 0 where that is rounding."""
        pieces = self.all if pieces is None else pieces
        before = self.squares[self.index(pieces)].clone()
        _, move, *_ = self.advance(pieces)
        relative = move / before.clamp(min=torch.finfo(torch.float64).tiny)
        floor = [rounding(self._copies[k].dtype) ** 2 for k in pieces]
        return torch.where(relative > torch.tensor(floor, dtype=torch.float64, device=self.device), relative, 0.0)

    def snapshot(self) -> None:
        """Store the present copies as the snapshots that the parameters are multiplied with."""
        self._snapshots = [copy.clone() for copy in self._copies]
        self.snapshot_squares = self.squares.clone()
        self.beside = self.squares.clone()

    def advance(self, pieces: Sequence[int] | None = None) -> Tensor:
        """θ·δ, ‖δ‖², ‖θ + δ‖² and the product of θ + δ with the snapshot (0 without one), ``(4, pieces)``.

        The copies hold θ and the parameters θ + δ. Afterwards the copies hold θ + δ as well. Of a piece that has
        another size than its copy, δ is NaN.
        """
        pieces = self.all if pieces is None else pieces
        sums = [self._advance(k) for k in pieces]
        table = self._table(sums)
        index = self.index(pieces)
        self.squares[index] = table[2]
        self.beside[index] = torch.where(self.snapshot_squares[index].isnan(), torch.nan, table[3])
        self._keep_versions(pieces)
        return table

    def gradient(self, members: Sequence[Sequence[Member]] | None = None) -> Tensor:
        """θ·∇L and ‖∇L‖² of some parameters, by default all, ``(2, pieces)``; 0 for those without a gradient.

        θ is as in the copies: the gradient was taken there.
        """
        members = self.members(set(map(id, self.parameters))) if members is None else members
        sums = []
        for group in members:
            left = self._copies[group[0].piece]
            if len(group) < len(self._groups[group[0].piece]):
                left = torch.cat([left[m.start : m.start + local(m.parameter).numel()] for m in group])
            right = _flat([_gradient(m.parameter) for m in group])
            sums.append(kernels.products(_wide(left), _wide(right)))
        return self._table(sums)

    def moved(self, member: Member) -> Tensor:
        """Whether the elements of a parameter differ from those in the copy, a tensor without dimensions."""
        now = _flat([local(member.parameter)])
        return (now != self._copies[member.piece][member.start : member.start + now.numel()]).any()

    def by_layer(self, sums: Tensor) -> Tensor:
        """Sums by piece, ``(sums, pieces)``, added up by layer and over all processes, ``(sums, layers)``."""
        return shards.summed(self.by_local_layer(sums * self._weights), self._mesh)

    def by_local_layer(self, sums: Tensor) -> Tensor:
        """Sums by piece added up by layer, of this process alone."""
        return sums.new_zeros(len(sums), len(self.layers)).index_add(1, self._layer_of_piece, sums)

    def layers_where(self, chosen: Tensor) -> str:
        """The layers with a chosen piece, in words."""
        layers = [layer for layer, is_in in zip(self.layer_of, chosen.tolist(), strict=True) if is_in]
        return ", ".join(dict.fromkeys("the parameters" if layer == "total" else layer for layer in layers))

    def index(self, pieces: Sequence[int]) -> Any:
        """The index of some pieces in a tensor that has all in its last dimension."""
        return slice(None) if len(pieces) == len(self.all) else torch.tensor(pieces, device=self.device)

    def follow(self) -> bool:
        """Move what is stored to the parameters' device, if they have been moved. Returns whether they have."""
        device = self.parameters[0].device
        has_moved = device != self.device
        if has_moved:
            self._to(device, self._weights)
        return has_moved

    def _to(self, device: torch.device, weights: Any) -> None:
        layers = [self.layers.index(layer) for layer in self.layer_of]
        unknown = torch.full((len(self.all),), torch.nan, dtype=torch.float64, device=device)
        self._layer_of_piece = torch.tensor(layers, device=device)
        self._weights = torch.as_tensor(weights, dtype=torch.float64, device=device)
        self.squares = getattr(self, "squares", unknown).to(device)
        self.beside = getattr(self, "beside", unknown).to(device)
        self.snapshot_squares = getattr(self, "snapshot_squares", unknown).to(device)
        self._copies = [copy.to(device) for copy in self._copies]
        self._snapshots = [snapshot.to(device) for snapshot in self._snapshots]

    def _copy_all(self) -> None:
        sums = []
        for k in self.all:
            piece = self._piece(k)
            self._copies[k].copy_(piece)
            sums.append(kernels.products(_wide(piece), _wide(piece)))
        self.squares = self._table(sums)[1]
        self._versions = self._now()

    def _advance(self, k: int) -> Sums:
        piece, copy = self._piece(k), self._copies[k]
        if piece.numel() != copy.numel():
            return self._resize(k, piece)
        if piece.dtype is not copy.dtype:
            copy = self._copies[k] = copy.to(piece)
            self._snapshots[k] = self._snapshots[k].to(piece)
        theta = _wide(copy)
        sums = kernels.advance(_wide(piece), theta, _wide(self._snapshots[k]))
        if theta is not copy:  # the kernel overwrote a float32 version, not the copy itself
            copy.copy_(piece)
        return sums

    def _run_is_unlike(self, k: int, turn: int) -> bool:
        """Whether a run of elements of a large parameter differs from the copy, or a piece of small ones does."""
        first = local(self._groups[k][0]).detach()
        if len(self._groups[k]) > 1 or not first.is_contiguous() or not first.numel():
            return not _equal(self._piece(k), self._copies[k])
        run = slice(turn * RUN % first.numel(), turn * RUN % first.numel() + RUN)
        return not _equal(first.view(-1)[run], self._copies[k][run])

    def _resize(self, k: int, piece: Tensor) -> Sums:
        """A new copy of a piece that has another size now; its snapshot is of no more use."""
        sizes = [size for *_, size in self._versions[self._bounds[k]]]
        self.resized += [p for p, size in zip(self._groups[k], sizes, strict=True) if local(p).numel() != size]
        self._copies[k] = piece.clone()
        self._snapshots[k] = piece[:0].clone()
        self.snapshot_squares[k] = torch.nan
        _, square = kernels.products(_wide(piece), _wide(piece))
        unknown = square * math.nan
        return unknown, unknown, square, unknown

    def _now(self, among: slice = slice(None)) -> list[tuple[int, int, int]]:
        """Version, address and size of some parameters, by default all."""
        tensors = map(local, self.parameters[among])
        return [(tensor._version, tensor.data_ptr(), tensor.numel()) for tensor in tensors]

    def _keep_versions(self, pieces: Sequence[int]) -> None:
        if len(pieces) == len(self.all):
            self._versions = self._now()
        else:
            for bounds in (self._bounds[k] for k in pieces):
                self._versions[bounds] = self._now(bounds)

    def _piece(self, k: int) -> Tensor:
        """The parameters of a piece as they are now."""
        return _flat([local(parameter) for parameter in self._groups[k]])

    def _table(self, sums: list[Sums]) -> Tensor:
        """What a kernel returned for every piece as a tensor, ``(sums, pieces)``."""
        if not sums:
            return torch.zeros(4, 0, dtype=torch.float64, device=self.device)
        values: list[Any] = list(itertools.chain.from_iterable(sums))
        flat = torch.stack(values) if torch.is_tensor(values[0]) else torch.tensor(values, dtype=torch.float64)
        return flat.view(len(sums), -1).T


def rounding(dtype: torch.dtype) -> float:
    """Relative length of a change that is rounding, as where a wrapper takes a perturbation back.

    0 for half types, in which a change of this kind is as long as a step.
    """
    return 16 * torch.finfo(dtype).eps if dtype.itemsize >= 4 else 0.0


def _split(flat: Tensor, sizes: Sequence[int], chosen: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """The chosen stretches of a flat tensor, and the others; of an empty tensor, two empty ones."""
    if not flat.numel():
        return flat, flat.clone()
    stretches = list(zip(flat.split(list(sizes)), chosen, strict=True))
    inside = [stretch for stretch, is_in in stretches if is_in]
    outside = [stretch for stretch, is_in in stretches if not is_in]
    return torch.cat(inside), torch.cat(outside)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
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
