"""What a trainer has stored says of the parameters: which the optimizer trains, and after how many steps; which
tensors are buffers; and which are the optimizer's own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from normgrowth.checkpoints.tensors import Shape

_LIKE_PARAMETER = ("exp_avg", "momentum_buffer", "state1", "square_avg", "sum", "z", "mu", "m")
_OF_DISTRIBUTED = re.compile(r"(?:.*\.)?optim\w*\.(?:optim\w*\.)?(?:state\.)?(.+)\.(?:exp_avg(?:_sq)?|momentum_buffer)")
_MOMENTS = re.compile(
    r"(?:^|\.)(?:(?:max_)?exp_(?:avg|inf)(?:_sq)?(?:_row|_col)?|momentum_buffer|fp32_param)(?:\.|$)"
    r"|(?:^|\.)optim\w*\.(?:.*\.)?(?:state|param_groups)\."
)
SCHEDULE_FREE = (
    "saved in the optimizer's train mode: of schedule-free optimizers these are the weights at which gradients are "
    "taken, and not the averages that are evaluated"
)
_DEPTH = 4  # of containers in which an optimizer's state may lie


@dataclass
class Trained:
    """The parameters that optimizers train: their names if the state has them, otherwise their shapes in its order.

    The shape of a parameter without a state of its own is None: it has had no gradient yet, or the optimizer needs no
    state. It is idle, and has had no gradient, if others of its group have a state.
    """

    names: list[str] = field(default_factory=list)
    shapes: list[Shape | None] = field(default_factory=list)
    is_ordered: bool = True  # whether the shapes are in the order of the model's parameters
    steps: int | None = None
    idle: int = 0  # of those without a shape
    buffers: list[str] = field(default_factory=list)  # tensors that the file lists as buffers

    def __bool__(self) -> bool:
        return bool(self.names or self.shapes)


def trained(tree: Any) -> Trained:
    """What all optimizers in a file's containers train; empty without any."""
    states = list(_states(tree, _DEPTH))
    total = Trained(is_ordered=len(states) == 1, buffers=list(_buffers(tree)))
    for state in states:
        _add(total, state)
    return total


def notes(tree: Any) -> list[str]:
    """What the optimizers in a file say of the weights beside them."""
    groups = (group for state in _states(tree, _DEPTH) for group in state["param_groups"] if isinstance(group, dict))
    return [SCHEDULE_FREE] if any(group.get("train_mode") is True for group in groups) else []


def _buffers(tree: Any) -> Iterator[str]:
    """Names of tensors that a file lists as buffers, as DeepSpeed's ``buffer_names`` does."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if "buffer" in str(key) and isinstance(value, list | tuple | set):
            yield from (name for name in value if isinstance(name, str))


def is_state(name: str) -> bool:
    """Whether a tensor, by its name among weights, belongs to the state of an optimizer."""
    return bool(_MOMENTS.search(name))


def trained_names(keys: Iterable[str]) -> Trained:
    """The same from the keys of a distributed checkpoint, such as ``optim.state.h.0.weight.exp_avg``."""
    names = {match[1] for key in keys if (match := _OF_DISTRIBUTED.fullmatch(key))}
    return Trained(names=sorted(names))


def _states(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict) and isinstance(value.get("param_groups"), list) and "state" in value:
        yield value
    elif isinstance(value, dict | list | tuple) and depth:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _states(inner, depth - 1)


def _add(total: Trained, optimizer: Mapping[str, Any]) -> None:
    state = optimizer["state"] if isinstance(optimizer["state"], dict) else {}
    groups = [group for group in optimizer["param_groups"] if isinstance(group, dict)]
    total.is_ordered &= len(groups) == 1
    counts = [int(count) for entry in state.values() if (count := _count(entry)) is not None]
    total.steps = max([*counts, total.steps or 0]) if counts else total.steps
    for group in groups:
        parameters = list(group.get("params", ()))
        names = group.get("param_names") or [name for name in parameters if isinstance(name, str)]
        total.names += map(str, names)
        if not names:
            shapes = [_shape(parameter, state) for parameter in parameters]
            total.shapes += shapes
            total.idle += shapes.count(None) if any(shapes) else 0


def _count(entry: Any) -> float | None:
    value = entry.get("step") if isinstance(entry, dict) else None
    try:
        return float(value) if value is not None else None
    except (TypeError, ValueError, RuntimeError):
        return None


def _shape(parameter: Any, state: Mapping[Any, Any]) -> Shape | None:
    """The shape of a parameter: its own if the optimizer was pickled with it, otherwise that of its moments."""
    if hasattr(parameter, "shape"):
        return tuple(parameter.shape)
    entry = state.get(parameter)
    if not isinstance(entry, dict):
        return None
    shapes = {key: tuple(value.shape) for key, value in entry.items() if hasattr(value, "shape") and key != "step"}
    if "exp_avg_sq_row" in shapes and "exp_avg_sq_col" in shapes:  # Adafactor's, factored
        return shapes["exp_avg_sq_row"] + shapes["exp_avg_sq_col"][-1:]
    for key in _LIKE_PARAMETER:
        if key in shapes:
            return shapes[key]
    try:  # factors, such as the rows and columns of torch's Adafactor
        return np.broadcast_shapes(*shapes.values()) if shapes else None
    except ValueError:
        return Counter(shapes.values()).most_common(1)[0][0]


def untrained(stored: Mapping[str, Shape], evidence: Trained, moved: set[str] | None = None) -> set[str]:
    """The stored tensors that no optimizer trains, as far as this is certain.

    Args:
        stored: shapes by name, in the order of the file.
        evidence: what the optimizers train; without a match to what is stored it says nothing.
        moved: those that differ between two checkpoints, if there are several.
    """
    if evidence.names:
        return _untrained_by_name(stored, evidence.names)
    known = Counter(shape for shape in evidence.shapes if shape is not None)
    unknown = len(evidence.shapes) - known.total() - evidence.idle
    if known.total() + unknown >= len(stored) or known - Counter(stored.values()):
        return set()
    if evidence.idle:
        return _moved_by_no_gradient(stored, known, moved or set()) if not unknown else set()
    if unknown:  # a parameter of any shape may be without a state: only their number is known
        is_settled = moved is not None and len(moved) == len(evidence.shapes)
        return set(stored) - moved if is_settled and moved else set()
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in stored.items():
        by_shape.setdefault(shape, []).append(name)
    certain = {name for shape, names in by_shape.items() if len(names) == known[shape] for name in names}
    in_order = [shape for shape in evidence.shapes if shape is not None]
    excluded = _outside_all_orders(stored, in_order) if evidence.is_ordered else set()
    for shape, names in by_shape.items():
        if len(names) > known[shape]:
            excluded |= _not_among(names, known[shape], certain, moved)
    return excluded


def _moved_by_no_gradient(stored: Mapping[str, Shape], known: Counter[Shape], moved: set[str]) -> set[str]:
    """Tensors that move, of shapes that the optimizer does not train: those without a gradient keep their values."""
    return {name for name in moved if name in stored and not known[stored[name]]}


def _not_among(names: Sequence[str], count: int, certain: set[str], moved: set[str] | None) -> set[str]:
    """Those of several tensors of one shape that are not among the ``count`` trained ones, if that can be told.

    They are the ones that never moved, or that belong to a module of which nothing else is trained, such as a loss.
    """
    modules = {name.rpartition(".")[0] for name in certain}
    chosen = [name for name in names if moved is not None and name in moved]
    if len(chosen) != count:
        chosen = [name for name in names if name.rpartition(".")[0] in modules]
    return set(names) - set(chosen) if len(chosen) == count else set()


def _untrained_by_name(stored: Mapping[str, Shape], names: Sequence[str]) -> set[str]:
    """Tensors without one of the names, which may have a prefix more or less."""
    ends = {name.rpartition("module.")[2] for name in names}
    matched = {name for name in stored if name in ends or any(end.endswith(f".{name}") for end in ends)}
    if not matched:
        matched = {name for name in stored if any(name.endswith(f".{end}") for end in ends)}
    return set(stored) - matched if 2 * len(matched) >= len(ends) else set()


def _outside_all_orders(stored: Mapping[str, Shape], shapes: Sequence[Shape]) -> set[str]:
    """Tensors that are in no subsequence of the file which has the shapes that the optimizer has, in its order."""
    names = list(stored)
    first = _first_places([stored[name] for name in names], shapes)
    last = _first_places([stored[name] for name in reversed(names)], shapes[::-1])
    if first is None or last is None:
        return set()
    latest = [len(names) - 1 - place for place in reversed(last)]
    possible = set()
    for shape, begin, end in zip(shapes, first, latest, strict=True):
        possible |= {name for name in names[begin : end + 1] if stored[name] == shape}
    return set(names) - possible


def _first_places(stored: Sequence[Shape], shapes: Sequence[Shape]) -> list[int] | None:
    """The earliest place of each shape in order, or None if they are not there in this order."""
    places = []
    place = 0
    for shape in shapes:
        while place < len(stored) and stored[place] != shape:
            place += 1
        if place == len(stored):
            return None
        places.append(place)
        place += 1
    return places
