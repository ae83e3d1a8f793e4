"""Local Sphinx extension: what the stock theme gets wrong for a page that must work offline and for everyone."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

from fontTools.subset import Subsetter
from fontTools.ttLib import TTFont
from sphinx.application import Sphinx


def one_search_field(app: Sphinx) -> None:
    """The theme puts a second, hidden search field into the navigation bar; screen readers meet both."""
    app.config.html_theme_options["navbar_persistent"] = []


def tidy_pages(app: Sphinx, error: Exception | None) -> None:
    """Drop the 1.5 MB icon script, icons and scripts that no page uses, name the search field.

    Citations lose the role of a list: they have links between them, which a list must not. Figures become part of their
    page, in its colours; on a phone a tap opens one alone, and it can be enlarged.
    """
    if error or app.builder.name != "html":
        return
    out = Path(app.outdir)
    for page in out.rglob("*.html"):
        lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
        # scripts of figures to move are fetched by book.js, styles stand where a figure does
        unused = r"fontawesome\.js|_static/explore/" + (r".*\.js" if 'class="explore"' in "".join(lines) else "")
        html = "".join(line for line in lines if not re.search(unused, line))
        html = html.replace('<div role="list" class="citation-list">', '<div class="citation-list">')
        html = html.replace('<input type="search"\n', '<input type="search" aria-label="Search"\n')
        html = html.replace("fab fa-github", "fas fa-code-branch")  # one icon is not worth a font of 118 kB
        if 'class="math' not in html:  # MathJax is 262 kB
            html = re.sub(r"<script [^>]*/mathjax/[^>]*></script>", "", html)
        html = _letters_once(IMAGE.sub(lambda match: _inlined(match, out), html))
        html = re.sub(r'<div class="glance-figure" data-figure="([\w-]+)"></div>', partial(_small, html=html), html)
        html = PAIR.sub(partial(_pair, out=out), html)
        page.write_text(html, encoding="utf-8")
    for notebook in (Path(app.srcdir) / "executed").glob("*.ipynb"):  # what the button of a page downloads
        shutil.copy(notebook, out / "_sources" / notebook.name)
    named = "".join(page.read_text(encoding="utf-8") for page in out.glob("*.html"))
    for image in (out / "_images").glob("*"):  # of an earlier build, whose page was made anew
        if image.name not in named:
            image.unlink()
    for script in (out / "_static").rglob("fontawesome.js*"):
        script.unlink()
    _few_icons(out / "_static", named)


def _few_icons(static: Path, pages: str) -> None:
    """Replace the font of 1,400 icons, 156 kB on every page, by one of those that pages, scripts and styles name."""
    sheet = static / "styles" / "pydata-sphinx-theme.css"
    style = sheet.read_text(encoding="utf-8")
    codes = {
        name: code
        for rule, code in re.findall(r'((?:\.fa-[\w-]+:+before,?)+)\{content:"\\([0-9a-f]+)"', style)
        for name in re.findall(r"fa-[\w-]+", rule)
    }
    scripts = "".join(path.read_text(encoding="utf-8") for path in (static / "scripts").glob("*.js"))
    wanted = {int(codes[name], 16) for name in re.findall(r"\bfa-[\w-]+", pages + scripts) if name in codes}
    for path in static.rglob("*.css"):  # what styles use without a name, as an escape or as the letter itself
        text = re.sub(r'\.fa-[^{}]*\{content:"[^"]*"', "", path.read_text(encoding="utf-8"))
        wanted |= {int(code, 16) for code in re.findall(r'"\\([ef][0-9a-f]{3})"', text)}
        wanted |= {ord(letter) for letter in text if "\ue000" <= letter <= "\uf8ff"}
    fonts = static / "vendor" / "fontawesome" / "webfonts"
    font = TTFont(fonts / "fa-solid-900.ttf", recalcTimestamp=False)
    subsetter = Subsetter()
    subsetter.populate(unicodes=wanted)
    subsetter.subset(font)
    font.flavor = "woff"  # woff2 would need a package more for 1 kB
    font.save(fonts / "icons.woff")
    source = r"url\([^)]*fa-solid-900\.woff2\) format\(\"woff2\"\),url\([^)]*fa-solid-900\.ttf\) format\(\"truetype\"\)"
    style, replaced = re.subn(source, 'url(../vendor/fontawesome/webfonts/icons.woff) format("woff")', style)
    if not codes or not (replaced or "icons.woff" in style):
        raise ValueError(f"{sheet.name} names its icons in another way than before: look at _few_icons")
    sheet.write_text(style, encoding="utf-8")


IMAGE = re.compile(
    r'(?P<before><figure [^>]*?id="(?P<name>[\w-]+)"[^>]*>\s*)(?:<a [^>]*>)?'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<src>_images/[\w.-]+\.svg)"(?P<rest>[^>]*)/?>(?:\s*</a>)?'
)
# The colours of the book's figures by what `book.css` calls them, which says what each is on light and on dark pages.
THEME = {
    "#000000": "text", "#222222": "text", "#ffffff": "ground", "#e3e3e3": "grid", "#ededed": "grid", "#f0f0f0": "grid",
    "#0072b2": "blue", "#e69f00": "orange", "#009e73": "green", "#cc79a7": "pink", "#56b4e9": "sky", "#d55e00": "red",
    "#595959": "grey", "#666666": "grey",
}  # fmt: skip
COLOUR = re.compile("|".join(THEME), re.I)


def _inlined(match: re.Match[str], out: Path) -> str:
    """A figure's drawing in the place of its image, as a link to the file."""
    drawing = themed((out / match["src"]).read_text(encoding="utf-8"), match["name"])
    width = re.search(r"width: ?[\d.]+%", match["rest"])
    start = f'<svg id="svg-{match["name"]}" class="figure" role="img" aria-label="{match["alt"]}"'
    start += f' style="{width[0]}"' if width else ""
    return f'{match["before"]}<a class="figure-link" href="{match["src"]}">{drawing.replace("<svg", start, 1)}</a>'


def themed(svg: str, name: str) -> str:
    """A drawing of matplotlib's as part of a page: its colours are variables, its ids carry the figure's name.

    Letters keep their ids: all drawings of a page share them.

    >>> themed('<svg width="9pt" viewBox="0 0 9 9"><use xlink:href="#a"/><g id="a" d="1.23456"/></svg>', "f")
    '<svg viewBox="0 0 9 9"><use href="#f-a"/><g id="f-a" d="1.2"/></svg>'
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style .*?</style>", "", _shorter(svg), flags=re.S)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", svg, count=1)
    own = rf'(?:(?<= id=")|(?<=href="#)|(?<=url\(#))(?!{FONTS})'
    svg = re.sub(own, f"{name}-", svg).replace("xlink:href", "href")
    svg = COLOUR.sub(lambda found: f"var(--fig-{THEME[found[0].lower()]})", svg)
    return re.sub(r"\s+", " ", svg).replace("> <", "><").strip()


def _shorter(svg: str) -> str:
    """A drawing without comments, its places to a tenth of a point; scales and styles keep their digits."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    return re.sub(r'scale\([^)]*\)|style="[^"]*"|(\b\d+\.\d)\d+', lambda found: found[1] or found[0], svg)


FONTS = "DejaVu|Cm|STIX"


def _letters_once(html: str) -> str:
    """The page with the shape of each letter in its first drawing alone: they are half the weight of a figure."""
    seen: set[str] = set()

    def first(match: re.Match[str]) -> str:
        known = match[1] in seen
        seen.add(match[1])
        return "" if known else match[0]

    return re.sub(rf'<path id="((?:{FONTS})[^"]*)"[^>]*/>', first, html)


def _small(match: re.Match[str], html: str) -> str:
    """A figure of the page once more, for the card at its head; nothing is drawn twice."""
    found = re.search(rf'<svg id="svg-{match[1]}"[^>]*aria-label="([^"]*)"[^>]*(viewBox="[^"]*")', html)
    if found is None:
        raise ValueError(f"the card shows {match[1]}, and the page has no such figure")
    drawing = f'<svg role="img" aria-label="{found[1]}" {found[2]}><use href="#svg-{match[1]}"/></svg>'
    return f'<a class="glance-figure" href="#{match[1]}">{drawing}</a>'


def _wordless(svg: str) -> str:
    """A drawing without its letters and legends, which nobody could read at the size of a card.

    >>> head = '<svg xmlns="http://www.w3.org/2000/svg">'
    >>> _wordless(head + '<g id="line"/><g><g id="text_1"><g/></g></g><g id="legend_1"/></svg>')
    '<svg xmlns="http://www.w3.org/2000/svg"><g id="line" /><g /></svg>'
    """
    for prefix, space in (("", "http://www.w3.org/2000/svg"), ("xlink", "http://www.w3.org/1999/xlink")):
        ET.register_namespace(prefix, space)
    root = ET.fromstring(svg[svg.index("<svg") :])
    for parent in [*root.iter()]:
        for child in [each for each in parent if each.get("id", "").startswith(("text_", "legend_"))]:
            parent.remove(child)
    return ET.tostring(root, encoding="unicode")


PAIR = re.compile(r'<div class="(?P<kind>card-figure[^"]*)" data-figure="(?P<page>[\w-]+)#(?P<name>[\w-]+)">.*?</div>')


def _pair(match: re.Match[str], out: Path) -> str:
    """A figure of another page as two small images, for light and for dark; only the one that is seen is loaded.

    Done again after each build, since the other page may have been made anew alone.
    """
    page = (out / f"{match['page']}.html").read_text(encoding="utf-8")
    figure = page.partition(f'id="{match["name"]}"')[2].partition("</figure>")[0]
    found, alt = re.search(r"_images/[\w.-]+\.svg", figure), re.search(r'(?:alt|aria-label)="([^"]*)"', figure)
    if found is None or alt is None:
        raise ValueError(f"a card shows {match['page']}#{match['name']}, and there is no such figure")
    light, dark = (found[0].replace(".svg", f"-{kind}.svg") for kind in ("light", "dark"))
    svg = _shorter((out / found[0]).read_text(encoding="utf-8"))
    svg = svg if "hero" in match["kind"] else _wordless(svg)
    (out / light).write_text(svg, encoding="utf-8")
    css = (out / "_static" / "book.css").read_text(encoding="utf-8").partition("/* figures, dark */")[2]
    colours = dict(re.findall(r"--fig-(\w+): (#\w+)", css.partition("}")[0]))
    svg = COLOUR.sub(lambda each: colours[THEME[each[0].lower()]], svg)
    # letters have no colour of their own: they are black where nothing says otherwise
    (out / dark).write_text(svg.replace("<svg ", f'<svg fill="{colours["text"]}" ', 1), encoding="utf-8")
    images = (("light", light), ("dark", dark))
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()  # so that its room is kept
    shown = f'width="{float(width):.0f}" height="{float(height):.0f}" alt="{alt[1]}"'
    shown += "" if "hero" in match["kind"] else ' loading="lazy"'
    shown = "".join(f'<img class="only-{kind}" src="{src}" {shown}>' for kind, src in images)
    return f'<div class="{match["kind"]}" data-figure="{match["page"]}#{match["name"]}">{shown}</div>'


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", one_search_field)
    app.connect("build-finished", tidy_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
