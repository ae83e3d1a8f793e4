"""The built pages: links, numbers, captions, buttons; and in a browser, from disk, without a network."""

import copy
import json
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
import yaml
from bs4 import BeautifulSoup
from playwright.sync_api import sync_playwright

from workflow import ROOT, chapters, report
from workflow.stage import configuration, fill, placeholders

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
    for page, soup in soups.items():
        for link in soup.find_all("a", href=True):
            target = urlparse(link["href"])
            if target.scheme or target.netloc:
                continue
            file = html / (unquote(target.path) or f"{page}.html")
            assert file.exists(), f"{page}: {link['href']}"
            if target.fragment and file.suffix == ".html":
                there = soups.get(file.stem) or BeautifulSoup(file.read_text(encoding="utf-8"), "html.parser")
                assert there.find(id=unquote(target.fragment)), f"{page}: {link['href']}"


def test_no_markup_is_left_raw(soups):
    for page, soup in soups.items():
        prose = copy.copy(soup.find("main"))
        for verbatim in prose.select("pre, code, script, .math"):
            verbatim.decompose()
        found = re.search(r"\{\{|\}\}|\{(glue|eq|numref|cite)|\[\?\]|\bnan\b", prose.get_text(" "))
        assert not found, (page, found)


def test_every_figure_has_number_caption_and_alt_text(soups):
    for chapter in chapters():
        figures = [figure for figure in soups[chapter].find_all("figure") if figure.find("img")]
        assert figures
        for figure in figures:
            assert figure.find(class_="caption-number") and "What to see" in figure.find("figcaption").get_text()
    for page, soup in soups.items():
        for image in soup.find("article").find_all("img"):
            assert len(image.get("alt", "")) > 20, (page, image)


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
    result = report.collect("smoke", 0, chapters())
    value = placeholders(result, report.load_claims(), smoke / "seed-0")
    with pytest.raises(ValueError, match=r"nothing stands for {{ no-such-claim }}"):
        fill("{{ no-such-claim }}", value)
    with pytest.raises(ValueError, match="nothing stands for"):
        fill("{{ glue:03-t5:nothing }}", value)


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_page_in_a_browser(browser, html, name, width, scheme):
    """From disk, without a network: no error, no request to another host, no prose that scrolls sideways."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((html / f"{name}.html").as_uri())
    page.wait_for_load_state("networkidle")
    if name in chapters():
        page.wait_for_selector("mjx-container", timeout=20_000)
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1"), "the page scrolls sideways"
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)"), "an image did not load"
    assert page.evaluate("document.querySelectorAll('mjx-merror').length") == 0
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    page.close()


def test_mathematics_is_typeset(browser, html, soups):
    page = browser.new_page()
    page.goto((html / "01-random-walk.html").as_uri())
    page.wait_for_selector("mjx-container", timeout=20_000)
    page.wait_for_load_state("networkidle")
    wanted = len(soups["01-random-walk"].select("main span.math, main div.math"))
    assert page.evaluate("document.querySelectorAll('main mjx-container').length") >= wanted > 40
    page.close()
