"""The pages of the book: what they say of a run, the templates that show it, and a local extension of Sphinx.

``build`` stages the sources of all pages, plain MyST, and Sphinx renders them; nothing of the run is read later.
"""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from nbutils.claims.records import Record, format_band, format_measured, format_number
from workflow import book, notebooks
from workflow.pages import api

if TYPE_CHECKING:  # only Sphinx itself needs it
    from sphinx.application import Sphinx


def state(record: Record) -> str:
    """What became of a check, in a word."""
    return "open" if record.role == "open" else "holds" if record.holds else "noted" if record.noted else "fails"


@cache
def gpu() -> dict[str, Any]:
    """What a GPU measured, as ``book/gpu.json`` keeps it."""
    return json.loads(notebooks.ON_GPU.read_text(encoding="utf-8"))


def on_gpu(record: Record) -> str:
    """What a GPU measured of a check; empty where it was not run there, or is open."""
    value = gpu()["checks"].get(f"{record.claim}: {record.check}")
    return "" if value is None else format_number(value)


TEMPLATES = Environment(
    loader=PackageLoader("workflow.pages"),
    undefined=StrictUndefined,  # a placeholder that stands for nothing is an error that names it
    autoescape=lambda name: ".html." in (name or ""),  # Markdown is escaped where it holds HTML
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"measured": format_measured, "band": format_band, "state": state, "origin": book.origin}
TEMPLATES.filters |= {"version": book.version, "on_gpu": on_gpu}


def render(template: str, **values: Any) -> str:
    return TEMPLATES.get_template(template).render(values)


# What the theme gets wrong for a page that must work offline and for everyone, as pattern and replacement.
TIDY = (
    (r"<(?:script|link)[^>]*/fontawesome\.js[^>]*>(?:</script>)?", ""),  # 1.5 MB; the icons are a font, too
    ('<div role="list" class="citation-list">', '<div class="citation-list">'),  # its children are no list items
    # a second title and contents, for paper: what search would show of each page
    (r'<div id="jb-print-docs-body"(?:(?!<div id="searchbox">)[\s\S])*', ""),
    ("fab fa-github", "fas fa-code-branch"),  # one icon is not worth a font of 118 kB
)
MATHJAX = re.compile(r"<script [^>]*/mathjax/[^>]*></script>")


def tidy(app: Sphinx, error: Exception | None) -> None:
    """Correct the pages where they are, and put what they let one download beside them."""
    if error or app.builder.name != "html":
        return
    out = Path(app.outdir)
    for page in [page for page in out.rglob("*.html") if "_static" not in page.parts]:
        html = page.read_text(encoding="utf-8")
        for pattern, replacement in TIDY:
            html = re.sub(pattern, replacement, html)
        page.write_text(html if 'class="math' in html else MATHJAX.sub("", html), encoding="utf-8")
    shutil.copytree(Path(app.srcdir) / "executed", out / "_sources", dirs_exist_ok=True)
    for script in (out / "_static").rglob("fontawesome.js*"):
        script.unlink()


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("missing-reference", api.elsewhere)
    app.connect("autodoc-skip-member", api.unsaid)
    app.connect("build-finished", tidy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
