"""Which tensors of a series are trained parameters: who knows is asked, in turn.

The model's class, if ``config.json`` names a known one; an optimizer's state; and the series itself, in which a tensor
that never changes was not trained, and two that are always equal are one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from normgrowth.checkpoints import optimizers
from normgrowth.checkpoints.comparisons import Sums, same, tied
from normgrowth.checkpoints.store import Reference
from normgrowth.checkpoints.tensors import Tensor
from normgrowth.checkpoints.weights import ADAPTER_ALONE, Weights

_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")  # beside the weights: the Trainer's, accelerate's
_IS_WEIGHT = re.compile(r"weight|bias|kernel")
ByTensor = Mapping[str, Sums]


class Verdict(NamedTuple):
    """What the series says of its tensors: those that are none of its parameters, those that never change, notes."""

    left_out: dict[str, str]
    constant: dict[str, float]  # and their share of ρ² at the last step
    notes: list[str]


def reference_of(key: str, label: str, weights: Weights, is_alone: bool) -> Reference:
    """The tensors that a series counts, as its last checkpoint has them.

    The class is asked if a name leaves a doubt, or if there is no other checkpoint to compare with.
    """
    trained = weights.trained or _trained_beside(weights.folder)
    reference = Reference(key, label, dict(weights.shapes), dict(weights.left_out), trained, list(weights.notes))
    is_plain = all(name.rpartition(".")[2] in ("weight", "bias") for name in weights.parameters)
    if is_alone or weights.doubtful or not is_plain:
        ask_class(reference, weights)
    if not reference.model_class:
        _leave_out_ties(reference, tied(weights.parameters))
    return reference


def ask_class(reference: Reference, weights: Weights) -> None:
    """Ask the model's class, if it is known, which of the stored tensors are parameters, and which are tied."""
    from normgrowth.checkpoints import classes

    stored = weights.parameters | weights.doubtful
    kind = classes.of_folder(weights.folder, stored.keys()) if _has_configuration(weights.folder) else None
    reference.model_class = kind.name if kind else ""
    if kind is None:
        return
    reference.parameters = [name for name in stored if name in kind.parameters]
    reference.buffers = [name for name in stored if name in kind.buffers]
    for name in reference.buffers:
        if reference.shapes.pop(name, None) is not None:
            reference.left_out[name] = f"buffer of {kind.name}"
    for name, tensor in weights.doubtful.items():
        if name in kind.parameters:
            reference.shapes[name] = tensor.shape
            del reference.left_out[name]
    ties = {}
    for alias, original in kind.ties.items():
        if alias in stored and original in stored and same(stored[alias], stored[original]):
            ties[alias] = original
    _leave_out_ties(reference, ties)


def _leave_out_ties(reference: Reference, ties: Mapping[str, str]) -> None:
    for alias, original in ties.items():
        if original in reference.shapes and reference.shapes.pop(alias, None) is not None:
            reference.left_out[alias] = f"tied to {original}"


def _has_configuration(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _trained_beside(folder: Path) -> optimizers.Trained:
    """What the optimizer that lies beside the weights trains; it is read only where no class can be asked."""
    if not _has_configuration(folder):
        for name in _OPTIMIZERS:
            if (folder / name).is_file():
                from normgrowth.checkpoints import pickles

                return pickles.trained_in(folder / name)
    return optimizers.Trained()


def judge(reference: Reference, series: Sequence[ByTensor], weights: Weights | None) -> Verdict:
    """Judge the tensors of a measured series.

    Args:
        series: the sums by tensor of each checkpoint that counts, in order.
        weights: those of the reference, to compare tensors that may be one; None if no two may be.
    """
    left_out: dict[str, str] = {}
    names = list(reference.shapes)
    left_out |= _counts(reference, series)
    moved = {name for name in names if any(step[name].displacement_sq > 0 for step in series[1:])}
    if reference.trained and not reference.model_class:
        shapes = {name: reference.shapes[name] for name in names}
        untrained = optimizers.untrained(shapes, reference.trained, moved if len(series) > 1 else None)
        left_out |= _not_trained([name for name in names if name in untrained], reference, series[-1])
    left_out |= _equal_tensors(reference, series, moved, left_out, weights)
    counted = [name for name in names if name not in left_out]
    moved &= set(counted)
    total = sum(series[-1][name].square for name in counted)
    if len(series) > 1:
        constant = {name: series[-1][name].square / total if total else 0.0 for name in counted if name not in moved}
        return Verdict(left_out, constant, _notes_on_several(reference, moved))
    return Verdict(left_out, {}, _notes_on_one(reference, counted))


def _not_trained(untrained: Sequence[str], reference: Reference, last: ByTensor) -> dict[str, str]:
    """Why tensors that the optimizer does not train are left out, each with its share of the ρ² of all tensors."""
    total = sum(last[name].square for name in reference.shapes)
    reasons = {}
    for name in untrained:
        share = 100 * last[name].square / total if total else 0.0
        reasons[name] = f"not in the state of the optimizer that is stored with it ({share:.3g} % of ρ² with it)"
    return reasons


def _counts(reference: Reference, series: Sequence[ByTensor]) -> dict[str, str]:
    """Single numbers that count something: whole at every step, and always growing."""
    single = [name for name, shape in reference.shapes.items() if math.prod(shape) == 1]
    counts = {}
    for name in single if len(series) > 1 and not reference.model_class else ():
        numbers = [math.sqrt(step[name].square) for step in series]
        is_whole = all(number == int(number) for number in numbers)
        is_growing = all(after > before for before, after in pairwise(numbers))
        if is_whole and is_growing and numbers[-1] >= 2:
            counts[name] = "counts: a whole number at every step, and always growing"
    return counts


def _notes_on_several(reference: Reference, moved: Collection[str]) -> list[str]:
    """What a series does not say of its tensors: which of those that move are buffers, if nothing else tells."""
    count = len(reference.trained.shapes)
    odd = [name for name in reference.shapes if name in moved and not _IS_WEIGHT.search(name)]
    is_told = reference.model_class or reference.trained or ADAPTER_ALONE in reference.notes
    if odd and not is_told:
        which = f"{', '.join(odd[:3])} ({len(odd)} in all)" if len(odd) > 3 else ", ".join(odd)
        return [f"no class and no optimizer says whether these are parameters or buffers that move, and count: {which}"]
    if reference.model_class or not 0 < count < len(moved) or _is_flat(reference, moved):
        return []
    return [f"the optimizer trains {count} tensors; {len(moved)} move, and which of them is not said: all are counted"]


def _is_flat(reference: Reference, names: Collection[str]) -> bool:
    """Whether the optimizer trains all values of these tensors in flat buffers, as those of half precision do."""
    flat = [shape[0] for shape in reference.trained.shapes if shape is not None and len(shape) == 1]
    size = sum(math.prod(reference.shapes[name]) for name in names)
    return len(flat) == len(reference.trained.shapes) and sum(flat) == size


def _notes_on_one(reference: Reference, counted: Sequence[str]) -> list[str]:
    """What one checkpoint alone does not say of its tensors."""
    trained = len(reference.trained.shapes or reference.trained.names)
    if reference.model_class or trained == len(counted) or _is_flat(reference, counted):
        return []
    odd = [name for name in counted if not name.endswith(("weight", "bias"))]
    which = f", such as {', '.join(odd[:3])}" if odd else ""
    if 0 < trained < len(counted):
        return [f"the optimizer trains {trained} tensors; which of these {len(counted)} is not said: all are counted"]
    return [f"one checkpoint alone does not say which tensors were trained: all others are counted{which}"]


def candidates_for_ties(reference: Reference, series: Sequence[ByTensor]) -> list[list[str]]:
    """Groups of matrices that have one shape and, at every step, one norm and one displacement."""
    groups: dict[object, list[str]] = {}
    for name, shape in reference.shapes.items():
        is_matrix = sum(length > 1 for length in shape) > 1
        if is_matrix and name not in reference.parameters and series[-1][name].square > 0:
            groups.setdefault((shape, tuple(step[name] for step in series)), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _equal_tensors(
    reference: Reference,
    series: Sequence[ByTensor],
    moved: set[str],
    left_out: Mapping[str, str],
    weights: Weights | None,
) -> dict[str, str]:
    """Matrices that are equal in every checkpoint, and so one parameter under several names."""
    aliases = {}
    tensors: Mapping[str, Tensor] = weights.parameters | weights.doubtful if weights else {}
    for group in candidates_for_ties(reference, series) if weights else []:
        rest = [name for name in group if name not in left_out]
        if not moved.issuperset(rest) and _may_start_equal(rest, tensors):
            continue
        for name in rest[1:]:
            if same(tensors[rest[0]], tensors[name]):
                aliases[name] = f"tied to {rest[0]}: equal in every checkpoint"
    return aliases


def _may_start_equal(names: Sequence[str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether equal matrices that never moved may only have started from the same values, and be several parameters.

    So it is with those of several layers, whose names differ in a number, and with matrices of one value.
    """
    stems = {re.sub(r"\d+", "#", name) for name in names}
    if len(stems) < len(names):
        return True
    values = tensors[names[0]].array()
    return bool((values == values.flat[0]).all())
