"""The state of a measured series, on disk beside its table: a later run goes on from it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from normgrowth.checkpoints.comparisons import Sums, same, tied
from normgrowth.checkpoints.files import MERGE
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.optimizers import Trained
from normgrowth.checkpoints.tensors import Shape
from normgrowth.checkpoints.weights import ADAPTER_ALONE, Weights


@dataclass
class Reference:
    """The checkpoint that decides which tensors, of which shapes, belong to the series."""

    key: str
    label: str
    shapes: dict[str, Shape]
    left_out: dict[str, str]  # tensors that are not counted, and why
    trained: Trained = field(default_factory=Trained)  # by the optimizers that are stored with it
    notes: list[str] = field(default_factory=list)
    model_class: str | None = None  # that of its configuration; None if it was not asked, "" if there is none
    parameters: list[str] = field(default_factory=list)  # those that the class has
    buffers: list[str] = field(default_factory=list)

    def check(self, label: str, weights: Weights) -> None:
        """Raise ReadError unless ``weights`` has the same parameters, tied ones counted once.

        What the reference leaves out, another checkpoint may hold or not.
        """
        if weights.is_adapter and ADAPTER_ALONE not in self.notes:
            raise ReadError(f"{label}: only an adapter: {MERGE}")
        shapes = {name: tensor.shape for name, tensor in (weights.doubtful | weights.parameters).items()}
        missing = self.shapes.keys() - shapes.keys()
        extra = weights.parameters.keys() - self.shapes.keys() - self.left_out.keys()
        if extra:
            extra -= tied(weights.parameters).keys()
        extra |= {alias for alias in self.left_out.keys() & shapes.keys() if self._is_untied(alias, weights)}
        if missing or extra:
            differences = [f"no {name}" for name in sorted(missing)] + [f"{name} more" for name in sorted(extra)]
            raise ReadError(f"{label}: other tensors than {self.label}: {', '.join(differences[:3])}")
        for name, shape in self.shapes.items():
            if shapes[name] != shape:
                raise ReadError(f"{label}: {name} has shape {shapes[name]}; in {self.label} it is {shape}")

    def _is_untied(self, alias: str, weights: Weights) -> bool:
        """Whether a tensor that is tied to another one in the reference has other values in ``weights``."""
        original = self.left_out[alias].removeprefix("tied to ")
        tensors = weights.doubtful | weights.parameters
        return original in self.shapes and original in tensors and not same(tensors[original], tensors[alias])


ANOTHER = "give another --out, or delete this one and its .state.json"
SECONDS = 5  # between two writings of the state
Pair = tuple[str, str | None]  # ``key`` of a checkpoint and of its predecessor, if there is one


class Store:
    """Sums by tensor that earlier runs have measured, by the pair of checkpoints that they compare.

    The table ``out`` is never read: the state beside it has all.

    Args:
        out: path of the table, or None to keep nothing.
        origin: sources and options of the series, in words. A state of another origin is refused.

    Raises:
        ValueError: ``out`` belongs to another series, or its state is missing or damaged.
    """

    def __init__(self, out: Path | None, origin: str) -> None:
        self.out = out
        self.origin = origin
        self.sums: dict[Pair, dict[str, Sums]] = {}
        self.steps: dict[str, int] = {}  # of each checkpoint that is measured, by its ``key``
        self.duplicates: dict[str, str] = {}  # from the ``key`` of a copy to that of its original
        self.reference: Reference | None = None
        self.state = out.with_name(out.name + ".state.json") if out else Path()
        self._saved_at = time.monotonic()
        if out and (out.exists() or self.state.exists()):
            self._load()

    def _load(self) -> None:
        try:
            state = json.loads(self.state.read_text(encoding="utf-8"))
            origin = state["origin"]
            self.duplicates = state["duplicates"]
            self.steps = state["steps"]
            self.reference = _reference(state["reference"])
            for key, key_before, by_name in state["done"]:
                self.sums[key, key_before] = {name: Sums(*values) for name, values in by_name.items()}
        except FileNotFoundError:
            raise ValueError(f"{self.out}: is there without its .state.json; {ANOTHER}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.state}: damaged; {ANOTHER}") from None
        if origin != self.origin:
            raise ValueError(f"{self.out}: was made with {origin}; {ANOTHER}")

    def save_now_and_then(self) -> None:
        """Save, unless that was done a moment ago."""
        if time.monotonic() - self._saved_at > SECONDS:
            self.save()

    def save(self) -> None:
        """Replace the state on disk in one go: a run that is killed leaves either the old state or the new one."""
        if not self.out or not self.reference:
            return
        state: dict[str, Any] = {
            "origin": self.origin,
            "reference": asdict(self.reference),
            "duplicates": self.duplicates,
            "steps": self.steps,
            "done": [[*pair, by_name] for pair, by_name in self.sums.items()],
        }
        part = self.state.with_suffix(".part")
        part.write_text(json.dumps(state), encoding="utf-8")
        os.replace(part, self.state)
        self._saved_at = time.monotonic()


def _reference(stored: Mapping[str, Any]) -> Reference:
    reference = Reference(**stored)
    reference.shapes = {name: tuple(shape) for name, shape in reference.shapes.items()}
    trained = Trained(**stored["trained"])
    trained.shapes = [None if shape is None else tuple(shape) for shape in trained.shapes]
    reference.trained = trained
    return reference
