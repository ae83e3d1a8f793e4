"""Two runs side by side. For each clause a pair just inside and just outside, and both orders of the runs."""

import copy
import json
import math
import re

import pytest
import yaml
from conftest import ROOT

from workflow import compare
from workflow.__main__ import main

SAME = set()


def a_run(first=None, *, count=40, drop=0, cost=None, verdict="confirmed", **run):
    """A golden run of 40 checks in two chapters; ``first`` changes the first ``count``."""
    ground = {"kind": "exact", "role": "stated", "measured": 0.5, "band": [0.0, 1.0], "holds": True}
    names = [{"chapter": f"0{1 + i // 20}-x", "claim": "one", "check": f"check {i}"} for i in range(40)]
    records = [ground | name | (first or {} if i < count else {}) for i, name in enumerate(names)]
    costs = {"cpu_seconds": 60.0, "peak_mb": 1000.0} | (cost or {})
    facts = {"hardware": "h", "versions": {"torch": "2"}, "seed": 0, "notebooks": [{"chapter": "01-x", **costs}]} | run
    return {"version": compare.VERSION, "run": facts, "records": records[drop:], "verdicts": {"one": verdict}}


def red(a, b):
    return {found.kind for found in compare.compare(a, b).findings if found.red}


OTHER = {"first": {"measured": 2.0, "holds": False}, "count": 1}


@pytest.mark.parametrize(
    ("a", "b", "forth", "back"),
    [
        ({}, {}, SAME, SAME),
        ({}, {"verdict": "partly confirmed"}, {"verdicts"}, {"verdicts"}),
        ({}, OTHER, {"checks"}, {"checks"}),
        (OTHER, OTHER, SAME, SAME),
        (OTHER, OTHER | {"count": 2}, {"checks"}, {"checks"}),
        ({}, {"first": {"measured": None, "holds": None}}, SAME, SAME),
        ({}, {"drop": 1}, {"lost"}, SAME),
        ({}, {"cost": {"cpu_seconds": 90.0}}, SAME, SAME),
        ({}, {"cost": {"cpu_seconds": 90.1}}, {"time"}, SAME),
        ({"cost": {"cpu_seconds": 10.0}}, {"cost": {"cpu_seconds": 20.0}}, SAME, SAME),
        ({"cost": {"cpu_seconds": 10.0}}, {"cost": {"cpu_seconds": 20.1}}, {"time"}, SAME),
        ({}, {"cost": {"peak_mb": 1300.0}}, SAME, SAME),
        ({}, {"cost": {"peak_mb": 1300.1}}, {"memory"}, SAME),
        ({"cost": {"peak_mb": 500.0}}, {"cost": {"peak_mb": 700.0}}, SAME, SAME),
        ({}, {"cost": {"cpu_seconds": 900.0, "peak_mb": 9000.0}, "hardware": "another"}, SAME, SAME),
    ],
)  # fmt: skip
def test_what_is_red(a, b, forth, back):
    a, b = a_run(**a), a_run(**b)
    assert (red(a, b), red(b, a)) == (forth, back)
    assert red(a, a) == red(b, b) == SAME, "nothing is new against itself, red or green"
    assert compare.conclusion(compare.compare(a, a)) == "GREEN: the same verdicts; 0 measured value(s) differ"


def test_what_a_run_was_made_with_and_new_checks_are_shown():
    a, b = a_run(drop=1), a_run(versions={"torch": "3"}, commit="c0ffee")
    rows = {(found.kind, found.where, found.a, found.b) for found in compare.compare(a, b).findings}
    assert rows == {
        ("made with", "torch", "2", "3"), ("made with", "commit", "none", "c0ffee"),
        ("new", "01-x: one: check 0", "–", "0.5")}  # fmt: skip
    assert "\n| new | 01-x: one: check 0 | – | 0.5 |  |\n" in compare.markdown(compare.compare(a, b), "x", "y")
    assert [found.where for found in compare.compare(b, a).of("lost")] == ["01-x: one: check 0"]


SD = {"mean": 0.0, "sd": 0.1, "n": 8}


@pytest.mark.parametrize(
    ("record", "distance", "unit"),
    [
        ({"band": [0.0, 2.0]}, 0.2, "half band"),
        ({"band": [0.0, None]}, 0.4, "room to the edge"),
        ({"band": [None, 0.3]}, 1.0, "room to the edge"),
        ({"kind": "derived", "baseline": SD}, 2.0, "sd"),
        ({"kind": "exact", "baseline": SD}, 0.4, "half band"),
        ({"kind": "derived", "baseline": SD | {"n": 7}}, 0.4, "half band"),
        ({"band": [0.5, 0.5]}, math.inf, "half band"),
        ({"band": ["nan", "nan"]}, math.inf, "nothing"),
        ({"measured": "nan"}, math.inf, "half band"),
    ],
)
def test_a_move_is_in_units_of_the_checks_own_scale(record, distance, unit):
    a = a_run(record, count=1)
    b = copy.deepcopy(a)
    b["records"][0]["measured"] = 0.7
    (move,) = compare.compare(a, b).moved
    assert (move.distance, move.unit) == (pytest.approx(distance), unit)
    assert compare.compare(b, b).moved == compare.compare(a, a).moved == []


def test_the_command_ends_with_one_line(tmp_path, capsys):
    files = {name: tmp_path / f"{name}.json" for name in ("a", "b")}
    files["a"].write_text(json.dumps(a_run()))
    files["b"].write_text(json.dumps(a_run(drop=20, cost={"cpu_seconds": 600.0})))
    assert main(["report", *map(str, files.values())]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "RED: lost: 20, time: 2"
    assert main(["report", str(files["a"]), str(files["a"])]) == 0
    assert capsys.readouterr().out.endswith("GREEN: the same verdicts; 0 measured value(s) differ\n")
    other = (json.dumps({"run": {}, "records": [], "verdicts": {}} | more) for more in ({}, {"version": 9}))
    texts = (None, "{", "3", '{"run": {}}', *other)
    whys = (
        "no run in",
        "is no JSON",
        "has no rec",
        "no records, v",
        "is older than its versions; this",
        "has version 9;",
    )
    for text, why in zip(texts, whys, strict=True):
        if text is not None:
            (tmp_path / "metrics.json").write_text(text)
        assert main(["report", str(tmp_path), str(files["a"])]) == 2 and why in capsys.readouterr().err


def test_each_script_and_target_that_a_job_of_the_host_names_is_there():
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(file.read_text())["jobs"]
        steps = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
        for folder, target in re.findall(r"(?:^|\s)make (?:-C (\S+) )?([a-z-]+)", steps):
            assert re.search(rf"^{target}:", (ROOT / folder / "Makefile").read_text(), re.M), target
        assert all((ROOT / script).exists() for script in re.findall(r"(?<![\w./])\.ci/[\w-]+", steps))
