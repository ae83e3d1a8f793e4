"""A copy of the checkout, in which a test may plant a defect."""

from __future__ import annotations

import shutil
from pathlib import Path

from workflow import ROOT

NOT_COPIED = (".git", ".venv*", "_build", ".snakemake", "__pycache__", ".*_cache", ".hypothesis")


def copy_checkout(to: Path) -> Path:
    """The files of a checkout, without builds and environments, in a fresh folder."""
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
