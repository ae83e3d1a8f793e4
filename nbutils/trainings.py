"""Trainings that several chapters share: run once by the workflow, or on the spot where there is no workflow.

Each has a name; ``nbutils.recipes_lm`` and ``nbutils.recipes_t5`` say what it is. ``python -m workflow`` trains it
before the first chapter that loads it and keeps the result beside the executed chapters, for one profile and seed. On
Colab, ``load`` trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from nbutils import recipes_lm, recipes_t5

if TYPE_CHECKING:
    from nbutils.training import Run

RECIPES: Mapping[str, Callable[..., Run]] = {**recipes_lm.RECIPES, **recipes_t5.RECIPES}


def names(pattern: str = "*") -> list[str]:
    """Names of the shared trainings that match ``pattern``, with ``*`` for any text.

    Raises:
        ValueError: none does.
    """
    found = [name for name in RECIPES if fnmatch(name, pattern)]
    if not found:
        raise ValueError(f"no shared training matches {pattern!r}: there are {', '.join(RECIPES) or 'none'}")
    return found


def make(name: str, *, profile: str, seed: int, device: str) -> Run:
    """Run one shared training now.

    Raises:
        ValueError: there is no training of this name.
    """
    if name not in RECIPES:
        raise ValueError(f"no shared training is named {name!r}: there are {', '.join(RECIPES) or 'none'}")
    return RECIPES[name](profile=profile, seed=seed, device=device)


def load(pattern: str, *, profile: str, seed: int, device: str) -> dict[str, Run]:
    """The shared trainings that match ``pattern``, by name.

    The workflow has them ready in the folder ``NBUTILS_TRAININGS``. Without that variable they are trained here and
    now, with a progress bar each.

    Raises:
        FileNotFoundError: the workflow did not train one of them.
    """
    from nbutils import training

    folder, runs = os.environ.get("NBUTILS_TRAININGS"), {}
    for name in names(pattern):
        if folder is None:
            runs[name] = make(name, profile=profile, seed=seed, device=device)
            continue
        runs[name] = training.load_run(Path(folder) / name)
    return runs
