"""The book as one PDF: its pages on one, printed by a Chromium. ``python -m workflow pdf --profile book``

LaTeX is not needed, and the PDF shows what the reader sees in the browser; ``book.css`` says what paper is like.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from workflow import Run
from workflow.pages import build

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str:
    """Path of a Chromium.

    Raises:
        RuntimeError: there is none on the path.
    """
    for name in BROWSERS:
        path = shutil.which(name)
        if path:
            return path
    raise RuntimeError(f"no Chromium to print with: install one of {', '.join(BROWSERS)}")


def make(run: Run) -> Path:
    """Print the pages that were last rendered of this run's profile.

    Returns:
        The PDF, ``_build/<profile>/norm-growth.pdf``.

    Raises:
        RuntimeError: no Chromium, or one of the two steps failed.
    """
    folder = run.reports / "pages"
    program = browser()
    target = run.reports / "norm-growth.pdf"
    build.sphinx(folder, folder / "single", folder / "pdf.log", "-b", "singlehtml")
    options = ["--headless", "--disable-gpu", "--no-pdf-header-footer", "--virtual-time-budget=120000"]
    options += ["--no-sandbox"] if sys.platform == "linux" else []  # a container's root has none; the page is our own
    target.unlink(missing_ok=True)
    page = (folder / "single" / "index.html").as_uri() + "?print"  # figures to move are drawn at once
    done = subprocess.run([program, *options, f"--print-to-pdf={target}", page], capture_output=True, text=True)
    if done.returncode or not target.exists():
        raise RuntimeError(f"{program} printed nothing: {done.stderr[-2000:]}")
    shutil.rmtree(folder / "single")
    return target
