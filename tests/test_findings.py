"""Sentences follow verdicts: shown with the one they belong to, left out otherwise; what a red run shows."""

import re

import pytest
from bs4 import BeautifulSoup

from nbutils.claims.records import Record
from workflow import ROOT, Run, book, notebooks, sources
from workflow.judge import Judgement, Problem
from workflow.pages import build, chapter, figures, verdicts
from workflow.pages.rendering import TEMPLATES

CLAIMS = book.claims()
LISTED = {
    "one": {"chapters": ["01-one"], "expected": "partly confirmed", "corrected": "b < a"},
    "two": {"chapters": ["01-one", "02-two"], "expected": "partly confirmed"},
    "far": {"chapters": ["02-two"], "expected": "open or partly confirmed", "corrected": "It is so.", "ours": True},
    "never": {"chapters": ["02-two"], "expected": "open"},
}
CARD = {
    "asks": "Is it so?", "claims": ["one", "two"], "found": "It is $x$.", "remember": "So.", "because": "We saw it.",
    "figure": "fig-a", "preprint": "§3",
}  # fmt: skip
STATS = {"chapter": "01-one", "started": "2026-11-24T22:41:45+00:00", "seconds": 5.31}
DRAWN = {"fig-a": figures.Figure("fig-a", "A line.", "90%", '<svg viewBox="0 0 461.2 273.6"/>')}


def record(claim, holds=True, check="a < b", **more):
    facts = {"kind": "derived", "measured": 3.0, "band": (0.0, 2.0), "holds": holds, "anchor": f"claim-{claim}"}
    return Record(claim, check, more.pop("role", "stated"), chapter=LISTED[claim]["chapters"][0], **facts | more)


@pytest.fixture
def run(monkeypatch):
    """``run(one="failed")``: a run whose claims have the verdicts that are expected, but for these."""
    listed = {
        name: {"id": name, "source": "Eq. <5>", "statement": "a < `b`", "object": "untrained: draws", **each}
        for name, each in LISTED.items()
    }
    monkeypatch.setattr(book, "claims", lambda: listed)
    monkeypatch.setattr(book, "chapters", lambda: ["01-one", "02-two"])

    def made(problems=(), records=None, **found):
        found = {**{name: each["expected"].split(" or ")[-1] for name, each in LISTED.items()}, **found}
        records = [record(name, found[name] != "failed") for name in found] if records is None else records
        facts = {"green": not problems, "profile": "smoke", "seed": 0, "device": "cpu", "hardware": "a machine"}
        facts |= {"kinds": {"derived": 4}, "noted": 1, "versions": {"torch": "2.13"}}
        facts["notebooks"] = [STATS | {"peak_mb": 758.0, "threads": 1}]
        return Judgement(facts, records, found, list(problems))

    return made


@pytest.mark.parametrize(
    ("finding", "found", "shown"),
    [
        ("one two", {}, "We find."),
        ("one two", {"two": "failed"}, "*failed*, not *partly confirmed*"),
        ("one two", {"two": "confirmed"}, "*confirmed*, not *partly confirmed*"),
        ("one two", {"two": "undecided"}, "We find."),  # an author has run one chapter
        ("far", {}, "We find."),
        ("far", {"far": "open"}, "*open*, not *partly confirmed*"),
        ("far=open", {"far": "open"}, "We find."),
        ("far=open", {}, ""),
        ("never", {}, "We find."),
    ],
)
def test_a_finding_is_shown_with_its_verdict(run, finding, found, shown):
    source = f"Before.\n\n:::{{finding}} {finding}\nWe find.\n:::\n\nAfter.\n"
    text = chapter.select_findings(source, verdicts.claims_of(run(**found)))
    assert text.startswith("Before.") and text.endswith("After.\n") and shown in text
    assert ("We find." in text) is (shown == "We find.") and (len(text.split()) == 2) is (shown == "")


def test_a_finding_of_no_claim_is_an_error(run):
    with pytest.raises(ValueError, match=r"claims\.yml lists no claim 'three'"):
        chapter.select_findings(":::{finding} three\nWe find.\n:::\n", verdicts.claims_of(run()))


def test_a_caption_says_what_to_see_only_where_all_came_out_as_expected(run):
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    def caption(**found):
        code = new_code_cell("", metadata={"mystnb": {"figure": {"name": "f", "caption": "Drawn. What to see: so."}}})
        node = new_notebook(cells=[new_markdown_cell("# T"), code])
        chapter.select_findings_in(node, "02-two", verdicts.claims_of(run(**found)))
        return code.metadata["mystnb"]["figure"]["caption"]

    assert caption() == caption(far="open") == caption(one="failed") == "Drawn. What to see: so."
    assert caption(two="failed") == "Drawn. What to see is left out: the verdict on `two` is *failed*."


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{{ no_such_claim }}", "'no_such_claim' is undefined"),
        ('{{ judged("no-such") }}', "has no attribute 'no-such'"),
        ('{{ number("01-one", "nothing") }}', "has no attribute 'nothing'"),
    ],
)
def test_a_placeholder_for_nothing_is_an_error_that_names_it(run, text, named):
    known = {"claims": verdicts.claims_of(run()), "numbers": {"01-one": {}}, "figures": {}}
    with pytest.raises(ValueError, match=f"errata.md: .*{named}"):
        build.filled("errata.md", text, known)
    filled = build.filled("a.md", '{{ judged("one") }}, $x$', known)
    assert filled.endswith(', <a href="01-one.html#claim-one">checks</a>, $x$')


@pytest.mark.parametrize("notebooks", [[], [STATS | {"made_from": "an older text"}]])
def test_a_chapter_that_was_edited_after_it_was_judged_is_not_rendered(run, notebooks, monkeypatch):
    """Its page would show outputs of one code with the verdicts on another."""
    monkeypatch.setattr(sources, "hashes", lambda: {"01-one": "today"})
    judgement = run()
    judgement.run["notebooks"] = notebooks
    with pytest.raises(ValueError, match="01-one was edited after it was judged: run it again"):
        build.staged(Run("smoke", chapters=("01-one",)), judgement, [])


def test_a_box_stands_below_the_title():
    assert chapter.below_title("# T\n\ntext", "", "box") == "# T\n\nbox\n\ntext"


@pytest.fixture
def red(run):
    """A red run with one of everything: checks that hold, failed, are noted and left open; a chapter that raised."""
    failed = record("one", False, check="c", anchor="failed-one-7")
    noted = record("two", False, check="chance", noted=True, further=({"seed": 7, "measured": 0.25, "holds": True},))
    left_open = record("far", None, role="open", reason="no <network>", kind=None)
    problems = [Problem("02-two", "", "cell [1] raised <E>"), Problem("01-one", "one", "x", "3", "[0, 2]")]
    records = [record("one"), failed, noted, left_open]
    return run(problems, records, one="failed", far="open", never="undecided")


def rendered(template, result):
    values = {"claims": verdicts.claims_of(result), "run": result.run, "records": result.records}
    values |= {"counts": verdicts.counts, "order": verdicts.ORDER}
    values |= {"kinds": ("exact", "derived"), "cards": {"01-one": CARD, "99-none": {}}, "title": lambda name: "One"}
    return TEMPLATES.get_template(f"{template}.j2").render(values)


def test_a_red_run_names_what_failed_and_shows_no_sentence_that_rests_on_it(run, red):
    def card(result):
        mine = [each for each in result.records if each.chapter == "01-one"]
        return chapter._card(CARD, result, mine, verdicts.claims_of(result), DRAWN)

    sentences = ("found", "remember", "because")
    assert all(CARD[name] in card(run()) and CARD[name] not in card(red) for name in sentences)
    assert "the verdict on `one` is *failed*, not *partly confirmed*" in card(red) and "2 of 3 checks" in card(red)
    assert "*In the paper: preprint §3, not in the published version.*" in card(red)
    assert CARD["remember"] in rendered("chapter_cards.md", run()) and CARD["asks"] in rendered("chapter_cards.md", red)
    assert "1 partly confirmed, 1 failed" in chapter._box("01-one", verdicts.claims_of(red))
    banner = build.red(red)
    assert build.red(run()) == ""
    assert '<a href="01-one.html#failed-one-7">01-one: one: c</a>' in banner and "raised &lt;E&gt;" in banner


def test_checks_and_scorecard_of_a_red_run(run, red):
    checks = BeautifulSoup(chapter._html("checks", records=red.records).source, "html.parser")
    assert checks.summary.get_text() == "✗ 1 check holds, 1 noted, 1 failed, 1 open" and checks.details.has_attr("open")
    assert [row["id"] for row in checks.select("tbody tr")] == ["claim-one", "failed-one-7", "claim-two", "claim-far"]
    assert "no <network>" in checks.get_text()
    rows, green = (
        BeautifulSoup(rendered("scorecard.html", result), "html.parser").select("tbody tr") for result in (red, run())
    )
    assert [row["data-verdict"] for row in rows] == ["failed", "partly confirmed", "open", "undecided"]
    assert [row["data-verdict"] for row in green] == ["partly confirmed", "partly confirmed", "in part", "open"]
    assert "Open: no <network>" in rows[2].get_text() and "untrained" in rows[3].get_text()
    counts = rendered("verdict_counts.md", red)
    assert "**3 claims of the paper:** 1 partly confirmed, 1 failed, 1 undecided." in counts
    assert "1 left open. 1 noted" in counts and "is no verdict on the paper" in counts
    assert "This run is **red**" in rendered("run_state.md", red)


def test_what_a_claim_rests_on_comes_from_its_checks_and_numbers_of_the_run(run):
    """Every number that ``claims.yml`` names is one that a chapter of the claim glues, or has in its prose."""
    for name, claim in CLAIMS.items():
        texts = [book.source(chapter).read_text(encoding="utf-8") for chapter in claim["chapters"]]
        for number in re.findall(r"\{(\w+)\}", f"{claim['object']} {claim.get('scale', '')}"):
            glued = [f" {number}=f" in text or f"{{glue:text}}`{number}`" in text for text in texts]
            assert any(glued), (name, number)
    records = [record("one", kind="empirical", n=9), record("one", kind="empirical", n=12), record("far", kind="exact")]
    claims = verdicts.claims_of(run(records=records, two="refuted", one="refuted"))
    assert claims["one"].evidence == "untrained: draws; 9 to 12 draws" and claims["far"].evidence == "untrained: draws"
    claims["one"].listed["object"] = ["proof", "trained here: a network"]
    assert claims["one"].evidence == "proof; trained here: a network; 9 to 12 trainings"
    assert (claims["far"].word, claims["one"].word) == ("in part", "refuted")
    claims["one"].listed["object"] = "pretrained: a model"
    assert claims["one"].evidence == "pretrained: a model; 9 to 12 replicates (texts or draws)"


@pytest.mark.parametrize(
    ("claim", "version"),
    [
        ({"source": "Eq. 5"}, "preprint only"),
        ({"source": "Eq. 5", "published": "§5"}, "both versions"),
        ({"source": "published §5"}, "published only"),
        ({"source": "released code"}, "released code"),
        ({"source": "–", "ours": True}, ""),
    ],
)
def test_a_verdict_has_its_version(claim, version):
    assert book.version(claim) == version


# ---- short ----

TAG = re.compile(r"\(?\{\{ judged\([^)]*\) \}\}\)?")  # what a sentence rests on
ONE_WORD = re.compile(r"\{\{.*?\}\}|\{[a-z:]+\}`[^`]*`|\$\$.*?\$\$|\$[^$]*\$", re.S)  # a number of the run, a formula
ADDRESS = re.compile(r"(?<=\])\([^)]*\)")  # of a link
CAPTION = re.compile(r"^    caption: \|?\n?((?:(?! {2}image:).*\n)*?)(?=  image:)", re.M)


def length(text):
    """Words of a text as a reader counts them: a number and a formula are one, the tag with a verdict is none."""
    plain = ONE_WORD.sub("N", ADDRESS.sub("", TAG.sub("", text)))
    return len([word for word in plain.split() if word.strip("*_,;.")])


def too_long(name, text, blocks, limit):
    """Where a block of a file has more words than the limit: file, line, count."""
    for start, block in blocks:
        if (count := length(block)) > limit:
            yield f"{name}:{text.count(chr(10), 0, start) + 1}: {count} words, {limit} at most: {block.strip()[:60]} …"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "book").glob("*.md")))
def test_a_finding_has_at_most_60_words_and_a_caption_50(name):
    text = (ROOT / "book" / name).read_text(encoding="utf-8")
    findings = [(match.start(), match[2]) for match in notebooks.FINDING.finditer(text)]
    captions = [(match.start(), match[1]) for match in CAPTION.finditer(text)]
    if name.removesuffix(".md") in book.chapters():
        findings.append((text.index("  found: "), book.card(name.removesuffix(".md"))["found"]))
        assert len(captions) == text.count("    caption: ")
    assert [*too_long(name, text, findings, 60), *too_long(name, text, captions, 50)] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("**We find.** It is $a + b$ and {{ number('01-one', 'two words') }} %.", 8),
        ("It falls ({{ judged('one') }}; {{ judged('two') }}), as {glue:text}`x` does.", 5),
        ("[The chapter](01-one.md) has {numref}`fig-a` as well.", 6),
    ],
)
def test_words_are_counted_as_a_reader_counts_them(text, words):
    assert length(text) == words
