"""Data that the chapters read: the numbers of the paper's published figures, and those of the last run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

_PACKAGE = Path(__file__).resolve().parent
_PLACES = _PACKAGE.parent / "book", _PACKAGE / "_shipped"  # of a checkout; of a wheel, which carries copies


def path(name: str) -> Path:
    """Path of a shipped file or folder, such as ``data/t5_norm.csv``: in the checkout if there is one, else the wheel.

    Raises:
        FileNotFoundError: it is in neither place.

    >>> path("data/t5_norm.csv").name
    't5_norm.csv'
    """
    for place in _PLACES:
        if (place / name).exists():
            return place / name
    raise FileNotFoundError(f"no {name!r} in the checkout (book/) nor in the package")


def published(name: str) -> pd.DataFrame:
    """A table of numbers read off the paper's published figures (``book/data/README.md`` has the provenance).

    >>> published("t5_norm")["step"].iloc[-1]
    np.int64(524288)
    """
    import pandas as pd

    return pd.read_csv(path(f"data/{name}.csv"))
