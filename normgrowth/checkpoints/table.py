"""The table of a measured series: rows of the total and of groups of tensors, from sums by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from normgrowth.checkpoints.comparisons import Sums
from normgrowth.layers import layer_order, layers, type_of

Grouping = str | Callable[[str], str]
GROUPINGS: dict[str, Callable[[Iterable[str]], dict[str, str]]] = {  # from tensors to their rows beside the total
    "total": lambda names: {},
    "layer": layers,
    "type": lambda names: {name: type_of(name) for name in names},
    "tensor": lambda names: {name: name for name in names},
}


class Row(NamedTuple):
    """One row of the table. Values are None without a checkpoint before it, a cosine also where a norm is 0."""

    step: int
    layer: str
    norm: float
    cos_similarity: float | None = None
    displacement_sq: float | None = None
    inner: float | None = None


COLUMNS = Row._fields


def check(by: Grouping) -> None:
    """Raise ValueError for an unknown name of a grouping."""
    if isinstance(by, str) and by not in GROUPINGS:
        raise ValueError(f"by = {by!r}: choose {', '.join(GROUPINGS)}, or give a function of a tensor's name")


def row_names(names: Iterable[str], by: Grouping) -> dict[str, str]:
    """The row of each tensor beside the total."""
    by_tensor = {name: by(name) for name in names} if callable(by) else GROUPINGS[by](names)
    if "total" in by_tensor.values():
        raise ValueError("no row may be named 'total': that one is the sum over all")
    return by_tensor


def of_series(series: Sequence[tuple[int, Mapping[str, Sums]]], names: Sequence[str], by: Grouping) -> pd.DataFrame:
    """The table of a series, given as step and sums by tensor of each checkpoint, over the tensors ``names``."""
    row_of = row_names(names, by)
    rows: list[Row] = []
    norms: dict[str, float] = {}
    for step, by_tensor in series:
        parts: dict[str, list[Sums]] = {"total": [by_tensor[name] for name in names]}
        for name in names:
            if name in row_of:
                parts.setdefault(row_of[name], []).append(by_tensor[name])
        order = sorted(parts, key=layer_order) if by == "layer" else list(parts)
        new = [_row(step, layer, parts[layer], norms.get(layer)) for layer in order]
        norms = {row.layer: row.norm for row in new}
        rows += new
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(COLUMNS[2:], "float64"))


def norm(parts: Iterable[Sums]) -> float:
    return math.sqrt(math.fsum(part.square for part in parts))


def _row(step: int, layer: str, parts: Sequence[Sums], norm_before: float | None) -> Row:
    """One row from the sums of its tensors; ``norm_before`` is the norm of the layer in the step before."""
    rho = norm(parts)
    if norm_before is None:
        return Row(step, layer, rho)
    displacement_sq = math.fsum(part.displacement_sq for part in parts)
    dot = math.fsum(part.dot for part in parts)
    cosine = None
    if rho > 0 and norm_before > 0:  # by its distance from 1, in which nothing cancels
        cosine = 1 - (displacement_sq - (rho - norm_before) ** 2) / (2 * rho * norm_before)
        cosine = min(max(cosine, -1.0), 1.0)
    return Row(step, layer, rho, cosine, displacement_sq, 2 * dot)
