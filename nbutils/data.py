"""Data that the chapters read: the numbers of the paper's published figures, and the seed baselines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

_PACKAGE = Path(__file__).resolve().parent
# In a checkout the files lie in book/ and tests/; a wheel carries copies of them.
_CHECKOUT = {"data": "book/data", "baselines": "tests/baselines", "book.mplstyle": "book/book.mplstyle"}

TABLES = (
    "t5_norm",
    "t5_norm_by_layer",
    "t5_cos_similarity",
    "t5_cos_similarity_by_layer",
    "trans_scale",
    "attn_histograms",
    "sim_by_layer",
    "finetune_trans",
)


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
        ValueError: unknown table.

    >>> published("t5_norm")["step"].iloc[-1]
    np.int64(524288)
    """
    import pandas as pd

    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}: choose one of {', '.join(TABLES)}")
    return pd.read_csv(path(f"data/{name}.csv"))
