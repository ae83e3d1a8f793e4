"""Norm, direction and norm budget of a series of checkpoints: folders, revisions on the Hub, or several of either."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from nbutils.checkpoints.comparisons import Sums, same, sums, tied
from nbutils.checkpoints.sources import Checkpoint, Opener, Skip, find, series_below
from nbutils.checkpoints.weights import ReadError, Weights
from nbutils.names import layer_of, layer_order

COLUMNS = ("step", "layer", "norm", "cos_similarity", "displacement_sq", "inner")


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


@dataclass
class _Reference:
    """The checkpoint that decides which tensors belong to the series: the last of its most common kind."""

    label: str
    stamp: str
    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    left_out: dict[str, str]

    def check(self, label: str, weights: Weights) -> None:
        """Raise ReadError unless ``weights`` has the same parameters, tied ones counted once."""
        self.left_out |= weights.left_out
        have = {name: t.shape for name, t in weights.parameters.items() if name not in self.aliases}
        for alias in self.aliases.keys() & weights.parameters.keys():
            if self.aliases[alias] in weights.parameters and not same(weights, alias, weights, self.aliases[alias]):
                raise ReadError(f"{label}: {alias} differs from {self.aliases[alias]}; in {self.label} they are tied")
        more = have.keys() - self.shapes.keys()
        if more:
            more = more - tied(weights).keys()
        less = self.shapes.keys() - have.keys()
        if less or more:
            names = [f"no {name}" for name in sorted(less)] + [f"{name} more" for name in sorted(more)]
            said = ", ".join(names[:2]) + (f" and {len(names) - 2} other differences" if len(names) > 2 else "")
            raise ReadError(f"{label}: other tensors than {self.label}: {said}")
        for name, shape in self.shapes.items():
            if have[name] != tuple(shape):
                raise ReadError(f"{label}: {name} has shape {have[name]}; in {self.label} it is {tuple(shape)}")


def _reference(found: Sequence[Checkpoint], opener: Opener) -> _Reference | None:
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
            return _Reference(checkpoint.label, checkpoint.stamp, shapes, aliases, left_out)
    return None


class Row(NamedTuple):
    """One row of the table; None where there is no neighbour, or no direction."""

    step: int
    layer: str
    norm: float
    cos_similarity: float | None = None
    displacement_sq: float | None = None
    inner: float | None = None


Key = tuple[str, str, str, str]  # ``key`` of a checkpoint, then of its predecessor


def _measure(
    checkpoint: Checkpoint,
    before: Checkpoint | None,
    norms: dict[str, float],
    ref: _Reference,
    opener: Opener,
    by: str,
) -> list[Row]:
    """Rows of one checkpoint; ``norms`` are those of ``before``, by layer."""
    previous = opener(before) if before else None  # first: the opener keeps the last two
    current = opener(checkpoint)
    ref.check(checkpoint.label, current)
    parts: dict[str, list[Sums]] = {"total": []}
    for name in ref.shapes:
        one = sums(current.parameters[name], previous.parameters[name] if previous else None)
        if not all(map(math.isfinite, one)):
            raise ReadError(f"{checkpoint.label}: {name} holds values that are not finite, or too large to square")
        for layer in ("total", layer_of(name)) if by == "layer" else ("total",):
            parts.setdefault(layer, []).append(one)
    rows = []
    for layer in sorted(parts, key=layer_order):
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


def _equal(a: Checkpoint, b: Checkpoint, ref: _Reference, opener: Opener) -> bool:
    if a.commit and a.commit == b.commit:
        return True
    x, y = opener(a), opener(b)
    return all(same(x, name, y, name) for name in ref.shapes)


class _Store:
    """Rows that are done, in ``out`` and beside it what they were made from; both files are replaced whole."""

    def __init__(self, out: Path | None, origin: dict[str, Any], overwrite: bool) -> None:
        self.out, self.origin, self.saved = out, origin, -math.inf
        self.rows: dict[Key, list[Row]] = {}
        self.loaded: list[Key] = []  # those of an earlier run
        self.twins: list[list[str]] = []  # ``key`` of a duplicate, then of its original
        self.reference: _Reference | None = None
        self.state = out.with_name(out.name + ".state.json") if out else None
        if out and not overwrite and (out.exists() or (self.state and self.state.exists())):
            self._load()

    def _load(self) -> None:
        assert self.out and self.state
        try:
            state = json.loads(self.state.read_text(encoding="utf-8"))
            origin, reference = state["origin"], _Reference(**state["reference"])
        except FileNotFoundError:
            raise ValueError(
                f"{self.out}: is there, and not from this command; give another --out, or --overwrite"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.state}: damaged; give another --out, or --overwrite") from None
        if origin != self.origin:
            told = {"source": "source {}", "by": "--by {}", "match": "--match '{}'"}
            said = {k: " ".join(v) if isinstance(v, list) else v for k, v in origin.items()}
            changed = ", ".join(told[k].format(said.get(k)) for k in told if origin.get(k) != self.origin[k])
            raise ValueError(f"{self.out}: was made with {changed}; give the same, another --out, or --overwrite")
        reference.shapes = {name: tuple(shape) for name, shape in reference.shapes.items()}
        self.reference, self.twins = reference, state["duplicates"]
        rows = _read_rows(self.out) if self.out.exists() else {}
        for step, digest, *key in state["done"]:
            if digest == _digest(rows.get(step, [])):
                self.rows[tuple(key)] = rows[step]
        self.loaded = list(self.rows)

    def save(self, counted: dict[Key, list[Row]], *, now: bool = False) -> None:
        """At most once a second unless ``now``: a killed run loses no more."""
        if (
            not counted
            or not self.out
            or not self.state
            or not self.reference
            or (not now and time.monotonic() < self.saved + 1)
        ):
            return
        if not now:  # what an earlier run has done is kept until this one comes to it
            last = max(rows[0].step for rows in counted.values())
            counted = counted | {key: self.rows[key] for key in self.loaded if self.rows[key][0].step > last}
        done = [[rows[0].step, _digest(rows), *key] for key, rows in counted.items()]
        state = {"origin": self.origin, "reference": asdict(self.reference), "done": done, "duplicates": self.twins}
        table = _csv([COLUMNS, *(row for rows in counted.values() for row in rows)])
        parts = {}
        for path, content in ((self.state, json.dumps(state, indent=0)), (self.out, table)):
            parts[path] = path.with_name(path.name + ".part")
            parts[path].write_text(content, encoding="utf-8")
        for path, part in parts.items():  # killed between the two: the digests tell which rows are of this state
            os.replace(part, path)
        self.saved = time.monotonic()

    @contextlib.contextmanager
    def keeping(self, counted: Callable[[], dict[Key, list[Row]]]) -> Iterator[None]:
        """Save what is done if the work within stops: an interrupt, or the network."""
        try:
            yield
        except BaseException:
            self.saved = -math.inf
            self.save(counted())
            raise


def _csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(["" if v is None else v for v in row] for row in rows)
    return text.getvalue()


def _digest(rows: Sequence[Row]) -> str:
    """Of the rows of one step as the table has them, so that rows made beside another neighbour do not pass."""
    return hashlib.sha256(_csv(rows).encode()).hexdigest()


def _read_rows(path: Path) -> dict[int, list[Row]]:
    """Rows of a table by step; a torn or foreign line is left out."""
    rows: dict[int, list[Row]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        complete = "".join(line for line in file if line.endswith("\n"))
    for cells in csv.reader(complete.splitlines()):
        with contextlib.suppress(ValueError, TypeError):
            step, layer, norm, *rest = cells
            row = Row(int(step), layer, float(norm), *(float(cell) if cell else None for cell in rest))
            rows.setdefault(row.step, []).append(row) if len(cells) == len(COLUMNS) else None
    return rows


def _walk(
    found: Sequence[Checkpoint], store: _Store, opener: Opener, result: Series, by: str, progress: bool
) -> dict[Key, list[Row]]:
    """Rows of the checkpoints that count, in order of steps."""
    from tqdm.auto import tqdm

    known, here = store.reference, {c.key: c for c in found}
    if known and (known.label, known.stamp) in here and here[known.label, known.stamp].place is None:
        ref: _Reference | None = known  # no download to look at it again
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
                    store.rows[mine] = _measure(checkpoint, before, norms, ref, opener, by)
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


def _none(sources: Sequence[str | Path], match: str, skipped: Sequence[Skip]) -> str:
    """Why there is nothing to measure."""
    there = len(find(sources)[0]) if match != "*" else 0
    if there:
        return f"none of its {there} checkpoint{'s' if there > 1 else ''} matches {match!r}"
    said = ["no checkpoint with a step in its name, such as step1000, checkpoint-1000 or step_20k"]
    for what, items in (
        ("", skipped),
        ("it has folders that hold series: ", [below for one in sources for below in series_below(Path(one))]),
    ):
        if items:
            more = f" and {len(items) - 3} more" if len(items) > 3 else ""
            said.append(f"{what}{', '.join(map(str, items[:3]))}{more}")
    return "; ".join(said)


def series(
    source: str | Path | Iterable[str | Path],
    *,
    by: str = "total",
    out: str | Path | None = None,
    match: str = "*",
    keep: bool = True,
    overwrite: bool = False,
    progress: bool = False,
) -> Series:
    """Measure the parameter norm, direction and norm budget along a series of checkpoints.

    Weights are read tensor by tensor in blocks and summed in float64; no model is built. Buffers are left out, tied
    weights counted once. What cannot be read is listed in ``skipped``, with the file and the reason.

    Args:
        source, match: as in ``find``.
        by: ``total``, or ``layer`` for rows of each block, the embeddings, the output layer and the rest as well.
        out: CSV that is written on the way; a run with the same arguments goes on where the last one stopped.
        keep: leave downloads in the Hub's cache; otherwise each is deleted after use.
        overwrite: begin anew, whatever is in ``out``.
        progress: show a bar.

    Raises:
        ValueError: no checkpoint is readable, or ``out`` belongs to another series.
        FileNotFoundError, ConnectionError: as in ``find``.

    >>> import torch
    >>> from nbutils.chapters.growth import saved_series
    >>> with saved_series({step: {"w": torch.tensor([3.0, 4.0 * step])} for step in (0, 1)}) as folder:
    ...     series(folder).table.iloc[1, 2:].tolist()  # ρ' = 5, cos = 3/5, ‖Δ‖² = 4², 2θ·Δ = 0
    [5.0, 0.6, 16.0, 0.0]
    """
    if by not in ("total", "layer"):
        raise ValueError(f"by = {by!r}: choose total or layer")
    sources = [source] if isinstance(source, str | Path) else list(source)
    spelled = [str(Path(s).resolve() if Path(s).exists() else s) for s in sources]
    origin = {"source": spelled, "by": by, "match": match}
    store = _Store(Path(out) if out is not None else None, origin, overwrite)
    found, skipped = find(sources, match)
    if not found:
        raise ValueError(f"{', '.join(map(str, sources))}: {_none(sources, match, skipped)}")
    result, opener = Series(skipped=skipped), Opener(keep)
    try:
        counted = _walk(found, store, opener, result, by, progress)
    finally:
        opener.close()
    if not counted:
        raise ValueError("no checkpoint could be read:\n" + "\n".join(f"  {skip}" for skip in result.skipped))
    assert store.reference
    result.table = pd.DataFrame([row for rows in counted.values() for row in rows], columns=list(COLUMNS))
    numbers = list(COLUMNS[2:])
    result.table[numbers] = result.table[numbers].astype("float64")
    result.left_out = store.reference.left_out
    result.parameters = sum(math.prod(shape) for shape in store.reference.shapes.values())
    return result
