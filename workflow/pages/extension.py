"""The local extension of Sphinx: links of the reference, and what the theme gets wrong."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from workflow.pages import api

if TYPE_CHECKING:  # only Sphinx itself needs it
    from sphinx.application import Sphinx

# What the theme gets wrong for a page that must work offline and for everyone, as pattern and replacement.
TIDY = (
    (r"<(?:script|link)[^>]*/fontawesome\.js[^>]*>(?:</script>)?", ""),  # 1.5 MB; the icons are a font, too
    ('<div role="list" class="citation-list">', '<div class="citation-list">'),  # its children are no list items
    # a second title and contents, for paper: what search would show of each page
    (r'<div id="jb-print-docs-body"(?:(?!<div id="searchbox">)[\s\S])*', ""),
    ("fab fa-github", "fas fa-code-branch"),  # one icon is not worth a font of 118 kB
    # a line does not begin with the point that ends a formula
    (r'(<span class="math[^"]*">[^<]*</span>)([.,;:?!)\]’”-]+)', r'<span class="unbroken">\1\2</span>'),
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
    app.connect("missing-reference", api.external_link)
    app.connect("autodoc-skip-member", api.skip_alias)
    app.connect("build-finished", tidy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
