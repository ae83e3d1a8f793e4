"""From records to verdicts, problems and reports: everything that must make a run red does."""

import argparse
import contextlib
import errno
import json
import os
import xml.etree.ElementTree as ET

import pytest

from nbutils import claims as claims_module
from nbutils.claims.records import Record
from workflow import jobs, launch, report, summaries


def record(claim="one", role="stated", holds=True, chapter="01-one", check="a number", **more):
    facts = {"kind": "exact", "holds": holds, "profile": "smoke", "measured": 1.0, "band": (0.0, 2.0)}
    return Record(claim, check, role, chapter=chapter, **facts | more)


def listed(*names, **more):
    return {name: {"id": name, "chapters": ["01-one"], "source": "s", "statement": "s", **more} for name in names}


def problems(claims, expected, records, chapters=("01-one",)):
    return [problem.what for problem in report.audit(claims, expected, records, chapters)[1]]


def test_green():
    verdicts, found = report.audit(listed("one"), {"one": "confirmed"}, [record()], ["01-one"])
    assert verdicts == {"one": "confirmed"} and found == []


def test_check_that_does_not_hold_is_red_and_shows_its_band():
    verdicts, found = report.audit(listed("one"), {"one": "confirmed"}, [record(holds=False)], ["01-one"])
    assert verdicts == {"one": "failed"}
    assert (found[0].chapter, found[0].claim, found[0].measured, found[0].band) == ("01-one", "one", "1", "[0, 2]")


def test_verdict_that_differs_is_red():
    assert problems(listed("one"), {"one": "refined"}, [record()]) == [
        "verdict confirmed, but verdicts.yml has refined"
    ]


def test_verdict_may_be_open_only_where_something_cannot_be_had():
    kept = {"one": "open or confirmed"}
    assert problems(listed("one"), kept, [record(role="open", holds=None, reason="r")]) == []
    assert problems(listed("one"), kept, [record()]) == []
    assert "verdict failed, but verdicts.yml has open or confirmed" in problems(
        listed("one"), kept, [record(holds=False)]
    )


def test_verdict_without_an_entry_is_red():
    assert problems(listed("one"), {}, [record()]) == ["verdict confirmed has no entry in verdicts.yml"]


def test_listed_claim_that_is_not_checked_is_red():
    found = problems(listed("one", "two"), {"one": "confirmed", "two": "confirmed"}, [record()])
    assert "listed in claims.yml, but the chapter does not check it" in found


def test_check_for_a_claim_that_is_not_listed_is_red():
    assert problems(listed("one"), {"one": "confirmed"}, [record(), record("else")]) == [
        "checked, but not listed in claims.yml"
    ]


def test_planned_claim_that_is_checked_is_red():
    assert problems(listed("one", planned=True), {}, [record()]) == ["checked, but marked as planned in claims.yml"]


def test_check_in_another_chapter_is_red():
    found = problems(listed("one"), {"one": "confirmed"}, [record(), record(chapter="02-two")], ("01-one", "02-two"))
    assert found == ["checked in a chapter that claims.yml does not name for it"]


def test_open_is_not_passed_and_not_red():
    verdicts, found = report.audit(
        listed("one"), {"one": "open"}, [record(role="open", holds=None, reason="r")], ["01-one"]
    )
    assert verdicts == {"one": "open"} and found == []


def test_what_comes_after_a_planned_claim_is_judged_too():
    claims = listed("one", planned=True) | listed("two")
    verdicts, found = report.audit(claims, {"two": "confirmed"}, [record("two")], ["01-one"])
    assert verdicts == {"two": "confirmed"} and found == []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Executed notebooks of two chapters, a claim each: ``write(chapter, **more)`` leaves one with its record."""
    monkeypatch.setattr(report, "run_folder", lambda profile, seed: tmp_path / f"seed-{seed}")
    claims = listed("one") | {"two": {**listed("two")["two"], "chapters": ["02-two"]}}
    monkeypatch.setattr(report, "load_claims", lambda: claims)
    monkeypatch.setattr(report, "load_verdicts", lambda: {"one": "confirmed", "two": "confirmed"})
    monkeypatch.setattr(report, "all_chapters", lambda: ["01-one", "02-two"])
    monkeypatch.setattr(report.cluster, "trained_for", lambda chapter, profile: {"lm-two"} & {f"lm-{chapter[3:]}"})
    (tmp_path / "seed-0" / "logs").mkdir(parents=True)

    def write(chapter, **more):
        entry = record(chapter[3:], chapter=chapter, seed=0, **more).as_dict()
        cell = {"cell_type": "code", "outputs": [{"data": {claims_module.MIME: entry}}]}
        (tmp_path / "seed-0" / f"{chapter}.ipynb").write_text(json.dumps({"cells": [cell, {"cell_type": "markdown"}]}))
        stats = {"device": "cpu", "hardware": "h", "versions": {"torch": "2"}, "chapter": chapter, "made_from": "t"}
        (tmp_path / "seed-0" / f"{chapter}.json").write_text(json.dumps(stats))

    write("01-one")
    write("02-two")
    return tmp_path / "seed-0", write


def collected():
    found = report.collect("smoke", 0, ["01-one", "02-two"])
    return found.run["green"], found


def test_a_run_in_which_all_holds_is_green_and_says_how_it_was_run(folder):
    green, found = collected()
    assert green and not found.problems and found.verdicts == {"one": "confirmed", "two": "confirmed"}
    told = {key: found.run[key] for key in ("device", "hardware", "versions", "chapters", "kinds", "noted")}
    assert told == {"device": "cpu", "hardware": "h", "versions": {"torch": "2"}, "chapters": ["01-one", "02-two"],
                    "kinds": {"exact": 2}, "noted": 0}  # fmt: skip
    assert found.run["verdict_counts"] == {"confirmed": 2}


def test_a_chapter_that_failed_did_not_run_or_lost_its_training_is_red(folder):
    place, _ = folder
    for job, what, said in (
        ("02-two", "cell [3] raised E", ("02-two", "cell [3] raised E")),
        ("lm-two", "training raised E", ("02-two", "not run: the training lm-two failed")),
        (None, None, ("02-two", "no result: its job did not start, or left no word")),
    ):
        if job:
            jobs.note_error(place / "logs" / "e.error.json", job, what)
        else:
            (place / "logs" / "e.error.json").unlink()
            (place / "02-two.ipynb").unlink()
        green, found = collected()
        assert not green and said in [(problem.chapter, problem.what) for problem in found.problems]
        assert found.run["chapters"] == ["01-one"] and found.verdicts == {"one": "confirmed"}


def test_a_check_that_fails_or_a_verdict_that_differs_is_red(folder):
    _, write = folder
    write("02-two", holds=False)
    green, found = collected()
    assert not green and found.verdicts["two"] == "failed"
    write("02-two", role="counterexample")
    green, found = collected()
    assert not green and "verdict failed, but verdicts.yml has confirmed" in [p.what for p in found.problems]


def test_a_run_without_any_result_is_red_and_names_no_device(folder):
    for file in [*folder[0].glob("*.ipynb")]:
        file.unlink()
    green, found = collected()
    assert not green and found.run["device"] is None and found.run["hardware"] is None and found.records == []


def test_planned_claims_and_chapters_that_did_not_run_are_left_alone():
    claims = listed("one") | {"two": {**listed("two")["two"], "chapters": ["02-two"]}} | listed("three", planned=True)
    assert problems(claims, {"one": "confirmed"}, [record()]) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {id: a, chapters: [x], source: s, statement: s}\n" * 2, "claim 'a' is listed twice"),
        ("- {id: a, chapters: [x], source: s}\n", "claim 'a': missing field 'statement'"),
        (
            "- {id: a, chapters: [x], source: s, statement: s, verdict: confirmed}\n",
            "claim 'a': unknown field 'verdict'",
        ),
        ("- {chapters: [x]}\n", "has no id"),
        ("- one\n", "has no id"),
        ("one: {chapters: [x]}\n", "a list of entries is expected"),
        ("- {id: a, chapters: [x\n", "claims.yml: while parsing"),
    ],
)
def test_bad_claims_file(tmp_path, text, said):
    file = tmp_path / "claims.yml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        report.load_claims(file)


@pytest.mark.parametrize(
    "entry",
    [
        "{verdict: maybe, reason: r}",
        "{verdict: confirmed}",
        "{verdict: failed, reason: r}",
        "{verdict: open or maybe, reason: r}",
        "confirmed",
    ],
)
def test_bad_verdicts_file(tmp_path, entry):
    file = tmp_path / "verdicts.yml"
    file.write_text(f"one: {entry}\n")
    with pytest.raises(ValueError, match=r"'one' needs a verdict .* and a reason"):
        report.load_verdicts(file)


def test_claims_and_verdicts_of_the_book_agree():
    claims, verdicts = report.load_claims(), report.load_verdicts()
    assert set(verdicts) == {name for name, claim in claims.items() if not claim.get("planned")}


def whole(records, found):
    run = {"profile": "smoke", "seed": 0, "green": not found, "verdict_counts": {}, "noted": 0, "chapters": ["01-one"]}
    return report.Report(run, records, {"one": "failed"}, found, [])


def test_junit_counts_failures_errors_and_open_claims():
    records = [record(), record(check="b", holds=False), record("two", "open", None, check="open", reason="no network")]
    found = [
        report.Problem("01-one", "one", "does not hold", "1", "[0, 2]"),
        report.Problem("02-two", "", "cell [1] raised E"),
    ]
    suites = {suite.get("name"): suite for suite in ET.fromstring(summaries.junit(whole(records, found)))}
    assert {key: suites["01-one"].get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "3", "failures": "1", "errors": "0", "skipped": "1"}  # fmt: skip
    assert suites["02-two"].get("errors") == "1"


def test_the_summary_counts_what_holds_of_all_that_was_checked():
    """One holds, one is noted, one fails, one is open: one of four holds, and each line says which it is."""
    noted = {"further": ({"seed": 5, "measured": 1.5, "holds": True},), "noted": True}
    records = [record(), record(check="b", holds=False), record(check="c", holds=False, **noted),
               record("one", "open", None, check="d", reason="no network", measured=None)]  # fmt: skip
    lines = [line.strip("| ").split(" | ") for line in summaries.markdown(whole(records, [])).splitlines()]
    (verdict,) = [line for line in lines if line[0] == "one" and len(line) == 4]
    assert verdict[2:] == ["failed", "1 of 4 hold"]
    last = {line[2]: line[-1] for line in lines if line[0] == "one" and len(line) > 4}
    assert last == {"a number": "yes", "b": "**no**", "c": "noted", "d": "open"}
    told = {line[2]: line[3:7] for line in lines if line[0] == "one" and len(line) > 4}
    held = ["exact", "stated", "1", "[0, 2]"]
    assert told == {"a number": held, "b": held, "c": held, "d": ["exact", "open", "", ""]}


def test_reports_are_written_into_a_new_folder_and_withdrawn(tmp_path):
    folder = tmp_path / "not" / "there"
    summaries.write(whole([record()], []), folder)
    assert {file.name for file in folder.iterdir()} == {"metrics.json", "junit.xml", "summary.md"}
    assert not summaries.say_red(folder)
    summaries.write(whole([record(holds=False)], [report.Problem("01-one", "one", "does not hold")]), folder)
    assert summaries.say_red(folder)
    summaries.withdraw(folder)
    assert not list(folder.iterdir()) and not summaries.say_red(folder)


def test_summaries_name_chapter_claim_value_and_band():
    found = [report.Problem("01-one", "one", "does not hold", "1.23", "[0, 1]")]
    for text in (summaries.markdown(whole([record(holds=False)], found)), report.table(found)):
        assert all(part in text for part in ("01-one", "one", "1.23", "[0, 1]"))


def test_nothing_is_found_before_it_is_run():
    """A planned claim has no corrected statement yet: that comes with its chapter."""
    assert not [name for name, claim in report.load_claims().items() if claim.get("planned") and claim.get("corrected")]


def test_a_claim_of_two_chapters_waits_for_both():
    claims = {"one": {**listed("one")["one"], "chapters": ["01-one", "02-two"]}}
    both = ["01-one", "02-two"]
    assert report.audit(claims, {"one": "refined"}, [record()], ["01-one"], both) == ({}, [])
    records = [record(), record(chapter="02-two", role="corrected")]
    assert report.audit(claims, {"one": "refined"}, records, both, both) == ({"one": "refined"}, [])


def test_a_verdict_of_two_chapters_is_shown_again_by_both(monkeypatch, capsys):
    """One of them alone has no verdict on the claim, and would be green."""
    claims = {"one": {**listed("one")["one"], "chapters": ["02-two", "01-one", "15-still-to-come"]}}
    monkeypatch.setattr(report, "load_claims", lambda: claims)
    monkeypatch.setattr(summaries, "load_claims", lambda: claims)
    both = ["01-one", "02-two"]
    monkeypatch.setattr(report, "all_chapters", lambda: both)
    records = [record(), record(chapter="02-two")]
    found = report.audit(claims, {"one": "refuted"}, records, both, both)[1]
    assert [problem.what for problem in found] == ["verdict confirmed, but verdicts.yml has refuted"]
    assert report.audit(claims, {"one": "refuted"}, records, both, [*both, "03-three"])[1] == found, (
        "some chapters alone"
    )
    command = "make smoke SEED=0 CHAPTERS='01-one 02-two'"
    red = whole(records, found)
    red = red._replace(run={**red.run, "device": "cpu"})
    assert launch.conclude(red, None) == 1 and f"to run it again: {command}\n" in capsys.readouterr().out
    assert summaries.metrics(red)["problems"][0]["again"] == command
    row = next(line for line in summaries.markdown(red).splitlines() if "has refuted" in line)
    assert f"`{command}`" in row
    (error,) = [case for case in ET.fromstring(summaries.junit(red)).iter("testcase") if case.find("error") is not None]
    assert {entry.get("value") for entry in error.iter("property") if entry.get("name") == "again"} == {command}
    training = report.Problem("t5-null", "", "training raised E")
    assert report.shown_by(training) == ["t5-null"], "a training takes the whole run, as before"


@pytest.fixture
def run_measured_before(monkeypatch):
    """A run of one listed claim that was measured at 20 fresh seeds, and does not hold."""
    kept = {"01-one": {"one/a number": {"mean": 1.5, "sd": 0.125, "n": 20}}}
    monkeypatch.setattr(report, "_over_fresh_seeds", lambda profile: kept)
    monkeypatch.setattr(summaries, "load_claims", lambda: listed("one") | {"one": {"source": "Eq. 5"}})
    records = [report.with_baseline(record(holds=False, profile="smoke", measured=3.25))]
    found = report.audit(listed("one"), {"one": "failed"}, records, ["01-one"])[1]
    run = {"profile": "smoke", "seed": 7, "device": "cpu", "green": False, "verdict_counts": {}}
    return report.Report(run, records, {"one": "failed"}, found, [])


NAMED = (
    "01-one",
    "one",
    "Eq. 5",
    "3.25",
    "[0, 2]",
    "1.5 ± 0.12 (sd), n = 20",
    "7",
    "make smoke SEED=7 CHAPTERS=01-one",
)


def test_every_report_names_all_of_a_failed_check(run_measured_before):
    """Chapter, claim, source, measured, band, baseline, seed, and the command that runs that one again."""
    page = summaries.markdown(run_measured_before)
    problem = next(line for line in page.splitlines() if line.startswith("| 01-one | one |"))
    assert all(part in problem for part in NAMED), problem
    case = ET.fromstring(summaries.junit(run_measured_before)).find(".//testcase")
    properties = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
    assert {case.get("classname"), *properties.values()} >= set(NAMED)
    assert all(part in case.find("failure").text for part in NAMED[2:])
    metrics = summaries.metrics(run_measured_before)
    assert metrics["records"][0] | {"chapter": "01-one", "claim": "one", "source": "Eq. 5", "measured": 3.25,
        "band": (0.0, 2.0), "baseline": {"mean": 1.5, "sd": 0.125, "n": 20},
        "again": NAMED[-1]} == metrics["records"][0]  # fmt: skip
    assert metrics["problems"][0]["baseline"] == NAMED[5] and metrics["problems"][0]["again"] == NAMED[-1]


def test_the_summary_lists_a_check_that_holds_too(run_measured_before):
    good = run_measured_before._replace(problems=[])
    row = next(line for line in summaries.markdown(good).splitlines() if "| a number |" in line)
    assert all(part in row for part in NAMED[1:6])


@pytest.mark.parametrize(
    ("told", "command"),
    [
        (("smoke", 0, "cpu", ["04-t5"]), "make smoke SEED=0 CHAPTERS=04-t5"),
        (("book", 7, "cuda", ["01-a", "02-b"]), "make book SEED=7 DEVICE=cuda CHAPTERS='01-a 02-b'"),
        (("gpu", 0, "cuda", ["01-a"]), "make gpu SEED=0 CHAPTERS=01-a"),
        (("smoke", 0, None, ["t5-null"]), "make smoke SEED=0"),
    ],
)
def test_the_command_that_runs_it_again(told, command):
    assert report.again(*told) == command


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Runs of the profile book whose notebooks are made up: ``launched(*chapters, problems=…)`` gives the status."""
    monkeypatch.setattr(launch, "BUILD", tmp_path)
    monkeypatch.setattr(launch, "ROOT", tmp_path)
    monkeypatch.setattr(launch, "checkout", contextlib.nullcontext)
    monkeypatch.setattr(launch, "run_folder", lambda profile, seed: tmp_path / profile / f"seed-{seed}")
    monkeypatch.setattr(launch, "snakemake", lambda target, **how: True)
    monkeypatch.setattr(launch, "no_room", lambda *folders: "")
    monkeypatch.setattr(launch.retry.stale, "remove_unsound", lambda *what: [])
    monkeypatch.setattr(launch.notebooks, "write_readme_figure", lambda folder: None)
    monkeypatch.setattr(launch, "look_again", lambda seeds, **how: None)

    def run(*names, problems=()):
        result = whole([record()], list(problems))
        result = result._replace(run={**result.run, "profile": "book", "device": "cpu"})
        monkeypatch.setattr(launch.report, "collect", lambda *what: result)
        options = {"profile": "book", "device": "cpu", "executor": "local", "seed": 0, "html": False}
        return launch.run(argparse.Namespace(chapters=list(names), **options))

    return run


PLACES = ("book/metrics.json", "book/junit.xml", "book/summary.md", "metrics.json")
WRONG = report.Problem("04-t5", "", "cell [1] raised E")


def left(folder):
    """The reports that are there, and whether each ``metrics.json`` is green."""
    found = [place for place in PLACES if (folder / place).exists()]
    green = {json.loads((folder / name).read_text())["run"]["green"] for name in found if name.endswith("json")}
    return found, green


def test_a_run_of_some_chapters_leaves_no_green_report_of_all(launched, tmp_path, capsys):
    assert launched() == 0 and left(tmp_path) == ([*PLACES], {True})
    assert launched("04-t5", problems=[WRONG]) == 1
    assert left(tmp_path) == ([], set()) and "reports of all chapters are withdrawn" in capsys.readouterr().out
    assert launched("04-t5") == 0 and left(tmp_path) == ([], set()), "some chapters have no reports of their own"
    assert "withdrawn" not in capsys.readouterr().out


def test_a_red_report_stays_while_its_chapters_are_run_again(launched, tmp_path):
    """It names the command that is followed now, and does not turn green by it."""
    assert launched(problems=[WRONG]) == 1 and left(tmp_path) == ([*PLACES], {False})
    assert launched("04-t5") == 0 and left(tmp_path) == ([*PLACES], {False})
    (tmp_path / "book" / "metrics.json").write_text('{"run": {"green": fal')
    assert launched("04-t5") == 0 and left(tmp_path) == ([], set()), "one that cannot be read may be green"


@pytest.mark.parametrize("place", PLACES)
def test_a_report_that_cannot_be_written_takes_the_others_with_it(launched, tmp_path, monkeypatch, capsys, place):
    """What was written before it said green."""
    put = launch.jobs.put

    def full(target, text):
        if target == tmp_path / place:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(target, text)

    monkeypatch.setattr(launch.jobs, "put", full)
    assert launched() == 1 and left(tmp_path) == ([], set())
    assert "the reports were not written: No space left on device" in capsys.readouterr().out.splitlines()[-1]


def test_a_run_that_did_not_reach_its_end_is_red_whatever_its_notebooks_say():
    green = report.Report({"green": True}, [], {}, [], ())
    assert report.stopped(green, "").run["green"] is False
    told = report.stopped(green, "no pages")
    assert told.run["green"] is False and [problem.what for problem in told.problems] == ["no pages"]


def test_a_problem_of_a_claim_stands_in_the_first_of_its_chapters():
    records = [Record("unlisted", "a", "stated", holds=True, chapter=chapter) for chapter in ("01-one", "02-two")]
    _, problems = report.audit({}, {}, records, ["01-one", "02-two"])
    assert [problem.chapter for problem in problems if "not listed" in problem.what] == ["01-one"]


def test_a_table_of_problems_is_as_wide_as_its_longest_cells():
    found = [
        report.Problem("a-long-chapter", "c", "w", "1", "[0, 2]", "left out"),
        report.Problem("b", "", "what it is"),
    ]
    assert report.table(found).splitlines() == [
        "chapter         claim  problem     measured  band",
        "a-long-chapter  c      w           1         [0, 2]",
        "b                      what it is",
    ]
    assert report.table([]) == "chapter  claim  problem  measured  band"


def test_what_is_kept_of_a_profile_is_kept_for_each_device_apart():
    names = [report.alarms_file(*told).name for told in (("book",), ("book", "cpu"), ("gpu", "cuda"))]
    assert names == ["alarms-book.json", "alarms-book.json", "alarms-gpu-cuda.json"]


def test_a_baseline_is_found_by_chapter_claim_and_check(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "alarms_file", lambda profile: tmp_path / f"{profile}.json")
    kept = {"chapters": {"01-one": {"measured": {"one/a number": {"mean": 1.0, "sd": 2.0, "n": 3}}}}}
    (tmp_path / "smoke.json").write_text(json.dumps(kept))
    report._over_fresh_seeds.cache_clear()
    found = [report.with_baseline(record(**facts)).baseline for facts in (
        {}, {"claim": "two"}, {"check": "b"}, {"chapter": "02-two"}, {"profile": "book"})]  # fmt: skip
    report._over_fresh_seeds.cache_clear()
    assert found == [{"mean": 1.0, "sd": 2.0, "n": 3}, None, None, None, None]
    assert report.format_baseline(record()) == ""


@pytest.mark.parametrize(
    ("told", "command"),
    [
        (("gpu", 1, "cpu", ["01-a"]), "make gpu SEED=1 DEVICE=cpu CHAPTERS=01-a"),
        (("book", 1, "cpu", ["01-a", "t5-null-2"]), "make book SEED=1"),
        (("book", 1, "cuda", ["1x"]), "make book SEED=1 DEVICE=cuda"),
        (("gpu", 1, None, ["12-b"]), "make gpu SEED=1 CHAPTERS=12-b"),
    ],
)
def test_the_command_names_a_device_that_is_not_the_profiles_own(told, command):
    assert report.again(*told) == command


def test_a_claim_checked_where_it_is_not_named_is_red_beside_its_own_chapter():
    claims = {"one": {**listed("one")["one"], "chapters": ["01-one", "02-two"]}}
    records = [record(), record(chapter="03-three"), record(chapter="02-two")]
    chapters = ["01-one", "02-two", "03-three"]
    verdicts, found = report.audit(claims, {"one": "confirmed"}, records, chapters)
    assert verdicts == {"one": "confirmed"} and [(each.chapter, each.claim) for each in found] == [("03-three", "one")]
    _, found = report.audit(claims, {"one": "confirmed"}, records[1:2], chapters)
    assert [each.chapter for each in found] == ["03-three", "01-one", "02-two"]


def test_a_check_that_stays_red_says_what_further_seeds_measured():
    more = ({"seed": 3, "measured": 0.5, "holds": True}, {"seed": 4, "measured": "nan", "holds": False})
    (found,) = problems(listed("one"), {"one": "failed"}, [record(holds=False, further=more)])
    assert found == "stated check does not hold: a number (looked at again: 0.5 at seed 3, nan at seed 4)"
    (found,) = problems(listed("one"), {"one": "failed"}, [record(holds=False)])
    assert found == "stated check does not hold: a number"


@pytest.mark.parametrize(
    ("text", "red"),
    [
        ('{"run": {"green": false}}', True), ('{"run": {"green": true}}', False), ('{"run": {}}', False), ("{", False),
        ('{"run": {"green": null}}', False), ("[]", False), ('{"run": 1}', False), (None, False), ("{}", False),
        ('{"run": {"green": 0}}', False),
    ],
)  # fmt: skip
def test_a_folder_says_red_only_where_its_run_does(tmp_path, text, red):
    if text is not None:
        (tmp_path / "metrics.json").write_text(text)
    assert summaries.say_red(tmp_path) is red


def test_a_bar_in_a_cell_does_not_end_it():
    lines = summaries.rows(["a", "b"], [(1, "x|y"), ("|", None)])
    assert lines == ["| a | b |", "|---|---|", "| 1 | x\\|y |", "| \\| | None |"]


@pytest.mark.parametrize(("device", "name"), [("cpu", "alarms-smoke.json"), ("cuda", "alarms-smoke-cuda.json")])
def test_alarms_are_kept_by_device(device, name):
    assert report.alarms_file("smoke", device).name == name
