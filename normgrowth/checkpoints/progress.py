"""The training step that a checkpoint records inside: in a pickle, in a trainer's JSON, or in an optimizer's count."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from normgrowth.checkpoints import optimizers

_STEP = re.compile(
    r"(?:(?:global|train(?:ing|ed|er)?|current|cur|last|optimizer|n)_?)?(?:step|iter(?:ation)?|update|it)s?"
    r"(?:_(?:num|count|number|no|idx))?|num_updates|num_optimizer_steps", re.I
)  # fmt: skip
_PLANS = re.compile(
    r"arg|conf|hparam|hyper|optim(?!izer_history)|sched|callback|loops|model|state_dict|weight|module|param", re.I
)
_FILES = ("trainer_state.json", "training_state.json", "checkpoint_metadata.json", "train_state.json", "state.json")
_DEPTH = 3


class Progress(NamedTuple):
    """How far a training had come, as far as it is recorded: steps, epochs, and the optimizer's own count of steps."""

    step: int | None = None
    epoch: int | None = None
    optimizer: int | None = None


def inside(tree: Any) -> Progress:
    """What the containers of a file record; of several counts of steps the outermost."""
    found = sorted(_counts(tree, _DEPTH), key=lambda count: (-count[0], "global" not in count[1], count[1]))
    return Progress(found[0][2] if found else None, _epoch(tree), optimizers.trained(tree).steps)


def _epoch(tree: Any) -> int | None:
    """The epoch at the top of the containers, or the length of a history that has an entry for each."""
    if not isinstance(tree, dict):
        return None
    counts = [_whole(tree.get(key)) for key in ("epoch", "current_epoch", "epochs", "last_epoch")]
    if isinstance(tree.get("history"), list):
        counts.append(len(tree["history"]))
    return next((count for count in counts if count is not None), None)


def step_beside(folder: Path) -> int | None:
    """The step in the JSON that a trainer leaves beside the weights."""
    for name in _FILES:
        with suppress(OSError, ValueError, RecursionError):
            step = inside(json.loads((folder / name).read_text(encoding="utf-8"))).step
            if step is not None:
                return step
    return None


def _counts(value: Any, depth: int) -> Iterator[tuple[int, str, int]]:
    """Counts of steps: how far from the deepest level, the key, and the count."""
    if isinstance(value, list | tuple) and value:
        yield from _counts(value[-1], depth - 1)  # the last entry of a history
    if not isinstance(value, dict) or depth <= 0:
        return
    for key, inner in value.items():
        name = str(key)
        if _STEP.fullmatch(name) and (step := _whole(inner)) is not None:
            yield depth, name.lower(), step
        elif not _PLANS.search(name):
            yield from _counts(inner, depth - 1)


def _whole(value: Any) -> int | None:
    """A number of steps as an integer, or None for what is none."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        if hasattr(value, "numel") and (value.numel() != 1 or value.is_meta):
            return None
        number = float(value) if not isinstance(value, str) else -1.0
        return int(number) if number >= 0 and number == int(number) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
