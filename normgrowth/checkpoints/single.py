"""Norms of one saved model by layer, type or tensor, from its files alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from normgrowth.checkpoints import find, hub
from normgrowth.checkpoints.comparisons import sums, tied
from normgrowth.checkpoints.find import Checkpoint
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.series import Grouping, row_names
from normgrowth.checkpoints.steps import step_of
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
    checkpoints, skips = find.checkpoints(place)
    if not checkpoints:
        is_without_step = any(Path(skip.label) == place for skip in skips)
        return Checkpoint(NO_STEP, name, "", place) if is_without_step else None
    weights_at = checkpoints[0].place
    is_source = weights_at == place
    is_within = weights_at is not None and weights_at.parent == place and step_of(weights_at.name) is None
    return checkpoints[0] if len(checkpoints) == 1 and (is_source or is_within) else None


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
    weights = find.opener(keep)(checkpoint)
    aliases = {alias: f"tied to {original}" for alias, original in tied(weights.parameters).items()}
    tensors = {name: tensor for name, tensor in weights.parameters.items() if name not in aliases}
    rows_of_tensors = row_names(tensors, by)
    squares: dict[str, list[float]] = {"total": []}
    parameters = {"total": 0}
    for name, tensor in tensors.items():
        square = sums(tensor).square
        if not math.isfinite(square):
            raise ReadError(f"{checkpoint.label}: {name} holds values that are not finite, or too large to square")
        for layer in {"total", rows_of_tensors.get(name, "total")}:
            squares.setdefault(layer, []).append(square)
            parameters[layer] = parameters.get(layer, 0) + tensor.numel()
    total = math.fsum(squares["total"])
    rows = []
    for layer in sorted(squares, key=layer_order) if by == "layer" else squares:
        square = math.fsum(squares[layer])
        share = 100 * square / total if total else math.nan
        rows.append((layer, math.sqrt(square), share, parameters[layer]))
    table = pd.DataFrame(rows, columns=["layer", "norm", "share", "parameters"])
    return MeasuredModel(checkpoint.label, table, weights.left_out | aliases)
