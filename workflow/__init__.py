"""From the chapters' sources to the executed, checked and rendered book. Snakemake runs it; see ``Snakefile``."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"


def chapters() -> list[str]:
    """Names of the chapters in ``book/``: the sources whose name starts with two digits, in order."""
    return sorted(path.stem for path in (ROOT / "book").glob("[0-9][0-9]-*.md"))


def git(*words: str) -> str | None:
    """What git says of this checkout; None outside of one, or where there is no git."""
    try:
        said = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() if said.returncode == 0 else None


def run_folder(profile: str, seed: int) -> Path:
    """Folder of the executed notebooks of one profile and seed."""
    return BUILD / profile / f"seed-{seed}"


def html_folder(profile: str) -> Path:
    """Folder of the rendered pages: ``_build/html`` for the book, ``_build/<profile>/html`` for other profiles."""
    return BUILD / "html" if profile == "book" else BUILD / profile / "html"
