"""Trainings that take long or that chapters share: run once by the workflow, or on the spot where there is no workflow.

Each has a name; ``recipes_lm`` and ``recipes_t5`` say what it is. ``python -m workflow`` trains it before the first
chapter that loads it and keeps the result beside the executed chapters, for one profile and seed. On Colab, ``load``
trains.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from nbutils import devices, profiles
from nbutils.shared_runs import recipes_lm, recipes_t5

if TYPE_CHECKING:
    from nbutils.training import Run

CODE = Path(__file__).parents[1]  # of nbutils
RECIPES: Mapping[str, Callable[..., Run]] = {**recipes_lm.RECIPES, **recipes_t5.RECIPES}


def names(pattern: str = "*") -> list[str]:
    """Names of the shared trainings that match ``pattern``, with ``*`` for any text.

    Raises:
        ValueError: none does.

    >>> names("lm-pre-*")
    ['lm-pre-text', 'lm-pre-shuffled', 'lm-pre-noise']
    """
    found = [name for name in RECIPES if fnmatch(name, pattern)]
    if not found:
        raise ValueError(f"no shared training matches {pattern!r}: there are {', '.join(RECIPES)}")
    return found


def load(pattern: str, *, profile: str, seed: int, device: str) -> dict[str, Run]:
    """The shared trainings that match ``pattern``, by name.

    The workflow has them ready in the folder ``NBUTILS_TRAININGS``. Without that variable they are trained here and
    now, with a progress bar each; if ``NBUTILS_RESULTS`` names a folder, such as one in Google Drive, each is kept
    there as soon as it is done, and read from there by the next session.

    Raises:
        FileNotFoundError: the workflow did not train one of them.
    """
    from nbutils.training import FILE, Run

    trained, results, runs = os.environ.get("NBUTILS_TRAININGS"), os.environ.get("NBUTILS_RESULTS"), {}
    folder = Path(trained) if trained else None
    if results and not trained:
        folder = Path(results) / "trainings" / _settings(profile, seed, device)
    for name in names(pattern):
        if folder and (trained or (folder / name / FILE).is_file()):
            runs[name] = Run.load(folder / name)
            continue
        runs[name] = RECIPES[name](profile=profile, seed=seed, device=device)
        if folder:
            runs[name].save(folder / name)
    return runs


def _settings(profile: str, seed: int, device: str) -> str:
    """What a training depends on, as a folder's name: the code of ``nbutils`` too, by a digest."""
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(CODE.rglob("*.py")))).hexdigest()[:12]
    return f"{profiles.resolve(profile)}-{devices.resolve(device)}-seed-{seed}-{digest}"
