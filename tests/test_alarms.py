"""False alarms: every check is judged, today's baselines decide, and red is red."""

import io
import json

import nbformat
import pytest

from nbutils import claims
from workflow import alarms, chapters, jobs, report
from workflow.__main__ import main
from workflow.kept import sources_of_chapter

BASE = {"one/random": {"mean": 1.0, "sd": 0.01, "n": 20}}


@pytest.fixture(autouse=True)
def baseline(monkeypatch):
    monkeypatch.setattr(claims, "_baselines", lambda name: BASE)


def record(check, measured=1.0, holds=True, **more):
    return {"claim": "one", "chapter": "01-one", "check": check, "kind": "band", "role": "stated", "measured": measured,
            "expected": None, "band": [0.0, 2.0], "holds": holds, "profile": "smoke", **more}  # fmt: skip


def write(build, seed, *records, made_from="a text"):
    folder = build / "smoke" / f"seed-{seed}"
    folder.mkdir(parents=True)
    cell = nbformat.v4.new_code_cell("x")
    cell.outputs = [nbformat.v4.new_output("display_data", {claims.MIME: entry}) for entry in records]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "01-one.ipynb")
    (folder / "01-one.json").write_text(
        json.dumps({"hardware": "h", "versions": {"torch": "2"}, "made_from": made_from})
    )


@pytest.fixture
def stub(monkeypatch):
    """A chapter that is not in the book, for the commands."""
    monkeypatch.setattr("workflow.launch.chapters", lambda: ["01-one"])
    monkeypatch.setattr("workflow.launch.notebooks.sync", list)
    monkeypatch.setattr("workflow.launch.kept.sources_of_chapter", lambda name, profile: "a text")
    monkeypatch.setattr(alarms, "all_chapters", lambda: ["01-one"])


def keeps_in(monkeypatch, file):
    for function in (alarms.keep, alarms.load):
        monkeypatch.setattr(function, "__defaults__", (file,))


def judged(build, seeds):
    return alarms.measure("smoke", seeds, ["01-one"], build)


def failures(build, seed):
    return alarms.pooled(judged(build, [seed])).failures


def test_every_check_counts_the_fixed_ones_too(tmp_path):
    opened = record("open", None, None, role="open", reason="no network")
    for seed in (1000, 1001):
        held = seed == 1000
        write(tmp_path, seed, record("random", band_from="smoke, 20 seeds"), record("fixed", 3.0, held), opened)
    found = judged(tmp_path, range(1000, 1002))
    counts = alarms.pooled(found)
    assert (counts.evaluated, counts.failures, counts.rate) == (4, 1, 0.25)
    assert found["chapters"]["01-one"]["left_open"] == 2
    assert found["chapters"]["01-one"]["failed"] == [
        {"claim": "one", "check": "fixed", "at": [{"seed": 1001, "measured": 3.0}]}
    ]
    assert counts.twice == [] and not counts.green, "a quarter is above half a percent"


def test_the_spread_of_every_value_is_kept_and_reports_show_it(tmp_path, monkeypatch):
    """Of checks with a fixed band too: mean, sd and number of seeds; infinities and open checks are left out."""
    opened = record("open", None, None, role="open", reason="no network")
    for seed, value in ((1000, 1.0), (1001, 2.0), (1002, 3.0)):
        infinite = record("often infinite", "inf" if seed == 1000 else value)
        write(tmp_path, seed, record("fixed", value), infinite, opened)
    found = judged(tmp_path, range(1000, 1003))
    three, two = {"mean": 2.0, "sd": 1.0, "n": 3}, {"mean": 2.5, "sd": pytest.approx(0.5**0.5), "n": 2}
    assert found["chapters"]["01-one"]["measured"] == {"one/fixed": three, "one/often infinite": two}
    monkeypatch.setattr(report, "ALARMS", alarms.keep(found, tmp_path / "alarms.json"))
    report._over_fresh_seeds.cache_clear()
    assert report.baseline_of(record("fixed")) == three
    assert report.format_baseline(record("fixed")) == "2 ± 1 (sd), n = 3"
    assert report.baseline_of(record("open")) is None and report.baseline_of(record("new")) is None
    assert report.baseline_of(record("fixed") | {"profile": "book"}) is None, "another profile, other values"
    report._over_fresh_seeds.cache_clear()


def test_todays_baseline_decides_and_not_the_recorded_band(tmp_path):
    """0.1 away is ten sd: outside. A record of an older, wider band said that it holds, and the other way round."""
    write(tmp_path, 1000, record("random", 1.1, True, band_from="smoke, 20 seeds"))
    assert failures(tmp_path, 1000) == 1
    write(tmp_path, 1001, record("random", 1.02, False, band_from="smoke, 20 seeds"))
    assert failures(tmp_path, 1001) == 0
    write(tmp_path, 1002, record("new", band_from="no baseline"))
    assert failures(tmp_path, 1002) == 1, "no baseline, no band, does not hold"


def test_the_recomputed_band_is_the_ledgers_own(tmp_path):
    """Values across the edges of the band: the ledger and the judgement of its record agree."""
    kept = []
    for case in ({}, {"expected": 1.005}, {"role": "counterexample", "claimed": 1.5},
                 {"role": "counterexample", "claimed": 1.01}):  # fmt: skip
        for value in (0.9, 0.955, 0.962, 1.0, 1.038, 1.045, 1.1):
            ledger = claims.Ledger("01-one", profile="smoke", seed=0, device="cpu")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(claims, "_show", lambda record, anchor: kept.append(record))
                ledger.check("one", "random", value, **case)
    assert {entry["holds"] for entry in kept} == {True, False}
    assert [alarms.holds(entry) for entry in kept] == [entry["holds"] for entry in kept]


def test_few_are_green_but_none_twice(tmp_path):
    checks = [record(f"check {index}") for index in range(150)]
    for seed, wrong in ((1000, 0), (1001, 1), (1002, None), (1003, None)):
        records = [entry | {"holds": False} if index == wrong else entry for index, entry in enumerate(checks)]
        write(tmp_path, seed, *records)
    found = alarms.pooled(judged(tmp_path, range(1000, 1004)))
    assert found.green and found.failures == 2 and found.evaluated == 600
    write(tmp_path, 1004, checks[0] | {"holds": False}, *checks[1:])
    again = judged(tmp_path, range(1000, 1005))
    counts = alarms.pooled(again)
    assert counts.rate < alarms.RATE and counts.twice == ["01-one / one / check 0"] and not counts.green
    assert alarms.conclusion(again).startswith("RED: 3 of 750")


def test_a_notebook_that_is_not_there_is_red(tmp_path):
    write(tmp_path, 1000, record("fixed"))
    found = judged(tmp_path, [1000, 1001])
    counts = alarms.pooled(found)
    assert counts.missing == ["01-one, seed 1001"] and not counts.green
    assert "1 notebook(s) without a result" in alarms.conclusion(found)


def test_seeds_that_made_the_bands_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"seeds \[19, 20\] made the bands"):
        judged(tmp_path, [19, 20, 21])


def test_nothing_to_judge_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no executed notebook"):
        judged(tmp_path, [1000])


def test_the_command_keeps_what_it_found(tmp_path, monkeypatch, capsys, stub):
    kept = tmp_path / "alarms.json"
    monkeypatch.setattr("workflow.launch.ROOT", tmp_path)
    keeps_in(monkeypatch, kept)
    write(tmp_path, 1000, record("fixed"))
    assert main(["alarms", "--first", "1000", "--seeds", "1", "--build", str(tmp_path)]) == 0
    assert json.loads(kept.read_text())["chapters"]["01-one"]["evaluated"] == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("GREEN: 0 of 1 checks did not hold (0.000 %)")
    write(tmp_path, 2000, record("fixed"))
    assert main(["alarms", "--first", "2000", "--seeds", "1", "--build", str(tmp_path)]) == 2, "other seeds, same text"
    assert "01-one has not changed since seeds 1000 to 1000 were judged" in capsys.readouterr().err
    assert main(["alarms", "--profile", "book", "--build", str(tmp_path)]) == 2, "another profile would replace all"


def test_the_last_line_and_the_table_name_chapters_that_changed(tmp_path, monkeypatch, stub):
    write(tmp_path, 1000, record("fixed"))
    found = judged(tmp_path, [1000])
    monkeypatch.setattr(alarms.kept, "sources_of_chapter", lambda name, profile: "a text")
    assert "changed" not in alarms.conclusion(found)
    assert "| chapters that have changed since | none |" in alarms.markdown(found)
    monkeypatch.setattr(alarms.kept, "sources_of_chapter", lambda name, profile: "a new text")
    assert alarms.conclusion(found).endswith("; changed since: 01-one")
    assert "| chapters that have changed since | 01-one |" in alarms.markdown(found)


def test_some_chapters_anew_leave_the_others(tmp_path):
    """A chapter that was mended gets seeds of its own; what failed in the others stays, and each names its seeds."""
    write(tmp_path, 1000, record("fixed", 3.0, False))
    write(tmp_path, 2000, *[record(f"check {index}") for index in range(300)], made_from="a mended text")
    (old,) = judged(tmp_path, [1000])["chapters"].values()
    kept = {"profile": "smoke", "chapters": {"01-one": old, "02-two": old, "03-three": old}}
    merged = alarms.merge(kept, judged(tmp_path, [2000]))
    assert {name: entry["seeds"] for name, entry in merged["chapters"].items()} == {
        "01-one": [2000, 2000],
        "02-two": [1000, 1000],
        "03-three": [1000, 1000],
    }
    counts = alarms.pooled(merged)
    assert (counts.evaluated, counts.failures, counts.twice) == (302, 2, [])
    assert "1000 to 1000; 2000 to 2000 in 01-one" in alarms.markdown(merged)
    assert alarms.merge(None, kept) == kept
    with pytest.raises(ValueError, match="what is kept is of smoke, this of book"):
        alarms.merge(kept, {**kept, "profile": "book"})


def test_a_chapter_that_has_not_changed_keeps_its_result(tmp_path):
    """Otherwise one could draw seeds until they are green."""
    for seed in range(1000, 1005):
        write(tmp_path, seed, record("fixed", 3.0, seed != 1002))
    kept = judged(tmp_path, range(1001, 1004))
    assert kept["chapters"]["01-one"]["made_from"] == "a text"
    for others in (range(1003, 1005), range(1002, 1005), range(1001, 1003)):
        with pytest.raises(ValueError, match="01-one has not changed since seeds 1001 to 1003 were judged: its result"):
            alarms.merge(kept, judged(tmp_path, others))
    for more in (range(1001, 1004), range(1000, 1005)):
        found = judged(tmp_path, more)
        assert alarms.merge(kept, found) == found and alarms.pooled(found).failures == 1
    write(tmp_path, 1010, record("fixed"), made_from="a mended text")
    mended = judged(tmp_path, [1010])
    assert alarms.merge(kept, mended) == mended
    with pytest.raises(ValueError, match="have different sources, those of seeds 1004 and 1010"):
        judged(tmp_path, [1004, 1010])
    old = {"profile": "smoke", "chapters": {"01-one": {"seeds": [1000, 1000]}}}
    assert alarms.merge(old, mended) == mended, "kept before sources were"


def test_no_other_run_may_start_until_all_is_judged(tmp_path, monkeypatch, stub):
    """It would change the notebooks that are read."""
    held, kept = io.StringIO(), tmp_path / "alarms.json"
    monkeypatch.setattr("workflow.launch.ROOT", tmp_path)
    monkeypatch.setattr("workflow.launch.BUILD", tmp_path)
    monkeypatch.setattr("workflow.launch.lock", lambda: held)

    def runs(*what, **how):
        write(tmp_path, 1000, record("fixed"))
        return True

    monkeypatch.setattr("workflow.launch.snakemake", runs)
    measure, asked = alarms.measure, []
    monkeypatch.setattr(alarms, "measure", lambda *given: [asked.append(held.closed), measure(*given)][1])
    keeps_in(monkeypatch, kept)
    assert main(["alarms", "--first", "1000", "--seeds", "1"]) == 0
    assert asked == [False] and held.closed and kept.exists()


@pytest.mark.parametrize(
    ("job", "told", "kept"),
    [
        ("01-one", None, False),
        ("01-one", jobs.KILLED, False),
        ("01-one", "ValueError: no", True),
        ("its-training", "ValueError: no", True),
        ("another-training", "ValueError: no", False),
    ],
)
def test_an_interrupted_run_keeps_nothing_and_a_failed_notebook_counts(
    tmp_path, monkeypatch, capsys, stub, job, told, kept
):
    """A notebook that is not there because nobody ran it says nothing of the chapter."""
    monkeypatch.setattr("workflow.cluster.trained_for", lambda chapter, profile: {"its-training"})
    monkeypatch.setattr("workflow.launch.ROOT", tmp_path)
    monkeypatch.setattr("workflow.launch.BUILD", tmp_path)
    monkeypatch.setattr("workflow.launch.run_folder", lambda profile, seed: tmp_path / profile / f"seed-{seed}")
    monkeypatch.setattr("workflow.launch.lock", io.StringIO)
    keeps_in(monkeypatch, tmp_path / "alarms.json")

    def stopped(*what, **how):
        write(tmp_path, 1000, record("fixed"))
        logs = tmp_path / "smoke" / "seed-1001" / "logs"
        logs.mkdir(parents=True)
        if told:
            (logs / f"{job}.error.json").write_text(json.dumps({"job": job, "what": told}))
        return False

    monkeypatch.setattr("workflow.launch.snakemake", stopped)
    assert main(["alarms", "--first", "1000", "--seeds", "2"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "alarms.json").exists() == kept
    assert "1 notebook(s) without a result" in last if kept else last.endswith("nothing is kept of it")


def test_the_result_that_stands_is_told_before_hours_of_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("workflow.launch.BUILD", tmp_path)
    monkeypatch.setattr("workflow.launch.snakemake", lambda *what, **how: pytest.fail("it ran"))
    entry = {"seeds": [1000, 1049], "made_from": sources_of_chapter("03-t5", "smoke")}
    monkeypatch.setattr(alarms, "load", lambda: {"profile": "smoke", "chapters": {"03-t5": entry}})
    assert main(["alarms", "--first", "2000", "03-t5"]) == 2
    assert "03-t5 has not changed since seeds 1000 to 1049 were judged" in capsys.readouterr().err


def test_the_kept_result_is_green():
    """What the page on running the book shows is green, from at least 50 seeds, and adds up."""
    found = alarms.load()
    assert found, "not measured yet: make alarms"
    assert set(found["chapters"]) == set(chapters())
    for entry in found["chapters"].values():
        assert entry["seeds"][1] - entry["seeds"][0] >= 49 and entry["measured"]
    counts = alarms.pooled(found)
    assert counts.green and alarms.conclusion(found).startswith("GREEN: ")
    assert f"{counts.evaluated:,}" in alarms.markdown(found)
