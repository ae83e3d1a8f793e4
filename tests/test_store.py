"""A series goes on where it stopped, and what is on disk is whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_files import assert_is, cut, make, model, save

from nbutils import checkpoints
from nbutils.checkpoints import series, store


@pytest.fixture
def measured(monkeypatch):
    """Labels of the checkpoints that are read in full."""
    seen, plain = [], checkpoints._measure
    monkeypatch.setattr(checkpoints, "_measure", lambda c, *rest: seen.append(c.step) or plain(c, *rest))
    return seen


def test_a_second_run_reads_only_what_is_new(tmp_path, measured):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    first = series(tmp_path / "run", out=out, by="layer")
    assert measured == [0, 10, 20, 30] and first.resumed == 0
    again = series(tmp_path / "run", out=out, by="layer")
    assert measured == [0, 10, 20, 30] and again.resumed == 4
    assert again.table.equals(first.table)
    states[40] = model(40)
    save(states[40], tmp_path / "run" / "step40")
    states[15] = model(15)
    save(states[15], tmp_path / "run" / "step15")
    later = series(tmp_path / "run", out=out, by="layer")
    assert measured[4:] == [15, 20, 40]  # 20 has a new neighbour
    assert_is(later.table, states)
    assert later.table.equals(series(tmp_path / "run", by="layer").table)
    assert not list(tmp_path.glob("*.part"))


def test_a_path_may_be_spelled_otherwise(tmp_path, measured, monkeypatch):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    save(states[30], tmp_path / "run" / "step5")
    first = series(tmp_path / "run", out=out)
    measured.clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    for spelled in ("run", "./run/", "../" + tmp_path.name + "/run", "link"):
        again = series(spelled, out=out)
        assert measured == [] and again.resumed == 4 and again.table.equals(first.table), spelled
    assert [d.label for d in again.duplicates] == ["link/step5"], "told as it is spelled now"
    make(tmp_path / "other")
    with pytest.raises(ValueError, match=f"norms.csv: was made with source {tmp_path}/run; give the same"):
        series("other", out=out)


def test_duplicates_are_remembered(tmp_path, measured):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    save(states[30], tmp_path / "run" / "step5")
    first = series(tmp_path / "run", out=out)
    assert len(out.read_text().splitlines()) == 5
    measured.clear()
    again = series(tmp_path / "run", out=out)
    assert measured == [] and again.duplicates == first.duplicates and again.table.equals(first.table)


@pytest.mark.parametrize("by", ["total", "layer"])
def test_a_copy_counts_once_its_original_is_gone(tmp_path, by):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    save(states[30], tmp_path / "run" / "step35")
    (copy,) = series(tmp_path / "run", out=out, by=by).duplicates
    assert copy.label.endswith("step35")
    (tmp_path / "run" / "step30").rename(tmp_path / "away")
    later = series(tmp_path / "run", out=out, by=by)
    states[35] = states.pop(30)
    assert not later.duplicates
    assert_is(later.table, states)


def test_a_run_that_stops_early_keeps_what_an_earlier_one_did_beyond(tmp_path, measured, monkeypatch):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    series(tmp_path / "run", out=out)
    states[5] = model(55)
    save(states[5], tmp_path / "run" / "step5")
    counting = checkpoints._measure

    def stopped(checkpoint, *rest):
        if checkpoint.step == 10:
            raise KeyboardInterrupt
        return counting(checkpoint, *rest)

    monkeypatch.setattr(checkpoints, "_measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        series(tmp_path / "run", out=out)
    monkeypatch.setattr(checkpoints, "_measure", counting)
    measured.clear()
    assert_is(series(tmp_path / "run", out=out).table, states)
    assert measured == [10], "5 was done before the stop, and 20 and 30 by the first run"


def test_a_torn_table_is_mended(tmp_path, measured):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    first = series(tmp_path / "run", out=out, by="layer")
    for keep in (-3, -30, -200):
        measured.clear()
        cut(out, keep)
        again = series(tmp_path / "run", out=out, by="layer")
        assert measured and 0 not in measured and again.table.equals(first.table)
    out.unlink()
    assert_is(series(tmp_path / "run", out=out, by="layer").table, states)


def test_killed_between_table_and_state(tmp_path, measured, monkeypatch):
    """The state knows the new neighbour of a step; the table still has the row beside the old one."""
    make(tmp_path / "run")
    (tmp_path / "run" / "step10").rename(tmp_path / "later")
    out, plain = tmp_path / "norms.csv", os.replace
    series(tmp_path / "run", out=out)
    (tmp_path / "later").rename(tmp_path / "run" / "step10")

    def killed(source, target):
        if Path(target) == out:
            raise KeyboardInterrupt
        plain(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        series(tmp_path / "run", out=out)
    monkeypatch.setattr(os, "replace", plain)
    whole = series(tmp_path / "run").table
    assert series(tmp_path / "run", out=out).table.equals(whole)


def test_a_changed_checkpoint_and_its_neighbour_are_read_again(tmp_path, measured):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    series(tmp_path / "run", out=out)
    measured.clear()
    states[10] = model(77)
    save({**states[10], "pad.position_ids": torch.arange(3)}, tmp_path / "run" / "step10")
    assert_is(series(tmp_path / "run", out=out).table, states)
    assert measured == [10, 20]


def test_a_killed_run_goes_on(tmp_path, measured, monkeypatch):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    plain = checkpoints._measure

    def killed(checkpoint, *rest):
        if checkpoint.step == 20:
            raise KeyboardInterrupt
        return plain(checkpoint, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints, "_measure", killed)
        series(tmp_path / "run", out=out)
    assert len(out.read_text().splitlines()) == 3
    measured.clear()
    assert_is(series(tmp_path / "run", out=out).table, states)
    assert measured == [20, 30]


def test_a_run_killed_without_warning_leaves_whole_files(tmp_path, measured):
    """SIGKILL at the third checkpoint; the clock runs a minute a look, so that each row is saved."""
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    code = (
        "import itertools, os, signal, sys; from nbutils import checkpoints; from nbutils.checkpoints import store\n"
        "plain = checkpoints._measure\n"
        "store.time.monotonic = itertools.count(0, 60).__next__\n"
        "def measure(c, *rest): return plain(c, *rest) if c.step < 20 else os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoints._measure = measure; checkpoints.series(sys.argv[1], out=sys.argv[2])"
    )
    words = [str(tmp_path / "run"), str(out)]
    assert subprocess.run([sys.executable, "-c", code, *words]).returncode == -9
    assert len(out.read_text().splitlines()) == 3
    assert_is(series(tmp_path / "run", out=out).table, states)
    assert measured == [20, 30]


def test_a_table_of_something_else_is_not_overwritten(tmp_path):
    make(tmp_path / "run")
    out = tmp_path / "norms.csv"
    out.write_text("my,own,data\n")
    with pytest.raises(ValueError, match="not from this command"):
        series(tmp_path / "run", out=out)
    assert out.read_text() == "my,own,data\n"
    series(tmp_path / "run", out=out, overwrite=True)
    before = out.read_text()
    with pytest.raises(ValueError, match="was made with --by total; give the same, another --out, or --overwrite"):
        series(tmp_path / "run", out=out, by="layer")
    (tmp_path / "norms.csv.state.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        series(tmp_path / "run", out=out)
    assert out.read_text() == before


def test_what_is_done_is_saved_at_most_once_a_second_unless_it_is_now(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(store.time, "monotonic", lambda: clock[0])
    kept = store.Store(tmp_path / "out.csv", {"source": ["s"]}, False)
    rows = {(str(step), "", "", ""): [store.Row(step, "total", 1.0)] for step in range(5)}
    first = lambda number: dict(list(rows.items())[:number])  # noqa: E731
    kept.save(first(1))
    assert not kept.out.exists(), "nothing is decided yet"
    kept.reference = store.Reference("a", "b", {"w": (2,)}, {}, {})
    written = []
    for number, later in ((0, 0.0), (1, 0.0), (2, 0.5), (3, 0.49), (4, 0.01), (5, 0.5)):
        clock[0] += later
        kept.save(first(number))
        written.append(len(kept.out.read_text().splitlines()) - 1 if kept.out.exists() else 0)
    assert written == [0, 1, 1, 1, 4, 4]
    kept.save(rows, now=True)
    assert len(kept.out.read_text().splitlines()) == 6
    store.Store(None, {}, False).save(rows, now=True)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"origin": {}, "reference": {}}', '{"origin": {}, "reference": 1}'])
def test_a_damaged_state_is_named_and_overwritten_only_where_that_is_asked(tmp_path, text):
    make(tmp_path / "run", steps=(1, 2))
    out = tmp_path / "norms.csv"
    (tmp_path / "norms.csv.state.json").write_text(text)
    with pytest.raises(ValueError, match=r"norms\.csv\.state\.json: damaged; give another --out, or --overwrite"):
        series(tmp_path / "run", out=out)
    assert series(tmp_path / "run", out=out, overwrite=True).resumed == 0 and out.exists()
    assert series(tmp_path / "run", out=out).resumed == 2


def test_what_a_table_was_made_with_is_told_as_it_is_typed(tmp_path):
    make(tmp_path / "run", steps=(1, 2))
    out = tmp_path / "norms.csv"
    series(tmp_path / "run", out=out, by="layer", match="step*")
    for more, said in (({}, "with --by layer, --match 'step*'; give"), ({"by": "layer"}, "with --match 'step*'; give"),
                       ({"match": "step*"}, "with --by layer; give")):  # fmt: skip
        with pytest.raises(ValueError) as error:
            series(tmp_path / "run", out=out, **more)
        assert said in str(error.value)


def test_torn_and_foreign_lines_of_a_table_are_left_out(tmp_path):
    (tmp_path / "t.csv").write_text(
        "step,layer,norm,cos_similarity,displacement_sq,inner\n1,total,2.5,,,\n1,rest,1.0,,,\n2,total,3.5,0.5,0.25,-1\n"
        "x,total,1,,,\n3,total,y,,,\n4,total\n5,total,1,,,,\n6,total,1,,\n\n7,total,1,,,"
    )
    found = store._read_rows(tmp_path / "t.csv")
    assert found == {1: [(1, "total", 2.5, None, None, None), (1, "rest", 1.0, None, None, None)],
                     2: [(2, "total", 3.5, 0.5, 0.25, -1.0)]}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": 1}, r"other tensors than ref: no b$"), ({"a": 1, "b": 1, "c": 1}, "than ref: c more$"),
        ({"a": 1, "c": 1}, "than ref: no b, c more$"), ({"c": 1}, "than ref: no a, no b and 1 other differences$"),
        ({"c": 1, "d": 1}, "than ref: no a, no b and 2 other differences$"), ({"a": 1, "b": 1}, None),
    ],
)  # fmt: skip
def test_at_most_two_differences_from_the_reference_are_named(tmp_path, state, said):
    reference = store.Reference("ref", "", {"a": (2,), "b": (2,)}, {}, {})
    save({name: torch.ones(2) for name in state}, tmp_path / "step1")
    with store.Weights(tmp_path / "step1") as found:
        if said:
            with pytest.raises(store.ReadError, match=f"step1: .*{said}"):
                reference.check("step1", found)
        else:
            reference.check("step1", found)
