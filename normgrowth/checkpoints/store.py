"""The state of a measured series, on disk beside its table: a later run goes on from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from normgrowth.checkpoints.comparisons import tied
from normgrowth.checkpoints.weights import ReadError, Weights


@dataclass
class Reference:
    """The checkpoint that decides which tensors, of which shapes, belong to the series."""

    key: str
    label: str
    shapes: Mapping[str, tuple[int, ...]]
    left_out: dict[str, str]  # tensors that are not counted, and why

    def check(self, label: str, weights: Weights) -> None:
        """Raise ReadError unless ``weights`` has the same parameters, tied ones counted once."""
        shapes = weights.shapes
        missing = self.shapes.keys() - shapes.keys()
        extra = shapes.keys() - self.shapes.keys()
        if extra:
            extra -= tied(weights.parameters).keys()
        if missing or extra:
            differences = [f"no {name}" for name in sorted(missing)] + [f"{name} more" for name in sorted(extra)]
            raise ReadError(f"{label}: other tensors than {self.label}: {', '.join(differences[:3])}")
        for name, shape in self.shapes.items():
            if shapes[name] != shape:
                raise ReadError(f"{label}: {name} has shape {shapes[name]}; in {self.label} it is {shape}")


class Row(NamedTuple):
    """One row of the table. Values are None without a checkpoint before it, a cosine also where a norm is 0."""

    step: int
    layer: str
    norm: float
    cos_similarity: float | None = None
    displacement_sq: float | None = None
    inner: float | None = None


COLUMNS = Row._fields
ANOTHER = "give another --out, or delete this one and its .state.json"
Pair = tuple[str, str | None]  # ``key`` of a checkpoint and of its predecessor, if there is one


class Store:
    """Rows that earlier runs have measured, by the pair of checkpoints that they compare.

    The table ``out`` is never read: the state beside it has all rows.

    Args:
        out: path of the table, or None to keep nothing.
        origin: sources and options of the series, in words. A state of another origin is refused.

    Raises:
        ValueError: ``out`` belongs to another series, or its state is missing or damaged.
    """

    def __init__(self, out: Path | None, origin: str) -> None:
        self.out = out
        self.origin = origin
        self.rows: dict[Pair, list[Row]] = {}
        self.duplicates: dict[str, str] = {}  # from the ``key`` of a copy to that of its original
        self.reference: Reference | None = None
        self.state = out.with_name(out.name + ".state.json") if out else Path()
        if out and (out.exists() or self.state.exists()):
            self._load()

    def _load(self) -> None:
        try:
            state = json.loads(self.state.read_text(encoding="utf-8"))
            origin = state["origin"]
            self.duplicates = state["duplicates"]
            self.reference = Reference(**state["reference"])
            self.reference.shapes = {name: tuple(shape) for name, shape in self.reference.shapes.items()}
            for key, key_before, rows in state["done"]:
                self.rows[key, key_before] = [Row(*row) for row in rows]
        except FileNotFoundError:
            raise ValueError(f"{self.out}: is there without its .state.json; {ANOTHER}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.state}: damaged; {ANOTHER}") from None
        if origin != self.origin:
            raise ValueError(f"{self.out}: was made with {origin}; {ANOTHER}")

    def save(self) -> None:
        """Replace the state on disk in one go: a run that is killed leaves either the old state or the new one."""
        if not self.out or not self.reference:
            return
        state: dict[str, Any] = {
            "origin": self.origin,
            "reference": asdict(self.reference),
            "duplicates": self.duplicates,
            "done": [[*pair, rows] for pair, rows in self.rows.items()],
        }
        part = self.state.with_suffix(".part")
        part.write_text(json.dumps(state), encoding="utf-8")
        os.replace(part, self.state)
