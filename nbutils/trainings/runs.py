"""The record of a training on disk: one file ``run.pt`` of plain lists, numbers, texts and tensors."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import torch

from nbutils.training import Run

NAME, TABLES = "run.pt", ("history", "layers", "measures")


def save_run(run: Run, folder: Path | str) -> None:
    """Write ``run.pt`` into a folder; an old one is replaced when the new one is whole.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_run(Run(pd.DataFrame({"step": [0], "norm": [0.1 + 0.2]})), folder)
    ...     load_run(folder).history["norm"].tolist()
    [0.30000000000000004]
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    tables = {name: getattr(run, name).to_dict("list") for name in TABLES}
    part = place / f"{NAME}.part{os.getpid()}"
    try:
        torch.save(tables | {"snapshots": run.snapshots, "settings": run.settings}, part)
        os.replace(part, place / NAME)
    finally:
        part.unlink(missing_ok=True)


def load_run(folder: Path | str) -> Run:
    """Read what ``save_run`` wrote; numbers come back to the last bit.

    Raises:
        FileNotFoundError: no run there.
    """
    file = Path(folder) / NAME
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {NAME}: it is not a saved run")
    found = torch.load(file, weights_only=True)
    return Run(**found | {name: pd.DataFrame(found[name]) for name in TABLES})
