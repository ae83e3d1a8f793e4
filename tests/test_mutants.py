"""Planted defects: the list applies to the code as it is, a generator's are drawn fairly, a few are killed here."""

import json
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


SOURCE = """def double(x: int | None, *, more=None) -> list[int | None]:
    return x + 2 if x > 0 else -x
PAIRS = zip((), (), strict=True)
WIDTH = profiles.choose("book", smoke=1, book=2, gpu=Size(3))
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


def test_defects_stand_in_code_not_in_annotations_nor_in_choices(small):
    """The sum, its 2, the condition, the comparison, its 0, the minus: six; the two ``|`` are never evaluated.

    Nor is a star of a signature a product, ``strict`` what it watches, or a size of ours wrong.
    """
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
        before = change.split(" → ")[0]
        lines = filter(None, map(str.strip, (ROOT / file).read_text(encoding="utf-8").splitlines()))
        assert any(before in (line, f"{before.split(': ')[0]}: {line}") for line in lines), (file, change)
        assert len(reason) > 10, change


def test_survivors_below_the_share_and_wrong_equivalents_are_red():

    def killed(name, by="t"):
        return Outcome(name, "killed", by, 60.0)

    def survived(name):
        return Outcome(name, "survived", "", 30.0)

    three = [a_mutant(id="a"), a_mutant(id="b"), a_mutant(id="c", equivalent="because")]
    good = [killed("a"), killed("b", "chapter 01-random-walk"), survived("c")]
    assert mutants.share(three, good) == 1 and mutants.problems(three, good, 1.0) == []
    half = [killed("a"), survived("b"), survived("c")]
    assert mutants.share(three, half) == 0.5 and mutants.problems(three, half, 0.5) == []
    assert mutants.problems(three, half, 0.6) == ["50.0 % are killed; at least 60 % must be"]
    assert "said to be equivalent" in mutants.problems(three, [killed("a"), killed("b"), killed("c")], 0.9)[0]
    invalid = [killed("a"), Outcome("b", "invalid", "why", 0.0), survived("c")]
    assert "b: no verdict: why" in mutants.problems(three, invalid, 0.0)
    page = mutants.markdown(three, half)
    assert page.index("| b |") < page.index("| a |") and "50.0 % killed" in page and "equivalent: because" in page
    told = mutants.summary(three, good)
    assert {key: told[key] for key in ("planted", "killed", "by_chapters", "files", "share", "minutes")} == {
        "planted": 3, "killed": 2, "by_chapters": 1, "files": 1, "share": 1, "minutes": 2}  # fmt: skip
    assert [each["id"] for each in told["survived"]] == ["c"]


def test_the_page_says_what_was_seen_at_first_and_what_is_not_seen_today(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "KEPT", tmp_path / "mutants.json")
    assert "Not measured yet" in mutants.sentence()
    first = {"planted": 50, "killed": 40, "by_chapters": 3, "files": 7, "survived": []}
    left = [{"id": "a", "breaks": "b", "equivalent": text} for text in ("because", "because", "")]
    sample = {"tool": "a tool", "commit": "abc", "first": first, "now": {**first, "killed": 47, "survived": left}}
    listed = {"planted": 9, "killed": 8, "ids": []}
    mutants.keep({"listed": listed, "samples": {"sample of 50, seed 1": sample}})
    said = mutants.sentence()
    assert (
        "Of 9 listed defects 8 turned" in said and "Of 50 that a tool made in 7 modules (sample of 50, seed 1" in said
    )
    assert "2 change nothing that can be seen. Of the other 48, 40 were seen at first, 83.3 %, 3 of them by" in said
    assert "today 1 are not seen" in said


def test_the_kept_result_is_of_the_list_as_it_is():
    """The pages show it: a list that has grown since would be shown with an old count."""
    kept = mutants.kept()["listed"]
    again = "the kept result is of another list: run `make mutants` and commit tests/baselines/mutants.json"
    assert kept.get("ids") == [mutant.id for mutant in LISTED], again


PART = """
SIZE = int("1")
def double(x): return x * 2
def triple(x): return x * 3
def quarter(x): return x / 4
def below(x):
    while x > 1: x = x / 2
    return x
"""
TESTS = """
from nbutils.part import below, double
def test_double(): assert double(2) == 4
def test_below(): assert below(5) <= 1
"""
CHAPTER = """
import sys
from nbutils.part import triple
sys.exit(triple(1) != 3 or not sys.argv[-1] == "01-one")
"""
PLANT = """
import json, pathlib, sys
from workflow import mutants
from workflow.defects import Mutant
folder, planted = pathlib.Path(sys.argv[1]), [Mutant(*each, tests=(tests,)) for *each, tests in json.loads(sys.argv[2])]
mutants.ROOT, mutants.LIMIT, mutants.using = folder, 15, lambda file: ["01-one"]
for _ in range(2):
    print(json.dumps(mutants.judged(planted, folder / "told.jsonl", 2)))
"""
ENDS = {  # what is planted, by which tests it is judged, what becomes of it, by what
    "by a test": ("x * 2", "x * 4", "part", "killed", "tests/test_part.py::test_double"),
    "by a chapter": ("x * 3", "x * 4", "part", "killed", "chapter 01-one"),
    "by nothing": ("x / 4", "x / 8", "part", "survived", "no chapter, either"),
    "endless": ("x > 1", "True", "part", "killed", "not finished after 15 s"),
    "no module": ('int("1")', 'int("a")', "part", "killed", "tests/test_part.py cannot be collected"),
    "without a defect, too": ("x * 2", "x * 5", "red", "invalid", "without a defect, too: tests/test_red.py::test_red"),
}


def test_every_way_in_which_a_defect_can_end(tmp_path):
    """In a small checkout, in a process of its own, because it forks. What is known is not judged again."""
    for file, text in {
        "nbutils/__init__.py": "",
        "nbutils/part.py": PART,
        "tests/test_part.py": TESTS,
        "tests/test_red.py": "def test_red(): assert False",
        "workflow/__init__.py": "",
        "workflow/__main__.py": CHAPTER,
        "told.jsonl": '["torn',
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text + "\n")
    planted = [
        (name, "nbutils/part.py", text, becomes, "b", f"tests/test_{tests}.py")
        for name, (text, becomes, tests, *_) in ENDS.items()
    ]
    words = [sys.executable, "-c", PLANT, str(tmp_path), json.dumps(planted)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    first, again = (json.loads(line) for line in done.stdout.splitlines())
    assert {name: (result, by) for name, result, by, _ in first} == {name: end[3:] for name, end in ENDS.items()}
    assert [outcome[:3] for outcome in again] == [outcome[:3] for outcome in first]
    told = (tmp_path / "told.jsonl").read_text().splitlines()
    assert len(told) == 1 + len(ENDS) - 1 + 2, "judged once each, survivors twice; without a verdict nothing is kept"
    assert (tmp_path / "nbutils" / "part.py").read_text() == PART + "\n", "the checkout itself is as it was"


REAL = """
import json, pathlib, sys
from workflow import defects, mutants
chosen = [mutant for mutant in defects.load() if mutant.id in ("growth-weights", "samples-sides")]
chosen.append(chosen[0]._replace(id="harmless", becomes=chosen[0].text + "  # and nothing else", equivalent="it is"))
one = "nbutils/chapters/one_weight.py"
by_chapter = defects.Mutant("one", one, "small / (one + small)", "small / one", "b", ("tests/test_names.py",))
chosen += [by_chapter] if "chapter" in sys.argv else []
print(json.dumps([outcome[1:3] for outcome in mutants.judged(chosen, pathlib.Path(sys.argv[1]), 2)]))
"""


def _judged(*words):
    """Defects in copies of this checkout: what became of each, and by what."""
    done = subprocess.run([sys.executable, "-c", REAL, *words], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert defects.misplaced(LISTED) == [], "the checkout itself is as it was"
    return [tuple(each) for each in json.loads(done.stdout)]


def test_listed_defects_are_killed_and_what_breaks_nothing_survives(tmp_path):
    found = _judged(str(tmp_path / "told.jsonl"))
    assert [result for result, _ in found] == ["killed", "killed", "survived"], found


@pytest.mark.slow
def test_a_chapter_sees_what_its_tests_do_not(tmp_path):
    assert _judged(str(tmp_path / "told.jsonl"), "chapter")[-1] == ("killed", "chapter 12-vanishing-steps")
