"""The training step that a checkpoint records inside: in a pickle, in a trainer's JSON, or in an optimizer's count."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from normgrowth.checkpoints import optimizers

_STEP = re.compile(
    r"(?:(?:global|train(?:ing|ed|er)?|current|cur|last|optimizer|n)_?)?(?:step|iter(?:ation)?|update|it)s?"
    r"(?:_(?:num|count|number|no|idx))?|num_updates|num_optimizer_steps", re.I
)  # fmt: skip
_PLANS = re.compile(r"arg|conf|hparam|hyper|optim(?!izer_history)|sched|callback|loops|model|state_dict|weight|module|param", re.I)
_FILES = ("trainer_state.json", "training_state.json", "checkpoint_metadata.json", "train_state.json", "state.json")
_DEPTH = 3


def step_in(tree: Any) -> int | None:
    """The step in the containers of a file: the outermost count of steps, or else the optimizer's own count."""
    found = sorted(_counts(tree, _DEPTH), key=lambda count: (-count[0], "global" not in count[1], count[1]))
    if found:
        return found[0][2]
    return optimizers.trained(tree).steps


def step_beside(folder: Path) -> int | None:
    """The step in the JSON that a trainer leaves beside the weights."""
    for name in _FILES:
        with suppress(OSError, ValueError, RecursionError):
            step = step_in(json.loads((folder / name).read_text(encoding="utf-8")))
            if step is not None:
                return step
    return None


def epoch_in(tree: Any) -> int | None:
    """The epoch at the top of a file's containers."""
    return _whole(tree.get("epoch")) if isinstance(tree, dict) else None


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
