"""From records to verdicts, problems and reports: everything that must make a run red does, and says by what."""

import argparse
import contextlib
import errno
import json
import os
import resource
from datetime import UTC, datetime
from pathlib import Path

import jsonschema
import pytest

import workflow
from nbutils import shared_runs
from nbutils.claims import KINDS, MIME, ROLES, VERDICTS
from nbutils.claims.records import Record
from workflow import ROOT, Run, book, execute, job, kept, run, sources, write
from workflow.collect import EDITED, Collected, collect
from workflow.judge import Judgement, Problem, audit, judge, to_rerun
from workflow.processes import KILLED

GOLDEN = Path(__file__).parent / "golden"
FURTHER = (1000003, 2000006)


def record(claim="one", role="stated", holds=True, chapter="01-one", check="a number", **more):
    facts = {"kind": "exact", "holds": holds, "profile": "smoke", "measured": 1.0, "band": (0.0, 2.0)}
    return Record(claim, check, role, chapter=chapter, **facts | more)


def listed(*names, expected="confirmed", chapters=("01-one",)):
    entry = {"chapters": list(chapters), "source": "Eq. 5", "statement": "s", "expected": expected, "why": "w"}
    return {name: {"id": name, **entry} for name in names}


FAILS = record(holds=False)
OPEN = record(role="open", holds=None, measured=None, band=None, kind=None, reason="no network")
BOTH = ("01-one", "02-two")


@pytest.mark.parametrize(
    ("claims", "records", "ran", "verdicts", "problems"),
    [
        (listed("one"), [record()], ["01-one"], {"one": "confirmed"}, []),
        (listed("one"), [FAILS], ["01-one"], {"one": "failed"}, ["stated check does not hold", "verdict failed"]),
        (listed("one", expected="partly confirmed"), [record()], ["01-one"], {"one": "confirmed"},
         ["verdict confirmed, but claims.yml expects partly confirmed"]),
        (listed("one", expected="open or confirmed"), [record()], ["01-one"], {"one": "confirmed"}, []),
        (listed("one", expected="open or confirmed"), [OPEN], ["01-one"], {"one": "open"}, []),
        (listed("one"), [OPEN], ["01-one"], {"one": "open"}, ["verdict open, but"]),
        (listed("one", expected="open or partly confirmed"), [record()], ["01-one"],
         {"one": "confirmed"}, ["verdict confi"]),
        (listed("one", "two"), [record()], ["01-one"], {"one": "confirmed", "two": "failed"},
         ["listed in claims.yml, but the chapter does not check it", "verdict failed"]),
        (listed("one"), [record(), record("else")], ["01-one"], {"one": "confirmed"}, ["checked, but not listed"]),
        (listed("one"), [record(), record(chapter="02-two")], BOTH, {"one": "confirmed"},
         ["checked in a chapter that claims.yml does not name for it"]),
        (listed("one", chapters=BOTH), [record()], ["01-one"], {}, []),  # it waits for the other
        (listed("one", chapters=BOTH), [FAILS], ["01-one"], {"one": "failed"}, ["does not hold", "verdict failed"]),
        (listed("one", chapters=[]), [], BOTH, {}, ["names no chapter, or one that is not there"]),
        (listed("one", chapters=["03-gone"]), [], BOTH, {}, ["names no chapter, or one that is not there"]),
        (listed("one", chapters=BOTH, expected="partly confirmed"),
         [record(), record(chapter="02-two", role="corrected")], BOTH, {"one": "partly confirmed"}, []),
        (listed("one", chapters=BOTH), [record()], BOTH, {"one": "confirmed"}, ["the chapter does not check it"]),
    ],
)  # fmt: skip
def test_what_makes_a_run_red(claims, records, ran, verdicts, problems):
    found, red = audit(claims, records, ran, BOTH)
    assert len(red) == len(problems) and all(what in each.what for what, each in zip(problems, red, strict=True)), red
    assert found == verdicts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Executed notebooks of two chapters, a claim each: ``write(chapter, seed, *records)`` leaves one."""
    monkeypatch.setattr("workflow.BUILD", tmp_path)
    monkeypatch.setattr(book, "claims", lambda: listed("one") | listed("two", chapters=["02-two"]))
    monkeypatch.setattr(book, "chapters", lambda: list(BOTH))
    monkeypatch.setattr(sources, "hashes", lambda: dict.fromkeys((*BOTH, *shared_runs.names()), "today"))
    monkeypatch.setattr(sources, "trainings_of", lambda chapter: ["t5-own-3"] if chapter == "02-two" else [])

    def write(chapter, *records, seed=0, made_from="today", device="cpu"):
        place = Run("smoke", seed)
        place.logs.mkdir(parents=True, exist_ok=True)
        of_run = [{**each.as_dict(), "seed": seed, "device": device} for each in records]
        cells = [{"cell_type": "code", "outputs": [{"data": {MIME: each}}]} for each in of_run]
        place.notebook(chapter).write_text(json.dumps({"cells": [*cells, {"cell_type": "markdown"}]}))
        stats = {"device": device, "hardware": "h", "versions": {"torch": "2"}, "made_from": made_from}
        place.stats(chapter).write_text(json.dumps(stats))

    write("01-one", record())
    write("02-two", record("two", chapter="02-two"))
    return write


def judged(*chapters):
    """The judgement on a run as it lies there, and on its reruns."""
    collected = collect(Run("smoke", 0, chapters=chapters or BOTH))
    doubtful = to_rerun(collected)
    reruns = [collect(other) for other in collected.run.further(doubtful)] if doubtful else []
    return judge(collected, reruns)


def test_a_run_in_which_all_holds_is_green_and_says_how_it_was_run(folder):
    found = judged()
    facts = {key: found.run[key] for key in ("green", "device", "hardware", "versions", "kinds", "noted")}
    assert facts == {"green": True, "device": "cpu", "hardware": "h", "versions": {"torch": "2"}, "kinds": {"exact": 2},
                     "noted": 0}  # fmt: skip
    assert found.run["verdict_counts"] == {"confirmed": 2} and found.run["chapters"] == list(BOTH)


@pytest.mark.parametrize(("made_from", "device"), [("yesterday", "cpu"), ("today", "cuda")])
def test_a_result_of_another_code_or_device_is_refused_and_removed(folder, made_from, device):
    folder("02-two", record("two", chapter="02-two"), made_from=made_from, device=device)
    found = judged()
    assert not found.run["green"] and found.verdicts == {"one": "confirmed"}
    assert found.problems[0].what == EDITED
    assert not Run("smoke").notebook("02-two").exists() and not Run("smoke").stats("02-two").exists()


def test_records_of_another_run_do_not_count(folder):
    """A notebook that overwrites its parameters would be judged at one seed three times."""
    path = Run("smoke").notebook("02-two")
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))
    found = judged()
    assert not found.run["green"] and "damaged (a record of 02-two, profile smoke, seed 7" in found.problems[0].what


def test_a_notebook_without_its_stats_is_removed_so_that_the_next_run_makes_both(folder):
    Run("smoke").stats("02-two").unlink()
    assert not judged().run["green"] and not Run("smoke").notebook("02-two").exists()


@pytest.mark.parametrize(
    ("log", "text", "why"),
    [
        (None, "", "no result: its job did not start"),
        ("t5-own.log", "30 %", f"not run: in the job of its trainings, {KILLED}"),
        ("lm-pre-text.log", "stopped: lm-pre-text: KeyError: x\n", "no result: its job did not start"),  # not of its
    ],
)  # fmt: skip
def test_why_a_chapter_has_no_result(folder, log, text, why):
    """What raised, ran too long or was killed is in ``test_workflow``."""
    place = Run("smoke")
    place.notebook("02-two").unlink()
    if log:
        (place.logs / log).write_text(text)
    found = judged()
    assert not found.run["green"] and [each.what for each in found.problems] == [why]
    assert found.verdicts == {"one": "confirmed"}


def further(*holds, b="", wrong=2):
    """The runs at both further seeds: a check each and, of kind ``b``, another that fails in the first ``wrong``."""
    found = [[record(kind="derived", holds=each, measured=5.0 - 4 * each, seed=seed)]
             for each, seed in zip(holds, FURTHER, strict=False)]  # fmt: skip
    for i, each in enumerate(found if b else ()):
        each.append(record(check="b", kind=b, holds=i >= wrong, seed=FURTHER[i]))
    return found


@pytest.mark.parametrize(
    ("first", "others", "noted", "fails"),
    [
        (False, further(True, True), True, []),
        (False, further(True, False), False, ["a number"]),
        (False, further(True), False, ["a number"]),  # one of the two did not end: nothing is excused
        (True, further(False, False), False, []),  # holds here: never judged again
        (False, further(True, True, b="exact"), True, ["b (at seed 1000003, 2000006)"]),
        (False, further(True, True, b="derived"), True, ["b (at seed 1000003, 2000006)"]),
        (False, further(True, True, b="exact", wrong=1), True, ["b (at seed 1000003)"]),
        (False, further(True, True, b="derived", wrong=1), True, []),
    ],
)
def test_two_of_three_seeds_decide(folder, first, others, noted, fails):
    folder("01-one", record(kind="derived", holds=first), record(check="b", kind="derived"))
    for seed, records in zip(FURTHER, others, strict=False):
        folder("01-one", *records, seed=seed)
    found = judged("01-one").records
    assert found[0].noted is noted and [each.check for each in found if each.fails] == fails


def test_further_seeds_of_another_code_excuse_nothing(folder):
    folder("01-one", record(kind="derived", holds=False))
    for seed, made_from in zip(FURTHER, ("today", "yesterday"), strict=True):
        folder("01-one", record(kind="derived"), seed=seed, made_from=made_from)
    assert [each.fails for each in judged("01-one").records] == [True]


@pytest.mark.parametrize(("at_end", "counts"), [("today", True), ("edited", False)])
def test_a_result_counts_only_if_its_code_was_the_same_as_its_job_ended(folder, monkeypatch, at_end, counts):
    """Also if the edit is taken back afterwards: code that is imported late may have been the edited one."""
    monkeypatch.setattr(sources, "hash_of", lambda name: at_end)
    request = Run("smoke", 0, chapters=("01-one",))
    options = argparse.Namespace(profile="smoke", seed=0, device="cpu", threads=1)
    job.keep_stats("01-one", request.stats("01-one"), options, datetime.now(UTC), "today", resource.RUSAGE_SELF)
    collected = collect(request)
    assert ("01-one" in collected.records) == counts and collected.missing == ({} if counts else {"01-one": EDITED})


def test_reruns_after_an_edit_excuse_nothing(folder, monkeypatch):
    """The edit comes after the chapter was run, and before its reruns: they are of other code than it is."""
    folder("01-one", record(kind="derived", holds=False))

    def chapters(runs, options):
        if runs[0].seed == FURTHER[0]:
            monkeypatch.setattr(sources, "hashes", lambda: dict.fromkeys((*BOTH, *shared_runs.names()), "edited"))
            for seed in FURTHER:
                folder("01-one", record(kind="derived"), seed=seed, made_from="edited")
        return True

    monkeypatch.setattr(execute, "chapters", chapters)
    ((_, collected, reruns),) = run.measured([Run("smoke", 0, chapters=("01-one",))], argparse.Namespace())
    assert all("01-one" in rerun.records for rerun in reruns)
    assert collected.missing == {"01-one": EDITED} and not judge(collected, reruns).run["green"]


@pytest.mark.parametrize(
    ("expected", "made_from"), [("confirmed", "today"), ("refuted", "today"), ("confirmed", "older")]
)
def test_numbers_are_kept_only_of_a_run_that_is_green_by_todays_claims_and_code(
    folder, monkeypatch, expected, made_from
):
    folder("01-one", record(), made_from=made_from)
    claims = listed("one", expected=expected) | listed("two", chapters=["02-two"])
    monkeypatch.setattr(book, "claims", lambda: claims)
    monkeypatch.setattr(kept, "Run", lambda profile, *facts: Run("smoke", *facts))
    monkeypatch.setattr(kept, "_last", lambda profile: {"run": {"green": True, "hardware": "h"}})
    monkeypatch.setattr(kept, "NUMBERS", workflow.BUILD / "numbers.json")
    monkeypatch.setattr(kept, "glued", lambda executed: {"n": "1"})
    monkeypatch.setattr("nbformat.read", lambda file, as_version: file.name)
    kept.keep_numbers()
    assert kept.NUMBERS.exists() == ((expected, made_from) == ("confirmed", "today"))


def golden(monkeypatch):
    """A red run with one of everything: checks that hold, fail, are noted and open, and a chapter that raised."""
    claims = listed("one", "two") | listed("three", chapters=BOTH)
    monkeypatch.setattr(book, "claims", lambda: claims)
    monkeypatch.setattr(book, "chapters", lambda: list(BOTH))
    again = ({"seed": 1000010, "measured": 1.25, "holds": True}, {"seed": 2000013, "measured": 1.5, "holds": True})
    records = [
        record(seed=7, device="cpu"),
        record(check="a | b", holds=False, measured=3.25, seed=7, device="cpu", anchor="failed-one-2"),
        record("two", check="by chance", kind="derived", holds=False, measured=5.0, further=again, noted=True, seed=7),
        record("three", "open", None, check="open", measured=None, band=None, kind=None, reason="no network", seed=7),
    ]
    verdicts, problems = audit(claims, records, ["01-one"], BOTH)
    problems = [Problem("02-two", "", "cell [1] f(0) raised KeyError: 'x'"), *problems]
    facts = {"profile": "smoke", "seed": 7, "device": "cpu", "green": False, "noted": 1, "notebooks": []}
    return Judgement(facts, records, verdicts, problems)


@pytest.mark.parametrize("name", ["metrics.json", "summary.md", "last-lines.txt"])
def test_reports_of_a_red_run_are_the_golden_ones(tmp_path, monkeypatch, capsys, name):
    """Chapter, claim, source, measured, band, seed and the command that runs it again, for each reader."""
    found = golden(monkeypatch)
    monkeypatch.setattr("workflow.BUILD", tmp_path)
    write.reports(found, Run("smoke"))
    assert write.conclude(found, None) == 1
    (tmp_path / "smoke" / "last-lines.txt").write_text(capsys.readouterr().out)
    made = (tmp_path / "smoke" / name).read_text()
    assert made == (GOLDEN / name).read_text(), "if this is meant: copy it, and read the difference"
    assert write.load(tmp_path / "smoke").problems == found.problems


def test_the_metrics_of_a_run_are_what_the_schema_says():
    schema = json.loads((ROOT / "book" / "_static" / "metrics.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(json.loads((GOLDEN / "metrics.json").read_text()), schema)
    assert schema["properties"]["version"]["const"] == write.VERSION
    fields = schema["properties"]["records"]["items"]["properties"]
    enums = {name: set(fields[name]["enum"]) for name in ("role", "kind")}
    assert enums == {"role": {*ROLES, "open"}, "kind": {*KINDS, None}}
    assert set(schema["properties"]["verdicts"]["additionalProperties"]["enum"]) == {*VERDICTS, "failed"}


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Runs of the profile book whose notebooks are made up: ``launched(*chapters, problems=…)`` gives the status."""
    for module in ("workflow", "workflow.write"):
        monkeypatch.setattr(f"{module}.BUILD", tmp_path)
    monkeypatch.setattr(execute, "lock_checkout", contextlib.nullcontext)

    def measured(requests, options):
        return [run.Measured(True, Collected(request), []) for request in requests]

    monkeypatch.setattr(run, "measured", measured)

    def start(*names, problems=()):
        facts = {"profile": "book", "seed": 0, "device": "cpu", "green": not problems, "verdict_counts": {}, "noted": 0}
        monkeypatch.setattr(run, "judge", lambda collected, reruns: Judgement(facts, [], {}, list(problems)))
        return run.run([Run("book", 0, "cpu", names or tuple(book.chapters()))], argparse.Namespace())

    return start


PLACES = ("book/metrics.json", "book/summary.md", "metrics.json")
WRONG = Problem("t5", "", "cell [1] raised E")


def left(folder):
    """The reports that are there, and whether each ``metrics.json`` is green."""
    found = [place for place in PLACES if (folder / place).exists()]
    return found, {json.loads((folder / name).read_text())["run"]["green"] for name in found if name.endswith("json")}


def test_a_run_of_some_chapters_leaves_no_report_of_all(launched, tmp_path):
    assert launched() == 0 and left(tmp_path) == ([*PLACES], {True})
    assert launched("t5", problems=[WRONG]) == 1 and left(tmp_path) == ([], set())
    assert launched("t5") == 0 and left(tmp_path) == ([], set()), "some chapters have no reports of their own"
    assert launched(problems=[WRONG]) == 1 and left(tmp_path) == ([*PLACES], {False})


def test_a_report_that_cannot_be_written_takes_the_others_with_it(launched, tmp_path, monkeypatch):
    """What was written before it said green."""
    write_atomically = write.write_atomically

    def full(target, text):
        if target == tmp_path / PLACES[-1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_atomically(target, text)

    monkeypatch.setattr(write, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        launched()
    assert left(tmp_path) == ([], set())


ENTRY = "- {id: a, chapters: [x], source: s, statement: s, object: proof, expected: confirmed, why: w}\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ENTRY * 2, "claim 'a': listed twice"),
        (ENTRY.replace("statement: s, ", ""), "claim 'a': missing field 'statement'"),
        (ENTRY.replace("why: w", "because: w"), "claim 'a': unknown field 'because', missing field 'why'"),
        (ENTRY.replace("confirmed", "failed"), "claim 'a': expected is one of"),
        (ENTRY.replace("confirmed", "open or maybe"), "claim 'a': expected is one of"),
        (ENTRY.replace("proof", "opinion"), "claim 'a': unknown object 'opinion'"),
        (ENTRY.replace("proof", "trained here"), "object 'trained here' names its size and steps"),
        (ENTRY.replace("proof", "{trained here: nine}"), "object is a text"),
        ("- {chapters: [x]}\n", "has no id"),
        ("- one\n", "has no id"),
        ("one: {chapters: [x]}\n", "a list of entries is expected"),
        ("- {id: a, chapters: [x\n", "claims.yml: while parsing"),
    ],
)
def test_a_list_of_claims_that_is_wrong_is_refused_and_says_where(tmp_path, text, reason):
    (tmp_path / "claims.yml").write_text(text)
    with pytest.raises(ValueError, match=reason):
        book.claims(tmp_path / "claims.yml")
