"""Data that the chapters read: the numbers of the paper's published figures, and the seed baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_PACKAGE = Path(__file__).resolve().parent
# In a checkout the files lie in book/ and tests/; a wheel carries copies of them.
_CHECKOUT = {"data": "book/data", "baselines": "tests/baselines", "book.mplstyle": "book/book.mplstyle"}

TABLES: dict[str, tuple[str, ...]] = {
    "t5_norm": ("step", "norm", "plotted_sqrt_fit"),
    "t5_norm_by_layer": ("step", "layer", "norm"),
    "t5_cos_similarity": ("step", "cos_similarity"),
    "t5_cos_similarity_by_layer": ("step", "layer", "cos_similarity"),
    "trans_scale": ("variant", "bias", "scale", "cosine_similarity"),
    "attn_histograms": ("dataset", "variant", "metric", "bin_left", "bin_right", "n_heads"),
    "sim_by_layer": ("model", "layer", "init", "cosine_similarity"),
    "finetune_trans": ("dataset", "variant", "metric", "epoch", "value"),
}
# Columns that name a series of a table; the others are numbers, and one of `_ORDER` runs along the series.
_LABELS = ("dataset", "model", "init", "layer", "variant", "metric", "bias")
_ORDER = ("step", "scale", "epoch", "bin_left", "layer")  # the first that a table has
_WORDS = {"dataset", "model", "init", "variant", "metric"}
_MAY_LACK = {"value"}  # points that the published figure does not have, because they overflowed there


def path(name: str) -> Path:
    """Path of a shipped file such as ``data/t5_norm.csv``: from the checkout where there is one, else from the wheel.

    Raises:
        FileNotFoundError: the file is in neither place.

    >>> path("data/t5_norm.csv").name
    't5_norm.csv'
    """
    first, _, rest = name.partition("/")
    checkout = _PACKAGE.parent / _CHECKOUT.get(first, first) / rest
    for candidate in (checkout, _PACKAGE / "_shipped" / name):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"no file {name!r} in the checkout ({_CHECKOUT.get(first, first)}/) nor in the package")


def published(name: str) -> pd.DataFrame:
    """A table of numbers read off the paper's published figures (``book/data/README.md`` has the provenance).

    Raises:
        ValueError: unknown table, missing columns, a value that is no finite number, steps that are not increasing.

    >>> published("t5_norm")["step"].iloc[-1]
    np.int64(524288)
    """
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}: choose one of {', '.join(TABLES)}")
    return read_series(path(f"data/{name}.csv"), TABLES[name])


def read_series(file: Path | str, columns: Sequence[str]) -> pd.DataFrame:
    """Read a CSV of a series over steps (or scales); with columns such as ``layer``, each layer's steps must increase.

    Raises:
        ValueError: missing columns, a value that is no finite number, steps that are not increasing. Names the file.

    >>> read_series(path("data/t5_norm.csv"), ("step", "norm")).shape
    (104, 2)
    """
    import pandas as pd

    table = pd.read_csv(file)
    name = Path(file).name
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise ValueError(f"{name}: missing column {', '.join(missing)}; expected {', '.join(columns)}")
    for column in set(columns) - _WORDS:
        numbers = pd.to_numeric(table[column], errors="coerce")
        bad = ~np.isfinite(numbers.to_numpy(dtype=np.float64))
        if column in _MAY_LACK:
            bad &= table[column].notna().to_numpy()
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(
                f"{name}: column {column}, row {row + 1} is '{table[column].iloc[row]}'; expected a number"
            )
    order = next((column for column in _ORDER if column in columns), "step")
    labels = [column for column in _LABELS if column in columns and column != order]
    groups = table.groupby(labels, sort=False) if labels else [((), table)]
    for key, group in groups:
        falling = np.diff(group[order].to_numpy()) <= 0
        if falling.any():
            place = group[order].iloc[int(np.argmax(falling)) + 1]
            where = "".join(f" of {label} {value}" for label, value in zip(labels, key, strict=True))
            raise ValueError(f"{name}: {order} {place}{where} is out of order; {order}s must increase")
    return table[list(columns)]
