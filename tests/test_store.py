"""A series goes on where it stopped, and what is on disk is whole."""

from importlib import import_module

import pandas as pd
import pytest
import torch
from checkpoint_files import assert_is, make, model, save

from normgrowth.checkpoints import series

MODULE = import_module("normgrowth.checkpoints.series")  # as an attribute of its package the name is the function


@pytest.fixture
def measured(monkeypatch):
    """Steps of the checkpoints that are read in full."""
    steps: list[int] = []
    measure = MODULE.sums_by_tensor

    def counting(checkpoint, *rest):
        steps.append(checkpoint.step)
        return measure(checkpoint, *rest)

    monkeypatch.setattr(MODULE, "sums_by_tensor", counting)
    return steps


@pytest.fixture
def run(tmp_path):
    """A walk, in ``run/``, measured into ``norms.csv``."""
    states = make(tmp_path / "run")
    series(tmp_path / "run", out=tmp_path / "norms.csv")
    return states


def put(states, tmp_path, step, state):
    states[step] = state
    save(state, tmp_path / "run" / f"step{step}")


def new(states, tmp_path):
    put(states, tmp_path, 40, model(40))
    put(states, tmp_path, 15, model(15))


def changed(states, tmp_path):
    put(states, tmp_path, 10, model(77))
    save({**states[10], "pad.position_ids": torch.arange(3)}, tmp_path / "run" / "step10")


def gone(states, tmp_path):
    del states[10]
    (tmp_path / "run" / "step10").rename(tmp_path / "away")


def last_gone(states, tmp_path):
    put(states, tmp_path, 40, model(40))
    (tmp_path / "run" / "step0").rename(tmp_path / "away")
    (tmp_path / "run" / "step30").rename(tmp_path / "away too")
    del states[0], states[30]


def another_model(states, tmp_path):
    for step in states:
        put(states, tmp_path, step, model(step, layers=1))


def table_lost(states, tmp_path):
    (tmp_path / "norms.csv").unlink()


@pytest.mark.parametrize(
    ("happens", "read"),
    [
        (lambda *_: None, []), (new, [15, 20, 40]), (changed, [10, 20]), (gone, [20]), (last_gone, [10, 40]),
        (another_model, [0, 10, 20, 30]), (table_lost, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_second_run_reads_only_what_is_new_or_has_another_neighbour(
    tmp_path, run, measured, monkeypatch, happens, read
):
    out = tmp_path / "norms.csv"
    happens(run, tmp_path)
    result = series(tmp_path / "run", out=out)
    assert measured == read
    assert len(result.skipped) == len([*tmp_path.glob("away*")])  # said, not lost in silence
    monkeypatch.chdir(tmp_path)  # the same place in other words
    assert len(series("run", out=out).skipped) == len(result.skipped)
    assert_is(result.table, run)
    assert len(pd.read_csv(out)) == len(run) and not list(tmp_path.glob("*.part"))
    assert series(tmp_path / "run", out=out).table.equals(result.table)


def test_duplicates_are_remembered(tmp_path, measured):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    save(states[30], tmp_path / "run" / "step35")
    first = series(tmp_path / "run", out=out)
    measured.clear()
    again = series(tmp_path / "run", out=out)
    assert measured == [] and again.table.equals(first.table) and again.duplicates == first.duplicates
    (tmp_path / "run" / "step30").rename(tmp_path / "away")
    states[35] = states.pop(30)
    later = series(tmp_path / "run", out=out)
    assert not later.duplicates, "the original is gone"
    assert_is(later.table, states)


def test_a_run_that_stops_keeps_what_it_and_an_earlier_one_have_done(tmp_path, run, measured, monkeypatch):
    put(run, tmp_path, 5, model(55))
    counting = MODULE.sums_by_tensor

    def stopped(checkpoint, *rest):
        if checkpoint.step == 10:
            raise KeyboardInterrupt
        return counting(checkpoint, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MODULE, "sums_by_tensor", stopped)
        series(tmp_path / "run", out=tmp_path / "norms.csv")
    measured.clear()
    assert_is(series(tmp_path / "run", out=tmp_path / "norms.csv").table, run)
    assert measured == [10], "5 was done before the stop, and 20 and 30 by the first run"


MADE = "norms.csv: was made with {}/run --by total --match '*'; give another --out, or delete this one"
REFUSED = [
    ({"source": ["{}/run/step0", "{}/run"]}, None, MADE),
    ({"by": "layer"}, None, MADE), ({"match": "s*"}, None, MADE), ({"step": r"step(\d+)"}, None, MADE),
    *[({}, text, "norms.csv.state.json: damaged; give another --out") for text in ("{", "{}", "[]", "null")],
]  # fmt: skip


@pytest.mark.parametrize(("options", "state", "why"), REFUSED)
def test_a_table_of_something_else_is_left_alone(tmp_path, run, options, state, why):
    out = tmp_path / "norms.csv"
    given = [source.format(tmp_path) for source in options.get("source", ["{}/run"])]
    options = {name: value for name, value in options.items() if name != "source"}
    if state:
        (tmp_path / "norms.csv.state.json").write_text(state)
    before = out.read_bytes()
    with pytest.raises(ValueError) as error:
        series(given, out=out, **options)
    assert why.format(tmp_path) in str(error.value) and out.read_bytes() == before
    (tmp_path / "norms.csv.state.json").unlink()
    with pytest.raises(ValueError, match=r"norms\.csv: is there without its .state.json; give another --out"):
        series(given, out=out, **options)
