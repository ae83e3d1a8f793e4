"""Norm, direction and norm budget of a series of checkpoints: folders, revisions on the Hub, or several of either."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from nbutils.checkpoints.comparisons import Sums, same, sums, tied
from nbutils.checkpoints.sources import Checkpoint, Opener, Skip, find, grouped, series_below
from nbutils.checkpoints.store import COLUMNS, Key, Reference, Row, Store
from nbutils.checkpoints.weights import ReadError
from nbutils.names import layer_of, layer_order, layers, type_of

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


def _reference(found: Sequence[Checkpoint], opener: Opener) -> Reference | None:
    """From headers alone where they are at hand; of a series on the Hub the last readable revision decides."""
    kinds: list[tuple[Checkpoint, frozenset[object]]] = []
    for checkpoint in reversed(found):
        if checkpoint.place is None and kinds:
            continue
        with contextlib.suppress(ReadError):
            shapes = {name: t.shape for name, t in opener(checkpoint).parameters.items()}
            kinds.append((checkpoint, frozenset(i for i in shapes.items() if layer_of(i[0]) != "head")))
            if checkpoint.place is None:
                opener.pinned = checkpoint.label
    counts = Counter(kind for _, kind in kinds)
    for checkpoint, kind in kinds:
        if counts[kind] == max(counts.values()):
            weights = opener(checkpoint)
            aliases = tied(weights)
            shapes = {name: t.shape for name, t in weights.parameters.items() if name not in aliases}
            left_out = weights.left_out | {alias: f"tied to {name}" for alias, name in aliases.items()}
            return Reference(checkpoint.label, checkpoint.stamp, shapes, aliases, left_out)
    return None


def _measure(
    checkpoint: Checkpoint,
    before: Checkpoint | None,
    norms: dict[str, float],
    ref: Reference,
    opener: Opener,
    by: Grouping,
    jobs: int,
) -> list[Row]:
    """Rows of one checkpoint; ``norms`` are those of ``before``, by layer."""
    previous = opener(before) if before else None  # first: the opener keeps the last two
    current = opener(checkpoint)
    ref.check(checkpoint.label, current)

    def summed(name: str) -> Sums:
        return sums(current.parameters[name], previous.parameters[name] if previous else None)

    parts, labels = {"total": []}, _labels(ref.shapes, by)
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(summed, ref.shapes) if jobs > 1 else map(summed, ref.shapes)
        for name, one in zip(ref.shapes, found, strict=True):
            if not all(map(math.isfinite, one)):
                raise ReadError(f"{checkpoint.label}: {name} holds values that are not finite, or too large to square")
            for label in ("total", labels[name]) if labels else ("total",):
                parts.setdefault(label, []).append(one)
    rows = []
    for layer in sorted(parts, key=layer_order) if by == "layer" else parts:
        square, moved, dot = (math.fsum(column) for column in zip(*parts[layer], strict=True))
        norm, cos = math.sqrt(square), None
        if previous is None:
            rows.append(Row(checkpoint.step, layer, norm))
            continue
        if norm > 0 and norms[layer] > 0:  # from its gap to 1: there nothing cancels
            cos = 1 - (moved - (norm - norms[layer]) ** 2) / (2 * norm * norms[layer])
            cos = min(max(cos, -1.0), 1.0)
        rows.append(Row(checkpoint.step, layer, norm, cos, moved, 2 * dot))
    return rows


def _labels(names: Iterable[str], by: Grouping) -> dict[str, str]:
    """The row of each tensor beside the total; none for ``total`` alone."""
    if by == "total":
        return {}
    if by == "layer":
        return layers(names)
    label = {"type": type_of, "tensor": str}.get(by, by) if isinstance(by, str) else by
    found = {name: label(name) for name in names}
    if "total" in found.values():
        raise ValueError("no row may be named 'total': that one is the sum over all")
    return found


def _equal(a: Checkpoint, b: Checkpoint, ref: Reference, opener: Opener) -> bool:
    if a.commit and a.commit == b.commit:
        return True
    x, y = opener(a), opener(b)
    return all(same(x, name, y, name) for name in ref.shapes)


def _walk(
    found: Sequence[Checkpoint], store: Store, opener: Opener, result: Series, by: Grouping, jobs: int, progress: bool
) -> dict[Key, list[Row]]:
    """Rows of the checkpoints that count, in order of steps."""
    from tqdm.auto import tqdm

    known, here = store.reference, {c.key: c for c in found}
    if known and (known.label, known.stamp) in here and here[known.label, known.stamp].place is None:
        ref: Reference | None = known  # no download to look at it again
    else:
        ref = _reference(found, opener)
    if ref is None:
        result.skipped += [Skip(c.label, why) for c in found if (why := _unreadable(c, opener))]
        return {}
    if known and (known.shapes, known.aliases) != (ref.shapes, ref.aliases):
        store.rows, store.loaded, store.twins = {}, [], []
    elif known:
        ref.left_out |= known.left_out
    store.reference = ref
    store.twins = [t for t in store.twins if (t[0], t[1]) in here and (t[2], t[3]) in here]
    done = set(store.rows)
    order = [c for c in found if list(c.key) not in [t[:2] for t in store.twins]]
    counted: dict[Key, list[Row]] = {}
    path: list[Checkpoint] = []

    def key(i: int) -> Key:
        return (*path[i].key, *(path[i - 1].key if i else ("", "")))

    def duplicate(copy: Checkpoint, original: Checkpoint) -> None:
        store.twins.append([*copy.key, *original.key])
        order.remove(copy)

    with (
        tqdm(total=len(found), desc="checkpoints", unit="", disable=not progress) as bar,
        store.keeping(lambda: counted),
    ):
        while len(path) < len(order):
            bar.update(len(path) + len(found) - len(order) - bar.n)
            checkpoint, before = order[len(path)], path[-1] if path else None
            path.append(checkpoint)
            mine = key(len(path) - 1)
            try:
                if mine not in store.rows:
                    norms = {row.layer: row.norm for row in counted[key(len(path) - 2)]} if before else {}
                    store.rows[mine] = _measure(checkpoint, before, norms, ref, opener, by, jobs)
                rows = store.rows[mine]
                near = [
                    i
                    for i, (other, theirs) in enumerate(counted.items())
                    if not {mine, other} <= done and math.isclose(theirs[0].norm, rows[0].norm, rel_tol=1e-12)
                ]
                twin = next((i for i in near if _equal(path[i], checkpoint, ref, opener)), None)
                if twin is None and before and before.step == checkpoint.step:
                    raise ReadError(f"{checkpoint.label}: step {checkpoint.step} is {before.label} too, other weights")
            except ReadError as error:
                result.skipped.append(Skip(checkpoint.label, str(error)))
                order.remove(path.pop())
                continue
            if twin is None:
                counted[mine] = rows
                store.save(counted)
                continue
            path.pop()
            # Away from its place a copy lies far from its neighbours: the one that lies nearer to them is the original.
            steps = [counted[key(i)][0].displacement_sq for i in (twin, twin + 1) if i < len(path)]
            apart = [moved for moved in steps if moved is not None]
            if twin == len(path) - 1 or sum(apart) / len(apart) <= (rows[0].displacement_sq or 0.0):
                duplicate(checkpoint, path[twin])
            else:
                duplicate(path[twin], checkpoint)
                path, counted = [], {}  # again, from rows that are there
        bar.update(len(found) - bar.n)
    if counted:
        store.save(counted, now=True)
    for a, b, c, d in store.twins:
        result.duplicates.append(Skip(here[a, b].label, f"its weights are those of {here[c, d].label}"))
    result.resumed = len(done & set(counted))
    return counted


def _unreadable(checkpoint: Checkpoint, opener: Opener) -> str | None:
    try:
        opener(checkpoint)
    except ReadError as error:
        return str(error)
    return None


def _none(sources: Sequence[str | Path], match: str, step: str | None, skipped: Sequence[Skip]) -> str:
    """Why there is nothing to measure."""
    there = len(find(sources, step=step)[0]) if match != "*" else 0
    if there:
        return f"none of its {there} checkpoint{'s' if there > 1 else ''} matches {match!r}"
    said = ["no checkpoint with a step in its name, such as step1000, checkpoint-1000 or step_20k"]
    said = [f"no name in which {step!r} finds a step"] if step else said
    below = [folder for one in sources for folder in series_below(Path(one))]
    for what, items in (("", grouped(skipped)), ("it has folders that hold series: ", below)):
        if items:
            more = f" and {len(items) - 3} more" if len(items) > 3 else ""
            said.append(f"{what}{', '.join(map(str, items[:3]))}{more}")
    return "; ".join(said)


def series(
    source: str | Path | Iterable[str | Path],
    *,
    by: Grouping = "total",
    out: str | Path | None = None,
    match: str = "*",
    step: str | None = None,
    jobs: int = 1,
    keep: bool = True,
    overwrite: bool = False,
    progress: bool = False,
) -> Series:
    """Measure the parameter norm, direction and norm budget along a series of checkpoints.

    Weights are read tensor by tensor in blocks and summed in float64; no model is built. Buffers are left out, tied
    weights counted once. What cannot be read is listed in ``skipped``, with the file and the reason.

    Args:
        source, match, step: as in ``find``.
        by: ``total``, or ``layer`` for rows of each block, the embeddings, the output layer and the rest as well;
            ``type`` for attention, mlp, norm and so on; ``tensor``; or a function from a tensor's name to its row.
        jobs: tensors read at once, in threads; the numbers are the same.
        out: CSV that is written on the way; a run with the same arguments goes on where the last one stopped.
        keep: leave downloads in the Hub's cache; otherwise each is deleted after use.
        overwrite: begin anew, whatever is in ``out``.
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
    if jobs < 1:
        raise ValueError(f"jobs = {jobs}: at least 1")
    sources = [source] if isinstance(source, str | Path) else list(source)
    spelled = [str(Path(s).resolve() if Path(s).exists() else s) for s in sources]
    named = by if isinstance(by, str) else f"{by.__module__}.{by.__qualname__}"
    origin = {"source": spelled, "by": named, "match": match} | ({"step": step} if step else {})
    store = Store(Path(out) if out is not None else None, origin, overwrite)
    found, skipped = find(sources, match, step)
    if not found:
        raise ValueError(f"{', '.join(map(str, sources))}: {_none(sources, match, step, skipped)}")
    result, opener = Series(skipped=skipped), Opener(keep)
    try:
        counted = _walk(found, store, opener, result, by, jobs, progress)
    finally:
        opener.close()
    if not counted:
        raise ValueError("no checkpoint could be read:\n" + "\n".join(f"  {line}" for line in grouped(result.skipped)))
    assert store.reference
    result.table = pd.DataFrame([row for rows in counted.values() for row in rows], columns=list(COLUMNS))
    numbers = list(COLUMNS[2:])
    result.table[numbers] = result.table[numbers].astype("float64")
    result.left_out = store.reference.left_out
    result.parameters = sum(math.prod(shape) for shape in store.reference.shapes.values())
    return result
