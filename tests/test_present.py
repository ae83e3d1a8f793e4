"""How chapters are shown: today's text with the outputs of the run, checks as one line a section, figures as files."""

import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from nbutils.claims import MIME
from nbutils.claims.records import Record
from workflow import ROOT, book, notebooks
from workflow.judge import Judgement
from workflow.pages import chapter, figures


def record(check, holds=True, **more):
    facts = {"kind": "exact", "measured": 0.5, "band": (0.0, 1.0), "holds": holds, "chapter": "01-one"} | more
    return Record("one", check, facts.pop("role", "stated"), **facts)


def cell(source, *records, tags=(), outputs=()):
    shown = [new_output("display_data", {MIME: each.as_dict(), "text/html": "as recorded"}) for each in records]
    return new_code_cell(source, outputs=[*shown, *outputs], metadata={"tags": list(tags)})


@pytest.fixture
def shown(monkeypatch):
    """``shown(cells, records)``: the cells of a chapter without a card as its page has them."""
    monkeypatch.setattr(book, "card", lambda name: {})

    def made(*cells, records=()):
        result = Judgement({"green": True, "profile": "smoke"}, list(records), {}, [])
        node = new_notebook(cells=[new_markdown_cell("# T"), *cells])
        return chapter.page(node, "01-one", result, {}, "")[0].cells[1:]

    return made


def folded(cells):
    return [BeautifulSoup(each.source, "html.parser").details for each in cells if each.source.startswith("<details")]


def test_checks_of_a_section_are_one_line_that_opens(shown):
    first, second, third = record("a < b", anchor="claim-one"), record("c"), record("d")
    cells = shown(
        cell("claims.check(a)", first),
        cell("x = x + 1", second),
        new_markdown_cell("words\n\n## Two\n\nsee [four](t5.md)"),
        cell("claims.check(d)", third),
        records=[first, second, third],
    )
    lines = folded(cells)
    assert [line.summary.get_text() for line in lines] == ["✓ 2 checks hold", "✓ 1 check holds"]
    assert lines[0].select_one("tbody tr")["id"] == "claim-one" and not lines[0].has_attr("open")
    assert not any(MIME in output.get("data", {}) for each in cells for output in each.get("outputs", ()))
    assert [each.source.partition("\n")[0][:12] for each in cells] == [
        "claims.check", "x = x + 1", "words", '<details cla', "## Two", "claims.check", '<details cla',
    ]  # fmt: skip
    assert "[four](t5.ipynb)" in cells[4].source


def test_the_judgement_of_the_workflow_is_shown_not_what_the_notebook_recorded(shown):
    """And what only the workflow saw, at further seeds, stands with the last checks."""
    judged = record("a", holds=False, noted=True, further=({"seed": 7, "measured": 0.25, "holds": True},))
    added = record("b (at seed 7, 8)", holds=False)
    (line,) = folded(shown(cell("claims.check()", record("a", holds=False)), records=[judged, added]))
    assert line.summary.get_text() == "✗ 1 noted, 1 failed" and line.has_attr("open")
    assert "0.25 at seed 7" in line.get_text() and "b (at seed 7, 8)" in line.get_text()


def test_neighbours_that_are_folded_and_show_nothing_are_one_cell(shown):
    glue = new_output("display_data", {"a": "b"}, metadata={"scrapbook": {"name": "n"}})
    bar = new_output("stream", name="stderr", text="10%")
    log = new_output("stream", name="stdout", text="[2026-11-25 04:24:44,152] [WARNING] [x.py:2:f] CPU\n")
    cells = shown(
        cell("import numpy as np", tags=["hide-input"], outputs=[bar, log]),
        cell("glue(n=1)", tags=["hide-input"], outputs=[glue]),
        cell("y = f(x)"),
    )
    assert [each.source for each in cells] == ["import numpy as np\n\nglue(n=1)", "y = f(x)"]
    assert cells[0].metadata.mystnb["code_prompt_show"] == "Code: preparation"
    assert cells[0].outputs == [glue], "prose still finds its number, and no bar of progress is left"


def test_a_page_has_the_text_of_today_and_the_outputs_of_the_run(tmp_path, monkeypatch):
    """And so has what it lets one download, in plain words, with the numbers of the run."""
    source = book.source("random-walk")
    node = notebooks.executable(source)
    data = {"application/papermill.record/text/plain": "'0.4321'"}
    scrap = {"name": "walk_exponent", "mime_prefix": "application/papermill.record/"}
    code = [each for each in node.cells if each.cell_type == "code"]
    code[2].outputs = [new_output("display_data", data, metadata={"scrapbook": scrap})]
    injected = new_code_cell("seed = 7", metadata={"tags": ["injected-parameters"]})
    node.cells.insert(node.cells.index(code[1]) + 1, injected)
    done = tmp_path / "random-walk.ipynb"
    nbformat.write(node, done)

    edited = tmp_path / "edited" / "random-walk.md"
    edited.parent.mkdir()
    edited.write_text(source.read_text(encoding="utf-8").replace("**Intuition.**", "We ask why."), encoding="utf-8")
    monkeypatch.setattr(book, "source", lambda name: edited)
    executed = nbformat.read(done, as_version=4)
    made = chapter.grafted("random-walk", executed)
    assert "We ask why" in made.cells[0].source and not any("seed = 7" in each.source for each in made.cells)
    assert [each for each in made.cells if each.cell_type == "code"][2].outputs == code[2].outputs
    monkeypatch.undo()
    plain = notebooks.in_plain_words(made, source, notebooks.glued(executed))
    prose = "\n".join(each.source for each in plain.cells if each.cell_type == "markdown")
    assert "0.4321" in prose and not re.search(r"```\{|\{[a-z:]+\}`|^:::", prose, re.M)


@pytest.mark.parametrize("name", book.chapters())
def test_a_card_names_claims_figures_and_a_number_of_its_chapter(name):
    card, text, claims = book.card(name), book.source(name).read_text(encoding="utf-8"), book.claims()
    assert {"asks", "claims", "found", "remember", "because"} <= set(card)
    of_paper = not all(claims[claim].get("ours") for claim in card["claims"])
    assert card.get("preprint") or card.get("published") or not of_paper
    assert all(name in claims[claim]["chapters"] for claim in card["claims"])
    for figure in filter(None, [card.get("figure"), *(each["after"] for each in card.get("explore", ()))]):
        assert f"    name: {figure}\n" in text, figure
    assert re.search(r"\{glue:text\}`(\w+)`", card["because"])


def test_every_colour_of_the_style_has_one_on_dark_pages():
    style = (ROOT / "normgrowth" / "style.mplstyle").read_text(encoding="utf-8")
    cycle = {f"#{each.lower()}" for each in re.findall(r"'([0-9A-F]{6})'", style)}
    assert cycle and cycle <= set(figures.DARK)
