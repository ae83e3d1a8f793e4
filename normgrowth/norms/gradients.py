"""The gradients that a step uses, read where they are ready."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normgrowth.norms.pieces import Member, Pieces

Members = Sequence[Sequence[Member]]  # parameters, piece by piece


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
        self._stamps: list[tuple[int, int] | None] | None = None

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
        self._stamps = self._now()

    def end(self) -> tuple[Tensor, Tensor]:
        """θ·∇L and ‖∇L‖², and 1 for each piece with a parameter that has moved without a gradient, where they are NaN.

        Call it while the copies hold θ and the parameters θ + δ.
        """
        if self._stamps is not None and 0 in self._depth.values() and self._stamps == self._now():
            self.read(list(self._depth), depth=1)
        unread = torch.zeros_like(self._sums[0])
        for member in self._empty:
            unread[member.piece] = torch.maximum(unread[member.piece], self._pieces.moved(member).double())
        return torch.where(unread > 0, torch.nan, self._sums), unread

    def _now(self) -> list[tuple[int, int] | None]:
        """Which gradients the parameters have: a write in place raises the version."""
        gradients = [member.parameter.grad for group in self._members for member in group]
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]
