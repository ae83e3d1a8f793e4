"""Planted defects: the list applies to the code as it is, a few are killed here, all of them by `make test-all`."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from workflow import mutants

LISTED = mutants.load()
# Files of nbutils without mathematics of their own: they choose, read, fetch, draw or call.
PLAIN = {
    "nbutils/__init__.py",
    "nbutils/__main__.py",
    "nbutils/animation.py",
    "nbutils/chapters/__init__.py",
    "nbutils/data.py",
    "nbutils/figures.py",
    "nbutils/profile.py",
    "nbutils/trainings/__init__.py",
    "nbutils/trainings/runs.py",
    "nbutils/checkpoints/store.py",
    "nbutils/checkpoints/weights.py",
    "nbutils/claims/records.py",
}


def test_every_mutant_applies_to_the_code_as_it_is():
    assert mutants.misplaced(LISTED) == []


def test_every_module_with_mathematics_has_a_mutant():
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "nbutils").rglob("*.py")} - PLAIN
    assert modules == {mutant.file for mutant in LISTED if mutant.file.startswith("nbutils/")}


def a_mutant(**more):
    file = "nbutils/chapters/growth.py"
    entry = {"id": "m", "file": file, "text": "weights = 1 / t", "becomes": "weights = 1 / t**2",
             "breaks": "b", "tests": ("tests/test_growth.py",)}  # fmt: skip
    return mutants.Mutant(**entry | more)


def test_a_text_that_is_gone_or_stands_twice_is_told():
    assert mutants.misplaced([a_mutant()]) == []
    for text, count in (("weights = 2 / t", 0), ("def ", None)):
        said = mutants.misplaced([a_mutant(text=text)])
        assert len(said) == 1 and "m: " in said[0] and (count is None or f"stands {count} times" in said[0])
    assert len(mutants.misplaced([a_mutant(file="nbutils/gone.py")])) == 1
    assert len(mutants.misplaced([a_mutant(becomes="weights = 1 / t")])) == 1, "it changes nothing"
    assert mutants.misplaced([a_mutant(tests=("tests/test_gone.py",))]) == ["m: there is no tests/test_gone.py"]


def test_a_list_with_a_wrong_field_is_refused(tmp_path):
    file = tmp_path / "mutants.yml"
    entry = "- {id: a, file: nbutils/chapters/growth.py, text: x, becomes: y, breaks: z}\n"
    file.write_text(entry)
    assert mutants.load(file)[0].tests == ("tests/test_growth.py",)
    for text, said in ((entry * 2, "listed twice"), (entry.replace("becomes", "become"), "mutant 'a': .*become")):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            mutants.load(file)


def test_survivors_below_the_share_and_wrong_equivalents_are_red():

    def killed(name):
        return mutants.Outcome(name, "killed", "t", 1.0)

    def survived(name):
        return mutants.Outcome(name, "survived", "", 1.0)

    three = [a_mutant(id="a"), a_mutant(id="b"), a_mutant(id="c", equivalent="because")]
    good = [killed("a"), killed("b"), survived("c")]
    assert mutants.share(three, good) == 1 and mutants.problems(three, good) == []
    half = [killed("a"), survived("b"), survived("c")]
    assert mutants.share(three, half) == 0.5 and "50.0 % are killed" in mutants.problems(three, half)[0]
    assert "said to be equivalent" in mutants.problems(three, [killed("a"), killed("b"), killed("c")])[0]
    invalid = [killed("a"), mutants.Outcome("b", "invalid", "why", 0.0), survived("c")]
    assert "b: no verdict: why" in mutants.problems(three, invalid)
    page = mutants.markdown(three, half)
    assert page.index("| b |") < page.index("| a |") and "50.0 % killed" in page and "equivalent: because" in page


def test_the_summary_of_a_whole_run_names_every_mutant():
    three = [a_mutant(id="a"), a_mutant(id="b"), a_mutant(id="c", equivalent="because")]
    results = {"a": "killed", "b": "killed", "c": "survived"}
    found = mutants.summary(three, [mutants.Outcome(name, result, "t", 1.0) for name, result in results.items()])
    assert (found["planted"], found["killed"], found["ids"]) == (2, 2, ["a", "b", "c"])


def test_the_kept_result_is_of_the_list_as_it_is():
    """The pages show it: a list that has grown since would be shown with an old count."""
    kept = json.loads(mutants.KEPT.read_text())
    again = "the kept result is of another list: run `make mutants` and commit tests/baselines/mutants.json"
    assert kept.get("ids") == [mutant.id for mutant in LISTED], again
    counted = [mutant for mutant in LISTED if not mutant.equivalent]
    assert kept["planted"] == len(counted) == kept["killed"] + len(kept["survived"]), again
    assert len(kept["equivalent"]) == len(LISTED) - len(counted), again
    assert kept["files"] == len({mutant.file for mutant in LISTED}), again


PLANT = """
import json
from workflow import mutants
chosen = [mutant for mutant in mutants.load() if mutant.quick]
harmless = chosen[0]._replace(id="harmless", becomes=chosen[0].text + "  # and nothing else")
print(json.dumps([outcome.result for outcome in mutants.plant([*chosen, harmless], jobs=2)]))
"""


def test_a_few_are_killed_and_what_breaks_nothing_survives():
    """In copies, through the runner itself; in a process of its own, because it forks."""
    done = subprocess.run([sys.executable, "-c", PLANT], cwd=ROOT, capture_output=True, text=True, timeout=900)
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) >= 4 and results == ["killed"] * (len(results) - 1) + ["survived"], done.stdout
    assert mutants.misplaced(LISTED) == [], "the checkout itself is as it was"


@pytest.mark.slow
def test_of_all_mutants_enough_are_killed():
    done = subprocess.run([sys.executable, "-m", "workflow.mutants"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
