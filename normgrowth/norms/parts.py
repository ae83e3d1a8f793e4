"""What each attached optimizer trains of the tracked parameters."""

from __future__ import annotations

import itertools
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
    others: Sequence[int]  # all pieces but these
    orphans: Sequence[int]  # its pieces whose parameters are in no group, and written if the groups have copies of them
    is_mixed: bool  # some of its pieces have other parameters too


class Parts:
    """The parts of the attached optimizers, whose groups may change during a training."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._families: dict[int, list[Any]] = {}  # by the id of an optimizer: itself, and all that it holds
        self._given: set[int] = set()  # ids of the optimizers that were added, without those that these hold
        self.renew()

    def renew(self) -> None:
        """Ask for all parts again, as when pieces have been split."""
        self._parts: dict[int, Part] = {}
        self.whole = self._part((), frozenset(map(id, self._pieces.parameters)))

    def add(self, optimizer: Any, family: Sequence[Any]) -> Callable[[], None]:
        """Add an optimizer, and what it holds. Returns a function that removes them.

        Raises:
            ValueError: one of them has been added already.
        """
        if any(id(member) in self._families for member in family):
            raise ValueError("this tracker is on this optimizer already: call first what attach() returned")
        self._given.add(id(optimizer))
        self._parts.clear()
        for member in family:
            self._families[id(member)] = optimizers.family(member)  # which keeps it, and so its id

        def remove() -> None:
            self._given.discard(id(optimizer))
            for member in family:
                self._families.pop(id(member))
            self._parts.clear()

        return remove

    def holds_others(self, optimizer: Any) -> bool:
        return len(self._families[id(optimizer)]) > 1

    def of(self, optimizer: Any) -> Part:
        """The part of an optimizer.

        One that was added and trains parameters that are not tracked may step on copies: the parameters in no group
        are members then, and all of them if it has none of the tracked ones in its groups, so that its part has no ids.
        """
        key = self._key(optimizer)
        known = self._parts.get(id(optimizer))
        if known is None or known.key != key:
            ids = self.whole.ids.intersection(key)
            has_strangers = id(optimizer) in self._given and not self.whole.ids.issuperset(key)
            known = self._part(key, ids, self._orphans() if has_strangers and ids else frozenset())
            if not ids and id(optimizer) in self._given:
                known = known._replace(members=self.whole.members, pieces=self.whole.pieces, others=[])
            self._parts[id(optimizer)] = known
        return known

    def _key(self, optimizer: Any) -> tuple[int, ...]:
        family = self._families[id(optimizer)]
        return tuple(id(parameter) for member in family for parameter in optimizers.trained(member))

    def _orphans(self) -> frozenset[int]:
        """The ids of trainable parameters that are in no group of an attached optimizer."""
        keys = itertools.chain.from_iterable(self._key(optimizer) for optimizer in self._attached())
        trainable = {id(parameter) for parameter in self._pieces.parameters if parameter.requires_grad}
        return frozenset(trainable.difference(keys))

    def _attached(self) -> list[Any]:
        return [family[0] for family in self._families.values()]

    def _part(self, key: tuple[int, ...], ids: frozenset[int], orphans: frozenset[int] = frozenset()) -> Part:
        members = self._pieces.members(ids | orphans)
        pieces = [group[0].piece for group in members]
        others = sorted(set(self._pieces.all).difference(pieces))
        lost = [group[0].piece for group in members if id(group[0].parameter) in orphans]
        is_mixed = self._pieces.are_mixed(ids) or self._pieces.are_mixed(orphans)
        return Part(key, ids, members, pieces, others, lost, is_mixed)
