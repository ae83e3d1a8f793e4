"""How chapters are shown: the card, folded plumbing, checks as one line a section, drawings as part of their page."""

import re

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from nbutils.claims import MIME
from nbutils.claims.records import Record
from workflow import ROOT, chapters, pdf, present, report, sphinx_pages

CLAIMS = {claim: each for claim, each in report.load_claims().items()}


def record(check, holds=True, **more):
    facts = {"kind": "exact", "measured": 0.5, "band": (0.0, 1.0), "holds": holds, "chapter": "01-one"} | more
    return Record("one", check, facts.pop("role", "stated"), **facts)


def cell(source, *records, tags=()):
    outputs = [new_output("display_data", {MIME: each.as_dict(), "text/html": "as recorded"}) for each in records]
    return new_code_cell(source, outputs=outputs, metadata={"tags": list(tags)})


def shown(*cells, records=()):
    return present.present(new_notebook(cells=list(cells)), "01-one", list(records)).cells


def test_checks_of_a_section_are_one_line_that_opens():
    first, second, third = record("a < b", anchor="claim-one"), record("c"), record("d")
    cells = shown(
        new_markdown_cell("# Title\n\ntext\n\n## One"),
        cell("claims.check(a)", first),
        cell("x = x + 1", second),
        new_markdown_cell("words\n\n## Two\n\nmore"),
        cell("claims.check(d)", third),
        records=[first, second, third],
    )
    folded = [each for each in cells if each.source.startswith("<details")]
    assert [BeautifulSoup(each.source, "html.parser").summary.get_text() for each in folded] == [
        "✓ 2 checks hold",
        "✓ 1 check holds",
    ]
    rows = BeautifulSoup(folded[0].source, "html.parser").select("tbody tr")
    assert rows[0]["id"] == "claim-one" and "a < b" in rows[0].get_text() and "a &lt; b" in folded[0].source
    assert [td.get_text() for td in rows[0].select("td")][1:] == ["0.5", "[0, 1]", "exact"]
    assert not any(MIME in output.get("data", {}) for each in cells for output in each.get("outputs", ()))
    sections = [each.source.partition("\n")[0] for each in cells if each.cell_type == "markdown"]
    assert sections.index("## Two") > sections.index(folded[0].source.partition("\n")[0]), "a section keeps its checks"
    assert "\n\n" not in folded[0].source, "an empty line would end the HTML"


@pytest.mark.parametrize(
    ("more", "summary", "is_open"),
    [
        ({"holds": False}, "✗ 1 check holds, 1 failed", True),
        ({"holds": False, "noted": True}, "◐ 1 check holds, 1 noted", True),
        ({"holds": None, "role": "open", "reason": "no <network>"}, "✓ 1 check holds, 1 open", False),
    ],
)
def test_what_does_not_hold_is_seen_without_a_click(more, summary, is_open):
    records = [record("a"), record("b", **more)]
    text = shown(new_markdown_cell("# T"), cell("claims.check()", *records), records=records)[-1].source
    details = BeautifulSoup(text, "html.parser").details
    assert details.summary.get_text() == summary and details.has_attr("open") is is_open
    assert "<network>" not in text


def test_the_judgement_of_the_workflow_is_shown_not_what_the_notebook_recorded():
    seen = record("a", holds=False)
    judged = record("a", holds=False, noted=True, further=({"seed": 7, "measured": 0.25, "holds": True},))
    text = shown(new_markdown_cell("# T"), cell("claims.check()", seen), records=[judged])[-1].source
    assert "0.25 at seed 7" in text and "◐" in text and "✗" not in text


def test_what_only_the_workflow_saw_stands_with_the_last_checks():
    seen, added = record("a"), record("a (at seed 7, 8)", holds=False)
    text = shown(new_markdown_cell("# T"), cell("claims.check()", seen), records=[seen, added])[-1].source
    assert "1 check holds, 1 failed" in text and "a (at seed 7, 8)" in text and '<details class="checks" open>' in text


def test_a_population_is_told_with_its_interval():
    each = record("a", form="population", statistic="median", n=9, interval=(0.25, 0.75), kind="empirical")
    text = shown(new_markdown_cell("# T"), cell("claims.check()", each), records=[each])[-1].source
    assert "median of 9: 0.5, interval [0.25, 0.75]" in text and "empirical" in text


def test_plumbing_is_folded_and_neighbours_are_one_cell():
    glue = new_output("display_data", {"a": "b"}, metadata={"scrapbook": {"name": "n"}})
    bar = new_output("stream", name="stderr", text="10%")
    kept = cell("glue(n=1)")
    kept.outputs = [glue]
    imports = cell("import numpy as np", tags=["hide-input"])
    imports.outputs = [bar]
    cells = shown(new_markdown_cell("# T"), imports, cell("size = choose(profile, smoke=1)"), kept, cell("y = f(x)"))
    assert [each.source for each in cells[1:]] == [
        "import numpy as np\n\nsize = choose(profile, smoke=1)\n\nglue(n=1)",
        "y = f(x)",
    ]
    assert "hide-input" in cells[1].metadata["tags"] and not cells[2].metadata["tags"]
    assert cells[1].outputs == [glue], "prose still finds its number, and no bar of progress is left"


@pytest.mark.parametrize(
    ("source", "folded"),
    [
        ("from nbutils import norms", True),
        ("claims.check_all(\n  'a', 'b',\n  1 - gap,\n);", True),
        ("for n in sizes:\n    theory = f(n)\n    claims.check('a', 'b',\n      n, (0, 1))", True),
        ("for n in sizes:\n    rho = theta.norm()\n    theta = theta + delta\n    glue(a=1)", False),
        ("def law(t):\n    return t ** 0.5", False),
        ("def law(t):\n    return t ** 0.5\nclaims.check(\n  'a',\n 'b',\n 1,\n (0, 1))", False),
        ("mine = None  # your folder\nmatch = '*'\nsize = choose(profile, smoke=1)", False),
        ("choices = chooser(x)", False),
        ("axes[0].plot(x)", True),
        ("ax = figures.axes('t', 'rho')\nax.plot(t, rho)\nplt.show()", True),
        ("%timeit f(x)", False),
    ],
)
def test_what_is_plumbing(source, folded):
    assert present.is_plumbing(source) is folded


def test_the_cards_name_claims_and_figures_of_their_chapters():
    for chapter, card in present.cards().items():
        text = (ROOT / "book" / f"{chapter}.md").read_text(encoding="utf-8")
        assert {"asks", "claims", "found", "remember", "because", "figure"} <= set(card), chapter
        assert card.get("preprint") or card.get("published") or chapter == "17-your-own"
        assert all(chapter in CLAIMS[claim]["chapters"] for claim in card["claims"])
        for name in (card["figure"], *(each["after"] for each in card.get("explore", ()))):
            assert f"    name: {name}\n" in text, (chapter, name)
        numbers = re.findall(r"\{glue:text\}`(\w+)`", card["because"])
        assert numbers, chapter
    assert set(present.cards()) == set(chapters())


def test_a_card_says_what_was_found_only_with_its_verdict():
    told = present.cards()["01-random-walk"]
    kept = {claim: each.split(" or ")[-1] for claim, each in report.load_verdicts().items()}
    result = report.Report({"green": True}, [record("a", chapter="01-random-walk")], dict(kept), [], [])
    text = present.card("01-random-walk", result)
    assert (
        told["remember"].strip() in text
        and told["because"].strip() in text
        and ">confirmed</span>" in text
        and f'1 of 1 checks of this chapter hold\n(<a href="{present.KINDS_TOLD}">1 exact</a>)' in text
    )
    result.records.append(record("b", holds=False, chapter="01-random-walk"))
    assert "1 of 2 checks" in present.card("01-random-walk", result)
    result.verdicts[told["claims"][0]] = "refuted"
    text = present.card("01-random-walk", result)
    assert told["because"].strip() not in text
    assert told["remember"].strip() not in text and "left out" in text and told["asks"].strip() in text
    assert present.card("99-no-card", result) == ""


SVG = """<?xml version="1.0"?>
<svg xmlns:xlink="http://www.w3.org/1999/xlink" width="9pt" viewBox="0 0 90 90" version="1.1"><metadata>m</metadata>
<defs><style type="text/css">*{a: b}</style><path id="m1" d="M 1.23456 0.98765" style="stroke: #0072b2"/></defs>
<!-- words --><g id="p1" clip-path="url(#c1)" style="fill: #ffffff"><use xlink:href="#m1"/></g>
<g transform="translate(1.25 2) scale(0.095 -0.095)" style="opacity: 0.15"/></svg>"""


def test_a_drawing_in_a_page_has_the_page_colours_and_ids_of_its_own():
    text = sphinx_pages.themed(SVG, "fig-a")
    soup = BeautifulSoup(text, "html.parser")
    assert text.startswith('<svg viewBox="0 0 90 90">') and "metadata" not in text and "words" not in text
    assert soup.path["style"] == "stroke: var(--fig-blue)" and soup.g["style"] == "fill: var(--fig-ground)"
    assert soup.use["href"] == "#fig-a-m1" == f"#{soup.path['id']}" and soup.g["clip-path"] == "url(#fig-a-c1)"
    assert soup.path["d"] == "M 1.2 0.9" and "scale(0.095 -0.095)" in text, "letters keep their size"
    assert "translate(1.2 2)" in text and "opacity: 0.15" in text


def test_letters_are_drawn_once_in_a_page():
    letter = '<path id="DejaVuSans-30" d="M 0 0"/>'
    page = sphinx_pages._letters_once(f'<svg>{letter}<path id="f-m1"/></svg><svg>{letter}<path id="g-m1"/></svg>')
    assert page == f'<svg>{letter}<path id="f-m1"/></svg><svg><path id="g-m1"/></svg>'
    text = sphinx_pages.themed(f'<svg viewBox="0 0 1 1">{letter}<use href="#DejaVuSans-30"/></svg>', "f")
    assert 'id="DejaVuSans-30"' in text and 'href="#DejaVuSans-30"' in text


def test_every_colour_of_the_figures_is_there_on_light_and_dark_pages():
    css = (ROOT / "book" / "_static" / "book.css").read_text(encoding="utf-8")
    light, dark = css.split("/* figures, dark */")
    for part in (light, dark.partition("}")[0]):
        assert set(sphinx_pages.THEME.values()) <= set(re.findall(r"--fig-(\w+): #", part))
    style = (ROOT / "book" / "book.mplstyle").read_text(encoding="utf-8")
    cycle = {f"#{each.lower()}" for each in re.findall(r"'([0-9A-F]{6})'", style)}
    assert cycle and cycle <= set(sphinx_pages.THEME)


def test_the_executed_notebook_has_plain_words_outputs_and_its_own_numbers(tmp_path):
    from workflow import notebooks

    source = ROOT / "book" / "01-random-walk.md"
    node = notebooks.executable(source)
    scrap = {"name": "walk_exponent", "mime_prefix": "application/papermill.record/"}
    data = {"application/papermill.record/text/plain": "'0.4321'"}
    node.cells[1].outputs = [new_output("display_data", data, metadata={"scrapbook": scrap})]
    nbformat.write(node, tmp_path / "01-random-walk.ipynb")
    made = notebooks.executed(tmp_path / "01-random-walk.ipynb", source, lambda node: node)
    prose = "\n".join(each.source for each in made.cells if each.cell_type == "markdown")
    assert "0.4321" in prose and not re.search(r"```\{|\{[a-z:]+\}`|^:::", prose, re.M)
    assert made.cells[1].outputs == node.cells[1].outputs


def test_a_notebook_for_colab_has_the_card_the_kept_numbers_and_its_version(tmp_path, monkeypatch):
    from importlib.metadata import version

    from workflow import notebooks

    monkeypatch.setattr(notebooks, "NUMBERS", tmp_path / "numbers.json")
    source = ROOT / "book" / "01-random-walk.md"
    head = notebooks.plain(source).cells[0].source
    address = yaml.safe_load((ROOT / "_config.yml").read_text())["html"]["baseurl"]
    assert head.startswith("# 1. The random walk\n\n> **Asked.**") and "green run" not in head
    assert "Why believe it" not in head, "numbers of no run say nothing"
    assert f"({address}01-random-walk.html)" in head
    kept = '{"run": "profile book, seed 0", "chapters": {"01-random-walk": {"walk_left": "0.1234"}}}'
    (tmp_path / "numbers.json").write_text(kept)
    node = notebooks.plain(source)
    assert "**Why believe it.** Walked" in node.cells[0].source and "0.1234" in node.cells[0].source
    prose = "\n".join(each.source for each in node.cells if each.cell_type == "markdown")
    assert "0.1234" in prose and "green run (profile book, seed 0)" in prose and "`walk_t_max`" in prose
    setup = next(each.source for each in node.cells if "setup" in each.metadata.get("tags", ()))
    assert f'f"{{book}}@v{version("nbutils")}"' in setup
    compile(setup, "setup", "exec")


def test_paper_shows_what_is_folded_and_the_figures_of_cards():
    card = '<div class="card-figure" data-figure="01-one#fig-a"></div><details class="checks">Two</details>'
    figures = "".join(f'<figure id="fig-{x}"><img alt="{x}" src="{x}.svg"/></figure>' for x in "ba")
    head = '<head><script src="_static/explore/t5.js"></script></head>'  # in the order of names, which does not work
    soup = BeautifulSoup(pdf.for_paper(f"{head}<body>{card}{figures}</body>"), "html.parser")
    assert soup.select_one("div.card-figure img")["src"] == "a.svg" and soup.details.has_attr("open")
    assert "@media print" in str(soup.head)
    assert [each["src"] for each in soup.select("script")] == [f"_static/explore/{name}" for name in pdf.EXPLORE]
    script = (ROOT / "book" / "_static" / "book.js").read_text(encoding="utf-8")
    assert ", ".join(f'"{name}"' for name in pdf.EXPLORE) in script, "one order, on pages and on paper"
    with pytest.raises(ValueError, match="fig-a"):
        pdf.for_paper(card)
