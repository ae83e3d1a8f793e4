"""Local Sphinx extension: what the stock theme gets wrong for a page that must work offline and for everyone."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx


def one_search_field(app: Sphinx) -> None:
    """The theme puts a second, hidden search field into the navigation bar; screen readers meet both."""
    app.config.html_theme_options["navbar_persistent"] = []


FIGURE = r'(<figure [^>]*>\s*)(<img [^>]*src="(_images/[^"]+)"[^>]*>)'


def tidy_pages(app: Sphinx, error: Exception | None) -> None:
    """Drop the 1.5 MB icon script (the icon font stays), name the search field, take the list's role from citations.

    They have links between them, which a list must not. A figure links to its file: on a phone a tap opens it alone,
    and it can be enlarged.
    """
    if error or app.builder.name != "html":
        return
    out = Path(app.outdir)
    for page in out.rglob("*.html"):
        lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if "fontawesome.js" not in line]
        html = "".join(kept)
        html = html.replace('<div role="list" class="citation-list">', '<div class="citation-list">')
        html = html.replace('<input type="search"\n', '<input type="search" aria-label="Search"\n')
        html = html.replace("fab fa-github", "fas fa-code-branch")  # one icon is not worth a font of 118 kB
        if 'class="math' not in html:  # MathJax is 262 kB
            html = re.sub(r"<script [^>]*/mathjax/[^>]*></script>", "", html)
        html = re.sub(FIGURE, r'\1<a href="\3">\2</a>', html)
        page.write_text(html, encoding="utf-8")
    for script in (out / "_static").rglob("fontawesome.js*"):
        script.unlink()


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", one_search_field)
    app.connect("build-finished", tidy_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
