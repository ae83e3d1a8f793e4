"""What each attached optimizer trains of the tracked parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from normgrowth.norms import optimizers
from normgrowth.norms.gradients import Members
from normgrowth.norms.pieces import Pieces


class Part(NamedTuple):
    """The tracked parameters that an optimizer and all that it holds train."""

    key: tuple[int, ...]  # ids of all parameters in their groups
    ids: frozenset[int]
    members: Members
    pieces: Sequence[int]


class Parts:
    """The parts of the attached optimizers, whose groups may change during a training."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._families: dict[int, list[Any]] = {}  # by the id of an optimizer: itself, and all that it holds
        self._given: set[int] = set()  # ids of the optimizers that were added, without those that these hold
        self._parts: dict[int, Part] = {}
        self.whole = self._part((), frozenset(map(id, pieces.parameters)))

    def add(self, optimizer: Any, family: Sequence[Any]) -> Callable[[], None]:
        """Add an optimizer, and what it holds. Returns a function that removes them.

        Raises:
            ValueError: one of them has been added already.
        """
        if any(id(member) in self._families for member in family):
            raise ValueError("this tracker is on this optimizer already: call first what attach() returned")
        self._given.add(id(optimizer))
        for member in family:
            self._families[id(member)] = optimizers.family(member)  # which keeps it, and so its id

        def remove() -> None:
            self._given.discard(id(optimizer))
            for member in family:
                self._families.pop(id(member))
                self._parts.pop(id(member), None)

        return remove

    def holds_others(self, optimizer: Any) -> bool:
        return len(self._families[id(optimizer)]) > 1

    def of(self, optimizer: Any) -> Part:
        """The part of an optimizer.

        One that was added and has none of the tracked parameters in its groups may step on copies of them: its part has
        no ids, and all pieces.
        """
        family = self._families[id(optimizer)]
        key = tuple(id(parameter) for member in family for parameter in optimizers.trained(member))
        known = self._parts.get(id(optimizer))
        if known is None or known.key != key:
            ids = self.whole.ids.intersection(key)
            known = self._part(key, ids)
            if not ids and id(optimizer) in self._given:
                known = known._replace(members=self.whole.members, pieces=self.whole.pieces)
            self._parts[id(optimizer)] = known
        return known

    def _part(self, key: tuple[int, ...], ids: frozenset[int]) -> Part:
        members = self._pieces.members(ids)
        return Part(key, ids, members, [group[0].piece for group in members])
