"""Trainings that take long or that several chapters share, by name.

``recipes_lm`` and ``recipes_t5`` define them. ``python -m workflow`` runs a training before the first chapter that
loads it and keeps the result beside the executed chapters, for one profile and seed. Without the workflow, as on Colab,
``load`` trains.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from nbutils import devices, profiles
from nbutils.shared_runs import recipes_lm, recipes_t5

if TYPE_CHECKING:
    from nbutils.training import TrainingRun

CODE = tuple(Path(str(files(package))) for package in ("normgrowth", "nbutils"))  # folders of what trainings run
RECIPES: Mapping[str, Callable[..., TrainingRun]] = {**recipes_lm.RECIPES, **recipes_t5.RECIPES}


def names(pattern: str = "*") -> list[str]:
    """Names of the shared trainings that match ``pattern``; ``*`` stands for any text.

    Raises:
        ValueError: no training matches.

    >>> names("lm-pre-*")
    ['lm-pre-text', 'lm-pre-shuffled', 'lm-pre-noise']
    """
    matching = [name for name in RECIPES if fnmatch(name, pattern)]
    if not matching:
        raise ValueError(f"no shared training matches {pattern!r}: there are {', '.join(RECIPES)}")
    return matching


def load(pattern: str, *, profile: str, seed: int, device: str) -> dict[str, TrainingRun]:
    """The shared trainings that match ``pattern``, by name.

    The workflow has saved them in the folder ``NBUTILS_TRAININGS``. Without that variable they are trained now, each
    with a progress bar. If ``NBUTILS_RESULTS`` names a folder, such as one in Google Drive, each training is saved
    there when it is done, and the next session reads it from there.

    Raises:
        FileNotFoundError: the workflow did not train one of them.
    """
    from nbutils.training import FILE, TrainingRun

    trained = os.environ.get("NBUTILS_TRAININGS")
    results = os.environ.get("NBUTILS_RESULTS")
    folder = Path(trained) if trained else None
    if results and not trained:
        folder = Path(results) / "trainings" / _folder_name(profile, seed, device)
    runs = {}
    for name in names(pattern):
        if folder and (trained or (folder / name / FILE).is_file()):
            runs[name] = TrainingRun.load(folder / name)
            continue
        runs[name] = RECIPES[name](profile=profile, seed=seed, device=device)
        if folder:
            runs[name].save(folder / name)
    return runs


def _folder_name(profile: str, seed: int, device: str) -> str:
    """A name made of what a training depends on: profile, device, seed, and a digest of the code of both packages."""
    modules = [module for folder in CODE for module in sorted(folder.rglob("*.py"))]
    digest = hashlib.sha256(b"\0".join(module.read_bytes() for module in modules)).hexdigest()[:12]
    return f"{profiles.resolve(profile)}-{devices.resolve(device)}-seed-{seed}-{digest}"
