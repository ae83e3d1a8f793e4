"""Norm, direction and norm budget along a series of checkpoints in folders, on the Hub, or both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from normgrowth.checkpoints import find
from normgrowth.checkpoints.comparisons import Sums, same, sums, tied
from normgrowth.checkpoints.find import Checkpoint, Skip, grouped
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.store import COLUMNS, Reference, Row, Store
from normgrowth.checkpoints.weights import Weights
from normgrowth.layers import layer_order, layers, type_of

Grouping = str | Callable[[str], str]
OpenWeights = Callable[[Checkpoint], Weights]
GROUPINGS: dict[str, Callable[[Iterable[str]], dict[str, str]]] = {  # from tensors to their rows beside the total
    "total": lambda names: {},
    "layer": layers,
    "type": lambda names: {name: type_of(name) for name in names},
    "tensor": lambda names: {name: name for name in names},
}


class MeasuredSeries(NamedTuple):
    """A measured series of checkpoints.

    ``table`` has one row a step and layer, in the order of steps: ``norm`` ρ, and against the step before it
    ``cos_similarity``, ``displacement_sq`` = ‖Δ‖² and ``inner`` = 2θ·Δ (θ the earlier parameters, as in
    ``norms.norm_budget``), so that ρ'² = ρ² + ``displacement_sq`` + ``inner``. The first step has no neighbour.
    """

    table: pd.DataFrame
    duplicates: list[Skip]
    skipped: list[Skip]
    left_out: dict[str, str]  # tensors that are not counted, and why
    parameters: int
    last: str = ""  # the last checkpoint that counts: its folder or file, or org/name@revision of the Hub


class Counted(NamedTuple):
    """A checkpoint that counts, with its rows against the one that counts before it."""

    checkpoint: Checkpoint
    rows: list[Row]


def series(
    source: str | Path | Iterable[str | Path],
    *,
    by: Grouping = "total",
    out: str | Path | None = None,
    match: str = "*",
    step: str | None = None,
    keep: bool = True,
) -> MeasuredSeries:
    """Measure the parameter norm, direction and norm budget along a series of checkpoints.

    Weights are mapped tensor by tensor, read in blocks and summed in float64; no model is built. Buffers are left out,
    tied weights counted once. Checkpoints that cannot be read are listed in ``skipped``, with the file and the reason.

    Args:
        source, match, step: as in ``find.checkpoints``.
        by: ``total``, or ``layer`` for rows of each block, the embeddings, the output layer and the rest as well;
            ``type`` for attention, mlp, norm and so on; ``tensor``; or a function from a tensor's name to its row.
        out: CSV for the table; a run with the same arguments goes on where the last one stopped.
        keep: leave downloads in the Hub's cache; otherwise each is deleted after use.

    Raises:
        ValueError: no checkpoint is readable, or ``out`` belongs to another series.
        FileNotFoundError, ConnectionError: as in ``find.checkpoints``.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (0, 1):
    ...         Path(folder, f"step{step}").mkdir()
    ...         save_file({"w": torch.tensor([3.0, 4.0 * step])}, Path(folder, f"step{step}", "model.safetensors"))
    ...     series(folder).table.iloc[1, 2:].tolist()  # ρ' = 5, cos = 3/5, ‖Δ‖² = 4², 2θ·Δ = 0
    [5.0, 0.6, 16.0, 0.0]
    """
    row_names((), by)  # only to raise if ``by`` is unknown
    sources = [source] if isinstance(source, str | Path) else list(source)
    store = Store(Path(out) if out is not None else None, _origin(sources, by, match, step))
    checkpoints, skipped = find.checkpoints(sources, match, step)
    if not checkpoints:
        raise ValueError(f"{', '.join(map(str, sources))}: {_why_empty(skipped, match, step)}")
    measured = _measure_all(checkpoints, skipped, store, find.opener(keep), by)
    if store.out:
        measured.table.to_csv(store.out, index=False, lineterminator="\n")
    return measured


def _origin(sources: Sequence[str | Path], by: Grouping, match: str, step: str | None) -> str:
    """Sources and options of a series in words: a later run goes on only with the same ones."""
    places = [str(Path(source).resolve()) if Path(source).exists() else str(source) for source in sources]
    grouping = by if isinstance(by, str) else f"{by.__module__}.{by.__qualname__}"
    pattern = f" --step {step!r}" if step else ""
    return f"{' '.join(places)} --by {grouping} --match {match!r}{pattern}"


def _why_empty(skipped: Sequence[Skip], match: str, step: str | None) -> str:
    """Why there is no checkpoint in the sources."""
    if step:
        reasons = [f"no name in which {step!r} finds a step"]
    else:
        reasons = ["no checkpoint with a step in its name, such as step1000, checkpoint-1000 or step_20k"]
    reasons += grouped(skipped)
    if match != "*":
        reasons.append(f"only names that match {match!r} count")
    return "; ".join(reasons)


def _measure_all(
    checkpoints: Sequence[Checkpoint], skipped: list[Skip], store: Store, open_weights: OpenWeights, by: Grouping
) -> MeasuredSeries:
    """Measure the checkpoints in the order of steps; of several with equal weights the first counts."""
    from tqdm import tqdm

    reference = _update_reference(store, checkpoints, open_weights)
    skipped += _no_longer_there(store, checkpoints)
    duplicates: list[Skip] = []
    counted: dict[str, Counted] = {}
    before: Counted | None = None
    for checkpoint in tqdm(checkpoints, desc="checkpoints", unit="", disable=None):
        pair = (checkpoint.key, before.checkpoint.key if before else None)
        stored_rows = store.rows.get(pair)
        original = store.duplicates.get(checkpoint.key)
        try:
            if original not in counted:
                rows = stored_rows or _measure(checkpoint, before, reference, open_weights, by)
                current = Counted(checkpoint, rows)
                original = _original(current, counted, reference.shapes, open_weights)
            if not original:
                _refuse_same_step(checkpoint, before)
        except ReadError as error:
            skipped.append(Skip(checkpoint.label, str(error)))
            continue
        if original:
            store.duplicates[checkpoint.key] = original
            original_label = counted[original].checkpoint.label
            duplicates.append(Skip(checkpoint.label, f"its weights are those of {original_label}"))
            continue
        store.rows[pair] = rows
        if not stored_rows:
            store.save()
        counted[checkpoint.key] = current
        before = current
    if not counted:
        raise ValueError("no checkpoint could be read:\n" + "\n".join(f"  {line}" for line in grouped(skipped)))
    store.save()
    parameters = sum(map(math.prod, reference.shapes.values()))
    last = before.checkpoint if before else checkpoints[-1]
    place = str(last.place or last.label)
    return MeasuredSeries(_table(counted.values()), duplicates, skipped, reference.left_out, parameters, place)


def _update_reference(store: Store, checkpoints: Sequence[Checkpoint], open_weights: OpenWeights) -> Reference:
    """Make the last readable checkpoint the store's reference, with which all others are compared.

    If its tensors differ from those of the reference of an earlier run, the rows of that run are dropped.
    """
    stored = store.reference
    if stored and stored.key == checkpoints[-1].key:
        return stored  # without another download
    reference = _last_readable(checkpoints, open_weights)
    if reference is None:
        reference = Reference("", "", {}, {})  # why each cannot be read is reported when it is measured
    elif stored and reference.shapes != stored.shapes:
        store.rows = {}
        store.duplicates = {}
    store.reference = reference
    return reference


def _last_readable(checkpoints: Sequence[Checkpoint], open_weights: OpenWeights) -> Reference | None:
    for checkpoint in reversed(checkpoints):
        with suppress(ReadError):
            weights = open_weights(checkpoint)
            aliases = {alias: f"tied to {original}" for alias, original in tied(weights.parameters).items()}
            shapes = {name: shape for name, shape in weights.shapes.items() if name not in aliases}
            return Reference(checkpoint.key, checkpoint.label, shapes, weights.left_out | aliases)
    return None


def _no_longer_there(store: Store, checkpoints: Sequence[Checkpoint]) -> list[Skip]:
    """Steps that an earlier run has measured, and that no checkpoint has any more."""
    measured = {rows[0].step for rows in store.rows.values()}
    gone = measured - {checkpoint.step for checkpoint in checkpoints}
    return [Skip(f"step {step}", "measured before, and no longer there: not in the table") for step in sorted(gone)]


def _refuse_same_step(checkpoint: Checkpoint, before: Counted | None) -> None:
    """Raise ReadError if the checkpoint that counts before this one has the same step."""
    if before and before.checkpoint.step == checkpoint.step:
        other = before.checkpoint.label
        raise ReadError(f"{checkpoint.label}: step {checkpoint.step} is {other} too, other weights")


def _original(
    current: Counted, counted: Mapping[str, Counted], names: Iterable[str], open_weights: OpenWeights
) -> str | None:
    """The key of the checkpoint that counts already and has the same weights, if there is one."""
    for key, earlier in counted.items():
        if math.isclose(earlier.rows[0].norm, current.rows[0].norm, rel_tol=1e-12):
            earlier_parameters = open_weights(earlier.checkpoint).parameters
            parameters = open_weights(current.checkpoint).parameters
            if all(same(earlier_parameters[name], parameters[name]) for name in names):
                return key
    return None


def _measure(
    checkpoint: Checkpoint, before: Counted | None, reference: Reference, open_weights: OpenWeights, by: Grouping
) -> list[Row]:
    """Rows of one checkpoint, the total first, against the one that counts before it."""
    # The earlier checkpoint is opened first: it is still at hand, and opening another one may close it.
    previous = open_weights(before.checkpoint).parameters if before else None
    weights = open_weights(checkpoint)
    reference.left_out |= weights.left_out
    reference.check(checkpoint.label, weights)
    rows_of_tensors = row_names(reference.shapes, by)
    parts: dict[str, list[Sums]] = {"total": []}
    for name in reference.shapes:
        tensor_sums = sums(weights.parameters[name], previous[name] if previous else None)
        if not all(map(math.isfinite, tensor_sums)):
            raise ReadError(f"{checkpoint.label}: {name} holds values that are not finite, or too large to square")
        parts["total"].append(tensor_sums)
        if name in rows_of_tensors:
            parts.setdefault(rows_of_tensors[name], []).append(tensor_sums)
    norms_before = {row.layer: row.norm for row in before.rows} if before else {}
    order = sorted(parts, key=layer_order) if by == "layer" else list(parts)
    return [_row(checkpoint.step, layer, parts[layer], norms_before.get(layer)) for layer in order]


def row_names(names: Iterable[str], by: Grouping) -> dict[str, str]:
    """The row of each tensor beside the total."""
    if isinstance(by, str) and by not in GROUPINGS:
        raise ValueError(f"by = {by!r}: choose {', '.join(GROUPINGS)}, or give a function of a tensor's name")
    rows = {name: by(name) for name in names} if callable(by) else GROUPINGS[by](names)
    if "total" in rows.values():
        raise ValueError("no row may be named 'total': that one is the sum over all")
    return rows


def _row(step: int, layer: str, parts: Sequence[Sums], norm_before: float | None) -> Row:
    """One row from the sums of its tensors; ``norm_before`` is the norm of the layer in the step before."""
    norm = math.sqrt(math.fsum(part.square for part in parts))
    if norm_before is None:
        return Row(step, layer, norm)
    displacement_sq = math.fsum(part.displacement_sq for part in parts)
    dot = math.fsum(part.dot for part in parts)
    cosine = None
    if norm > 0 and norm_before > 0:  # by its distance from 1, in which nothing cancels
        cosine = 1 - (displacement_sq - (norm - norm_before) ** 2) / (2 * norm * norm_before)
        cosine = min(max(cosine, -1.0), 1.0)
    return Row(step, layer, norm, cosine, displacement_sq, 2 * dot)


def _table(counted: Iterable[Counted]) -> pd.DataFrame:
    rows = [row for current in counted for row in current.rows]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(COLUMNS[2:], "float64"))
