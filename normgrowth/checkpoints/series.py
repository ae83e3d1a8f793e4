"""Norm, direction and norm budget of a series of checkpoints: folders, revisions on the Hub, or several of either."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from normgrowth.checkpoints.comparisons import Sums, same, sums, tied
from normgrowth.checkpoints.find import Checkpoint, Skip, checkpoints, grouped, opener
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.store import COLUMNS, Reference, Row, Store
from normgrowth.checkpoints.weights import Weights
from normgrowth.layers import layer_order, layers, type_of

Grouping = str | Callable[[str], str]
Opened = Callable[[Checkpoint], Weights]
GROUPINGS: dict[str, Callable[[Iterable[str]], dict[str, str]]] = {  # of tensors the rows beside the total
    "total": lambda names: {},
    "layer": layers,
    "type": lambda names: {name: type_of(name) for name in names},
    "tensor": lambda names: {name: name for name in names},
}


class Series(NamedTuple):
    """A measured series.

    ``table`` has one row a step and layer, in the order of steps: ``norm`` ρ, and against the step before it
    ``cos_similarity``, ``displacement_sq`` = ‖Δ‖² and ``inner`` = 2θ·Δ (θ the earlier parameters, as in
    ``norms.norm_budget``), so that ρ'² = ρ² + ``displacement_sq`` + ``inner``. The first step has no neighbour.
    """

    table: pd.DataFrame
    duplicates: list[Skip]
    skipped: list[Skip]
    left_out: dict[str, str]  # tensors that are not counted, and why
    parameters: int


def _reference(found: Sequence[Checkpoint], store: Store, opened: Opened) -> Reference:
    """What the others are compared with: the last that can be read. One of other tensors makes what is known void."""
    known = store.reference
    if known and known.key == found[-1].key:
        return known  # no download to look at it again
    for checkpoint in reversed(found):
        with suppress(ReadError):
            weights = opened(checkpoint)
            aliases = {alias: f"tied to {name}" for alias, name in tied(weights.parameters).items()}
            shapes = {name: shape for name, shape in weights.shapes.items() if name not in aliases}
            if known and shapes != {name: tuple(shape) for name, shape in known.shapes.items()}:
                store.rows, store.duplicates = {}, {}
            return Reference(checkpoint.key, checkpoint.label, shapes, weights.left_out | aliases)
    return Reference("", "", {}, {})  # each says why when it is measured


class Counted(NamedTuple):
    """A checkpoint that counts, with its rows against the one that counts before it."""

    checkpoint: Checkpoint
    rows: list[Row]


def _measure(checkpoint: Checkpoint, before: Counted | None, ref: Reference, opened: Opened, by: Grouping) -> list[Row]:
    """Rows of one checkpoint."""
    previous = opened(before.checkpoint).parameters if before else None  # first: the last three are at hand
    norms = {row.layer: row.norm for row in before.rows} if before else {}
    weights = opened(checkpoint)
    ref.check(checkpoint.label, weights)
    parts: dict[str, list[Sums]] = {"total": []}
    labels = {name: by(name) for name in ref.shapes} if callable(by) else GROUPINGS[by](ref.shapes)
    if "total" in labels.values():
        raise ValueError("no row may be named 'total': that one is the sum over all")
    for name in ref.shapes:
        one = sums(weights.parameters[name], previous[name] if previous else None)
        if not all(map(math.isfinite, one)):
            raise ReadError(f"{checkpoint.label}: {name} holds values that are not finite, or too large to square")
        for label in {"total", labels.get(name, "total")}:
            parts.setdefault(label, []).append(one)
    names = sorted(parts, key=layer_order) if by == "layer" else list(parts)
    return [_row(checkpoint.step, name, parts[name], norms.get(name)) for name in names]


def _row(step: int, layer: str, parts: Sequence[Sums], before: float | None) -> Row:
    """One row from the sums of its tensors; ``before`` is the norm of the layer in the step before."""
    square, moved, dot = (math.fsum(column) for column in zip(*parts, strict=True))
    norm, cos = math.sqrt(square), None
    if before is None:
        return Row(step, layer, norm)
    if norm > 0 and before > 0:  # from its gap to 1: there nothing cancels
        cos = 1 - (moved - (norm - before) ** 2) / (2 * norm * before)
        cos = min(max(cos, -1.0), 1.0)
    return Row(step, layer, norm, cos, moved, 2 * dot)


def _original(one: Counted, counted: Mapping[str, Counted], names: Iterable[str], opened: Opened) -> str | None:
    """Which checkpoint that counts has the same weights."""
    for key, other in counted.items():
        if math.isclose(other.rows[0].norm, one.rows[0].norm, rel_tol=1e-12):
            x, y = opened(other.checkpoint).parameters, opened(one.checkpoint).parameters
            if all(same(x[name], y[name]) for name in names):
                return key
    return None


def _walk(found: Sequence[Checkpoint], skipped: list[Skip], store: Store, opened: Opened, by: Grouping) -> Series:
    """What the checkpoints that count have, in order of steps; of equal ones the first counts."""
    from tqdm import tqdm

    ref = store.reference = _reference(found, store, opened)
    gone = {rows[0].step for rows in store.rows.values()} - {checkpoint.step for checkpoint in found}
    skipped += [Skip(f"step {step}", "measured before, and no longer there: not in the table") for step in sorted(gone)]
    duplicates: list[Skip] = []
    counted: dict[str, Counted] = {}
    before: Counted | None = None
    for checkpoint in tqdm(found, desc="checkpoints", unit="", disable=None):
        pair = (checkpoint.key, before.checkpoint.key if before else None)
        known, original = store.rows.get(pair), store.duplicates.get(checkpoint.key)
        try:
            if original not in counted:
                one = Counted(checkpoint, known or _measure(checkpoint, before, ref, opened, by))
                original = _original(one, counted, ref.shapes, opened)
            if not original and before and before.checkpoint.step == checkpoint.step:
                other = before.checkpoint.label
                raise ReadError(f"{checkpoint.label}: step {checkpoint.step} is {other} too, other weights")
        except ReadError as error:
            skipped.append(Skip(checkpoint.label, str(error)))
            continue
        if original:
            store.duplicates[checkpoint.key] = original
            first = counted[original].checkpoint.label
            duplicates.append(Skip(checkpoint.label, f"its weights are those of {first}"))
            continue
        counted[checkpoint.key] = before = one
        store.rows[pair] = one.rows
        if not known:
            store.save()
    if not counted:
        raise ValueError("no checkpoint could be read:\n" + "\n".join(f"  {line}" for line in grouped(skipped)))
    store.save()
    rows = [row for one in counted.values() for row in one.rows]
    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(COLUMNS[2:], "float64"))
    if store.out:
        table.to_csv(store.out, index=False, lineterminator="\n")
    return Series(table, duplicates, skipped, ref.left_out, sum(map(math.prod, ref.shapes.values())))


def series(
    source: str | Path | Iterable[str | Path],
    *,
    by: Grouping = "total",
    out: str | Path | None = None,
    match: str = "*",
    step: str | None = None,
    keep: bool = True,
) -> Series:
    """Measure the parameter norm, direction and norm budget along a series of checkpoints.

    Weights are mapped tensor by tensor, read in blocks and summed in float64; no model is built. Buffers are left out,
    tied weights counted once. What cannot be read is listed in ``skipped``, with the file and the reason.

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
    if isinstance(by, str) and by not in GROUPINGS:
        raise ValueError(f"by = {by!r}: choose {', '.join(GROUPINGS)}, or give a function of a tensor's name")
    sources = [source] if isinstance(source, str | Path) else list(source)
    named = by if isinstance(by, str) else f"{by.__module__}.{by.__qualname__}"
    spelled = [str(Path(s).resolve()) if Path(s).exists() else str(s) for s in sources]
    origin = f"{' '.join(spelled)} --by {named} --match {match!r}" + (f" --step {step!r}" if step else "")
    store = Store(Path(out) if out is not None else None, origin)
    found, skipped = checkpoints(sources, match, step)
    if not found:
        known = "no checkpoint with a step in its name, such as step1000, checkpoint-1000 or step_20k"
        why = [f"no name in which {step!r} finds a step" if step else known, *grouped(skipped)]
        why += [f"only names that match {match!r} count"] if match != "*" else []
        raise ValueError(f"{', '.join(map(str, sources))}: {'; '.join(why)}")
    return _walk(found, skipped, store, opener(keep), by)
