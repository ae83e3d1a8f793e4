"""What a series has measured, on disk: the table, and beside it a state from which a later run goes on."""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nbutils.checkpoints.comparisons import same, tied
from nbutils.checkpoints.weights import ReadError, Weights

COLUMNS = ("step", "layer", "norm", "cos_similarity", "displacement_sq", "inner")
Shapes = dict[str, tuple[int, ...]]


@dataclass
class Reference:
    """The checkpoint that decides which tensors belong to the series: the last of its most common kind."""

    label: str
    stamp: str
    shapes: Shapes
    aliases: dict[str, str]
    left_out: dict[str, str]

    def check(self, label: str, weights: Weights) -> None:
        """Raise ReadError unless ``weights`` has the same parameters, tied ones counted once."""
        self.left_out |= weights.left_out
        for alias in self.aliases.keys() & weights.parameters.keys():
            original = self.aliases[alias]
            both = [weights.parameters[name] for name in (alias, original) if name in weights.parameters]
            if len(both) == 2 and not same(*both):
                raise ReadError(f"{label}: {alias} differs from {original}; in {self.label} they are tied")
        more = weights.shapes.keys() - self.aliases.keys() - self.shapes.keys()
        self.check_shapes(label, weights.shapes, more - tied(weights.parameters).keys() if more else more)

    def check_shapes(self, label: str, shapes: Mapping[str, tuple[int, ...]], more: Collection[str] = ()) -> None:
        """Raise ReadError if a parameter is missing or has another shape, or if there are ``more``."""
        less = self.shapes.keys() - shapes.keys()
        if less or more:
            names = [f"no {name}" for name in sorted(less)] + [f"{name} more" for name in sorted(more)]
            rest = f" and {len(names) - 2} other differences" if len(names) > 2 else ""
            raise ReadError(f"{label}: other tensors than {self.label}: {', '.join(names[:2])}{rest}")
        for name, shape in self.shapes.items():
            if shapes[name] != shape:
                raise ReadError(f"{label}: {name} has shape {shapes[name]}; in {self.label} it is {shape}")


class Row(NamedTuple):
    """One row of the table; None where there is no neighbour, or no direction."""

    step: int
    layer: str
    norm: float
    cos_similarity: float | None = None
    displacement_sq: float | None = None
    inner: float | None = None


Name = tuple[str, str]  # ``key`` of a checkpoint
Key = tuple[Name, Name | None]  # of a checkpoint and of its predecessor


class Store:
    """Rows by what they were made from. ``out`` is written whole, and never read: the state beside it has all rows."""

    def __init__(self, out: Path | None, origin: dict[str, Any], overwrite: bool) -> None:
        self.out, self.origin, self.saved = out, origin, -math.inf
        self.rows: dict[Key, list[Row]] = {}
        self.duplicates: dict[Name, Name] = {}  # of a copy its original
        self.reference: Reference | None = None
        self.state = out.with_name(out.name + ".state.json") if out else Path()
        if out and not overwrite and (out.exists() or self.state.exists()):
            self._load()

    def _load(self) -> None:
        try:
            state = json.loads(self.state.read_text(encoding="utf-8"))
            origin, self.reference = state["origin"], Reference(**state["reference"])
            shapes = self.reference.shapes
            self.reference.shapes = {name: tuple(shape) for name, shape in shapes.items()}
            self.duplicates = {tuple(copy): tuple(original) for copy, original in state["duplicates"]}
            for one, before, rows in state["done"]:
                self.rows[tuple(one), before and tuple(before)] = [Row(*row) for row in rows]
        except FileNotFoundError:
            why = "is there, and not from this command; give another --out, or --overwrite"
            raise ValueError(f"{self.out}: {why}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.state}: damaged; give another --out, or --overwrite") from None
        if origin != self.origin:
            options = {"source": "source {}", "by": "--by {}", "match": "--match '{}'", "step": "--step '{}'"}
            given = {k: " ".join(v) if isinstance(v, list) else v for k, v in origin.items()}
            changed = ", ".join(options[k].format(given.get(k)) for k in options if origin.get(k) != self.origin.get(k))
            raise ValueError(f"{self.out}: was made with {changed}; give the same, another --out, or --overwrite")

    def save(self, counted: Sequence[Row], *, now: bool = False) -> None:
        """Write both files, at most once a second unless ``now``: a killed run loses no more."""
        if not (self.out and self.reference and counted) or (not now and time.monotonic() < self.saved + 1):
            return
        done = [[*key, rows] for key, rows in self.rows.items()]
        twins = list(self.duplicates.items())
        state = {"origin": self.origin, "reference": asdict(self.reference), "done": done, "duplicates": twins}
        part = self.out.with_name(self.out.name + ".part")
        part.write_text(json.dumps(state), encoding="utf-8")
        os.replace(part, self.state)
        with part.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(COLUMNS)
            table.writerows(counted)
        os.replace(part, self.out)
        self.saved = time.monotonic()
