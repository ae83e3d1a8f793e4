"""A module stored twice in one model: beside its weights, a copy that follows them, such as the target of a critic, a
teacher or a momentum encoder, which is an average of the weights and no second set of parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np

from normgrowth.checkpoints.containers import AVERAGE
from normgrowth.checkpoints.optimizers import Trained
from normgrowth.checkpoints.tensors import Shape, Tensor

_FOLLOWS = re.compile(r"(?:^|_)(?:targ(?:et)?|teacher|momentum|slow|delayed|lagged|m)(?:_|\d|$)", re.I)
_NEAR = 0.5  # cosine: that of two matrices which were drawn and trained apart is near 0
_SAMPLE = 1 << 12  # values of each matrix that are compared
_MATRICES = 4  # of a module that are compared


class Twins(NamedTuple):
    """Two modules, by their prefixes, with the same tensors but for their values."""

    first: str
    second: str
    names: list[str]  # of the tensors that both have, after the prefix


def following(parameters: Mapping[str, Tensor], trained: Trained) -> tuple[dict[str, str], list[str]]:
    """The tensors of modules that follow another one, with reasons, and notes on those of which it cannot be told.

    The values of a follower are near those of the other module. Which one follows is in its name, or in the state of
    the optimizer, which has nothing for it.
    """
    left_out: dict[str, str] = {}
    notes: list[str] = []
    noted: set[str] = set()
    for twins in _twins(parameters):
        names = {prefix + name for prefix in (twins.first, twins.second) for name in twins.names}
        if not names.isdisjoint(noted) or not names.isdisjoint(left_out) or not _are_near(parameters, twins):
            continue
        follower = _follower(twins, trained)
        if follower:
            other = twins.first if follower == twins.second else twins.second
            why = f"follows {other.rstrip('.')}, whose values are near: an average of the weights"
            left_out |= {follower + name: why for name in twins.names}
        else:
            noted |= names
            pair = f"{twins.first.rstrip('.')} and {twins.second.rstrip('.')}"
            notes.append(f"{pair} hold nearly the same values: if one is an average or a copy, it is counted too")
    return left_out, notes


def _twins(parameters: Mapping[str, Tensor]) -> Iterator[Twins]:
    """Modules whose paths differ in one word, one of which has the tensors of the other: the outer ones first."""
    modules: dict[str, dict[str, Shape]] = {}
    for name, tensor in parameters.items():
        for place in (match.end() for match in re.finditer(r"\.", name)):
            modules.setdefault(name[:place], {})[name[place:]] = tensor.shape
    beside: dict[tuple[str, ...], list[str]] = {}
    for prefix in modules:
        path = prefix[:-1].split(".")
        for place, word in enumerate(path):
            if not word.isdigit():  # layers are no copies of each other
                beside.setdefault((*path[:place], "*", *path[place + 1 :]), []).append(prefix)
    groups = sorted((prefixes for prefixes in beside.values() if len(prefixes) > 1), key=lambda group: len(group[0]))
    for first, second in (pair for group in groups for pair in combinations(group, 2)):
        names = _common(modules[first], modules[second])
        twins = Twins(first, second, names)
        if (len(names) > 1 or (names and _by_name(twins))) and re.sub(r"\d", "", first) != re.sub(r"\d", "", second):
            yield twins


def _common(first: Mapping[str, Shape], second: Mapping[str, Shape]) -> list[str]:
    """The names of the smaller module if the larger one has these, in the same shapes, and few others."""
    smaller, larger = sorted((first, second), key=len)
    is_part = 2 * len(smaller) >= len(larger) and smaller.items() <= larger.items()
    has_matrix = is_part and any(sum(length > 1 for length in shape) > 1 for shape in smaller.values())
    return list(smaller) if has_matrix else []


def _are_near(parameters: Mapping[str, Tensor], twins: Twins) -> bool:
    """Whether the matrices of two modules, as far as they are compared, point in one direction."""
    matrices = [name for name in twins.names if parameters[twins.first + name].is_matrix][:_MATRICES]
    first, second = (
        np.concatenate([parameters[prefix + name].first(_SAMPLE).astype(np.float64) for name in matrices])
        for prefix in (twins.first, twins.second)
    )
    with np.errstate(all="ignore"):
        if first.std() <= 1e-6 * np.abs(first).max():  # of one value, from which several may start
            return False
        is_tied = np.array_equal(first, second)
        return not is_tied and bool(first @ second > _NEAR * np.sqrt((first @ first) * (second @ second)))


def _follower(twins: Twins, trained: Trained) -> str | None:
    """The prefix of the one that follows the other, if that can be told."""
    if follower := _by_name(twins):
        return follower
    if trained.idle >= len(twins.names):
        are_first = trained.shapes[0] is None
        if are_first != (trained.shapes[-1] is None):
            return twins.first if are_first else twins.second
    return None


def _by_name(twins: Twins) -> str | None:
    """The prefix of the one that is called a target, a teacher or an average, if the other one is not."""
    words = [prefix[:-1].split(".") for prefix in (twins.first, twins.second)]
    own_words = [word for word in zip(*words, strict=True) if word[0] != word[1]]
    is_first, is_second = (
        any(bool(_FOLLOWS.search(pair[side]) or AVERAGE.search(pair[side])) for pair in own_words) for side in (0, 1)
    )
    if is_first == is_second:
        return None
    return twins.first if is_first else twins.second
