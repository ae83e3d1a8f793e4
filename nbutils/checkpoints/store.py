"""Rows that are done and what they were made from, on disk: a series goes on where the last run of it stopped."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nbutils.checkpoints.comparisons import same, tied
from nbutils.checkpoints.weights import ReadError, Weights

COLUMNS = ("step", "layer", "norm", "cos_similarity", "displacement_sq", "inner")


@dataclass
class Reference:
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


class Row(NamedTuple):
    """One row of the table; None where there is no neighbour, or no direction."""

    step: int
    layer: str
    norm: float
    cos_similarity: float | None = None
    displacement_sq: float | None = None
    inner: float | None = None


Key = tuple[str, str, str, str]  # ``key`` of a checkpoint, then of its predecessor


class Store:
    """Rows that are done, in ``out`` and beside it what they were made from; both files are replaced whole."""

    def __init__(self, out: Path | None, origin: dict[str, Any], overwrite: bool) -> None:
        self.out, self.origin, self.saved = out, origin, -math.inf
        self.rows: dict[Key, list[Row]] = {}
        self.loaded: list[Key] = []  # those of an earlier run
        self.twins: list[list[str]] = []  # ``key`` of a duplicate, then of its original
        self.reference: Reference | None = None
        self.state = out.with_name(out.name + ".state.json") if out else None
        if out and not overwrite and (out.exists() or (self.state and self.state.exists())):
            self._load()

    def _load(self) -> None:
        assert self.out and self.state
        try:
            state = json.loads(self.state.read_text(encoding="utf-8"))
            origin, reference = state["origin"], Reference(**state["reference"])
        except FileNotFoundError:
            raise ValueError(
                f"{self.out}: is there, and not from this command; give another --out, or --overwrite"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.state}: damaged; give another --out, or --overwrite") from None
        if origin != self.origin:
            told = {"source": "source {}", "by": "--by {}", "match": "--match '{}'", "step": "--step '{}'"}
            said = {k: " ".join(v) if isinstance(v, list) else v for k, v in origin.items()}
            changed = ", ".join(told[k].format(said.get(k)) for k in told if origin.get(k) != self.origin.get(k))
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
