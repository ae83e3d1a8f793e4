"""Two runs side by side: what is red, in both orders of the runs, and how far a check moved."""

import json
import math

import pytest

from workflow import write
from workflow.__main__ import main
from workflow.compare import compare


def a_run(first=None, drop=0, verdict="confirmed"):
    """A run of three checks; ``first`` changes the first, and as many as ``drop`` are not there."""
    ground = {"kind": "exact", "role": "stated", "measured": 0.5, "band": [0.0, 1.0], "holds": True}
    records = [ground | {"chapter": "01-x", "claim": "one", "check": f"check {i}"} for i in range(3)]
    records[0] |= first or {}
    return {
        "version": write.VERSION,
        "run": {},
        "records": records[drop:],
        "verdicts": {"one": verdict},
        "problems": [],
    }


@pytest.fixture
def place(tmp_path):
    """``place("a", a_run())``: the file of a run."""

    def write(name, run):
        (tmp_path / f"{name}.json").write_text(run if isinstance(run, str) else json.dumps(run))
        return tmp_path / f"{name}.json"

    return write


FAILS = {"measured": 2.0, "holds": False}
MOVED, SAME = "1 measured value(s) differ", "0 measured value(s) differ"
RED = "RED: {} verdict(s) differ, {} check(s) fail in B alone, {} are not there; {}".format
GREEN = "GREEN: the same verdicts; {}".format


@pytest.mark.parametrize(
    ("a", "b", "forth", "back"),
    [
        ({}, {"verdict": "refuted"}, RED(1, 0, 0, SAME), RED(1, 0, 0, SAME)),
        ({}, {"first": FAILS}, RED(0, 1, 0, MOVED), GREEN(MOVED)),
        ({}, {"first": FAILS | {"noted": True}}, GREEN(MOVED), GREEN(MOVED)),
        ({}, {"first": {"measured": None, "holds": None}}, GREEN(MOVED), GREEN(MOVED)),
        ({}, {"drop": 2}, RED(0, 0, 2, SAME), GREEN(SAME)),
        ({"first": FAILS}, {"first": FAILS}, GREEN(SAME), GREEN(SAME)),
    ],
)
def test_what_is_red(place, capsys, a, b, forth, back):
    """Red are a verdict that differs, and a check that began to fail or is gone."""
    files = place("a", a_run(**a)), place("b", a_run(**b))
    for order, line in ((files, forth), (files[::-1], back)):
        assert main(["compare", *map(str, order)]) == line.startswith("RED")
        assert capsys.readouterr().out.splitlines()[-1] == line


@pytest.mark.parametrize(
    ("record", "distance"),
    [
        ({"band": [0.0, 2.0]}, 0.2),  # in halves of the band
        ({"band": [0.0, None]}, 0.4),  # in the room to its one edge
        ({"band": [None, 0.3]}, 1.0),
        ({"band": [0.5, 0.5]}, math.inf),
        ({"band": ["nan", "nan"]}, math.inf),
        ({"band": None}, math.inf),
        ({"measured": "nan"}, math.inf),
    ],
)
def test_a_move_is_in_units_of_the_checks_own_scale(place, record, distance):
    a, b = (write.load(place(name, a_run(record | more))) for name, more in (("a", {}), ("b", {"measured": 0.7})))
    (move,) = compare(a, b).moved
    assert move.distance == pytest.approx(distance)
    assert compare(a, a).moved == compare(b, b).moved == []


def test_what_is_no_run_of_this_version_is_refused(place, tmp_path, capsys):
    there = str(place("a", a_run()))
    for text in ("{", "3", '{"run": {}}'):
        assert main(["compare", str(place("b", text)), there]) == 2 and "no run in" in capsys.readouterr().err
    assert main(["compare", there, str(tmp_path / "none")]) == 2 and "no run in" in capsys.readouterr().err
    assert main(["compare", str(place("b", a_run() | {"version": 9})), there]) == 2
    assert "has version 9; this checkout reads version 1" in capsys.readouterr().err
