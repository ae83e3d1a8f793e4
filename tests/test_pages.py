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

from nbutils import __version__
from workflow import ROOT, Run, book, notebooks
from workflow.pages import api, pdf
from workflow.pages.verdicts import ANSWERS, ORDER

CARDS = {name: book.card(name) for name in book.chapters()}
OTHERS = ("callbacks", "scorecard", "errata", "new", "notation", "running", "cluster", "run", "api", "bibliography")
PAGES = ("index", *book.chapters(), *OTHERS)
CLAIMS = [f"claims/{name}" for name in book.claims()]
MODULES = [f"api/{name}" for group in api.groups().values() for name in group]
# In a browser: of pages that are made alike, one of each kind.
LOOKED_AT = (*PAGES, "claims/theorem1", "claims/fig1-80", "api/normgrowth.norms.tracker")


@pytest.fixture(scope="module")
def html(smoke) -> Path:
    return smoke / "html"


@pytest.fixture(scope="module")
def metrics(smoke):
    return json.loads((smoke / "metrics.json").read_text())


@pytest.fixture(scope="module")
def soups(html):
    pages = (*PAGES, *CLAIMS, *MODULES)
    return {page: BeautifulSoup((html / f"{page}.html").read_text(encoding="utf-8"), "html.parser") for page in pages}


@pytest.fixture(scope="module")
def words(metrics):
    """What pages show for each claim: the verdict, or the answer to a question of ours."""
    ours = {name for name, claim in book.claims().items() if claim.get("ours")}
    return {name: ANSWERS.get(each, each) if name in ours else each for name, each in metrics["verdicts"].items()}


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
            file = ((html / page).parent / unquote(target.path)).resolve() if target.path else html / f"{page}.html"
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
        shown = " ".join(output.get_text() for output in soup.select(".cell_output"))
        assert not re.search(r"\[?(WARNING|ERROR)\]|\w+Warning: ", shown), f"{page}: a log"
        assert not re.search(r"^(True|False)$", shown, re.M), f"{page}: what a check returns"


@pytest.mark.parametrize("chapter", book.chapters())
def test_a_chapter_has_its_card_its_verdicts_its_checks_and_its_figures(metrics, words, soups, chapter):
    soup, given, verdicts = soups[chapter], CARDS[chapter], words
    card = soup.find(class_="glance")
    assert card.find(class_="verdict").get_text() == verdicts[given["claims"][0]]
    drawn = [image["src"] for image in card.select("a.glance-figure img")]
    if figure := given.get("figure"):
        assert card.select_one("a.glance-figure")["href"] == f"#{figure}"
        assert len(drawn) == 2 and drawn == [image["src"] for image in soup.select(f"figure#{figure} img")]
    else:
        assert not drawn
    rows = soup.find(class_="verdict-box").find_all("li")
    shown = {row.find("code").get_text(): row.find(class_="verdict").get_text() for row in rows}
    assert shown == {name: verdicts[name] for name, claim in book.claims().items() if chapter in claim["chapters"]}
    mine = Counter(record["check"] for record in metrics["records"] if record["chapter"] == chapter)
    rows = copy.copy(soup).select("details.checks tbody tr")
    [row.find("code").extract() for row in rows]  # the claim
    found = Counter(" ".join(row.find("td").get_text().split()).partition(" ")[2] for row in rows)
    assert found == Counter(" ".join(check.split()) for check in mine.elements())
    assert soup.find(class_="eqno") and soup.find("a", href=re.compile("#equation-"))
    assert soup.find("span", class_="std-numref") and len(soup.select("figure")) > 0
    for figure in soup.select("figure:has(img)"):
        assert figure.find(class_="caption-number") and "What to see" in figure.find("figcaption").get_text()


def test_every_image_is_described(soups):
    for page, soup in soups.items():
        assert all(len(image.get("alt", "")) > 20 for image in soup.find("article").find_all("img")), page


def test_text_in_figures_is_of_reading_size_and_axes_are_labelled(soups, html):
    """At the width of the article, 648 px; matplotlib writes text as paths, scaled by a hundredth of its size.

    Some x axis and some y axis of a figure has a label, or ticks that are words.
    """
    title = r'^   <g id="matplotlib.axis_\d*[{}]">\n(?:(?!^   </g>).*\n)*?    <g id="text_\d+">'
    words = r'^    <g id="{}tick_\d+">\n(?:(?!^    </g>).*\n)*? *<!-- [A-Za-z]{{2}}'
    links = {link["href"] for chapter in book.chapters() for link in soups[chapter].select("figure a.figure-link")}
    assert len(links) >= len(book.chapters())
    for link in links:
        svg = (html / link).read_text(encoding="utf-8")
        width = float(re.search(r'viewBox="0 0 ([\d.]+) ', svg)[1])
        assert min(100 * float(scale) * 648 / width for scale in re.findall(r"scale\((0?\.\d+) -", svg)) >= 8.4, link
        for name, digits in (("x", "13579"), ("y", "02468")):
            assert re.search(title.format(digits), svg, re.M) or re.search(words.format(name), svg, re.M), (link, name)


def test_only_code_that_teaches_is_in_view(soups):
    def shown(chapter):
        inputs = soups[chapter].select("div.cell div.cell_input")
        return "\n".join(each.get_text() for each in inputs if not each.find_parent("details"))

    for chapter in book.chapters():
        assert "importlib" not in shown(chapter) and "Ledger(" not in shown(chapter)
    assert "unrolled = torch.cumsum(squares + cross, dim=0)" in shown("random-walk")
    assert "def mixed_sum" in shown("settled-direction") and "mine = None" in shown("your-own")


def test_the_landing_page_shows_counts_findings_and_chapters(words, soups):
    """The paper's claims and our own questions are counted apart; each card says what it rests on."""
    page, verdicts = soups["index"], words
    findings, cards = (each.select(":scope > *") for each in page.select(".cards"))
    listed = notebooks.FINDING.findall((ROOT / "book" / "index.md").read_text().partition("} cards\n")[2])
    shown = [names for names, _ in listed if not any(verdicts[name] == "open" for name in names.split())]
    assert len(listed) == len(findings) == 8 and len(shown) >= 6
    assert len([card for card in findings if card.find("a", href=True) and card.find(class_="scope")]) == len(shown)
    assert [card.find(class_="verdict").get_text() for card in cards] == [
        verdicts[given["claims"][0]] for given in CARDS.values()
    ]
    for ours, group in ((False, "claims of the paper"), (True, "questions of ours")):
        counts = Counter(verdicts[name] for name, claim in book.claims().items() if bool(claim.get("ours")) is ours)
        assert all(f"{count} {verdict}" in text(page) for verdict, count in counts.items())
        assert f"{counts.total()} {group}" in text(page) and "This run is green" in text(page)


def test_the_scorecard_links_claims_to_their_evidence(words, soups):
    claims, verdicts = book.claims(), words
    rows = {
        row.select_one(".claim-id code").get_text(): row for row in soups["scorecard"].select("tbody tr[data-verdict]")
    }
    assert set(rows) == set(claims)
    for name, row in rows.items():
        page, _, anchor = row.select_one("[data-label=where] a")["href"].partition(".html#")
        assert row.find(class_="verdict").get_text() == verdicts[name]
        assert page in claims[name]["chapters"] and name in soups[page].find(id=anchor).get_text()


def test_each_claim_has_a_page_to_send_and_the_map_names_every_page(html, metrics, words, soups):
    """Statement, verdict and a preview, and one file for programs; every page has the version and how to cite."""
    listed = json.loads((html / "claims.json").read_text(encoding="utf-8"))
    assert {each["id"]: each["verdict"] for each in listed} == metrics["verdicts"]
    assert all((html / each["page"]).exists() for each in listed)
    address, plain = book.configuration()["html"]["baseurl"], lambda text: " ".join(re.findall(r"\w+", text))
    for name, claim in book.claims().items():
        soup = soups[f"claims/{name}"]
        opening = plain(claim["statement"].strip().partition("$")[0])
        assert opening in plain(text(soup)) and soup.find(class_="verdict").get_text() == words[name], name
        assert soup.find(class_="scope").get_text() or metrics["verdicts"][name] == "open", name
        badge = soup.find(class_="version")
        assert (badge.get_text() if badge else "") == book.version(claim), name
        preview = {each["property"]: each["content"] for each in soup.select("meta[property^='og:']")}
        assert preview["og:title"] == f"{name}: {words[name]}" and opening[:9] in plain(preview["og:description"]), name
        assert (html / preview["og:image"].removeprefix(address)).stat().st_size > 10_000, name
    places = re.findall("<loc>(.*?)</loc>", (html / "sitemap.xml").read_text(encoding="utf-8"))
    there = {path for path in html.rglob("*.html") if "_static" not in path.parts}
    assert {html / place.removeprefix(address) for place in places} == there and html / "404.html" in there
    cited = f"Version {__version__}. Cite this page</summary>\n<pre>@misc"
    assert [path for path in there if cited not in path.read_text(encoding="utf-8")] == []


def test_numbers_in_prose_come_from_the_run(metrics, soups):
    """What the page shows for one number is what the executed notebook measured; and of the run itself."""
    measured = {record["check"]: record["measured"] for record in metrics["records"]}
    assert f"{measured['last 20 intervals over the cap']:.3f}" in text(soups["t5"])
    assert f"{measured['exponent, n = 1']:.3f}" in text(soups["random-walk"])
    run, page = metrics["run"], text(soups["run"])
    assert run["hardware"] in page and run["versions"]["torch"] in page
    assert all(f"{stats['seconds']:.1f}" in page and f"{stats['peak_mb']:.0f}" in page for stats in run["notebooks"])


def test_buttons_launch_download_and_report(html, soups):
    settings = book.configuration()["repository"]
    url, place = settings["url"], f"{settings['url'].removeprefix('https://github.com/')}"
    for page, soup in soups.items():
        links = [link["href"] for link in soup.find_all("a", href=True)]
        assert url in links and any(link.startswith(f"{url}/issues/new") and f"{page}.html" in link for link in links)
        if page in CARDS:
            colab = f"https://colab.research.google.com/github/{place}/blob/{settings['branch']}/book/notebooks/{page}.ipynb"
            binder = f"https://mybinder.org/v2/gh/{place}/{settings['branch']}?urlpath="
            assert colab in links and any(link.startswith(binder) and f"{page}.ipynb" in link for link in links)
            assert f"_sources/{page}.ipynb" in links


# In a browser. Each page is loaded once, and then looked at in two widths and two schemes.

WIDTHS, SCHEMES = (1280, 380), ("light", "dark")
LOOKS = [(width, scheme) for width in WIDTHS for scheme in SCHEMES]
SCROLLS = "pre, div.math, mjx-container, .pst-scrollable-table-container, .cell_output .text_html"

# Elements of prose that stick out of the window, and places that scroll sideways but should not.
SIDEWAYS = """scrolls => {
  const name = e => e.tagName + "." + e.className + ": " + e.textContent.trim().slice(0, 60);
  const prose = "main article :is(p, li, td, h1, h2, h3, h4, dt, dd, figcaption, img, svg, table)";
  const out = [...document.querySelectorAll(prose)]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(scrolls) && !e.closest(".headerlink"));
  const moving = [...document.querySelectorAll("main article, main article *")]
    .filter(e => e.scrollWidth > e.clientWidth + 1
    && /auto|scroll/.test(getComputedStyle(e).overflowX) && !e.closest(scrolls));
  const whole = document.documentElement.scrollWidth > innerWidth + 1 ? ["the page"] : [];
  return [...whole, ...out.map(name), ...moving.map(name)];
}"""
# Code in view that is cut off.
CLIPPED = """() => [...document.querySelectorAll("main div.cell_input pre")]
  .filter(e => e.checkVisibility() && !e.closest("details") && e.scrollWidth > e.clientWidth + 1)
  .map(e => e.textContent.slice(0, 60))"""
# Equations that are cut off and do not show it by a fading edge.
CUT = """() => [...document.querySelectorAll("main div.math:not(.wide) mjx-container")]
  .filter(math => math.checkVisibility() && math.scrollWidth > math.clientWidth + 1).map(math => math.textContent)"""
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
# Lines and points of a drawing that lie under one of its legends.
HIDDEN = """svg => {
  document.body.innerHTML = svg;
  const boxes = [...document.querySelectorAll("[id^=legend]")].map(legend => legend.getBoundingClientRect());
  const under = (x, y) => boxes.some(b => b.left + 2 < x && x < b.right - 2 && b.top + 2 < y && y < b.bottom - 2);
  const along = path => Array.from({length: 401}, (_, i) =>
    path.getPointAtLength(path.getTotalLength() * i / 400).matrixTransform(path.getScreenCTM()));
  const drawn = kind => [...document.querySelectorAll(`[id^=axes] > :is([id^=line2d], [id*=Collection]) ${kind}`)];
  const lines = drawn("path[clip-path]").filter(path => path.getTotalLength())
    .filter(path => along(path).some(p => under(p.x, p.y)));
  const marks = drawn("use").map(mark => mark.getBoundingClientRect())
    .filter(b => under((b.left + b.right) / 2, (b.top + b.bottom) / 2));
  return [...lines.map(line => line.closest("[id]").id), ...(marks.length ? [`${marks.length} points`] : [])];
}"""
AXE = """async ([rules, ...leave]) => {
  const options = {resultTypes: ["violations"], preload: false, ...(rules ? {runOnly: rules} : {})};
  const found = await axe.run({exclude: [["mjx-container"], ...leave.map(x => [x])]}, options);
  return found.violations.filter(v => ["serious", "critical"].includes(v.impact))
    .map(v => v.id + ": " + v.nodes.slice(0, 3).map(n => n.html.slice(0, 160) + " " + n.any.map(a => a.message)));
}"""
# Axe looks long at every word of code, whose colours are alike on all pages: once is enough.
ALIKE: dict[str, list[str]] = {"random-walk": []}
PHONE = ("index", "scorecard", "step-geometry")  # whose accessibility is looked at on a phone, too
MATH_DONE = """async () => {
  if (document.querySelector("script[src*=mathjax]")) await MathJax.startup.promise;
  await document.fonts.ready;
}"""


class Window:
    """One browser tab that notes what pages say in the console and which files they ask for."""

    def __init__(self, browser, html):
        self.html, self.messages, self.asked = html, [], []
        self.page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        self.page.on("console", lambda m: self.messages.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, name, width=1280, scheme="light"):
        self.messages.clear()
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


def test_a_link_to_a_check_opens_its_section(window):
    page = window.open("random-walk.html#claim-walk-middle")
    page.wait_for_selector("details.checks[open] #claim-walk-middle")
    assert page.locator("details.checks[open]").count() == 1
    assert 0 < page.locator("#claim-walk-middle").bounding_box()["y"] < 900


@pytest.fixture(scope="module")
def weights(html):
    """Size of a file as a server sends it: text in gzip, fonts and images as they are."""
    return cache(lambda path: min(len(gzip.compress(Path(path).read_bytes())), Path(path).stat().st_size))


@pytest.mark.parametrize("name", LOOKED_AT)
def test_page_in_a_browser(window, html, soups, weights, name):
    """From disk, without a network, wide and narrow, light and dark."""
    turn = LOOKED_AT.index(name) % len(LOOKS)  # another look at loading for each page
    looks = LOOKS[turn:] + LOOKS[:turn]
    page = window.open(f"{name}.html", *looks[0])
    figures = page.locator("div.explore").all()
    assert len(figures) == len(CARDS.get(name, {}).get("explore", ()))
    for figure in figures:  # fetched late; as soon as it is near
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
            assert page.evaluate(CLIPPED) == []
        else:
            page.wait_for_timeout(100)  # until they are fitted
            assert page.evaluate(CUT) == [], "equations cut without a sign"
        if width == 1280 or name in PHONE:
            rules = None if scheme == "light" or name in PHONE else ["color-contrast"]
            assert page.evaluate(AXE, [rules, *ALIKE.get(name, ["div.highlight"])]) == [], (width, scheme)
    assert window.messages == []
    assert [url for url in window.asked if not url.startswith(("file:", "data:"))] == []
    files = {unquote(urlparse(url).path) for url in window.asked if url.startswith("file:")}
    files = {file for file in files if "/_static/explore/" not in file or file.endswith(".css")}
    assert page.evaluate(LOADED), "an image did not load"
    assert page.evaluate("document.querySelectorAll('mjx-merror').length") == 0
    wanted = len(soups[name].select("main span.math, main div.math"))
    assert page.evaluate("document.querySelectorAll('main mjx-container').length") >= wanted
    budget = 1_150_000  # with the scripts of equations and the font of icons
    assert sum(map(weights, files)) < budget, "gzipped, with all it loads"


def test_search_from_a_page_finds_a_theorem(window):
    page = window.open("index.html")
    page.keyboard.press("Control+k")
    page.keyboard.type("Theorem 4")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results ul.search li a[href*='divergence']", timeout=20_000)
    assert [url for url in window.asked if not url.startswith(("file:", "data:"))] == [] and window.messages == []


def test_search_says_formulas_in_words(window):
    page = window.open("search.html")
    assert page.evaluate(r"spoken('\\(\\sqrt t \\mathrm{LN}(x_0)\\)')").strip() == "sqrt t LN (x_0)"
    shown = page.evaluate(r"Search.htmlToText('<div role=main>the <span class=math>\\(\\rho\\)</span> grows</div>')")
    assert shown.split() == ["the", "rho", "grows"]


def test_no_line_begins_with_the_point_that_ends_a_formula(soups):
    for name, soup in soups.items():
        for math in soup.select("main :not(.unbroken) > span.math"):
            after = math.next_sibling if isinstance(math.next_sibling, str) else ""
            assert not after.startswith(tuple(".,;:?!)")), (name, math.text)


def test_code_on_a_phone_is_of_reading_size(window):
    page = window.open("sublayers.html", 390)
    size = "pre => parseFloat(getComputedStyle(pre).fontSize)"
    sizes = f"[...document.querySelectorAll('div.cell_input pre')].map({size})"
    assert min(page.evaluate(sizes)) >= 14


def test_scorecard_filters(window):
    """By verdict, chapter, who asked and text, each told to screen readers and kept in the address."""
    page = window.open("scorecard.html")
    assert page.locator(".claims-filter").bounding_box()["y"] < 700, "in the first window"
    claims, shown = book.claims(), page.locator(".claims-table tbody tr:visible")
    page.locator("[name=verdict]").select_option("refuted")
    assert 0 < shown.count() < len(claims) and set(shown.locator(".verdict").all_inner_texts()) == {"refuted"}
    status = f"{shown.count()} of {len(claims)} claims shown: {shown.count()} refuted"
    assert page.get_by_role("status").inner_text() == status and page.url.endswith("?verdict=refuted")
    page.locator("[name=verdict]").select_option("")
    page.get_by_label("Asked by").select_option("us")
    ours = {name for name, claim in claims.items() if claim.get("ours")}
    assert set(shown.locator(".claim-id").all_inner_texts()) == ours
    page.locator("[name=text]").fill("no claim says this")
    assert shown.count() == 0 and page.get_by_role("status").inner_text().startswith("No claim fits")
    page.get_by_role("button", name="Show all").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("!location.search")
    assert shown.count() == len(claims) and window.messages == []
    page = window.open("scorecard.html?verdict=partly+confirmed&chapter=5&text=norm#all-claims")
    assert shown.count() > 0 and set(shown.locator(".verdict").all_inner_texts()) == {"partly confirmed"}
    texts = [text.lower() for text in shown.all_inner_texts()]
    assert all("norm" in text for text in texts)
    assert all("5" in numbers.split() for numbers in shown.evaluate_all("rows => rows.map(r => r.dataset.chapters)"))
    top = page.get_by_role("search", name="Filter the claims").bounding_box()["y"]
    assert page.evaluate("scrollY") > 0 and 48 <= top < 450, "scrolled to, and not under the page's head"


def test_scorecard_sorts(window):
    """Up and down, by keyboard alone; fig1-80 comes before fig1-100."""
    page = window.open("scorecard.html")
    natural = lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]  # noqa: E731
    for expected in ("ascending", "descending"):
        page.get_by_role("button", name="claim", exact=True).focus()
        page.keyboard.press("Enter")
        assert page.locator("th[aria-sort]").get_attribute("aria-sort") == expected
        names = page.locator(".claims-table .claim-id").all_inner_texts()
        assert names == sorted(book.claims(), key=natural, reverse=expected == "descending")
    page.get_by_role("button", name="verdict", exact=True).click()
    back = {word: verdict for verdict, word in ANSWERS.items()}
    ranks = [ORDER.index(back.get(word, word)) for word in page.locator(".claims-table .verdict").all_inner_texts()]
    assert ranks == sorted(ranks) and window.messages == []


def test_scorecard_is_cards_on_a_phone(window):
    """Each claim below the next, its cells above each other and labelled; still a table for screen readers."""
    page = window.open("scorecard.html", 390)
    first = page.locator(".claims-table tbody tr").first
    tops = {cell.get_attribute("data-label"): cell.bounding_box()["y"] for cell in first.get_by_role("cell").all()}
    assert tops["verdict"] < tops["claim"] < tops["where"] < tops["rests on"]
    table = page.get_by_role("table", name="All claims")
    assert table.get_by_role("row").count() == len(book.claims()) + 1
    assert table.get_by_role("columnheader").all_inner_texts() == [*tops]
    label = "e => getComputedStyle(e.querySelector('td:last-child'), '::before').content"
    assert "rests on" in first.evaluate(label)


def test_panels_stand_below_each_other_on_a_phone(window):
    for width, ending in ((1280, "exponent.svg"), (390, "exponent-stacked.svg")):
        shown = window.open("t5.html", width).locator("#fig-t5-exponent img.only-light")
        shown.scroll_into_view_if_needed()
        assert shown.evaluate("async image => (await image.decode(), image.currentSrc)").endswith(ending)
        assert shown.evaluate("image => image.clientWidth / image.naturalWidth") > 0.75, "letters of 10 px and more"
        assert shown.evaluate("image => image.naturalWidth > image.naturalHeight") == (width == 1280)
    shown.click()
    opened = window.page.locator("dialog.whole img.only-light")
    assert opened.evaluate("async image => (await image.decode(), image.clientWidth)") > 300


def test_no_legend_lies_on_what_is_drawn(browser, html):
    page = browser.new_page()
    drawn = sorted(path for path in (html / "_static" / "figures").glob("fig-*.svg") if "-dark" not in path.stem)
    found = {path.stem: page.evaluate(HIDDEN, path.read_text(encoding="utf-8")) for path in drawn}
    assert len(found) > len(CARDS) and {name: under for name, under in found.items() if under} == {}


@pytest.mark.slow
def test_one_pdf_of_the_whole_book(html, chromium):
    """Each chapter's title is in the outline or text of the printed page, and its figures are there."""
    made = pdf.print_book(Run("smoke"))
    content = made.read_bytes()
    pages = len(re.findall(rb"/Type\s*/Page\b", content))
    assert content.startswith(b"%PDF") and pages > 5 * len(book.chapters()), f"{pages} pages"
    assert len(content) > 1_000_000
