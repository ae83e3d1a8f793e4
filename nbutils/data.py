"""Data files that the chapters read, such as the numbers of the paper's published figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["path", "published"]

_PACKAGE = Path(__file__).resolve().parent
_FOLDERS = (_PACKAGE.parent / "book", _PACKAGE / "_shipped")  # of a checkout; of a wheel, which has copies


def path(name: str) -> Path:
    """Path of a shipped file or folder, such as ``data/t5_norm.csv``, in the checkout or in the installed package.

    Raises:
        FileNotFoundError: neither has the file.

    >>> path("data/t5_norm.csv").name
    't5_norm.csv'
    """
    for folder in _FOLDERS:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(f"no {name!r} in the checkout (book/) or in the package")


def published(name: str) -> pd.DataFrame:
    """A table of the paper's published numbers; ``book/data/README.md`` has their provenance.

    >>> published("t5_norm")["step"].iloc[-1]
    np.int64(524288)
    """
    import pandas as pd

    return pd.read_csv(path(f"data/{name}.csv"))
