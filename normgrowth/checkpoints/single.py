"""Norms of one saved model by layer, type or tensor, from its files alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from normgrowth.checkpoints import find, hub, parameters, places, table
from normgrowth.checkpoints.comparisons import Sums
from normgrowth.checkpoints.places import Checkpoint, Numbered, Unplaced
from normgrowth.checkpoints.series import Counted, sums_by_tensor, verdict_on
from normgrowth.checkpoints.steps import step_of
from normgrowth.checkpoints.table import Grouping
from normgrowth.checkpoints.tensors import Shape
from normgrowth.layers import layer_order

NO_STEP = 0  # a single model needs no step


class MeasuredModel(NamedTuple):
    """Norms of one model.

    ``table`` has one row a layer, the total first: ``layer``, ``norm`` ρ, ``share`` of the total's ρ² in %, and the
    number of ``parameters``.
    """

    label: str
    table: pd.DataFrame
    left_out: dict[str, str]  # tensors that are not counted, and why
    notes: Sequence[str] = ()  # what else is to be known of the norm


def single(source: str | Path, *, by: Grouping = "layer", keep: bool = True) -> MeasuredModel:
    """Measure the parameter norm of one saved model, total and by layer. No model is built, as in ``series``.

    Args:
        source: a folder or file with the weights of one model, a revision ``org/name@revision`` of the Hub, a
            repository ``org/name`` none of whose revisions names a step, or such a repository's folder in the Hub's
            cache.
        by: as in ``series``.
        keep: leave a download in the Hub's cache; otherwise it is deleted after use.

    Raises:
        ValueError: the source is a series of checkpoints, or its weights cannot be read.
        FileNotFoundError, ConnectionError: as in ``find.checkpoints``.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     weights = {"wte.weight": torch.full((2, 2), 1.5), "h.0.w": torch.tensor([4.0])}
    ...     save_file(weights, Path(folder, "model.safetensors"))
    ...     single(folder).table.values.tolist()
    [['total', 5.0, 100.0, 5], ['embeddings', 3.0, 36.0, 4], ['block 0', 4.0, 64.0, 1]]
    """
    checkpoint = locate(source)
    if checkpoint is None:
        raise ValueError(f"{source}: no single model: name one of its checkpoints, or measure it with series()")
    return measure(checkpoint, by, keep)


def locate(source: str | Path) -> Checkpoint | None:
    """Where the weights of a single model are; None for a source of a series, and for one in which nothing is."""
    name = str(source)
    if not find.is_on_disk(name):
        return _on_hub(name)
    place = Path(name)
    if (place / "snapshots").is_dir():
        return _in_cache(place)
    listed = list(places.entries(place, "*", step_of))
    entries: list[Checkpoint | Unplaced] = [entry for entry in listed if isinstance(entry, Checkpoint | Unplaced)]
    entries += places.placed([entry for entry in listed if isinstance(entry, Numbered)])
    candidates = [entry for entry in entries if isinstance(entry, Checkpoint)] or entries
    if len(candidates) != 1:
        return None
    only = candidates[0]
    weights_at = only.place
    is_source = weights_at == place
    is_within = weights_at is not None and weights_at.parent == place and step_of(weights_at.name) is None
    if not (is_source or is_within):
        return None
    return only if isinstance(only, Checkpoint) else Checkpoint(NO_STEP, only.skip.label, only.stamp, weights_at)


def _on_hub(name: str) -> Checkpoint | None:
    """The revision named after the ``@``, or the main one of a repository without steps."""
    repo, _, revision = name.partition("@")
    commits = hub.revisions(repo)
    if not revision:
        if any(step_of(other) is not None for other in commits):
            return None
        revision = "main"
    return Checkpoint(NO_STEP, f"{repo}@{revision}", commits.get(revision, revision))


def _in_cache(folder: Path) -> Checkpoint | None:
    """The main revision in a repository's folder of the Hub's cache, if no revision there names a step."""
    revisions = [str(file.relative_to(folder / "refs")) for file in folder.glob("refs/**/*") if file.is_file()]
    if "main" not in revisions or any(step_of(revision) is not None for revision in revisions):
        return None
    commit = (folder / "refs" / "main").read_text().strip()
    return Checkpoint(NO_STEP, f"{folder}@main", commit, folder / "snapshots" / commit)


def measure(checkpoint: Checkpoint, by: Grouping, keep: bool = True) -> MeasuredModel:
    """The norms of the model at a place that ``locate`` has returned.

    Raises:
        ReadError: the weights cannot be read, or are not finite.
    """
    table.check(by)
    open_weights = find.opener(keep)
    weights = open_weights(checkpoint)
    reference = parameters.reference_of(checkpoint.key, checkpoint.label, weights, is_alone=True)
    table.row_names(reference.shapes, by)  # a name that may not be is refused before anything is read
    by_tensor = sums_by_tensor(checkpoint, None, reference, open_weights)
    verdict = verdict_on([Counted(checkpoint, by_tensor)], reference, [checkpoint], open_weights)
    left_out = reference.left_out | verdict.left_out
    shapes = {name: shape for name, shape in reference.shapes.items() if name not in left_out}
    notes = [note for note in (*reference.notes, *verdict.notes, checkpoint.note) if note]
    return MeasuredModel(checkpoint.label, _table(by_tensor, shapes, by), left_out, notes)


def _table(by_tensor: Mapping[str, Sums], shapes: Mapping[str, Shape], by: Grouping) -> pd.DataFrame:
    """The table of a model over the tensors that ``shapes`` names."""
    row_of = table.row_names(shapes, by)
    groups: dict[str, list[str]] = {"total": list(shapes)}
    for name in shapes:
        if name in row_of:
            groups.setdefault(row_of[name], []).append(name)
    total = math.fsum(by_tensor[name].square for name in shapes)
    rows = []
    for layer in sorted(groups, key=layer_order) if by == "layer" else groups:
        names = groups[layer]
        square = math.fsum(by_tensor[name].square for name in names)
        share = 100 * square / total if total else math.nan
        rows.append((layer, math.sqrt(square), share, sum(math.prod(shapes[name]) for name in names)))
    return pd.DataFrame(rows, columns=["layer", "norm", "share", "parameters"])
