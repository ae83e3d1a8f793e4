"""Planted defects: the list applies to the code as it is, a generator's are drawn fairly, a few are killed here."""

import subprocess
import sys

import pytest
from conftest import ROOT

from workflow import defects, mutants
from workflow.defects import Mutant
from workflow.mutants import Outcome

LISTED = defects.load()


def test_every_mutant_applies_to_the_code_as_it_is():
    assert defects.misplaced(LISTED) == []


def a_mutant(**more):
    file = "nbutils/chapters/growth.py"
    entry = {"id": "m", "file": file, "text": "weights = 1 / t", "becomes": "weights = 1 / t**2",
             "breaks": "b", "tests": ("tests/test_growth.py",)}  # fmt: skip
    return Mutant(**entry | more)


def test_a_text_that_is_gone_or_stands_twice_is_told():
    assert defects.misplaced([a_mutant()]) == []
    for text, count in (("weights = 2 / t", 0), ("def ", None)):
        said = defects.misplaced([a_mutant(text=text)])
        assert len(said) == 1 and "m: " in said[0] and (count is None or f"stands {count} times" in said[0])
    assert len(defects.misplaced([a_mutant(file="nbutils/gone.py")])) == 1
    assert len(defects.misplaced([a_mutant(becomes="weights = 1 / t")])) == 1, "it changes nothing"
    assert defects.misplaced([a_mutant(tests=("tests/test_gone.py",))]) == ["m: there is no tests/test_gone.py"]


def test_a_list_with_a_wrong_field_is_refused(tmp_path):
    file = tmp_path / "mutants.yml"
    entry = "- {id: a, file: nbutils/chapters/growth.py, text: x, becomes: y, breaks: z}\n"
    file.write_text(entry)
    assert defects.load(file)[0].tests == ("tests/test_growth.py", "nbutils/chapters/growth.py")
    for text, said in ((entry * 2, "listed twice"), (entry.replace("becomes", "become"), "mutant 'a': .*become")):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            defects.load(file)
    with pytest.raises(ValueError, match="no mutant has nothing"):
        defects.chosen(["nothing"])


SOURCE = """def double(x: int | None) -> list[int | None]:
    return x + 2 if x > 0 else -x
PAIRS = zip((), (), strict=True)
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A checkout of one module, whose defects can be counted by hand."""
    (tmp_path / "nbutils").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "nbutils" / "fits.py").write_text(SOURCE)
    (tmp_path / "tests" / "test_fits.py").write_text("")
    (tmp_path / "equivalent.yml").write_text("[]")
    monkeypatch.setattr(defects, "ROOT", tmp_path)
    monkeypatch.setattr(defects, "EQUIVALENT", tmp_path / "equivalent.yml")
    return tmp_path


def test_defects_stand_in_code_not_in_annotations_nor_in_strict(small):
    """The sum, its 2, the condition, the comparison, its 0, the minus: six; the two ``|`` are never evaluated."""
    found = defects.places("nbutils/fits.py")
    assert {place.start[0] for place in found} == {2} and len(found) == 6
    names = {name for place in found for name, _ in place.defects}
    assert "core/ReplaceBinaryOperator_Add_Sub" in names and not [name for name in names if name.endswith("BitOr")]


def test_a_sample_is_of_different_places_and_always_the_same(small):
    drawn = defects.sample(5, 3)
    assert [mutant.becomes for mutant in drawn] == [mutant.becomes for mutant in defects.sample(5, 3)]
    assert len({mutant.id for mutant in drawn}) == 5 and all(mutant.becomes != SOURCE for mutant in drawn)
    assert {mutant.tests for mutant in drawn} == {("tests/test_fits.py", "nbutils/fits.py")}
    assert [m.becomes for m in defects.sample(5, 4)] != [m.becomes for m in drawn]
    with pytest.raises(ValueError, match="a sample of 7 from 6 places"):
        defects.sample(7, 0)


def test_an_equivalent_is_known_by_its_line(small):
    drawn = defects.sample(5, 3)[0]
    text = f"- {{file: nbutils/fits.py, change: '{drawn.breaks}', reason: because}}"
    (small / "equivalent.yml").write_text(text)
    again = defects.sample(5, 3)
    assert [mutant.equivalent for mutant in again] == ["because", "", "", "", ""]


def test_every_equivalent_is_a_line_of_today():
    """One whose line is gone excuses nothing, and would stay for ever."""
    for (file, change), reason in defects.equivalents().items():
        before = change.split(" → ")[0].split(": ", 1)[-1]
        assert before in (ROOT / file).read_text(encoding="utf-8"), (file, change)
        assert len(reason) > 10, change


def test_survivors_below_the_share_and_wrong_equivalents_are_red():

    def killed(name, by="t"):
        return Outcome(name, "killed", by, 60.0)

    def survived(name):
        return Outcome(name, "survived", "no chapter", 30.0)

    three = [a_mutant(id="a"), a_mutant(id="b"), a_mutant(id="c", equivalent="because")]
    good = [killed("a"), killed("b", "chapter 01-random-walk"), survived("c")]
    assert mutants.share(three, good) == 1 and mutants.problems(three, good) == []
    half = [killed("a"), survived("b"), survived("c")]
    assert mutants.share(three, half) == 0.5 and "50.0 % are killed" in mutants.problems(three, half)[0]
    assert "said to be equivalent" in mutants.problems(three, [killed("a"), killed("b"), killed("c")])[0]
    invalid = [killed("a"), Outcome("b", "invalid", "why", 0.0), survived("c")]
    assert "b: no verdict: why" in mutants.problems(three, invalid)
    page = mutants.markdown(three, half)
    assert page.index("| b |") < page.index("| a |") and "50.0 % killed" in page and "equivalent: because" in page
    told = mutants.summary(three, good)
    assert {key: told[key] for key in ("planted", "killed", "by_chapters", "files", "minutes")} == {
        "planted": 3, "killed": 2, "by_chapters": 1, "files": 1, "minutes": 2}  # fmt: skip
    assert [each["id"] for each in told["survived"]] == ["c"]


def test_the_page_says_what_was_seen_at_first_and_what_is_not_seen_today(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "KEPT", tmp_path / "mutants.json")
    assert "Not measured yet" in mutants.sentence()
    first = {"planted": 50, "killed": 40, "by_chapters": 3, "files": 7, "survived": []}
    left = [{"id": "a", "breaks": "b", "equivalent": text} for text in ("because", "because", "")]
    sample = {"tool": "a tool", "first": first, "now": {**first, "killed": 47, "survived": left}}
    listed = {"planted": 9, "killed": 8, "ids": []}
    mutants.keep({"listed": listed, "samples": {"sample of 50, seed 1": sample}})
    said = mutants.sentence()
    assert "Of 9 listed defects 8 turned" in said and "Of 50 that a tool made in 7 modules" in said
    assert "40 were seen at first, 3 of them by a chapter alone" in said
    assert "2 change nothing that can be seen; 1 are not seen today" in said


def test_the_kept_result_is_of_the_list_as_it_is():
    """The pages show it: a list that has grown since would be shown with an old count."""
    kept = mutants.kept()["listed"]
    again = "the kept result is of another list: run `make mutants` and commit tests/baselines/mutants.json"
    assert kept.get("ids") == [mutant.id for mutant in LISTED], again


PLANT = """
import json, pathlib, sys
from workflow import defects, mutants
chosen = [mutant for mutant in defects.load() if mutant.id in ("growth-weights", "samples-sides", "text-round")]
chosen.append(chosen[0]._replace(id="harmless", becomes=chosen[0].text + "  # and nothing else", equivalent="it is"))
for _ in range(2):
    print(json.dumps([outcome.result for outcome in mutants.judged(chosen, pathlib.Path(sys.argv[1]), 2)]))
"""


def test_a_few_are_killed_and_what_breaks_nothing_survives(tmp_path):
    """In copies, in a process of its own, because it forks. What is known is not run again."""
    words = [sys.executable, "-c", PLANT, str(tmp_path / "told.jsonl")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
    first, again = done.stdout.splitlines()[-2:]
    assert first == again == '["killed", "killed", "killed", "survived"]', done.stdout + done.stderr
    assert len((tmp_path / "told.jsonl").read_text().splitlines()) == 4, "judged once each"
    assert defects.misplaced(LISTED) == [], "the checkout itself is as it was"


@pytest.mark.slow
def test_of_the_listed_mutants_enough_are_killed():
    done = subprocess.run([sys.executable, "-m", "workflow.mutants"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
