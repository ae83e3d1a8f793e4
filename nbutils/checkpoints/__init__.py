"""Norm, direction and norm budget of a series of checkpoints: folders, revisions on the Hub, or several of either."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from nbutils.checkpoints.comparisons import Sums, same, sums, tied
from nbutils.checkpoints.layouts import ReadError
from nbutils.checkpoints.sources import Checkpoint, Opener, Skip, find, grouped, series_below
from nbutils.checkpoints.store import COLUMNS, Key, Name, Reference, Row, Shapes, Store
from nbutils.layers import layer_of, layer_order, layers, type_of

Grouping = str | Callable[[str], str]
GROUPINGS = ("total", "layer", "type", "tensor")


@dataclass
class Series:
    """A measured series.

    ``table`` has one row a step and layer, in the order of steps: ``norm`` ρ, and against the step before it
    ``cos_similarity``, ``displacement_sq`` = ‖Δ‖² and ``inner`` = 2θ·Δ (θ the earlier parameters, as in
    ``nbutils.norms.norm_budget``), so that ρ'² = ρ² + ``displacement_sq`` + ``inner``. The first step has no neighbour.
    """

    table: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(COLUMNS)))
    duplicates: list[Skip] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # tensors that are not counted, and why
    parameters: int = 0
    resumed: int = 0  # steps taken from ``out``


def _reference(found: Sequence[Checkpoint], opener: Opener) -> Reference:
    """The last checkpoint of the most common kind; of a series on the Hub the last that can be read."""
    kinds: list[tuple[Checkpoint, frozenset[object]]] = []
    for checkpoint in reversed(found):
        if checkpoint.place is None and kinds:
            continue
        with contextlib.suppress(ReadError):
            shapes = opener(checkpoint).shapes
            kinds.append((checkpoint, frozenset(i for i in shapes.items() if layer_of(i[0]) != "head")))
            if checkpoint.place is None:
                opener.pinned = checkpoint.label
    if not kinds:
        return Reference("", "", {}, {}, {})  # each says why when it is measured
    counts = Counter(kind for _, kind in kinds)
    checkpoint = next(one for one, kind in kinds if counts[kind] == max(counts.values()))
    weights = opener(checkpoint)
    aliases = tied(weights.parameters)
    shapes = {name: shape for name, shape in weights.shapes.items() if name not in aliases}
    left_out = weights.left_out | {alias: f"tied to {name}" for alias, name in aliases.items()}
    return Reference(checkpoint.label, checkpoint.stamp, shapes, aliases, left_out)


def _settled(found: Sequence[Checkpoint], store: Store, opener: Opener) -> Reference:
    """The reference of this run; if that of an earlier one had other tensors, its rows do not count."""
    known = store.reference
    if known and any(c.key == (known.label, known.stamp) and c.place is None for c in found):
        return known  # no download to look at it again
    ref = _reference(found, opener)
    if known and (known.shapes, known.aliases) == (ref.shapes, ref.aliases):
        ref.left_out |= known.left_out
    else:
        store.rows, store.duplicates = {}, {}
    return ref


class Counted(NamedTuple):
    """A checkpoint that counts, with its rows against the one that counts before it."""

    checkpoint: Checkpoint
    key: Key
    rows: list[Row]


def _measure(checkpoint: Checkpoint, before: Counted | None, ref: Reference, opener: Opener, by: Grouping) -> list[Row]:
    """Rows of one checkpoint."""
    previous = opener(before.checkpoint).parameters if before else None  # first: the opener keeps the last two
    norms = {row.layer: row.norm for row in before.rows} if before else {}
    weights = opener(checkpoint)
    ref.check(checkpoint.label, weights)
    parts: dict[str, list[Sums]] = {"total": []}
    labels = _labels(ref.shapes, by)
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


def _labels(names: Iterable[str], by: Grouping) -> dict[str, str]:
    """The row of each tensor beside the total; none for ``total`` alone."""
    if by == "total":
        return {}
    if by == "layer":
        return layers(names)
    known: dict[str, Callable[[str], str]] = {"type": type_of, "tensor": str}
    label = by if callable(by) else known[by]
    found = {name: label(name) for name in names}
    if "total" in found.values():
        raise ValueError("no row may be named 'total': that one is the sum over all")
    return found


def _equal(a: Checkpoint, b: Checkpoint, shapes: Shapes, opener: Opener) -> bool:
    if a.commit and a.commit == b.commit:
        return True
    x, y = opener(a).parameters, opener(b).parameters
    return all(same(x[name], y[name]) for name in shapes)


def _original(one: Counted, counted: Iterable[Counted], shapes: Shapes, opener: Opener) -> Name | None:
    """Which checkpoint that counts has the same weights."""
    for other in counted:
        near = math.isclose(other.rows[0].norm, one.rows[0].norm, rel_tol=1e-12)
        if near and _equal(other.checkpoint, one.checkpoint, shapes, opener):
            return other.checkpoint.key
    return None


def _walk(
    found: Sequence[Checkpoint], store: Store, opener: Opener, result: Series, by: Grouping, progress: bool
) -> list[Row]:
    """Rows of the checkpoints that count, in order of steps; of equal ones the first counts."""
    from tqdm.auto import tqdm

    ref = store.reference = _settled(found, store, opener)
    opener.check, done = ref.check_shapes, set(store.rows)
    counted: dict[Name, Counted] = {}
    table: list[Row] = []
    before: Counted | None = None
    try:
        for checkpoint in tqdm(found, desc="checkpoints", unit="", disable=not progress):
            original = store.duplicates.pop(checkpoint.key, None)
            try:
                if original not in counted:
                    key = (checkpoint.key, before.checkpoint.key if before else None)
                    rows = store.rows.get(key) or _measure(checkpoint, before, ref, opener, by)
                    one = Counted(checkpoint, key, rows)
                    original = _original(one, counted.values(), ref.shapes, opener)
                if not original and before and before.checkpoint.step == checkpoint.step:
                    other = before.checkpoint.label
                    raise ReadError(f"{checkpoint.label}: step {checkpoint.step} is {other} too, other weights")
            except ReadError as error:
                result.skipped.append(Skip(checkpoint.label, str(error)))
                continue
            if original:
                store.duplicates[checkpoint.key] = original
                first = counted[original].checkpoint.label
                result.duplicates.append(Skip(checkpoint.label, f"its weights are those of {first}"))
                continue
            counted[checkpoint.key] = before = one
            store.rows[key] = rows
            table += rows
            store.save(table)
        store.rows = {one.key: one.rows for one in counted.values()}  # the rest belongs to no neighbours of now
    finally:
        store.save(table, now=True)
    result.resumed = len(done & store.rows.keys())
    return table


def _why_nothing(sources: Sequence[str | Path], match: str, step: str | None, skipped: Sequence[Skip]) -> str:
    """Why there is nothing to measure."""
    there = len(find(sources, step=step)[0]) if match != "*" else 0
    if there:
        return f"none of its {there} checkpoint{'s' if there > 1 else ''} matches {match!r}"
    known = "no checkpoint with a step in its name, such as step1000, checkpoint-1000 or step_20k"
    lines = [f"no name in which {step!r} finds a step" if step else known]
    below = [str(folder) for one in sources for folder in series_below(Path(one))]
    for what, items in (("", grouped(skipped)), ("it has folders that hold series: ", below)):
        if items:
            more = f" and {len(items) - 3} more" if len(items) > 3 else ""
            lines.append(f"{what}{', '.join(items[:3])}{more}")
    return "; ".join(lines)


def series(
    source: str | Path | Iterable[str | Path],
    *,
    by: Grouping = "total",
    out: str | Path | None = None,
    match: str = "*",
    step: str | None = None,
    keep: bool = True,
    overwrite: bool = False,
    progress: bool = False,
) -> Series:
    """Measure the parameter norm, direction and norm budget along a series of checkpoints.

    Weights are mapped tensor by tensor, read in blocks and summed in float64; no model is built. Buffers are left out,
    tied weights counted once. What cannot be read is listed in ``skipped``, with the file and the reason.

    Args:
        source, match, step: as in ``find``.
        by: ``total``, or ``layer`` for rows of each block, the embeddings, the output layer and the rest as well;
            ``type`` for attention, mlp, norm and so on; ``tensor``; or a function from a tensor's name to its row.
        out: CSV that is written on the way; a run with the same arguments goes on where the last one stopped.
        keep: leave downloads in the Hub's cache; otherwise each is deleted after use.
        overwrite: begin again, whatever is in ``out``.
        progress: show a bar.

    Raises:
        ValueError: no checkpoint is readable, or ``out`` belongs to another series.
        FileNotFoundError, ConnectionError: as in ``find``.

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
    spelled = [str(Path(s).resolve() if Path(s).exists() else s) for s in sources]
    named = by if isinstance(by, str) else f"{by.__module__}.{by.__qualname__}"
    origin = {"source": spelled, "by": named, "match": match} | ({"step": step} if step else {})
    store = Store(Path(out) if out is not None else None, origin, overwrite)
    found, skipped = find(sources, match, step)
    if not found:
        raise ValueError(f"{', '.join(map(str, sources))}: {_why_nothing(sources, match, step, skipped)}")
    result = Series(skipped=skipped)
    rows = _walk(found, store, Opener(keep), result, by, progress)
    if not rows or store.reference is None:
        raise ValueError("no checkpoint could be read:\n" + "\n".join(f"  {line}" for line in grouped(result.skipped)))
    result.table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(COLUMNS[2:], "float64"))
    result.left_out = store.reference.left_out
    result.parameters = sum(math.prod(shape) for shape in store.reference.shapes.values())
    return result
