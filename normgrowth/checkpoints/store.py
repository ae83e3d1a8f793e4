"""What a series has measured, on disk beside its table: a state from which a later run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from normgrowth.checkpoints.comparisons import tied
from normgrowth.checkpoints.weights import ReadError, Weights


@dataclass
class Reference:
    """The checkpoint that decides which tensors belong to the series."""

    key: str
    label: str
    shapes: Mapping[str, Sequence[int]]
    left_out: dict[str, str]

    def check(self, label: str, weights: Weights) -> None:
        """Raise ReadError unless ``weights`` has the same parameters, tied ones counted once."""
        self.left_out |= weights.left_out
        shapes = weights.shapes
        less, more = self.shapes.keys() - shapes.keys(), shapes.keys() - self.shapes.keys()
        if more:
            more -= tied(weights.parameters).keys()
        if less or more:
            names = [f"no {name}" for name in sorted(less)] + [f"{name} more" for name in sorted(more)]
            raise ReadError(f"{label}: other tensors than {self.label}: {', '.join(names[:3])}")
        for name, shape in self.shapes.items():
            if shapes[name] != tuple(shape):  # a list, from the state of an earlier run
                raise ReadError(f"{label}: {name} has shape {shapes[name]}; in {self.label} it is {shape}")


class Row(NamedTuple):
    """One row of the table; None where there is no neighbour, or no direction."""

    step: int
    layer: str
    norm: float
    cos_similarity: float | None = None
    displacement_sq: float | None = None
    inner: float | None = None


COLUMNS = Row._fields
ANOTHER = "give another --out, or delete this one and its .state.json"
Pair = tuple[str, str | None]  # ``key`` of a checkpoint and of its predecessor


class Store:
    """Rows by what they were made from. The table ``out`` is never read: the state beside it has all rows."""

    def __init__(self, out: Path | None, origin: str) -> None:
        self.out, self.origin = out, origin
        self.rows: dict[Pair, list[Row]] = {}
        self.duplicates: dict[str, str] = {}  # of the ``key`` of a copy that of its original
        self.reference: Reference | None = None
        self.state = out.with_name(out.name + ".state.json") if out else Path()
        if out and (out.exists() or self.state.exists()):
            self._load()

    def _load(self) -> None:
        try:
            state = json.loads(self.state.read_text(encoding="utf-8"))
            origin, self.duplicates = state["origin"], state["duplicates"]
            self.reference = Reference(**state["reference"])
            self.rows = {(one, before): [Row(*row) for row in rows] for one, before, rows in state["done"]}
        except FileNotFoundError:
            raise ValueError(f"{self.out}: is there without its .state.json; {ANOTHER}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.state}: damaged; {ANOTHER}") from None
        if origin != self.origin:
            raise ValueError(f"{self.out}: was made with {origin}; {ANOTHER}")

    def save(self) -> None:
        """Write the state, whole: a killed run leaves this one or that before it."""
        if not self.out or not self.reference:
            return
        state: dict[str, Any] = {
            "origin": self.origin,
            "reference": asdict(self.reference),
            "duplicates": self.duplicates,
        }
        state["done"] = [[*pair, rows] for pair, rows in self.rows.items()]
        part = self.state.with_suffix(".part")
        part.write_text(json.dumps(state), encoding="utf-8")
        os.replace(part, self.state)
