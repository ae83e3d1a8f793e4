"""Two runs side by side: what counts as a difference, how far a check moved, and what turns the comparison red."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

from nbutils.claims.records import Record
from workflow import compare
from workflow.__main__ import main


def record(check="a", measured=1.0, *, holds=True, band=(0.0, 2.0), baseline=None, claim="one"):
    kind = "derived" if baseline else "exact"
    return {"chapter": "01-one", "claim": claim, "check": check, "kind": kind, "role": "stated", "measured": measured,
            "band": list(band), "holds": holds, "baseline": baseline}  # fmt: skip


def a_run(*records, verdicts=None, problems=(), **run):
    settings = {"profile": "smoke", "seed": 0, "device": "cpu", "hardware": "h", "versions": {"torch": "2.13.0"}}
    green = not problems and all(entry["holds"] is not False for entry in records)
    return {"run": settings | {"green": green} | run, "records": list(records), "problems": list(problems),
            "verdicts": verdicts or {"one": "confirmed"}}  # fmt: skip


def test_the_same_run_twice_is_green_and_nothing_moved():
    found = compare.compare(a_run(record()), a_run(record()))
    assert not found.red and found.moved == [] and found.settings == []
    assert "every measured value is the same" in compare.markdown(found, "x", "y")


def test_moved_in_units_of_the_baseline_or_the_band_the_farthest_first():
    sd = {"mean": 1.0, "sd": 0.01, "n": 20}
    a = a_run(record("band"), record("seeds", baseline=sd), record("edge", 3.0, band=(1.0, None)))
    b = a_run(record("band", 1.5), record("seeds", 1.03, baseline=sd), record("edge", 3.5, band=(1.0, None)))
    moves = compare.compare(a, b).moved
    assert [(move.key[2], move.unit) for move in moves] == [
        ("seeds", "sd"), ("band", "half band"), ("edge", "room to the edge")]  # fmt: skip
    assert [move.distance for move in moves] == pytest.approx([3.0, 0.5, 0.25])
    assert not compare.compare(a, b).red, "a value that moved within its band is no verdict"


def test_a_number_that_became_none_has_moved_most():
    found = compare.compare(a_run(record(), record("b")), a_run(record(measured="nan", holds=False), record("b", 1.9)))
    assert found.moved[0].key[2] == "a" and found.moved[0].distance == float("inf") and found.red


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_no_number_in_both_runs_has_not_moved(value):
    same = a_run(record(measured=value, holds=False))
    assert compare.compare(same, same).moved == []
    other = a_run(record(measured=1.0))
    assert [move.distance for move in compare.compare(same, other).moved] == [float("inf")]


@pytest.mark.parametrize("band", [("nan", "nan"), (None, "inf"), ("-inf", "inf")])
def test_a_band_that_is_no_number_is_no_scale(band):
    """The ledger keeps what is not finite as text: that of a fit that failed."""
    found = compare.compare(a_run(record(band=band)), a_run(record(measured=1.5, band=band)))
    assert [move.distance for move in found.moved] == [float("inf")]


def test_a_check_that_fails_in_one_run_is_red():
    good, bad = a_run(record()), a_run(record(measured=3.0, holds=False))
    assert compare.compare(good, bad).red and compare.compare(bad, good).red
    assert not compare.compare(bad, bad).differ, "the two agree"


def test_two_runs_that_are_wrong_alike_have_nothing_new():
    """They do not differ, and each says why it is red: a check, or a chapter without a result."""
    problem = {"chapter": "02-two", "claim": "", "what": "cell [1] raised E", "measured": "", "band": ""}
    for bad in (a_run(record(measured=3.0, holds=False)), a_run(record(), problems=[problem])):
        found = compare.compare(bad, bad)
        assert not found.red and found.alike and not found.differ and found.red_alone == ["A", "B"]
        assert compare.conclusion(found).startswith("GREEN: nothing new, both are red alike")
    page = compare.markdown(found, "x", "y")
    assert "## x (A) and y (B): the same verdicts; red by itself: A and B" in page
    assert "| A | 02-two |  | cell [1] raised E |" in page and "| B | 02-two |  | cell [1] raised E |" in page
    one = compare.compare(a_run(record()), bad)
    assert one.red and one.red_alone == ["B"] and [row[0] for row in one.problems] == ["B"]
    unknown = {**bad, "run": {}, "problems": []}
    assert compare.compare(unknown, unknown).red, "a run that does not say that it is green"


def test_a_verdict_that_differs_or_is_missing_is_red():
    a = a_run(record(), verdicts={"one": "confirmed", "two": "refined"})
    assert compare.compare(a, a_run(record(), verdicts={"one": "confirmed", "two": "refuted"})).verdicts == [
        ("two", "refined", "refuted")
    ]
    missing = compare.compare(a, a_run(record(), verdicts={"one": "confirmed"}))
    assert missing.verdicts == [("two", "refined", "none")] and missing.differ and not missing.failed_in_one


def test_a_lost_check_is_red_and_settings_are_shown():
    a = a_run(record(), record("old"))
    b = a_run(record(), record("new"), device="cuda", versions={"torch": "2.14.0", "scipy": "1"})
    found = compare.compare(a, b)
    assert found.red and not found.differ and compare.conclusion(found).endswith("lost: 1")
    assert not compare.compare(a_run(record()), a_run(record(), record("new"))).red
    assert ([r.check for r in found.only_a], [r.check for r in found.only_b]) == (["old"], ["new"])
    assert found.settings == [("device", "cpu", "cuda"), ("torch", "2.13.0", "2.14.0"), ("scipy", "none", "1")]
    page = compare.markdown(found, "x", "y")
    assert all(part in page for part in ("2.13.0", "2.14.0", "old", "new"))


def test_the_command(tmp_path, capsys):
    for name, run in (("a", a_run(record())), ("b", a_run(record(measured=3.0, holds=False)))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").write_text(json.dumps(run))
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "a" / "metrics.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "GREEN: the same verdicts; 0 measured value(s) differ"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "RED: 0 verdict(s) differ, 1 check(s) hold in one run only; red by itself: B"
    )
    assert main(["report", str(tmp_path / "b"), str(tmp_path / "b")]) == 0, "a gate is red for what is new"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "GREEN: nothing new, both are red alike; 0 measured value(s) differ"


@pytest.mark.parametrize(
    ("text", "said"), [(None, "no run in"), ("{", "is no JSON"), ('{"run": {}}', "has no records, verdicts")]
)
def test_what_is_no_run_gets_one_line(tmp_path, capsys, text, said):
    file = tmp_path / "metrics.json"
    if text is not None:
        file.write_text(text)
    assert main(["report", str(file), str(file)]) == 2
    assert said in capsys.readouterr().err


# In the place of each environment's Python: a run leaves what the test laid down for it, and only the report is real.
PYTHON = f"""#!/usr/bin/env bash
laid="$LAID/$(basename "$(dirname "$(dirname "$0")")").json"
case "$*" in
-c*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
*"pip list"*) echo "torch==2.13.0" ;;
*"workflow run"*)
    echo "$*" >>runs.txt && mkdir -p _build/smoke
    cp "$laid" _build/smoke/metrics.json && grep -q '"green": true' "$laid" ;;
*"workflow report"*) PYTHONPATH="{ROOT}" "{sys.executable}" "$@" ;;
esac
"""
GOOD, BAD = a_run(record()), a_run(record(measured=3.0, holds=False))


@pytest.mark.parametrize(
    ("pinned", "newest", "status", "said"),
    [
        (GOOD, GOOD, 0, "the same verdicts"),
        (GOOD, BAD, 1, "1 check(s) hold in one run only; red by itself: B"),
        (BAD, BAD, 1, "red by itself: A and B"),
        (None, GOOD, 1, "RED: the run with the pinned packages left no report"),
        (GOOD, None, 1, "RED: the run with the newest packages left no report"),
    ],
)
def test_upgrades_end_with_a_summary_and_are_red_where_a_run_is(tmp_path, pinned, newest, status, said):
    """Weekly, nobody looks: a run that is red with both, or has no report at all, must show."""
    root, old = tmp_path / "project", tmp_path / "project" / "_build" / "smoke" / "metrics.json"
    for folder in (root / ".ci", root / ".venv" / "bin", old.parent):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "upgrades", root / ".ci")
    (root / ".venv" / "bin" / "python").write_text(PYTHON)
    (root / ".venv" / "bin" / "python").chmod(0o755)
    old.write_text(json.dumps(GOOD))  # of an older run
    for name, run in ((".venv", pinned), (".venv-newest", newest)):
        if run:
            (tmp_path / f"{name}.json").write_text(json.dumps(run))
    for words in (["init", "-q"], ["add", ".ci"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    words = ["bash", ".ci/upgrades"]
    done = subprocess.run(words, cwd=root, env=os.environ | {"LAID": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    summary = (root / "_build" / "upgrades" / "summary.md").read_text()
    assert said in summary and "### Packages that moved" in summary and said in done.stdout
    run = "-m workflow run --profile smoke"
    assert (root / "runs.txt").read_text() == f"{run}\n"
    assert (root / "_build/upgrades/checkout/runs.txt").read_text() == f"{run} --html\n", "jupyter-book is asked, too"


def test_the_weekly_job_runs_the_upgrades_and_all_tests():
    """And each script and target that a workflow names is there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    steps = {}
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(file.read_text())["jobs"]
        steps[file.stem] = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
        named = set(re.findall(r"(?:^|\s)make ([a-z-]+)", steps[file.stem]))
        assert named <= targets, named - targets
        assert all((ROOT / script).exists() for script in re.findall(r"(?<![\w./])\.ci/[\w-]+", steps[file.stem]))
    assert "make upgrades" in steps["weekly"] and "make test-all" in steps["weekly"]
    weekly = yaml.safe_load((ROOT / ".github" / "workflows" / "weekly.yml").read_text())
    assert weekly[True]["schedule"], "YAML reads the key `on` as true"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"measured": 2.5, "band": (1.0, 3.0)}, (1.0, "half band")),
        ({"measured": 2.5, "band": (1.0, None)}, (1.5, "room to the edge")),
        ({"measured": 2.5, "band": (None, 3.0)}, (0.5, "room to the edge")),
        ({"measured": "nan", "band": (1.0, None)}, (0.0, "room to the edge")),
        ({"measured": 2.5, "band": None}, (0.0, "room to the edge")),
        ({"measured": 2.5, "band": (1.0, 3.0), "baseline": {"mean": 2.0, "sd": 0.1, "n": 8}}, (0.1, "sd")),
        ({"measured": 2.5, "band": (1.0, 3.0), "baseline": {"mean": 2.0, "sd": 0.1, "n": 7}}, (1.0, "half band")),
    ],
)
def test_scale_of_a_check(facts, expected):
    found = compare.scale(Record("c", "a", "stated", kind="derived", **facts))
    assert found == (pytest.approx(expected[0]), expected[1])


@pytest.mark.parametrize("number", [14, 15, 16])
def test_at_most_fifteen_checks_that_moved_are_listed_and_all_are_counted(number):
    a, b = (a_run(*(record(f"c{i}", 1 + sign * 0.01 * (i + 1)) for i in range(number))) for sign in (0, 1))
    page = compare.markdown(compare.compare(a, b), "x", "y")
    assert f"### Checks that moved most ({number} moved)" in page
    lines = [line for line in page.splitlines() if line.endswith("| half band |")]
    assert len(lines) == min(number, 15)
    first = f"| 01-one | one | c{number - 1} | 1 | {1 + number / 100:.5g} | [0, 2] | [0, 2] | {number / 100:.2g} |"
    assert lines[0] == f"{first} half band |"


@pytest.mark.parametrize(("a", "b", "distance"), [(1.0, 0.5, 0.5), (0.5, 2.0, 1.5), (0.0, 0.0, 0.0), (2.0, 0.0, 2.0)])
def test_how_far_a_check_moved_has_no_sign(a, b, distance):
    moves = compare.compare(a_run(record(measured=a)), a_run(record(measured=b))).moved
    assert [move.distance for move in moves] == ([distance] if distance else [])


def test_a_spread_of_nothing_is_no_scale():
    sd = {"mean": 1.0, "sd": 0.0, "n": 20}
    found = compare.compare(a_run(record(baseline=sd)), a_run(record(measured=1.1, baseline=sd)))
    assert [(move.distance, move.unit) for move in found.moved] == [(float("inf"), "sd")]


@pytest.mark.parametrize("field", ["claim", "check", "chapter"])
def test_checks_are_the_same_by_chapter_claim_and_name(field):
    found = compare.compare(a_run(record()), a_run(record() | {field: "other"}))
    assert len(found.only_a) == len(found.only_b) == 1 and not found.moved and not found.differ
    page = compare.markdown(found, "x", "y")
    assert page.index("Checks in A only") < page.index("| 01-one | one | a | 1 |") < page.index("Checks in B only")


def test_an_open_check_fails_in_neither_run():
    left = record(measured=None, holds=None)
    assert not compare.compare(a_run(left), a_run(record())).failed_in_one
    failed = compare.compare(a_run(left), a_run(record(measured=3.0, holds=False)))
    assert len(failed.failed_in_one) == 1 and failed.red


def test_a_page_says_none_where_there_is_none_and_names_what_is():
    same = compare.markdown(compare.compare(a_run(record()), a_run(record())), "x", "y")
    assert same.count("None.") == 4 and "No difference." in same and "Problems of a run" not in same
    bare = a_run(record(), green=False)
    assert "None is told." in compare.markdown(compare.compare(bare, bare), "x", "y")
    threads = [{"threads": 2}, {"threads": 1}, {"threads": None}, {}]
    a, b = a_run(record(), notebooks=threads, commit="abc"), a_run(record(), verdicts={"one": "refuted"})
    found = compare.compare(a, b)
    assert found.settings == [("commit", "abc", "None"), ("threads", "1, 2", "None")]
    page = compare.markdown(found, "x", "y")
    assert "## x (A) and y (B): they differ" in page and "| one | confirmed | refuted |" in page


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe{", "is no JSON"), (b'{"run": {}, "records": []}', "it has no verdicts"), (b"{}", "records, run, ver")],
)
def test_a_file_that_no_run_wrote_is_named(tmp_path, content, said):
    (tmp_path / "metrics.json").write_bytes(content)
    for place in (tmp_path, tmp_path / "metrics.json"):
        with pytest.raises(ValueError, match=said):
            compare.load(place)


@pytest.mark.parametrize("text", ["3", "null", "true", "[]"])
def test_json_of_another_kind_is_named(tmp_path, text):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(ValueError, match=r"metrics.json is no run's metrics.json: it has no records, run, verdicts"):
        compare.load(tmp_path)
