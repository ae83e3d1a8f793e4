"""The built pages: links, numbers, captions, buttons; and in a browser, from disk, without a network."""

import copy
import gzip
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlparse

import axe_playwright_python
import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup
from playwright.sync_api import sync_playwright

from workflow import ROOT, Run, book
from workflow.pages import build, pdf
from workflow.pages.verdicts import ORDER

CARDS = {name: book.card(name) for name in book.chapters()}
PAGES = ("index", *book.chapters(), "scorecard", "errata", "new", "notation", "running", "run", "api", "bibliography")


@pytest.fixture(scope="module")
def html(smoke) -> Path:
    return smoke / "html"


@pytest.fixture(scope="module")
def soups(html):
    return {page: BeautifulSoup((html / f"{page}.html").read_text(encoding="utf-8"), "html.parser") for page in PAGES}


def text(soup):
    return " ".join(soup.find("main").get_text(" ").split())


def test_every_page_of_the_toc_is_there(html):
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    listed = [toc["root"], *(entry["file"] for part in toc["parts"] for entry in part["chapters"])]
    assert sorted(listed) == sorted(PAGES) and all((html / f"{page}.html").exists() for page in listed)


def test_internal_links_and_anchors_resolve(html, soups):
    anchors = cache(lambda file: set(re.findall(r'\sid="([^"]*)"', file.read_text(encoding="utf-8"))))
    for page, soup in soups.items():
        for link in soup.find_all("a", href=True):
            target = urlparse(link["href"])
            if target.scheme or target.netloc:
                continue
            file = html / (unquote(target.path) or f"{page}.html")
            assert file.exists(), f"{page}: {link['href']}"
            if target.fragment and file.suffix == ".html":
                assert unquote(target.fragment) in anchors(file), f"{page}: {link['href']}"


def test_no_markup_is_left_raw(soups):
    for page, soup in soups.items():
        prose = copy.copy(soup.find("main"))
        for verbatim in prose.select("pre, code, script, .math"):
            verbatim.decompose()
        found = re.search(r"\{\{|\}\}|\{(glue|eq|numref|cite)|\[\?\]|\bnan\b", prose.get_text(" "))
        assert not found, (page, found)


def test_every_figure_has_number_caption_and_alt_text(soups):
    for chapter in book.chapters():
        figures = [figure for figure in soups[chapter].find_all("figure") if figure.find("img")]
        assert figures
        for figure in figures:
            assert figure.find(class_="caption-number") and "What to see" in figure.find("figcaption").get_text()
    for page, soup in soups.items():
        for image in soup.find("article").find_all("img"):
            assert len(image.get("alt", "")) > 20, (page, image)


def test_text_in_figures_is_of_reading_size(soups, html):
    """At the width of the article, 648 px; matplotlib writes text as paths, scaled by a hundredth of its size."""
    for chapter in book.chapters():
        assert soups[chapter].select("figure a.figure-link"), chapter
        for link in soups[chapter].select("figure a.figure-link"):
            svg = (html / link["href"]).read_text(encoding="utf-8")
            width = float(re.search(r'viewBox="0 0 ([\d.]+) ', svg)[1])
            sizes = [100 * float(scale) * 648 / width for scale in re.findall(r"scale\((0?\.\d+) -", svg)]
            assert min(sizes) >= 8.4, (chapter, link["href"], min(sizes))


def test_axes_of_figures_are_labelled(soups, html):
    """In each figure some x axis and some y axis has a label, or ticks that are words."""
    title = r'^   <g id="matplotlib.axis_\d*[{}]">\n(?:(?!^   </g>).*\n)*?    <g id="text_\d+">'
    words = r'^    <g id="{}tick_\d+">\n(?:(?!^    </g>).*\n)*? *<!-- [A-Za-z]{{2}}'
    for chapter in book.chapters():
        for link in soups[chapter].select("figure a.figure-link"):
            svg = (html / link["href"]).read_text(encoding="utf-8")
            for name, digits in (("x", "13579"), ("y", "02468")):
                found = re.search(title.format(digits), svg, re.M) or re.search(words.format(name), svg, re.M)
                assert found, f"{chapter}, {link['href']}: no label on the {name} axis"


def test_equations_and_figures_are_numbered_and_referred_to(soups):
    for chapter in book.chapters():
        assert soups[chapter].find(class_="eqno") and soups[chapter].find("a", href=re.compile("#equation-"))
        assert soups[chapter].find("span", class_="std-numref")


def test_box_at_the_top_shows_the_verdicts_of_the_run(smoke, soups):
    verdicts = json.loads((smoke / "metrics.json").read_text())["verdicts"]
    claims = book.claims()
    for chapter in book.chapters():
        box = soups[chapter].find(class_="verdict-box")
        shown = {row.find("code").get_text(): row.find(class_="verdict").get_text() for row in box.find_all("li")}
        assert shown == {
            name: verdicts[name] for name in claims if chapter in claims[name]["chapters"] and name in verdicts
        }


def test_a_card_at_the_head_shows_what_was_found_and_its_figure(smoke, soups):
    verdicts = json.loads((smoke / "metrics.json").read_text())["verdicts"]
    for chapter, told in CARDS.items():
        card = soups[chapter].find(class_="glance")
        assert card.find(class_="verdict").get_text() == verdicts[told["claims"][0]], chapter
        asked, claim, *rest = (each.get_text() for each in card.find_all("strong"))
        assert (asked, rest[:2]) == ("Asked.", ["Found.", "Remember."]), chapter
        assert claim in ("The paper says.", "The claim is ours.", "Expected."), chapter
        assert card.select_one("a.glance-figure")["href"] == f"#{told['figure']}", chapter
        drawn = [image["src"] for image in card.select("a.glance-figure img")]
        assert drawn == [image["src"] for image in soups[chapter].select(f"figure#{told['figure']} img")], chapter
        assert soups[chapter].find("article").find("h2").sourceline > card.sourceline, "above the first section"


def test_every_check_stands_in_the_line_of_its_section(smoke, soups):
    records = json.loads((smoke / "metrics.json").read_text())["records"]
    for chapter in book.chapters():
        mine = Counter(record["check"] for record in records if record["chapter"] == chapter)
        rows = copy.copy(soups[chapter]).select("details.checks tbody tr")
        [row.find("code").extract() for row in rows]  # the claim
        found = Counter(" ".join(row.find("td").get_text().split()).partition(" ")[2] for row in rows)
        assert found == Counter(" ".join(check.split()) for check in mine.elements()), chapter
        told = [each.get_text() for each in soups[chapter].select("details.checks summary")]
        assert sum(int(number) for each in told for number in re.findall(r"\d+", each)) == len(rows)


def test_figures_to_move_stand_where_they_are_said_to(soups):
    wanted = {chapter for chapter, told in CARDS.items() if "explore" in told}
    for page, soup in soups.items():
        assert not soup.select("script[src*='_static/explore/']"), page
        assert bool(soup.select("div.explore")) == (page in wanted) == bool(soup.select("link[href*='explore.css']"))


@pytest.mark.parametrize("chapter", [name for name, told in CARDS.items() if "explore" in told])
def test_a_figure_to_move_is_drawn_when_it_comes_near(window, chapter):
    """Its libraries, 160 kB, are not asked for before."""
    page = window.open(f"{chapter}.html")
    assert not [url for url in window.asked if "d3.min.js" in url]
    page.locator("div.explore").first.scroll_into_view_if_needed()
    page.wait_for_selector("div.explore figure svg[role=img]")
    page.wait_for_selector("div.explore output:not(:empty)")
    assert len([url for url in window.asked if "d3.min.js" in url]) == 1
    assert window.said == []


def test_figures_to_move_are_on_paper(window):
    page = window.open("01-random-walk.html")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_selector("div.explore figure svg[role=img]", state="attached")


def test_only_code_that_teaches_is_in_view(soups):
    def shown(chapter):
        inputs = soups[chapter].select("div.cell div.cell_input")
        return "\n".join(each.get_text() for each in inputs if not each.find_parent("details"))

    for chapter in book.chapters():
        assert "importlib" not in shown(chapter) and "Ledger(" not in shown(chapter)
    assert "unrolled = torch.cumsum(squares + cross, dim=0)" in shown("01-random-walk")
    assert "def mixed_sum" in shown("13-saturation") and "mine = None" in shown("17-your-own")


def test_the_landing_page_shows_findings_and_chapters(smoke, soups):
    page, verdicts = soups["index"], json.loads((smoke / "metrics.json").read_text())["verdicts"]
    findings, cards = page.select(".cards")
    assert len(findings.select(":scope > *")) == 6 and len(cards.select(":scope > *")) == len(CARDS)
    for card in [*findings.select(":scope > *"), *cards.select(":scope > *")]:
        assert card.find("a", href=True) and {"only-light", "only-dark"} == {
            kind for image in card.find_all("img") for kind in image["class"] if kind.startswith("only")
        }
    shown = [card.find(class_="verdict").get_text() for card in cards.select(":scope > *")]
    assert shown == [verdicts[told["claims"][0]] for told in CARDS.values()]
    assert "This run is green" in text(page)


def test_scorecard_has_every_claim_and_links_to_its_evidence(smoke, soups):
    rows = {
        row.select_one(".claim-id code").get_text(): row for row in soups["scorecard"].select(".claims-table tbody tr")
    }
    claims, verdicts = book.claims(), json.loads((smoke / "metrics.json").read_text())["verdicts"]
    assert set(rows) == set(claims)
    for name, row in rows.items():
        assert row.find(class_="verdict").get_text() == verdicts[name]
        if name in verdicts:
            page, _, anchor = row.find("a")["href"].partition(".html#")
            assert page in claims[name]["chapters"] and name in soups[page].find(id=anchor).get_text()


def test_what_is_new_has_every_correction_and_every_question_of_ours(smoke, soups):
    verdicts = json.loads((smoke / "metrics.json").read_text())["verdicts"]
    claims = book.claims()
    wanted = {name for name in verdicts if claims[name].get("ours") or claims[name].get("corrected")}
    targets = [link["href"] for link in soups["new"].find("article").select("li a[href*='#claim-']")]
    assert Counter(target.partition("#claim-")[2] for target in targets) == Counter(wanted)


def test_numbers_in_prose_come_from_the_run(smoke, soups):
    """What the page shows for one number is what the executed notebook measured."""
    records = json.loads((smoke / "metrics.json").read_text())["records"]
    measured = next(r["measured"] for r in records if r["check"] == "last 20 intervals over the cap")
    assert f"{measured:.3f}" in text(soups["04-t5"])
    exponent = next(r["measured"] for r in records if r["check"] == "exponent, n = 1")
    assert f"{exponent:.3f}" in text(soups["01-random-walk"])


def test_index_shows_the_counts_of_the_run(smoke, soups):
    """The paper's claims and our own questions are counted apart, and planned ones are no verdicts."""
    verdicts, claims = json.loads((smoke / "metrics.json").read_text())["verdicts"], book.claims()
    shown = text(soups["index"])
    for ours in (False, True):
        names = [name for name, claim in claims.items() if bool(claim.get("ours")) is ours]
        counts = Counter(verdicts[name] for name in names)
        assert all(f"{count} {verdict}" in shown for verdict, count in counts.items())
        assert f"{len(names)} {'questions of ours' if ours else 'claims of the paper'}" in shown


def test_how_it_was_run_has_time_memory_versions_and_hardware(smoke, soups):
    run = json.loads((smoke / "metrics.json").read_text())["run"]
    page = text(soups["run"])
    assert run["hardware"] in page and run["versions"]["torch"] in page
    for stats in run["notebooks"]:
        assert f"{stats['seconds']:.1f}" in page and f"{stats['peak_mb']:.0f}" in page and stats["peak_mb"] > 50


def test_launch_and_download_buttons(html, soups):
    settings = build.settings()
    url, branch = settings["repository"]["url"], settings["repository"]["branch"]
    name = url.removeprefix("https://github.com/")
    for chapter in book.chapters():
        links = [link["href"] for link in soups[chapter].find_all("a", href=True)]
        assert f"https://colab.research.google.com/github/{name}/blob/{branch}/book/notebooks/{chapter}.ipynb" in links
        assert any(
            link.startswith(f"https://mybinder.org/v2/gh/{name}/{branch}?urlpath=")
            and f"book/notebooks/{chapter}.ipynb" in link
            for link in links
        )
        assert (
            any(link.endswith(f"_sources/{chapter}.ipynb") for link in links)
            and (html / "_sources" / f"{chapter}.ipynb").exists()
        )


def test_what_a_page_lets_one_download_is_the_executed_notebook(html):
    for chapter in book.chapters():
        node = nbformat.read(html / "_sources" / f"{chapter}.ipynb", as_version=4)
        prose = "\n".join(cell.source for cell in node.cells if cell.cell_type == "markdown")
        assert not re.search(r"```\{|\{[a-z:]+\}`|^:::|<details", prose, re.M), chapter
        assert all(cell.execution_count for cell in node.cells if cell.cell_type == "code" and cell.source.strip())
        assert any(cell.get("outputs") for cell in node.cells)


def test_repository_and_issue_buttons(soups):
    url = build.settings()["repository"]["url"]
    for page, soup in soups.items():
        links = {link["href"] for link in soup.select("header a[href], .article-header-buttons a[href]")}
        assert url in links, page
        assert any(link.startswith(f"{url}/issues/new") and f"{page}.html" in link for link in links), page


# In a browser. Each page is loaded once, and then looked at in two widths and two schemes.

WIDTHS, SCHEMES = (1280, 380), ("light", "dark")
LOOKS = [(width, scheme) for width in WIDTHS for scheme in SCHEMES]
SCROLLS = "pre, div.math, mjx-container, .pst-scrollable-table-container, .cell_output .text_html"

# Elements of prose that stick out of the window, and places that scroll sideways but should not.
SIDEWAYS = """scrolls => {
  const name = e => e.tagName + "." + e.className + ": " + e.textContent.trim().slice(0, 60);
  const prose = "main article :is(p, li, h1, h2, h3, h4, dt, dd, figcaption, img, svg, table)";
  const out = [...document.querySelectorAll(prose)]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(scrolls) && !e.closest(".headerlink"));
  const moving = [...document.querySelectorAll("main article, main article *")]
    .filter(e => e.scrollWidth > e.clientWidth + 1
    && /auto|scroll/.test(getComputedStyle(e).overflowX) && !e.closest(scrolls));
  const whole = document.documentElement.scrollWidth > innerWidth + 1 ? ["the page"] : [];
  return [...whole, ...out.map(name), ...moving.map(name)];
}"""
WIDE = """() => [...document.querySelectorAll("main div.math mjx-container")]
  .filter(math => math.scrollWidth > math.clientWidth + 1).map(math => math.textContent.slice(0, 60))"""
# Of all images that can be seen; those below the window wait until somebody scrolls there.
LOADED = """async () => {
  const seen = [...document.images].filter(image => image.checkVisibility());
  seen.forEach(image => { image.loading = "eager"; });
  await Promise.all(seen.map(image => image.decode()));
  return seen.every(image => image.complete && image.naturalWidth > 0);
}"""
# Tables that scroll sideways and do not show it. Scroll shadows are a background image.
NO_HINT = """() => [...document.querySelectorAll("main table")].flatMap(table => {
  let box = table;
  while (box && !/auto|scroll/.test(getComputedStyle(box).overflowX)) box = box.parentElement;
  const hidden = box && box.scrollWidth > box.clientWidth + 1;
  const hinted = hidden && getComputedStyle(box).backgroundImage.includes("gradient");
  return hidden && !hinted ? [table.className + ": " + table.textContent.trim().slice(0, 60)] : [];
})"""
AXE = """async ([rules, ...leave]) => {
  const options = {resultTypes: ["violations"], preload: false, ...(rules ? {runOnly: rules} : {})};
  const found = await axe.run({exclude: [["mjx-container"], ...leave.map(x => [x])]}, options);
  return found.violations.filter(v => ["serious", "critical"].includes(v.impact))
    .map(v => v.id + ": " + v.nodes.slice(0, 3).map(n => n.html.slice(0, 160) + " " + n.any.map(a => a.message)));
}"""
# Axe looks long at every word of code, whose colours are alike on all pages: once is enough.
ALIKE: dict[str, list[str]] = {"01-random-walk": []}
MATH_DONE = """async () => {
  if (document.querySelector("script[src*=mathjax]")) await MathJax.startup.promise;
  await document.fonts.ready;
}"""


@pytest.fixture(scope="module")
def browser(chromium):
    quiet = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium, args=quiet)
        yield opened
        opened.close()


class Window:
    """One browser tab that notes what pages say in the console and which files they ask for."""

    def __init__(self, browser, html):
        self.html, self.said, self.asked = html, [], []
        self.page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        self.page.on("console", lambda m: self.said.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, name, width=1280, scheme="light"):
        self.said.clear()
        self.asked.clear()
        self.look(width, scheme)
        path, mark, query = name.partition("#" if "#" in name and "?" not in name else "?")
        self.page.goto((self.html / path).as_uri() + mark + query)
        self.page.add_style_tag(content="* {transition: none !important}")  # else axe sees colours half-way
        self.page.evaluate(MATH_DONE)
        return self.page

    def look(self, width, scheme):
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)


@pytest.fixture(scope="module")
def window(browser, html):
    return Window(browser, html)


@pytest.mark.parametrize("name", ["index", "scorecard", "02-step-geometry"])
def test_a_page_on_a_phone_is_accessible(window, name):
    page = window.open(f"{name}.html", 380, "dark")
    page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    assert page.evaluate(AXE, [None, "div.highlight"]) == []


def test_a_link_to_a_check_opens_its_section(window):
    page = window.open("01-random-walk.html#claim-walk-middle")
    page.wait_for_selector("details.checks[open] #claim-walk-middle")
    assert page.locator("details.checks[open]").count() == 1
    assert 0 < page.locator("#claim-walk-middle").bounding_box()["y"] < 900


@pytest.fixture(scope="module")
def weights(html):
    """Size of a file as a server sends it: text in gzip, fonts and images as they are."""
    return cache(lambda path: min(len(gzip.compress(Path(path).read_bytes())), Path(path).stat().st_size))


@pytest.mark.parametrize("name", PAGES)
def test_page_in_a_browser(window, html, soups, weights, name):
    """From disk, without a network, wide and narrow, light and dark."""
    turn = PAGES.index(name) % len(LOOKS)  # another look at loading for each page
    looks = LOOKS[turn:] + LOOKS[:turn]
    page = window.open(f"{name}.html", *looks[0])
    for figure in page.locator("div.explore").all():  # fetched late; as soon as it is near
        figure.scroll_into_view_if_needed()
        figure.locator("figure svg[role=img]").wait_for()
    page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    for width, scheme in looks:
        window.look(width, scheme)
        page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)
        assert page.evaluate(SIDEWAYS, SCROLLS) == [], (width, scheme)
        assert page.evaluate(NO_HINT) == [], (width, scheme)
        if width == 1280:
            assert page.evaluate(WIDE) == [], "equations that do not fit"
            rules = None if scheme == "light" else ["color-contrast"]
            assert page.evaluate(AXE, [rules, *ALIKE.get(name, ["div.highlight"])]) == [], (width, scheme)
    assert window.said == []
    assert [url for url in window.asked if not url.startswith(("file:", "data:"))] == []
    files = {unquote(urlparse(url).path) for url in window.asked if url.startswith("file:")}
    files = {file for file in files if "/_static/explore/" not in file or file.endswith(".css")}
    assert page.evaluate(LOADED), "an image did not load"
    assert page.evaluate("document.querySelectorAll('mjx-merror').length") == 0
    wanted = len(soups[name].select("main span.math, main div.math"))
    assert page.evaluate("document.querySelectorAll('main mjx-container').length") >= wanted
    budget = 560_000 if name == "index" else 1_150_000  # with thumbnails for both schemes and the font of icons
    assert sum(map(weights, files)) < budget, "gzipped, with all it loads"


def test_search_finds_a_theorem(window):
    page = window.open("search.html?q=Theorem+4")
    page.wait_for_selector("#search-results ul.search li a", timeout=20_000)
    found = page.locator("#search-results ul.search li a").evaluate_all("links => links.map(l => l.href)")
    assert any("12-vanishing-steps.html" in link for link in found)
    assert [url for url in window.asked if not url.startswith(("file:", "data:"))] == [] and window.said == []


def test_search_from_a_page(window):
    page = window.open("index.html")
    page.keyboard.press("Control+k")
    page.keyboard.type("saturation")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results ul.search li a", timeout=20_000)
    assert "q=saturation" in page.url


def natural(name):
    """Sorting key in which fig1-80 comes before fig1-100."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def test_scorecard_filters(window):
    """By verdict, chapter and text, each told to screen readers and kept in the address."""
    page = window.open("scorecard.html")
    assert page.locator(".claims-filter").bounding_box()["y"] < 700, "in the first window"
    whole = page.locator(".claims-table tbody tr").count()
    shown, verdict = page.locator(".claims-table tbody tr:visible"), page.locator("[name=verdict]")
    verdict.select_option("refuted")
    assert 0 < shown.count() < whole
    assert set(shown.locator(".verdict").all_inner_texts()) == {"refuted"}
    told = f"{shown.count()} of {whole} claims shown: {shown.count()} refuted"
    assert page.get_by_role("status").inner_text() == told and page.url.endswith("?verdict=refuted")
    verdict.select_option("")
    page.locator("[name=chapter]").select_option("3")
    assert all("3" in numbers.split() for numbers in shown.evaluate_all("rows => rows.map(r => r.dataset.chapters)"))
    page.locator("[name=chapter]").select_option("")
    ours = {name for name, claim in book.claims().items() if claim.get("ours")}
    page.get_by_label("Asked by").select_option("us")
    assert set(shown.locator(".claim-id").all_inner_texts()) == ours
    page.get_by_label("Asked by").select_option("the paper")
    assert not ours & set(shown.locator(".claim-id").all_inner_texts()) and shown.count() + len(ours) == whole
    page.get_by_label("Asked by").select_option("")
    page.locator("[name=text]").fill("no claim says this")
    assert shown.count() == 0 and page.get_by_role("status").inner_text().startswith("No claim fits")
    page.locator("[name=text]").fill("layer norm")
    texts = [text.lower() for text in shown.all_inner_texts()]
    assert 0 < len(texts) < whole and all("layer" in text and "norm" in text for text in texts)
    page.get_by_role("button", name="Show all").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("!location.search")
    assert shown.count() == whole and window.said == []


def test_scorecard_is_filtered_by_its_address(window):
    """As pages link to it; a value that no claim has asks for nothing."""
    page = window.open("scorecard.html?verdict=refined&chapter=3&text=norm#all-claims")
    rows = page.locator(".claims-table tbody tr:visible")
    assert [page.locator(f"[name={name}]").input_value() for name in ("verdict", "chapter", "text")] == [
        "refined",
        "3",
        "norm",
    ]
    assert rows.count() > 0 and set(rows.locator(".verdict").all_inner_texts()) == {"refined"}
    top = page.get_by_role("search", name="Filter the claims").bounding_box()["y"]
    assert page.evaluate("scrollY") > 0 and 48 <= top < 450, "scrolled to, and not under the page's head"
    page = window.open("scorecard.html?verdict=nonsense&chapter=99")
    assert rows.count() == len(book.claims()) and page.locator("[name=verdict]").input_value() == ""


def test_scorecard_sorts(window):
    """By each column, up and down, by keyboard alone."""
    page = window.open("scorecard.html")
    names = page.locator(".claims-table .claim-id")
    for expected in ("ascending", "descending"):
        page.get_by_role("button", name="claim", exact=True).focus()
        page.keyboard.press("Enter")
        assert page.locator("th[aria-sort]").get_attribute("aria-sort") == expected
        assert names.all_inner_texts() == sorted(book.claims(), key=natural, reverse=expected == "descending")
    page.get_by_role("button", name="where", exact=True).click()
    chapters_of = [claim["chapters"][0] for claim in book.claims().values()]
    first = page.locator(".claims-table tbody tr").evaluate_all(
        "rows => rows.map(r => +r.dataset.chapters.split(' ')[0])"
    )
    assert first == sorted(int(chapter[:2]) for chapter in chapters_of)
    page.get_by_role("button", name="our checks that hold", exact=True).click()
    held = page.locator(".claims-table td:last-child").all_inner_texts()
    counts = [int(cell.split(" of ")[0]) for cell in held if " of " in cell]
    assert counts and counts == sorted(counts)
    page.get_by_role("button", name="verdict", exact=True).click()
    order = [*ORDER]
    ranks = [order.index(verdict) for verdict in page.locator(".claims-table .verdict").all_inner_texts()]
    assert ranks == sorted(ranks) and window.said == []


@pytest.mark.parametrize("width", [1280, 390])
def test_scorecard_fits_its_window(window, width):
    """Nothing of the table is cut off or has to be scrolled to, and at 1280 px a claim has room."""
    page = window.open("scorecard.html", width)
    wide = """() => {
      const edge = document.querySelector("main article").getBoundingClientRect().right;
      return [...document.querySelectorAll(".claims-table, .claims-table *, .claims-filter *")]
        .filter(e => e.getBoundingClientRect().right > edge || (e.clientWidth && e.scrollWidth > e.clientWidth + 1))
        .map(e => e.outerHTML.slice(0, 80));
    }"""
    assert page.evaluate(wide) == []
    if width == 1280:
        assert page.locator("td[data-label=claim]").first.bounding_box()["width"] > 350
        assert page.evaluate("document.documentElement.scrollHeight") < 20 * 900


def test_scorecard_is_cards_on_a_phone(window):
    """Each claim below the next, its cells above each other and labelled; still a table for screen readers."""
    page = window.open("scorecard.html", 390)
    first = page.locator(".claims-table tbody tr").first
    tops = {cell.get_attribute("data-label"): cell.bounding_box()["y"] for cell in first.get_by_role("cell").all()}
    assert tops["verdict"] == tops["our checks that hold"] < tops["claim"] < tops["where"]
    assert page.get_by_role("table", name="All claims").get_by_role("row").count() == len(book.claims()) + 1
    assert page.get_by_role("columnheader").all_inner_texts()[-4:] == [*tops]
    label = "e => getComputedStyle(e.querySelector('td:last-child'), '::before').content"
    assert "our checks that hold" in first.evaluate(label)


@pytest.mark.parametrize("width", [1280, 390])
def test_scorecard_without_scripts(browser, html, width):
    context = browser.new_context(java_script_enabled=False, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.goto((html / "scorecard.html").as_uri() + "?verdict=refuted")
    assert page.locator(".claims-table tbody tr:visible").count() == len(book.claims())
    assert page.locator(".claims-filter").count() == 0
    context.close()


@pytest.mark.slow
def test_one_pdf_of_the_whole_book(html, chromium):
    """Each chapter's title is in the outline or text of the printed page, and its figures are there."""
    made = pdf.make(Run("smoke"))
    content = made.read_bytes()
    pages = len(re.findall(rb"/Type\s*/Page\b", content))
    assert content.startswith(b"%PDF") and pages > 5 * len(book.chapters()), f"{pages} pages"
    assert len(content) > 1_000_000
