"""The gradients that a step uses, read where they are ready."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from normgrowth.norms.pieces import Member, Pieces

Members = Sequence[Sequence[Member]]  # parameters, piece by piece
Stamp = tuple[weakref.ref[Tensor] | None, int]  # a gradient, and its version, which a write in place raises


class StepGradients:
    """θ·∇L and ‖∇L‖² by piece of one outermost call of ``step``.

    A call within it, as of the optimizer that SAM holds, has gradients of its own, which replace those of the call
    around it. What is never read is NaN.
    """

    def __init__(self, pieces: Pieces, members: Members) -> None:
        self._pieces = pieces
        self._members = members
        self._sums = torch.full((2, len(pieces.all)), torch.nan, dtype=torch.float64, device=pieces.device)
        self._depth = {group[0].piece: 0 for group in members}  # of the call in which a piece was read; 0 for none
        self._empty: list[Member] = []  # parameters that had no gradient
        self._stamps: list[Stamp] | None = None

    def read(self, pieces: Sequence[int], depth: int, scale: float = 1.0) -> None:
        """Read the gradients of some pieces, which are ``scale`` times too large, in a call of this depth."""
        among = set(pieces)
        members = [group for group in self._members if group[0].piece in among and self._depth[group[0].piece] < depth]
        if not members:
            return
        present = [group[0].piece for group in members]
        projection, square = self._pieces.gradient(members)
        index = self._pieces.index(present)
        self._sums[0, index] = projection / scale
        self._sums[1, index] = square / scale**2
        self._depth |= dict.fromkeys(present, depth)
        kept = [member for member in self._empty if member.piece not in set(present)]
        self._empty = kept + [member for group in members for member in group if member.parameter.grad is None]

    def postpone(self) -> None:
        """Leave the reading to a call within this one, or to the end if there is none and no gradient has changed."""
        gradients = [member.parameter.grad for group in self._members for member in group]
        self._stamps = [(None, 0) if gradient is None else _stamp(gradient) for gradient in gradients]

    def have_changed(self) -> bool:
        """Whether gradients have been written or replaced since the reading was postponed."""
        parameters = [member.parameter for group in self._members for member in group]
        return self._stamps is None or not all(map(_is_stamped, parameters, self._stamps))

    def end(self) -> tuple[Tensor, Tensor]:
        """θ·∇L and ‖∇L‖², and 1 for each piece with a parameter that has moved without a gradient, where they are NaN.

        Call it while the copies hold θ and the parameters θ + δ.
        """
        unread_pieces = {piece for piece, depth in self._depth.items() if not depth}
        if unread_pieces and not self.have_changed():
            self.read(list(self._depth), depth=1)
            unread_pieces = set()
        missed = [member for group in self._members for member in group if member.piece in unread_pieces]
        unread = torch.zeros_like(self._sums[0])
        for member in self._empty + missed:
            unread[member.piece] = torch.maximum(unread[member.piece], self._pieces.moved(member).double())
        return torch.where(unread > 0, torch.nan, self._sums), unread


def _stamp(gradient: Tensor) -> Stamp:
    return weakref.ref(gradient), gradient._version


def _is_stamped(parameter: Tensor, stamp: Stamp) -> bool:
    """Whether a parameter has the same gradient as when it was stamped, not written since."""
    reference, version = stamp
    gradient = parameter.grad
    if gradient is None or reference is None:
        return gradient is None and reference is None
    return reference() is gradient and gradient._version == version
