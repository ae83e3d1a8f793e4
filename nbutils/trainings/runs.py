"""The record of a training on disk: tables as CSV, settings as JSON, snapshots as safetensors."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pandas as pd
import safetensors.torch

from nbutils.training import Run


def save_run(run: Run, folder: Path | str) -> None:
    """Write tables as CSV, settings as JSON and snapshots as safetensors. All or nothing: an old folder is replaced.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_run(Run(pd.DataFrame({"step": [0], "norm": [3.0]})), Path(folder, "run"))
    ...     sorted(file.name for file in Path(folder, "run").iterdir())
    ['history.csv', 'settings.json', 'snapshots']
    """
    folder = Path(folder)
    part, old = (folder.with_name(f"{folder.name}.{word}{os.getpid()}") for word in ("part", "old"))
    try:
        (part / "snapshots").mkdir(parents=True)
        for name in ("history", "layers", "measures"):
            if len((table := getattr(run, name)).columns):
                table.to_csv(part / f"{name}.csv", index=False)
        for step, parameters in run.snapshots.items():
            tensors = {key: value.contiguous() for key, value in parameters.items()}
            safetensors.torch.save_file(tensors, part / f"snapshots/{step}.safetensors")
        (part / "settings.json").write_text(json.dumps(run.settings, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            os.replace(folder, old)
        os.replace(part, folder)
    finally:
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def load_run(folder: Path | str) -> Run:
    """Read what ``save_run`` wrote; numbers come back to the last bit.

    Raises:
        FileNotFoundError: no run there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_run(Run(pd.DataFrame({"step": [0], "norm": [0.1 + 0.2]})), Path(folder, "run"))
    ...     load_run(Path(folder, "run")).history["norm"].tolist()
    [0.30000000000000004]
    """
    folder = Path(folder)
    if not (folder / "history.csv").is_file():
        raise FileNotFoundError(f"{folder} has no history.csv: it is not a saved run")
    tables = {
        name: _read_table(folder / f"{name}.csv")
        for name in ("history", "layers", "measures")
        if (folder / f"{name}.csv").is_file()
    }
    files = sorted((folder / "snapshots").glob("*.safetensors"), key=lambda file: int(file.stem))
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    return Run(
        **tables, snapshots={int(file.stem): safetensors.torch.load_file(file) for file in files}, settings=settings
    )


def _read_table(file: Path) -> pd.DataFrame:
    """A table as it was written: through Python's ``float``, since pandas rounds the last bit in some versions."""
    table = pd.read_csv(file, dtype=str, keep_default_na=False)
    return table.apply(
        lambda x: x if x.name == "layer" else x.astype("int64") if x.name == "step" else x.replace("", "nan").map(float)
    )
