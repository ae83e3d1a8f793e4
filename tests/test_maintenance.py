"""How the book itself is tested: false alarms and planted defects."""

import argparse
import contextlib
import json
import subprocess

import nbformat
import pytest
from scipy import stats

import workflow
from maintenance import alarms, instruments, mutants, restamp
from nbutils import claims, shared_runs
from nbutils.claims.records import Record
from workflow import Run
from workflow.collect import collect
from workflow.judge import Judgement, to_rerun
from workflow.processes import STOPPED

RUN = Run("smoke", 1, chapters=("01-one",))


@pytest.fixture
def code(monkeypatch, tmp_path):
    """A book of one chapter in a folder of its own; the hash of its code, to be edited."""
    hashes = {"01-one": "its code"}
    monkeypatch.setattr(workflow, "BUILD", tmp_path)
    monkeypatch.setattr(alarms.sources, "hashes", lambda: dict.fromkeys(shared_runs.names(), "") | hashes)
    monkeypatch.setattr(alarms.book, "chapters", lambda: list(hashes))
    monkeypatch.setattr(alarms, "file_of", lambda profile, device="cpu": tmp_path / "alarms.json")
    monkeypatch.setattr(alarms.sources, "trainings_of", lambda chapter: ["lm-one"])
    monkeypatch.setattr(alarms.sources, "families", lambda: [["lm-one"]])
    return hashes


def write(run, *records, made_from="its code", device="cpu"):
    """An executed notebook; a record is (name, kind, measured, holds)."""
    run.folder.mkdir(parents=True, exist_ok=True)
    cell = nbformat.v4.new_code_cell("x")
    for name, kind, measured, holds in records:
        entry = {"claim": "one", "check": name, "role": "stated", "kind": kind, "measured": measured, "holds": holds}
        entry |= {"chapter": "01-one", "profile": "smoke", "seed": run.seed, "device": device, "band": [0.0, 2.0]}
        cell.outputs.append(nbformat.v4.new_output("display_data", {claims.MIME: entry}))
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), run.notebook("01-one"))
    made = {"hardware": "h", "versions": {}, "made_from": made_from, "device": device}
    run.stats("01-one").write_text(json.dumps(made))


def outcome(run=RUN, found=None):
    """What is kept of a run: red, noted or green; None where it is not judged."""
    found = found if found is not None else alarms.load("smoke")
    collected = collect(run)
    doubtful = to_rerun(collected)
    reruns = [collect(other) for other in run.further(doubtful)] if doubtful else []
    alarms.add(found, "01-one", "its code", collected, reruns)
    failed = found["chapters"].get("01-one", {"runs": {}})["runs"].get(str(run.seed))
    if failed is None:
        return None
    return "red" if any(check["red"] for check in failed) else "noted" if failed else "green"


@pytest.mark.parametrize(
    ("kind", "holds", "further", "verdict"),
    [
        ("exact", True, None, "green"),
        ("exact", False, None, "red"),
        ("published", False, None, "red"),
        ("derived", False, [True, True], "noted"),
        ("derived", False, [True, False], "red"),
        ("empirical", False, [True, None], None),
        ("derived", False, None, None),
    ],
)
def test_a_run_is_red_by_an_exact_check_or_by_two_of_three_and_waits_for_them(code, kind, holds, further, verdict):
    write(RUN, ("a", kind, 1.0, holds), ("b", "exact", 1.0, True))
    for run, held in zip(RUN.further(), further or (), strict=bool(further)):
        if held is not None:
            write(run, ("a", kind, 1.0, held), ("b", "exact", 1.0, True))
    assert outcome() == verdict
    for other in ({"made_from": "an edit"}, {"device": "cuda"}):
        write(RUN, ("a", "exact", 1.0, False), **other)
        assert outcome() is None, "of other code or another device"


@pytest.mark.parametrize(
    ("log", "last", "error", "verdict"),
    [
        ("01-one", f"{STOPPED}01-one: PapermillExecutionError: x", "ValueError", "red"),
        ("01-one", f"{STOPPED}01-one: PapermillExecutionError: x", "OSError", None),
        ("01-one", "half a li", "", None),
        ("lm-one", f"{STOPPED}lm-one: ValueError: x", "", "red"),
        ("lm-one", f"{STOPPED}lm-one: TimeUp: not finished after 9 s", "", None),
    ],
)
def test_code_that_raised_is_a_red_run_and_what_was_stopped_says_nothing(code, log, last, error, verdict):
    RUN.logs.mkdir(parents=True)
    (RUN.logs / f"{log}.log").write_text(f"a warning\n{last}")
    cell = nbformat.v4.new_code_cell("f(x)", execution_count=3)
    cell.outputs = [nbformat.v4.new_output("error", ename=error, evalue="x", traceback=[])]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), RUN.logs / f"{log}.ipynb")
    assert outcome() == verdict


def test_seeds_are_added_until_an_edit_voids_them_and_go_on_where_they_were_broken_off(code, monkeypatch, capsys):
    ran = []

    def execute(runs, options):
        for run in runs:
            if run.notebook("01-one").exists():
                continue  # as Snakemake does
            ran.append(run.seed)
            if len(ran) == 2:
                raise KeyboardInterrupt
            seed = float(run.seed)
            write(run, ("a", "exact", seed, True), ("endless", "exact", "inf", True), made_from=code["01-one"])

    for name, does in {"chapters": execute, "lock_checkout": contextlib.nullcontext}.items():
        monkeypatch.setattr(alarms.execute, name, does)
    options = argparse.Namespace()
    with pytest.raises(KeyboardInterrupt):
        alarms.measure(RUN, range(3), options)
    found = alarms.measure(RUN, range(3), options)
    assert ran == [0, 1, 1, 2] and found == alarms.load("smoke")
    assert alarms.pooled(found, code).runs == 3
    code["01-one"] = "an edit"
    assert alarms.pooled(found, code).absent == ["01-one"]
    assert list(alarms.measure(RUN, [7], options)["chapters"]["01-one"]["runs"]) == ["7"]
    assert alarms.main(["--first", "7", "--seeds", "1"]) == 0
    assert capsys.readouterr().out.startswith("SO FAR GREEN: 0.0 % of smoke runs red (95 %: at most 95.0 %), 1 of 100")
    monkeypatch.setattr(alarms.execute, "chapters", lambda *_: None)
    assert alarms.main(["--first", "7", "--seeds", "2"]) == 1
    assert capsys.readouterr().out.startswith("RED: not every seed came to its end in 01-one")


def test_a_chapter_is_judged_by_its_reruns_though_another_of_its_run_was_stopped(code, monkeypatch):
    def chapters(runs, options):
        for run in runs:
            write(run, ("a", "derived", 1.0, run.seed != RUN.seed))
        return False  # some job failed

    for name, does in {"chapters": chapters, "lock_checkout": contextlib.nullcontext}.items():
        monkeypatch.setattr(alarms.execute, name, does)
    (check,) = alarms.measure(RUN, [RUN.seed], argparse.Namespace())["chapters"]["01-one"]["runs"]["1"]
    assert len(check["further"]) == 2 and not check["red"]


def kept(profile, **red_of_runs):
    """A result: of each chapter how many of its runs are red."""
    bad = [{"claim": "c", "check": "a", "red": True}]
    entries = {
        name: {"made_from": "its code", "runs": {str(i): bad if i < red else [] for i in range(runs)}}
        for name, (red, runs) in red_of_runs.items()
    }
    return {"profile": profile, "device": "cpu", "chapters": entries}


@pytest.mark.parametrize(
    ("profile", "runs", "red", "line"),
    [
        ("smoke", 99, 0, "SO FAR GREEN: "), ("smoke", 100, 1, "GREEN: "), ("smoke", 99, 1, "RED: "),
        ("smoke", 9, 9, "RED: "), ("book", 19, 0, "SO FAR GREEN: "), ("book", 20, 0, "GREEN: "),
    ],
)  # fmt: skip
def test_how_many_runs_decide_and_how_many_may_be_red(monkeypatch, profile, runs, red, line):
    monkeypatch.setattr(alarms.book, "chapters", lambda: ["one"])
    found = kept(profile, one=(red, runs))
    counts = alarms.pooled(found, {"one": "its code"})
    assert alarms.conclusion(found, counts).startswith(line)
    assert counts.upper == pytest.approx(stats.beta.ppf(0.95, red + 1, runs - red) if red < runs else 1, rel=1e-9)


def test_a_run_is_red_if_one_of_its_chapters_is():
    """More seeds of one chapter are not more runs, and what is no chapter any more counts nowhere."""
    found = kept("smoke", one=(1, 4), two=(1, 2), gone=(9, 9))
    counts = alarms.pooled(found, dict.fromkeys(("one", "two"), "its code"))
    assert (counts.runs, counts.share) == (2, pytest.approx(1 - (1 - 1 / 4) * (1 - 1 / 2)))


def test_every_listed_defect_applies_to_the_code_as_it_is():
    assert mutants.misplaced(mutants.load()) == []


def judgement(profile, seed, made_from, **measured):
    """A run of one chapter whose checks have these values."""
    records = [
        Record("one", name, "stated", kind="exact", measured=value, band=(0.0, 2.0), holds=True, chapter="01-one")
        for name, value in measured.items()
    ]
    run = {"profile": profile, "seed": seed, "notebooks": [{"chapter": "01-one", "made_from": made_from}]}
    return Judgement(run, records, {}, [])


def pairs(last):
    """The four runs before a change and after it; the last run has this check as well."""
    before = [judgement(profile, seed, "older code", a=1.0) for profile, seed in restamp.RUNS]
    after = [judgement(profile, seed, "its code", a=1.0) for profile, seed in restamp.RUNS]
    after[-1] = judgement(*restamp.RUNS[-1], "its code", **{"a": 1.0} | last)
    return before, after


@pytest.mark.parametrize(
    ("last", "measured_at", "kept_at"),
    [
        ({}, "older code", "its code"),
        ({}, "another code", "another code"),  # these seeds were not measured at the code before
        ({"a": 1.0 + 2.0**-52}, "older code", "older code"),  # one bit, in one run of four
        ({"b": 1.0}, "older code", "older code"),
    ],
)
def test_measured_seeds_survive_only_a_change_that_moves_no_bit(code, last, measured_at, kept_at):
    kept = {"chapters": {"01-one": {"made_from": measured_at, "runs": {"7": []}}}}
    restamp.restamp(kept, restamp.unchanged_chapters(*pairs(last)))
    assert kept["chapters"]["01-one"]["made_from"] == kept_at


def test_seeds_are_stamped_only_by_the_runs_that_decide_and_of_todays_code(code):
    before, after = pairs({})
    with pytest.raises(ValueError, match="the runs are"):
        restamp.unchanged_chapters(before[:3], after[:3])
    code["01-one"] = "an edit"
    with pytest.raises(ValueError, match="01-one was edited after it was run"):
        restamp.unchanged_chapters(before, after)


@pytest.mark.parametrize("name", ["gpt2", "t5", "qwen3-moe", "modernbert"])
@pytest.mark.parametrize("instrument", instruments.INSTRUMENTS)
def test_every_instrument_agrees_with_a_plain_computation(instrument, name):
    row = instruments.row(instrument, name)
    assert row["gap"] < 1e-9 and row["peak GB"] > 0


def test_a_measurement_that_fails_is_a_row_with_its_reason():
    row = instruments.in_process(subprocess.run, "norms", "no such model")
    assert row["model"] == "no such model" and "no such model" in row["error"]
