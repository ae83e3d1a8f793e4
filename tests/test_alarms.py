"""The share of red runs: what counts as one, what is kept, and what voids it."""

import json

import nbformat
import numpy as np
import pytest
from scipy import stats

from nbutils import claims
from nbutils.claims.records import Record
from workflow import alarms, jobs, report


@pytest.fixture(autouse=True)
def one_chapter(monkeypatch, tmp_path):
    """A book of one chapter in a folder of its own; ``texts`` says what it is made from."""
    texts = {"01-one": "a text"}
    place = lambda profile, seed: tmp_path / profile / f"seed-{seed}"  # noqa: E731
    monkeypatch.setattr(alarms, "run_folder", place)
    monkeypatch.setattr(report, "run_folder", place)
    monkeypatch.setattr(alarms, "all_chapters", lambda: list(texts))
    monkeypatch.setattr(alarms.stale, "sources_of_chapter", texts.__getitem__)
    monkeypatch.setattr(alarms.stale, "code_of_chapter", texts.__getitem__)
    monkeypatch.setattr(alarms.cluster, "trained_for", lambda chapter, profile: {"lm-one"})
    monkeypatch.setattr(alarms, "alarms_file", lambda profile, device: tmp_path / f"{profile}-{device}.json")
    return texts


def record(check="a", measured=1.0, *, holds=True, kind="derived", **more):
    return {"claim": "one", "chapter": "01-one", "check": check, "form": "band", "kind": kind, "role": "stated",
            "measured": measured, "expected": None, "band": [0.0, 2.0], "holds": holds, "profile": "smoke",
            **more}  # fmt: skip


def write(folder, seed, *records, chapter="01-one", made_from="a text", hardware="h"):
    place = folder / "smoke" / f"seed-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    cell = nbformat.v4.new_code_cell("x")
    entries = [{**entry, "seed": seed, "chapter": chapter} for entry in records]
    cell.outputs = [nbformat.v4.new_output("display_data", {claims.MIME: entry}) for entry in entries]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), place / f"{chapter}.ipynb")
    stats_of = {"hardware": hardware, "versions": {"torch": "2"}, "made_from": made_from, "device": "cpu"}
    (place / f"{chapter}.json").write_text(json.dumps(stats_of))


def judged(seeds, found=None):
    found = found or alarms.load("smoke")
    alarms.add(found, "01-one", seeds)
    return found


def test_a_run_is_red_by_an_exact_check_or_by_two_of_three(tmp_path):
    write(tmp_path, 1, record(kind="exact"), record("b"))
    write(tmp_path, 2, record(kind="exact", holds=False), record("b"))
    for seed, holds in ((3, (True, True)), (4, (True, False)), (5, (False, False))):
        write(tmp_path, seed, record(kind="exact"), record("b", 3.0, holds=False))
        for other, held in zip(report.further(seed), holds, strict=True):
            write(tmp_path, other, record(kind="exact"), record("b", holds=held))
    found = judged(range(1, 6))
    counts = alarms.pooled(found)
    assert (counts.runs, counts.red, counts.noted, counts.absent, counts.share) == (5, 3, 1, [], 0.6)
    assert [(seed, check["red"]) for _, seed, check in counts.failed] == [
        ("2", True), ("3", False), ("4", True), ("5", True)]  # fmt: skip
    assert not counts.sound and alarms.conclusion(found).startswith("RED: 60.0 % of smoke runs red")
    rows = [line.split(" | ") for line in alarms.markdown(found).splitlines() if "| `one` |" in line]
    assert [(row[1], row[-1].rstrip(" |")) for row in rows] == [
        ("2", "not run: **red**"), ("3", "1, 1: noted"), ("4", "1, 1: **red**"), ("5", "1, 1: **red**")]  # fmt: skip


def test_a_check_that_held_and_fails_at_both_further_seeds_is_red_too(tmp_path):
    write(tmp_path, 1, record("a", holds=False), record("b"), record("c"))
    for other in report.further(1):
        write(tmp_path, other, record("a"), record("b", holds=False), record("c", holds=other != report.further(1)[0]))
    checks = judged([1])["chapters"]["01-one"]["runs"]["1"]
    said = f"b (at seed {report.further(1)[0]}, {report.further(1)[1]})"
    assert [(check["check"], check["red"]) for check in checks] == [("a", False), (said, True)], "c: one of three"


def test_what_was_broken_off_or_is_of_two_texts_is_not_judged(tmp_path):
    write(tmp_path, 1, record(holds=False))
    assert "01-one" not in judged([1])["chapters"], "not looked at again yet"
    for other, text in zip(report.further(1), ("a text", "an edit"), strict=True):
        write(tmp_path, other, record(), made_from=text)
    (check,) = judged([1])["chapters"]["01-one"]["runs"]["1"]
    assert check["red"], "another text excuses nothing"


def test_a_hundred_runs_may_have_one_that_is_red(tmp_path):
    for seed in range(101):
        write(tmp_path, seed, record(kind="exact", holds=seed not in (7, 100)))
    found = judged(range(100))
    assert alarms.conclusion(found).startswith("GREEN: 1.0 % of smoke runs red (95 %: at most 4.7 %), 100 of 100 runs")
    assert alarms.pooled(found).upper == pytest.approx(stats.beta.ppf(0.95, 2, 99), abs=1e-9)
    assert alarms.pooled(judged([100], found)).red == 2 and not alarms.pooled(found).sound


def test_more_runs_than_are_wanted_decide_too_and_red_ones_name_the_limit(tmp_path):
    for seed in range(103):
        write(tmp_path, seed, record(kind="exact", holds=seed < 101))
    assert alarms.conclusion(judged(range(101))).startswith("GREEN: 0.0 % of smoke runs red")
    found = judged(range(101, 103))
    assert alarms.pooled(found).upper == 1.0, "all of them are red"
    assert alarms.conclusion(found).endswith("sound is at most 1 % red")


def test_a_few_runs_decide_nothing(tmp_path):
    write(tmp_path, 1, record())
    assert alarms.conclusion(judged([1])).startswith("SO FAR GREEN: 0.0 % of smoke runs red (95 %: at most 95.0 %)")


def test_seeds_are_added_and_never_drawn_again(tmp_path):
    write(tmp_path, 1, record(kind="exact", holds=False), hardware="first")
    found = judged([1])
    write(tmp_path, 1, record(kind="exact"))  # the same text, drawn again
    write(tmp_path, 2, record(measured=3.0), hardware="second")
    assert alarms.missing(found, "01-one", [1, 2, 3]) == [2, 3]
    judged([1, 2], found)
    entry = found["chapters"]["01-one"]
    assert list(entry["runs"]) == ["1", "2"] and entry["runs"]["1"] and not entry["runs"]["2"]
    assert entry["hardware"] == ["first", "second"]
    assert entry["measured"]["one/a"] == pytest.approx({"mean": 2.0, "sd": 2**0.5, "n": 2})


def test_pooling_is_the_mean_and_spread_of_all_values():
    values = np.random.default_rng(0).normal(3, 2, 12)
    for first in (1, 5, 11):
        found = alarms.pool(alarms.pool(None, values[:first]), values[first:])
        assert found == pytest.approx({"mean": values.mean(), "sd": values.std(ddof=1), "n": 12})
    one_by_one = None
    for value in values:
        one_by_one = alarms.pool(one_by_one, [value])
    assert one_by_one == pytest.approx({"mean": values.mean(), "sd": values.std(ddof=1), "n": 12})


def test_another_text_voids_what_is_kept(tmp_path, one_chapter):
    write(tmp_path, 1, record(kind="exact", holds=False))
    found = judged([1])
    one_chapter["01-one"] = "another text"
    assert alarms.pooled(found).absent == ["01-one"] and not alarms.pooled(found).sound
    assert alarms.conclusion(found).startswith("RED")
    assert "not measured since they changed: 01-one" in alarms.conclusion(found)
    judged([1], found)
    assert alarms.pooled(found).absent == ["01-one"], "a notebook of the old text says nothing of the new one"
    write(tmp_path, 2, record(), made_from="another text")
    judged([1, 2], found)
    assert list(found["chapters"]["01-one"]["runs"]) == ["2"] and alarms.pooled(found).sound


def test_no_red_run_can_be_outnumbered_by_seeds_of_one_chapter(tmp_path, one_chapter):
    """A run is red if a chapter is: 1 − (1 − 1/4)(1 − 1/2); more seeds of one chapter are not more runs."""
    one_chapter["02-two"] = "its text"
    for seed in range(1, 5):
        write(tmp_path, seed, record(kind="exact", holds=seed != 4))
    for seed in (11, 12):
        write(tmp_path, seed, record(kind="exact", holds=seed != 12), chapter="02-two", made_from="its text")
    found = judged(range(1, 5))
    assert alarms.pooled(found).absent == ["02-two"]
    alarms.add(found, "02-two", [11, 12])
    assert (alarms.pooled(found).runs, alarms.pooled(found).share) == (2, pytest.approx(5 / 8))


def test_a_job_that_failed_is_a_red_run_and_one_that_was_killed_says_nothing(tmp_path):
    for seed, job, what in ((1, "01-one", "cell [3] raised E"), (2, "lm-one", "training raised E"), (3, "x", "E")):
        (tmp_path / "smoke" / f"seed-{seed}" / "logs").mkdir(parents=True)
        jobs.note_error(tmp_path / "smoke" / f"seed-{seed}" / "logs" / "e.error.json", job, what)
    ended = (jobs.KILLED, "cell ? raised TimeoutError: not finished", "cell [1] raised OSError: no space left",
             "cell ? raised: the chapter or a module of it changed while it ran")  # fmt: skip
    for seed, what in enumerate(ended, 4):
        (tmp_path / "smoke" / f"seed-{seed}" / "logs").mkdir(parents=True)
        jobs.note_error(tmp_path / "smoke" / f"seed-{seed}" / "logs" / "e.error.json", "01-one", what)
    found = judged(range(1, 9))
    assert list(found["chapters"]["01-one"]["runs"]) == ["1", "2"] and alarms.pooled(found).red == 2
    assert "cell [3] raised E" in alarms.markdown(found)


def test_the_page_names_runs_kinds_seeds_and_hardware(tmp_path):
    assert "Not measured yet: `make alarms PROFILE=smoke`" in alarms.markdown(alarms.load("smoke"))
    opened = record("open", None, holds=None, role="open", kind=None)
    for seed in (1, 2, 4):
        write(tmp_path, seed, record(kind="exact"), record("b"), record("c", "inf"), opened, hardware="a processor")
    found = judged([1, 2, 4])
    page = alarms.markdown(found)
    assert all(
        text in page for text in ("a processor", "1, 2, 4", "1 exact, 2 derived, 0 empirical", "63.2 %", "3 of 100")
    )
    for entry in found["chapters"].values():
        entry["kinds"].pop("empirical", None)  # a chapter without such checks
    assert "1 exact, 2 derived, 0 empirical" in alarms.markdown(found)
    assert "one/c" not in found["chapters"]["01-one"]["measured"]
    alarms.keep(found)
    assert alarms.load("smoke") == found


def test_neighbouring_seeds_are_told_as_a_range_and_no_run_as_none(tmp_path):
    for seed in (3, 4, 5):
        write(tmp_path, seed, record(kind="exact"))
    assert "3 to 5" in alarms.markdown(judged([3, 4, 5]))
    assert alarms.pooled(alarms.load("gpu")).runs == 0


@pytest.mark.parametrize("device", ["aaa", "zzz"])
def test_a_run_on_another_device_says_nothing(tmp_path, device):
    write(tmp_path, 1, record(kind="exact"))
    file = tmp_path / "smoke" / "seed-1" / "01-one.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"device": device}))
    assert alarms.pooled(judged([1])).runs == 0


def test_every_seed_of_a_chapter_is_missing_until_it_is_kept(tmp_path, one_chapter):
    assert alarms.missing(alarms.load("smoke"), "01-one", [1, 2]) == [1, 2]
    write(tmp_path, 1, record(kind="exact"))
    found = judged([1])
    assert alarms.missing(found, "01-one", [1, 2]) == [2]
    one_chapter["01-one"] = "another text"
    assert alarms.missing(found, "01-one", [1, 2]) == [1, 2]


def kept(profile, runs, red=0, chapters=("01-one",), first=0):
    """A result of so many runs, of which the first are red."""
    bad = [{"claim": "c", "check": "a", "red": True}]
    entry = {"made_from": "a text", "kinds": {"exact": 2}, "hardware": ["h"], "versions": {}, "measured": {},
             "runs": {str(first + i): bad if i < red else [] for i in range(runs)}}  # fmt: skip
    return {"profile": profile, "device": "cpu", "chapters": dict.fromkeys(chapters, entry)}


@pytest.mark.parametrize(
    ("profile", "runs", "red", "said"),
    [
        ("smoke", 99, 0, "SO FAR GREEN: "), ("smoke", 100, 0, "GREEN: "), ("smoke", 100, 1, "GREEN: "),
        ("smoke", 99, 1, "RED: "), ("smoke", 200, 2, "GREEN: "), ("smoke", 200, 3, "RED: "),
        ("book", 19, 0, "SO FAR GREEN: "), ("book", 20, 0, "GREEN: "), ("book", 20, 1, "RED: "),
        ("gpu", 19, 0, "SO FAR GREEN: "), ("gpu", 20, 0, "GREEN: "),
    ],
)  # fmt: skip
def test_how_many_runs_decide_and_how_many_may_be_red(profile, runs, red, said):
    found = kept(profile, runs, red)
    wanted = 100 if profile == "smoke" else 20
    assert alarms.conclusion(found).startswith(said)
    assert f"{runs} of {wanted} runs, 0 noted" in alarms.conclusion(found)
    assert f"{runs} of {wanted} |" in alarms.markdown(found)
    counts = alarms.pooled(found)
    assert counts.upper == pytest.approx(stats.beta.ppf(0.95, red + 1, runs - red), rel=1e-9)
    assert f"{100 * red / runs:.1f} % (with 95 % confidence at most {100 * counts.upper:.1f} %)" in alarms.markdown(
        found
    )


def test_a_chapter_that_was_not_measured_leaves_the_result_open(one_chapter):
    one_chapter["02-two"] = "its text"
    found = kept("book", 20)
    assert alarms.conclusion(found).startswith("SO FAR GREEN: ")
    assert alarms.conclusion(found).endswith("; not measured since they changed: 02-two")
    found["chapters"]["09-old"] = kept("book", 20, 20)["chapters"]["01-one"]
    assert alarms.pooled(found).red == 0, "what is no chapter any more is not counted"


def test_a_noted_check_is_no_red_run_and_a_run_with_both_is_red():
    found = kept("book", 4)
    noted, red = ({"claim": "c", "check": "a", "red": value} for value in (False, True))
    found["chapters"]["01-one"]["runs"] |= {"0": [noted, red], "1": [noted], "2": [noted, noted]}
    counts = alarms.pooled(found)
    assert (counts.red, counts.noted, counts.share, len(counts.failed)) == (1, 2, 0.25, 5)


def test_seeds_of_most_chapters_come_first_and_others_are_named(one_chapter):
    names = [f"0{i}-x" for i in range(1, 6)]
    one_chapter.update(dict.fromkeys(names, "a text"))
    found = kept("book", 3, chapters=names[:1], first=7)
    found["chapters"] |= kept("book", 20, chapters=names[1:4])["chapters"]
    found["chapters"] |= kept("book", 1, chapters=names[4:])["chapters"]
    page = alarms.markdown(found)
    assert "| seeds | 0 to 19; 7 to 9 in 01-x; 0 to 0 in 05-x |" in page
    assert "| checks of a run | 10 exact, 0 derived, 0 empirical |" in page


def test_values_are_pooled_over_seeds_and_one_value_has_no_spread(tmp_path):
    assert alarms.pool(None, [3.0]) == {"mean": 3.0, "sd": 0.0, "n": 1}
    assert alarms.pool(None, [3.0, 5.0]) == pytest.approx({"mean": 4.0, "sd": 2**0.5, "n": 2})
    for seed, value in enumerate((1.0, 4.0, 1.5, 0.5)):
        write(tmp_path, seed, record("a", value, kind="exact"), record("b", -value, kind="exact"))
    found = judged([0, 1])
    judged([0, 1, 2, 3], found)
    wanted = {"mean": 1.75, "sd": np.std([1, 4, 1.5, 0.5], ddof=1), "n": 4}
    measured = found["chapters"]["01-one"]["measured"]
    assert measured == {"one/a": pytest.approx(wanted), "one/b": pytest.approx(wanted | {"mean": -1.75})}
    assert found["chapters"]["01-one"]["kinds"] == {"exact": 2, "derived": 0, "empirical": 0}


@pytest.mark.parametrize(
    ("kinds", "fails", "looks"),
    [
        (("derived",), (1,), True), (("empirical",), (1,), True), (("exact",), (1,), False),
        (("derived",), (0,), False),
        (("exact", "derived"), (1, 1), False), (("exact", "derived"), (0, 1), True),
        (("derived", "empirical"), (1, 1), True), ((), (), False),
    ],
)  # fmt: skip
def test_a_chapter_is_looked_at_again_where_chance_may_have_failed_it_all(kinds, fails, looks):
    records = [Record("c", str(i), "stated", kind=kind, holds=not fails[i]) for i, kind in enumerate(kinds)]
    assert report.doubtful(records) is looks
    assert report.doubtful([*records, Record("c", "open", "open")]) is looks


def test_further_seeds_are_two_more_and_stay_below_two_to_the_31():
    assert report.further(2**31 - 1) == [1_000_002, 2_000_005]
    assert report.further(2**31 - 1_000_004) == [2**31 - 1, 1_000_002]
    assert report.further(2**31 - 1_000_003) == [0, 1_000_003]


@pytest.mark.parametrize(
    ("kind", "holds", "added"),
    [
        ("exact", (True, True), None), ("exact", (False, True), [0]), ("exact", (True, False), [1]),
        ("exact", (False, False), [0, 1]), ("derived", (True, False), None), ("derived", (False, True), None),
        ("derived", (False, False), [0, 1]),
    ],
)  # fmt: skip
def test_a_check_that_held_here_is_red_by_what_further_seeds_say(tmp_path, kind, holds, added):
    write(tmp_path, 1, record("a", holds=False), record("b", kind=kind))
    seeds = report.further(1)
    for seed, held in zip(seeds, holds, strict=True):
        write(tmp_path, seed, record("a", 1.5), record("b", kind=kind, holds=held))
    found = report.looked_at("smoke", 1, "01-one")
    assert [(each.check, each.holds, each.noted) for each in found[:2]] == [("a", False, True), ("b", True, False)]
    assert found[0].further == tuple({"seed": seed, "measured": 1.5, "holds": True} for seed in seeds)
    names = [f"b (at seed {', '.join(str(seeds[i]) for i in added)})"] if added else []
    assert [(each.check, each.fails, each.anchor) for each in found[2:]] == [(name, True, None) for name in names]


@pytest.mark.parametrize("there", [0, 1])
def test_a_check_that_a_further_seed_does_not_have_is_not_excused(tmp_path, there):
    write(tmp_path, 1, record("a", holds=False))
    for i, seed in enumerate(report.further(1)):
        write(tmp_path, seed, *([record("a")] if i == there else [record("other", holds=False)]))
    (found,) = report.looked_at("smoke", 1, "01-one")
    assert found.fails and len(found.further) == 1
    (tmp_path / "smoke" / f"seed-{report.further(1)[1]}" / "01-one.ipynb").unlink()
    assert report.looked_at("smoke", 1, "01-one")[0].further == ()
