"""Sentences follow verdicts: shown with the one they belong to, left out with a word otherwise."""

import json

import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from nbutils.claims.records import Record
from workflow import findings, present, report
from workflow.notebooks import to_markdown
from workflow.scorecard import COLUMNS, scorecard
from workflow.stage import bound

TEXT = "Before.\n\n:::{finding} one two\nWe find **so**.\n\n- and so\n:::\n\nAfter.\n"


def record(claim, holds=True, check="a < b", **more):
    facts = {"kind": "derived", "measured": 3.0, "band": (0.0, 2.0), "holds": holds, "anchor": f"claim-{claim}"}
    return Record(claim, check, "stated", chapter="01-one", **facts | more)


@pytest.fixture
def run(monkeypatch):
    """A run whose claims have these verdicts: ``one`` and ``two`` are to be refined, ``far`` open or refined."""
    kept = {"one": "refined", "two": "refined", "far": "open or refined", "never": "open"}
    monkeypatch.setattr(report, "load_verdicts", lambda: kept)

    def made(problems=(), records=None, **verdicts):
        found = {**dict.fromkeys(kept, "refined"), "never": "open", **verdicts}
        records = [record(name, found[name] != "failed") for name in found] if records is None else records
        return report.Report({"green": not problems}, records, found, list(problems), [])

    return made


def test_a_finding_is_shown_with_its_verdict(run):
    assert findings.bind(TEXT, run()) == "Before.\n\nWe find **so**.\n\n- and so\n\n\nAfter.\n"


@pytest.mark.parametrize("verdict", ["failed", "refuted", "confirmed"])
def test_a_finding_is_left_out_with_another_verdict(run, verdict):
    shown = findings.bind(TEXT, run(two=verdict))
    assert "We find" not in shown and "and so" not in shown and shown.startswith("Before.") and "After." in shown
    assert f"the verdict on `two` is *{verdict}*, not *refined*" in shown and "01-one.html#claim-two" in shown


def test_a_claim_that_waits_for_the_network_has_two_sentences(run):
    text = ":::{finding} far\nMeasured.\n:::\n\n:::{finding} far=open\nNot here.\n:::\n"
    assert findings.bind(text, run()).split() == ["Measured."]
    shown = findings.bind(text, run(far="open"))
    assert "Not here." in shown and "Measured." not in shown and "*open*, not *refined*" in shown
    assert findings.bind(":::{finding} never\nNobody knows.\n:::\n", run()).split() == ["Nobody", "knows."]


def test_a_row_of_a_table_keeps_what_we_find_only_with_its_verdict(run):
    table = (
        "| claim | verdict | we find |\n|---|---|---|\n| a | {{ one }} | it is $x$ |\n| b | {{ two }} | it isn't |\n"
    )
    assert findings.bind(table, run()) == table
    shown = findings.bind(table, run(two="failed")).splitlines()
    assert shown[2] == "| a | {{ one }} | it is $x$ |"
    assert shown[3] == "| b | {{ two }} | *left out: this run does not bear it* |"


def test_a_finding_of_no_claim_is_an_error(run):
    with pytest.raises(ValueError, match="no claim 'three' in this run"):
        findings.bind(":::{finding} three\nWe find.\n:::\n", run())


def test_what_we_say_instead_is_not_said_of_a_failed_claim():
    claim, failed = {"corrected": "It is so."}, json.loads('"failed"')  # as a run's report is read
    assert findings.corrected(claim, failed) == ""
    assert findings.corrected(claim, "refined") == " *We find:* It is so." and findings.corrected(claim, "failed") == ""
    assert findings.corrected({}, "confirmed") == ""


@pytest.mark.parametrize(("name", "verdict", "said"), [
    ("one", "refined", True), ("one", "confirmed", False), ("one", "open", False), ("one", "planned", False),
    ("far", "open", False), ("far", "refined", True), ("far", "refuted", False),
])  # fmt: skip
def test_what_we_say_instead_goes_with_the_verdict_that_is_kept(run, name, verdict, said):
    assert bool(findings.corrected({"id": name, "corrected": "It is so."}, verdict)) is said


def test_a_caption_says_what_to_see_only_where_all_came_out_as_kept(run, monkeypatch):
    monkeypatch.setattr(report, "load_claims", lambda: {name: {"chapters": ["01-one"]} for name in ("one", "far")})

    def caption(result):
        code = new_code_cell("", metadata={"mystnb": {"figure": {"name": "f", "caption": "Drawn. What to see: so."}}})
        return bound(new_notebook(cells=[new_markdown_cell("# T"), code]), "01-one", result).cells[1]

    assert caption(run()).metadata["mystnb"]["figure"]["caption"] == "Drawn. What to see: so."
    left = caption(run(one="failed")).metadata["mystnb"]["figure"]["caption"]
    assert left.startswith("Drawn. What to see is left out: the verdict on `one` is *failed*") and "so." not in left
    assert "so." in caption(run(far="open")).metadata["mystnb"]["figure"]["caption"]


def test_the_banner_links_every_failed_check_and_no_noted_one(run):
    assert findings.banner(run()) == ""
    noted = record("two", False, check="chance", noted=True, further=())
    bad = [record("one", False), record("one", False, check="c", anchor="failed-one-7"), noted]
    problems = [report.Problem("04-t5", "", "cell [1] raised <E>"), report.Problem("01-one", "one", "x", "3", "[0, 2]")]
    text = findings.banner(run(problems, bad, one="failed"))
    assert '<a href="01-one.html#claim-one">01-one: one: a &lt; b</a>' in text and "#failed-one-7" in text
    assert "chance" not in text and "cell [1] raised &lt;E&gt;" in text and "no verdict on the paper" in text
    assert f'id="{bad[1].anchor}"' in present._row(bad[1])


def test_a_box_stands_below_the_title():
    assert findings.below_title("# T\n\ntext", "", "box") == "# T\n\nbox\n\ntext"
    with pytest.raises(ValueError, match="begins with its title"):
        findings.below_title("text")


def test_notebooks_show_what_is_bound_to_the_expected_verdict():
    text = "a\n\n:::{finding} one\nWe find.\n:::\n\n:::{finding} one=open\nNot here.\n:::\n\nb"
    assert to_markdown(text, {}, {}, {}).split() == ["a", "We", "find.", "b"]


CLAIM = {"chapters": ["01-one"], "source": "Eq. <5>", "statement": "a < `b`", "corrected": "b < a"}
LISTED = {"one": CLAIM, "two": CLAIM, "far": {**CLAIM, "ours": True, "chapters": ["01-one", "02-two"]}, "plan": CLAIM}


def test_a_claim_that_no_check_decides_is_looked_for_in_its_first_chapter(run, monkeypatch):
    monkeypatch.setattr(report, "load_claims", lambda: {"far": {"chapters": ["01-one", "02-two"]}})
    assert findings.evidence("far", run(records=[])) == ("01-one.html", "")


def test_the_scorecard_states_no_finding_for_a_claim_that_failed(run):
    left = Record("far", "b < a", "open", chapter="01-one", reason="no network")
    found = run(two="failed", far="open", records=[record("one"), record("two", False), left])
    table = BeautifulSoup(scorecard(found, LISTED), "html.parser")
    rows = dict(zip(LISTED, table.select("tbody tr"), strict=True))
    assert [row["data-verdict"] for row in rows.values()] == ["refined", "failed", "open", "planned"]
    assert "We find: b < a" in rows["one"].get_text() and "We find" not in rows["two"].get_text()
    assert "Open: no network" in rows["far"].get_text() and "Open:" not in rows["two"].get_text()
    assert "a < b" in rows["two"].get_text() and rows["two"].find("code").get_text() == "b"
    assert rows["two"].find("a")["href"] == "01-one.html#claim-two"


def test_a_row_of_the_scorecard_has_verdict_claim_place_and_checks(run):
    table = BeautifulSoup(scorecard(run(two="failed", far="open"), LISTED), "html.parser")
    assert [cell.get_text() for cell in table.select("th[role=columnheader]")] == [*COLUMNS]
    rows = dict(zip(LISTED, table.select("tbody tr"), strict=True))
    for row in rows.values():
        assert [cell["data-label"] for cell in row.select("td[role=cell]")] == [*COLUMNS]
    shown = {name: [cell.get_text(" ") for cell in row.find_all("td")] for name, row in rows.items()}
    assert [cells[-1] for cells in shown.values()] == ["1 of 1", "0 of 1", "not decided", ""]
    assert shown["one"][2] == "Eq. <5> chapter  1" and shown["far"][2] == "our question chapters  1 , 2"
    assert [link["href"] for link in rows["far"].select("td:nth-child(3) a")] == ["01-one.html#claim-far"]
    assert rows["plan"].find("a") is None and rows["far"]["data-chapters"] == "1 2"


@pytest.mark.parametrize(("verdict", "told"), [("confirmed", True), ("refuted", True), ("failed", False)])
def test_what_we_say_instead_is_told_unless_a_check_failed(verdict, told):
    assert bool(findings.corrected({"corrected": "it is twice that"}, verdict)) is told


@pytest.mark.parametrize(
    ("verdict", "said"),
    [("refined", ""), ("open", ""), ("failed", "the verdict on `far` is *failed*."), ("confirmed", "`far` is *conf")],
)
def test_a_chapter_says_which_verdicts_surprise(run, monkeypatch, verdict, said):
    listed = {
        "far": {"chapters": ["01-one", "02-two"]},
        "one": {"chapters": ["02-two"]},
        "new": {"chapters": ["01-one"]},
    }
    monkeypatch.setattr(report, "load_claims", lambda: listed)
    found = findings.surprises("01-one", run(far=verdict, one="failed"))
    assert (said in found) and bool(said) is bool(found) and "`one`" not in found and "new" not in found
    assert "`one` is *failed*" in findings.surprises("02-two", run(far=verdict, one="failed"))
    assert findings.surprises("03-three", run(one="failed")) == ""


def test_evidence_is_the_first_check_of_the_claim_itself(run):
    records = [Record(name, "a", "stated", chapter=chapter) for name, chapter in
               (("one", "01-one"), ("two", "02-two"), ("two", "03-three"))]  # fmt: skip
    assert findings.evidence("two", run(records=records)) == ("02-two.html", "claim-two")


def test_the_banner_counts_problems_and_lists_those_without_a_value_by_their_words(run):
    told = [report.Problem("01-one", "one", "no check of it"), report.Problem("02-two", "two", "wrong", "3", "[0, 2]")]
    text = findings.banner(run(told, []))
    assert "2 problem(s)." in text and "- 01-one: no check of it" in text and "wrong" not in text
