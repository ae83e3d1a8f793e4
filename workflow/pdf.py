"""The book as one PDF: its pages on one, printed by a Chromium. ``python -m workflow pdf --profile book``

LaTeX is not needed, and what the PDF shows is what the reader sees in the browser.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from workflow import BUILD
from workflow.render import jupyter_book

EXPLORE = ("d3.min.js", "plot.umd.min.js", "t5.js", "explore.js")  # as book.js fetches them
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PRINT = """
<style>@media print {
  .bd-sidebar-primary, .bd-sidebar-secondary, .bd-header, .header-article, .bd-header-article, .prev-next-footer,
  .bd-footer, button, .headerlink { display: none !important; }
  h1 { break-before: page; } figure, img, table { break-inside: avoid; } pre { white-space: pre-wrap; }
}</style>
"""


def browser() -> str:
    """Path of a Chromium.

    Raises:
        RuntimeError: there is none on the path.
    """
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    raise RuntimeError(f"no Chromium to print with: install one of {', '.join(BROWSERS)}")


def make(profile: str) -> Path:
    """Print the pages that the last ``--html`` run of this profile staged.

    Returns:
        The PDF, ``_build/<profile>/norm-growth.pdf``.

    Raises:
        RuntimeError: no staged pages, no Chromium, or one of the two steps failed.
    """
    folder, program = BUILD / profile, browser()
    if not (folder / "source" / "_toc.yml").exists():
        raise RuntimeError(f"no pages in {folder}: run `make book` first, or `--profile {profile} --html`")
    single, target = folder / "single-page", folder / "norm-growth.pdf"
    shutil.rmtree(single, ignore_errors=True)
    _run([*jupyter_book(folder / "source", single), "--builder", "singlehtml"])
    page = single / "_build" / "singlehtml" / "index.html"
    page.write_text(for_paper(page.read_text(encoding="utf-8")), encoding="utf-8")
    target.unlink(missing_ok=True)
    options = ["--headless", "--disable-gpu", "--no-pdf-header-footer", "--virtual-time-budget=120000"]
    if sys.platform == "linux":
        options.append("--no-sandbox")  # a container's root has none; the page is our own
    _run([program, *options, f"--print-to-pdf={target}", page.as_uri()])
    if not target.exists():
        raise RuntimeError(f"{program} printed nothing")
    shutil.rmtree(single)
    return target


def for_paper(text: str) -> str:
    """The book on one page as it is printed: all unfolded, since paper cannot, and cards with their figures."""
    text = re.sub(
        r'<div class="[^"]*" data-figure="(?:[\w-]+#)?([\w-]+)"></div>', lambda card: _small(card[1], text), text
    )
    text = re.sub(r"<script [^>]*_static/explore/[^>]*></script>", "", text)  # here in no order, and too early
    text = text.replace("<details", "<details open").replace("</head>", PRINT + "</head>", 1)
    scripts = "".join(f'<script src="_static/explore/{name}"></script>' for name in EXPLORE)
    return text.replace("</body>", f"{scripts}</body>", 1)


def _small(name: str, text: str) -> str:
    """The figure of that name as a small image."""
    image = re.search(r'<img alt="[^"]*" src="[^"]*"', text.partition(f'id="{name}"')[2])
    if image is None:
        raise ValueError(f"a card shows {name}, and there is no such figure")
    return f'<div class="card-figure">{image[0]} style="max-width: 60%"/></div>'


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout)[-2000:]}")
