"""Trainings that take long or that chapters share: run once by the workflow, or on the spot where there is no workflow.

Each has a name; ``recipes_lm`` and ``recipes_t5`` say what it is. ``python -m workflow`` trains it
before the first chapter that loads it and keeps the result beside the executed chapters, for one profile and seed. On
Colab, ``load`` trains.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from nbutils.trainings import recipes_lm, recipes_t5

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


def make(name: str, *, profile: str, seed: int, device: str) -> Run:
    """Run one shared training now.

    Raises:
        ValueError: there is no training of this name.

    >>> run = make("lm-pre-noise", profile="smoke", seed=0, device="cpu")
    >>> run.settings["gradients"], len(run.history)  # 60 steps, and the start
    ('noise', 61)
    """
    if name not in RECIPES:
        raise ValueError(f"no shared training is named {name!r}: there are {', '.join(RECIPES)}")
    return RECIPES[name](profile=profile, seed=seed, device=device)


def load(pattern: str, *, profile: str, seed: int, device: str) -> dict[str, Run]:
    """The shared trainings that match ``pattern``, by name.

    The workflow has them ready in the folder ``NBUTILS_TRAININGS``. Without that variable they are trained here and
    now, with a progress bar each; if ``NBUTILS_RESULTS`` names a folder, such as one in Google Drive, each is kept
    there as soon as it is done, and read from there by the next session.

    Raises:
        FileNotFoundError: the workflow did not train one of them.

    >>> import tempfile
    >>> from unittest.mock import patch
    >>> import pandas as pd
    >>> from nbutils.training import Run
    >>> from nbutils.trainings.runs import save_run
    >>> with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, NBUTILS_TRAININGS=folder):
    ...     save_run(Run(pd.DataFrame({"step": [0], "norm": [5.0]})), Path(folder, "t5-own"))  # by the workflow
    ...     load("t5-own", profile="smoke", seed=0, device="cpu")["t5-own"].history["norm"].tolist()
    [5.0]
    """
    from nbutils.trainings import runs as kept

    folder, runs = os.environ.get("NBUTILS_TRAININGS"), {}
    results = results_folder(profile=profile, seed=seed, device=device)
    for name in names(pattern):
        if folder is not None:
            runs[name] = kept.load_run(Path(folder) / name)
        elif results and (results / name / kept.NAME).is_file():
            runs[name] = kept.load_run(results / name)
        else:
            runs[name] = make(name, profile=profile, seed=seed, device=device)
            if results:
                kept.save_run(runs[name], results / name)
    return runs


def results_folder(*, profile: str, seed: int, device: str) -> Path | None:
    """Where ``load`` keeps trainings between sessions; None without ``NBUTILS_RESULTS``.

    Its name has a digest of the module's code: trainings of another version of the book are not taken for these.

    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, NBUTILS_RESULTS="/content/drive"):
    ...     results_folder(profile="smoke", seed=7, device="cpu").name.rpartition("-")[0]  # after it, the digest
    'smoke-cpu-seed-7'
    """
    from nbutils import devices, profiles

    kept = os.environ.get("NBUTILS_RESULTS")
    if not kept:
        return None
    code = sorted(CODE.rglob("*.py"))
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in code)).hexdigest()[:12]
    settings = f"{profiles.resolve(profile)}-{devices.resolve(device)}-seed-{seed}-{digest}"
    return Path(kept) / "trainings" / settings
