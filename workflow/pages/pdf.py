"""The book as one PDF: ``python -m workflow pdf --profile book``.

Sphinx joins all pages into a single one, and Chromium prints it. This needs no LaTeX, and the PDF shows what readers
see in the browser; ``book.css`` has the rules for print.
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
        RuntimeError: no program of ``BROWSERS`` is on the path.
    """
    for name in BROWSERS:
        path = shutil.which(name)
        if path:
            return path
    raise RuntimeError(f"no Chromium to print with: install one of {', '.join(BROWSERS)}")


def print_book(run: Run) -> Path:
    """Print the pages that were last rendered for the profile of a run.

    Returns:
        The PDF, ``_build/<profile>/norm-growth.pdf``.

    Raises:
        RuntimeError: there is no Chromium, or Sphinx or Chromium failed.
    """
    program = browser()
    folder = run.staging
    target = run.reports / "norm-growth.pdf"
    build.sphinx(folder, folder / "single", folder / "pdf.log", "-b", "singlehtml")
    options = ["--headless", "--disable-gpu", "--no-pdf-header-footer", "--virtual-time-budget=120000"]
    options += ["--no-sandbox"] if sys.platform == "linux" else []  # else root cannot start it; the page is ours
    target.unlink(missing_ok=True)
    page = (folder / "single" / "index.html").as_uri() + "?print"  # ?print draws interactive figures at once
    process = subprocess.run([program, *options, f"--print-to-pdf={target}", page], capture_output=True, text=True)
    if process.returncode or not target.exists():
        raise RuntimeError(f"{program} printed nothing: {process.stderr[-2000:]}")
    shutil.rmtree(folder / "single")
    return target
