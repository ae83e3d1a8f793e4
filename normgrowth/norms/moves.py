"""Parameters that move where no step is recorded: the copies follow them, and the next reading tells of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normgrowth.norms.pieces import Pieces

SAME = 1e-3  # relative difference of two moves that are one, seen twice


class Moves:
    """What has been written between two steps, by the difference of parameters and copies.

    Most writes raise a tensor's version or give it a new address. Writes to ``p.data`` and those of fused optimizers do
    neither: these are hidden.

    Attributes:
        copies_are_old: steps have not been measured since the copies were made, so nothing can be compared.
        gap: largest relative change of a layer's ρ² by hidden writes, a tensor without dimensions.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._moved = torch.zeros_like(pieces.squares)  # largest move² over ‖θ‖² by piece since the last reading
        self._told = torch.zeros_like(pieces.squares)  # the same of moves that the last reading has told of
        self._writes_are_hidden = False  # some have been so far
        self.copies_are_old = False
        self.gap = torch.zeros_like(pieces.squares[0])

    def follow(self) -> None:
        """Keep what is stored on the parameters' device."""
        device = self._pieces.device
        self._moved, self._told, self.gap = self._moved.to(device), self._told.to(device), self.gap.to(device)

    def split(self, parents: Sequence[int]) -> None:
        """New pieces at the end have been parts of these."""
        self._moved = torch.cat([self._moved, self._moved[list(parents)]])
        self._told = torch.cat([self._told, torch.zeros_like(self._told[list(parents)])])

    def forget(self) -> None:
        """Copy all parameters as they are now, and forget what moved."""
        self._pieces.refresh()
        self.copies_are_old = False
        self._moved.zero_()

    def copy(self, steps: int, *, thoroughly: bool = False) -> None:
        """Make the copies current, and keep how far parameters have moved since the last of so many steps.

        Hidden writes are searched for ``thoroughly``, or once one has been seen, in all elements, which is a reading;
        else in a sample, and on other devices than a CPU not at all.
        """
        if self.copies_are_old:
            self._pieces.refresh()
            self.copies_are_old = False
            return
        self._refresh(self._pieces.rewritten())
        before = self._pieces.squares.clone()
        hidden = self._hidden(steps, thoroughly or self._writes_are_hidden)
        if hidden:
            self._refresh(hidden)
            self._keep_gap(self._pieces.squares, before)
        self._told.zero_()

    def sample_is_unlike(self, steps: int) -> bool:
        """Whether a few elements show a write; False on other devices than a CPU, which are not waited for."""
        can_compare = not self.copies_are_old and self._pieces.device.type == "cpu"
        return can_compare and self._pieces.sample_is_unlike(steps)

    @torch.inference_mode(False)  # what is kept has to be written later
    def compare(self) -> None:
        """Compare all parameters with their copies, which stay as they are: the move may be taken back."""
        if self.copies_are_old:
            return
        rewritten = set(self._pieces.rewritten())
        squares = self._pieces.squares.clone()
        for piece in self._pieces.unlike():
            distance, square = self._pieces.distance(piece)
            if abs(distance - float(self._told[piece])) > SAME * distance:
                self._moved[piece] = max(float(self._moved[piece]), distance)
            self._told[piece] = distance
            if piece not in rewritten:
                squares[piece] = square
        self._keep_gap(squares, self._pieces.squares)

    def layers(self) -> str:
        """The layers that have moved since this was asked last, in words."""
        layers = self._pieces.layers_where(self._moved > 0)
        self._moved.zero_()
        return layers

    def _refresh(self, pieces: Sequence[int]) -> None:
        """Copy some pieces; a move that a reading has told of is not kept."""
        if pieces:
            index = self._pieces.index(pieces)
            move = self._pieces.refresh(pieces)
            is_new = (move - self._told[index]).abs() > SAME * move
            self._moved[index] = torch.maximum(self._moved[index], torch.where(is_new, move, 0.0))

    def _hidden(self, steps: int, in_all: bool) -> Sequence[int]:
        """Pieces with hidden writes; on other devices than a CPU, which are not waited for, all that may have some."""
        if self._pieces.device.type != "cpu":
            return self._pieces.all if in_all else []
        hidden = self._pieces.unlike() if in_all or self.sample_is_unlike(steps) else []
        self._writes_are_hidden |= bool(hidden)
        return hidden

    def _keep_gap(self, squares: Tensor, before: Tensor) -> None:
        """Keep the largest relative change of a layer's sum of squares in this process."""
        after, earlier = self._pieces.by_local_layer(torch.stack([squares, before]))
        self.gap = torch.maximum(self.gap, relative_gap(after, earlier))


def relative_gap(value: Tensor, expected: Tensor) -> Tensor:
    """The largest relative difference."""
    return ((value - expected).abs() / value.clamp(min=torch.finfo(torch.float64).tiny)).max()
