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
import pytest
import yaml
from bs4 import BeautifulSoup
from playwright.sync_api import sync_playwright

from workflow import ROOT, chapters, pdf, report
from workflow.stage import VERDICT_ORDER, configuration, fill, placeholders

PAGES = ("index", *chapters(), "scorecard", "errata", "new", "notation", "running", "run", "api", "bibliography")


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
    for chapter in chapters():
        figures = [figure for figure in soups[chapter].find_all("figure") if figure.find("img") or figure.find("svg")]
        assert figures
        for figure in figures:
            assert figure.find(class_="caption-number") and "What to see" in figure.find("figcaption").get_text()
    for page, soup in soups.items():
        for image in soup.find("article").find_all("img"):
            assert len(image.get("alt", "")) > 20, (page, image)
        for image in soup.select(".nb-animation svg"):
            assert image["role"] == "img" and len(image["aria-label"]) > 20, page


def test_text_in_figures_is_of_reading_size(soups, html):
    """At the width of the article, 648 px; matplotlib writes text as paths, scaled by a hundredth of its size."""
    for chapter in chapters():
        for image in soups[chapter].select("figure img"):
            svg = (html / image["src"]).read_text(encoding="utf-8")
            width = float(re.search(r'viewBox="0 0 ([\d.]+) ', svg)[1])
            sizes = [100 * float(scale) * 648 / width for scale in re.findall(r"scale\((0?\.\d+) -", svg)]
            assert min(sizes) >= 8.4, (chapter, image["src"], min(sizes))


def test_axes_of_figures_are_labelled(soups, html):
    """In each figure some x axis and some y axis has a label, or ticks that are words."""
    title = r'^   <g id="matplotlib.axis_\d*[{}]">\n(?:(?!^   </g>).*\n)*?    <g id="text_\d+">'
    words = r'^    <g id="{}tick_\d+">\n(?:(?!^    </g>).*\n)*? *<!-- [A-Za-z]{{2}}'
    for chapter in chapters():
        for image in soups[chapter].select("figure img"):
            svg = (html / image["src"]).read_text(encoding="utf-8")
            for name, digits in (("x", "13579"), ("y", "02468")):
                found = re.search(title.format(digits), svg, re.M) or re.search(words.format(name), svg, re.M)
                assert found, f"{chapter}, {image['src']}: no label on the {name} axis"


def test_equations_and_figures_are_numbered_and_referred_to(soups):
    for chapter in chapters():
        assert soups[chapter].find(class_="eqno") and soups[chapter].find("a", href=re.compile("#equation-"))
        assert soups[chapter].find("span", class_="std-numref")


def test_box_at_the_top_shows_the_verdicts_of_the_run(smoke, soups):
    verdicts = json.loads((smoke / "metrics.json").read_text())["verdicts"]
    claims = report.load_claims()
    for chapter in chapters():
        box = soups[chapter].find(class_="verdict-box")
        shown = {row.find("code").get_text(): row.find(class_="verdict").get_text() for row in box.find_all("li")}
        assert shown == {
            name: verdicts[name] for name in claims if chapter in claims[name]["chapters"] and name in verdicts
        }


def test_scorecard_has_every_claim_and_links_to_its_evidence(smoke, soups):
    rows = {row.find("code").get_text(): row for row in soups["scorecard"].select(".claims-table tbody tr")}
    claims, verdicts = report.load_claims(), json.loads((smoke / "metrics.json").read_text())["verdicts"]
    assert set(rows) == set(claims)
    for name, row in rows.items():
        assert row.find(class_="verdict").get_text() == verdicts.get(name, "planned")
        if name in verdicts:
            page, _, anchor = row.find("a")["href"].partition(".html#")
            assert page in claims[name]["chapters"] and name in soups[page].find(id=anchor).get_text()


def test_what_is_new_has_every_correction_and_every_question_of_ours(smoke, soups):
    verdicts = json.loads((smoke / "metrics.json").read_text())["verdicts"]
    claims = report.load_claims()
    wanted = {name for name in verdicts if claims[name].get("ours") or claims[name].get("corrected")}
    targets = [link["href"] for link in soups["new"].find("article").select("li a[href*='#claim-']")]
    assert Counter(target.partition("#claim-")[2] for target in targets) == Counter(wanted)


def test_metrics_have_what_machines_need(smoke):
    metrics = json.loads((smoke / "metrics.json").read_text())
    assert set(metrics) >= {"run", "records", "verdicts"} and metrics["run"]["green"]
    for record in metrics["records"]:
        assert {
            "claim",
            "chapter",
            "check",
            "measured",
            "expected",
            "band",
            "holds",
            "seed",
            "profile",
            "device",
        } <= set(record)


def test_numbers_in_prose_come_from_the_run(smoke, soups):
    """What the page shows for one number is what the executed notebook measured."""
    records = json.loads((smoke / "metrics.json").read_text())["records"]
    measured = next(r["measured"] for r in records if r["check"] == "last 20 intervals over the cap")
    assert f"{measured:.3f}" in text(soups["03-t5"])
    exponent = next(r["measured"] for r in records if r["check"] == "exponent, n = 1")
    assert f"{exponent:.3f}" in text(soups["01-random-walk"])


def test_index_shows_the_counts_of_the_run(smoke, soups):
    """The paper's claims and our own questions are counted apart, and planned ones are no verdicts."""
    verdicts, claims = json.loads((smoke / "metrics.json").read_text())["verdicts"], report.load_claims()
    shown = text(soups["index"])
    for ours in (False, True):
        names = [name for name, claim in claims.items() if bool(claim.get("ours")) is ours]
        counts = Counter(verdicts.get(name, "planned") for name in names)
        assert all(f"{count} {verdict}" in shown for verdict, count in counts.items())
        assert f"{len(names)} {'questions of ours' if ours else 'claims of the paper'}" in shown


def test_how_it_was_run_has_time_memory_versions_and_hardware(smoke, soups):
    run = json.loads((smoke / "metrics.json").read_text())["run"]
    page = text(soups["run"])
    assert run["hardware"] in page and run["versions"]["torch"] in page
    for stats in run["notebooks"]:
        assert f"{stats['seconds']:.1f}" in page and f"{stats['peak_mb']:.0f}" in page and stats["peak_mb"] > 50


def test_launch_and_download_buttons(html, soups):
    settings = configuration()
    url, branch = settings["repository"]["url"], settings["repository"]["branch"]
    name = url.removeprefix("https://github.com/")
    for chapter in chapters():
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


def test_placeholder_for_nothing_is_an_error(smoke):
    result = report.load(smoke)
    value = placeholders(result, report.load_claims(), smoke / "seed-0")
    with pytest.raises(ValueError, match=r"nothing stands for {{ no-such-claim }}"):
        fill("{{ no-such-claim }}", value)
    with pytest.raises(ValueError, match="nothing stands for"):
        fill("{{ glue:03-t5:nothing }}", value)


def test_repository_and_issue_buttons(soups):
    url = configuration()["repository"]["url"]
    for page, soup in soups.items():
        links = {link["href"] for link in soup.select("header a[href], .article-header-buttons a[href]")}
        assert url in links, page
        assert any(link.startswith(f"{url}/issues/new") and f"{page}.html" in link for link in links), page


# In a browser. Each page is loaded once, and then looked at in two widths and two schemes.

WIDTHS, SCHEMES = (1280, 380), ("light", "dark")
LOOKS = [(width, scheme) for width in WIDTHS for scheme in SCHEMES]
SCROLLS = "pre, div.math, mjx-container, .wide-table, .pst-scrollable-table-container, .cell_output .text_html"

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
        path, mark, query = name.partition("?")
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
    page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    for width, scheme in looks:
        window.look(width, scheme)
        page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)
        assert page.evaluate(SIDEWAYS, SCROLLS) == [], (width, scheme)
        assert page.evaluate(NO_HINT) == [], (width, scheme)
        if width == 1280:
            rules = None if scheme == "light" else ["color-contrast"]
            assert page.evaluate(AXE, [rules, *ALIKE.get(name, ["div.highlight"])]) == [], (width, scheme)
    assert window.said == []
    assert [url for url in window.asked if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)"), "an image did not load"
    assert page.evaluate("document.querySelectorAll('mjx-merror').length") == 0
    wanted = len(soups[name].select("main span.math, main div.math"))
    assert page.evaluate("document.querySelectorAll('main mjx-container').length") >= wanted
    files = {unquote(urlparse(url).path) for url in window.asked if url.startswith("file:")}
    assert sum(map(weights, files)) < (400_000 if name == "index" else 1_000_000), "gzipped, with all it loads"


def test_search_finds_a_theorem(window):
    page = window.open("search.html?q=Theorem+4")
    page.wait_for_selector("#search-results ul.search li a", timeout=20_000)
    found = page.locator("#search-results ul.search li a").evaluate_all("links => links.map(l => l.href)")
    assert any("10-vanishing-steps.html" in link for link in found)
    assert [url for url in window.asked if not url.startswith(("file:", "data:"))] == [] and window.said == []


def test_search_from_a_page(window):
    page = window.open("index.html")
    page.keyboard.press("Control+k")
    page.keyboard.type("saturation")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results ul.search li a", timeout=20_000)
    assert "q=saturation" in page.url


def test_copy_buttons(window, soups):
    page = window.open("01-random-walk.html")
    page.wait_for_selector("button.copybtn", state="attached")
    cells = page.locator("div.cell_input:not(details div) div.highlight:has(button.copybtn)")
    code = cells.first.locator("pre").inner_text()
    cells.first.hover()
    cells.first.locator("button.copybtn").click()
    page.evaluate("document.body.append(Object.assign(document.createElement('textarea'), {id: 'pasted'}))")
    page.focus("#pasted")
    page.keyboard.press("Control+v")
    assert code.strip() and page.input_value("#pasted").split() == code.split()
    assert page.locator("button.copybtn").count() >= len(soups["01-random-walk"].select("div.cell_input"))


def natural(name):
    """Sorting key in which fig1-80 comes before fig1-100."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def test_scorecard_sorts_and_filters(window, soups):
    """By chapter, verdict and text, by keyboard alone; what is shown is told to screen readers."""
    page = window.open("scorecard.html")
    rows = page.locator(".claims-table tbody tr")
    whole = rows.count()
    shown = page.locator(".claims-table tbody tr:visible")
    page.locator(".claims-filter select").last.select_option("refuted")
    assert 0 < shown.count() < whole
    assert set(shown.locator(".verdict").all_inner_texts()) == {"refuted"}
    assert page.get_by_role("status").inner_text() == f"{shown.count()} of {whole} claims shown"
    page.locator(".claims-filter select").last.select_option("")
    page.locator(".claims-filter select").first.select_option("3")
    assert all("3" in numbers.split() for numbers in shown.evaluate_all("rows => rows.map(r => r.dataset.chapters)"))
    page.locator(".claims-filter select").first.select_option("")
    page.locator(".claims-filter input").fill("layer norm")
    texts = [text.lower() for text in shown.all_inner_texts()]
    assert 0 < len(texts) < whole and all("layer" in text and "norm" in text for text in texts)
    page.locator(".claims-filter input").fill("")
    assert shown.count() == whole
    first = page.locator(".claims-table tbody tr td:first-child")
    for expected in ("ascending", "descending"):
        page.get_by_role("button", name="claim", exact=True).focus()
        page.keyboard.press("Enter")
        assert page.locator("th[aria-sort]").get_attribute("aria-sort") == expected
        names = first.all_inner_texts()
        assert names == sorted(names, key=natural, reverse=expected == "descending")
    page.get_by_role("button", name="verdict", exact=True).click()
    order = [*VERDICT_ORDER, "planned"]
    ranks = [order.index(verdict) for verdict in page.locator(".claims-table .verdict").all_inner_texts()]
    assert ranks == sorted(ranks)
    assert window.said == []


def test_scorecard_without_scripts(browser, html):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((html / "scorecard.html").as_uri())
    assert page.locator(".claims-table tbody tr:visible").count() == len(report.load_claims())
    assert page.locator(".claims-filter").count() == 0
    context.close()


@pytest.mark.parametrize("name", ["02-step-geometry", "11-saturation"])
def test_animation(window, html, weights, name):
    """It waits for the reader, plays, pauses, follows the slider by keyboard, and is small."""
    page = window.open(f"{name}.html")
    root = page.locator(".nb-animation")
    moving, slider, button = root.locator("svg"), root.locator("input[type=range]"), root.locator("button")
    last, before = int(slider.get_attribute("max")), moving.inner_html()
    assert last >= 20 and int(slider.input_value()) == last
    slider.focus()
    page.keyboard.press("Home")
    assert slider.input_value() == "0" and moving.inner_html() != before
    said = root.locator("output").inner_text()
    assert said == slider.get_attribute("aria-valuetext")
    button.focus()
    page.keyboard.press("Enter")
    assert button.inner_text() == "Pause"
    page.wait_for_function("() => +document.querySelector('.nb-animation input').value > 1")
    page.keyboard.press("Enter")
    at = slider.input_value()
    page.wait_for_timeout(400)
    assert slider.input_value() == at and button.inner_text() == "Play"
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    assert moving.inner_html().split() == before.split()
    assert len(page.evaluate("document.querySelector('.nb-animation').outerHTML").encode()) < 300_000
    page.emulate_media(reduced_motion="reduce")
    page.reload()
    assert slider.is_visible() and not button.is_visible()
    page.emulate_media(reduced_motion="no-preference")


def test_animation_without_scripts_is_a_figure(browser, html):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((html / "11-saturation.html").as_uri())
    assert page.locator(".nb-animation svg").is_visible() and not page.locator(".nb-animation button").is_visible()
    assert page.get_by_role("img", name=re.compile("ttention")).count() == 1
    context.close()


@pytest.mark.slow
def test_one_pdf_of_the_whole_book(html, chromium):
    """Each chapter's title is in the outline or text of the printed page, and its figures are there."""
    made = pdf.make("smoke")
    content = made.read_bytes()
    pages = len(re.findall(rb"/Type\s*/Page\b", content))
    assert content.startswith(b"%PDF") and pages > 5 * len(chapters()), f"{pages} pages"
    assert len(content) > 1_000_000
