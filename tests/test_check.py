"""What plain papermill leaves is judged by one command, for people and, as JUnit XML, for a page of CI."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from nbutils.__main__ import main
from nbutils.claims import MIME
from nbutils.claims.records import Record

HOLDS = Record("one", "a number", "stated", kind="exact", measured=1.0, band=(0.0, 2.0), holds=True, chapter="t5")
OPEN = Record("three", "open", "open", reason="no network: a < b & c", chapter="t5")


def notebook(folder, *records, error=None, count=1, end="12:00", name="out.ipynb"):
    """An executed notebook with these records in its outputs; one that was killed has no count or no end."""
    outputs = [{"output_type": "display_data", "data": {MIME: record.as_dict()}} for record in records]
    if error:
        outputs.append({"output_type": "error", "ename": "KeyError", "evalue": error, "traceback": []})
    path = folder / name
    before = {"cell_type": "code", "source": [], "metadata": {"papermill": {"duration": 2.0}}, "outputs": []}
    cell = {"cell_type": "code", "source": ["x = 1"], "execution_count": count, "outputs": outputs}
    cell["metadata"] = {"papermill": {"duration": 1.5 if count else None}}
    papermill = {"papermill": {"end_time": end, "start_time": "2026-11-27T20:45:00.990803+00:00"}}
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown"}, before, cell], "metadata": papermill}))
    return path


def failed(kind):
    return Record("two", "another", "corrected", kind=kind, measured=9.0, band=(0.0, 2.0), holds=False, chapter="t5")


@pytest.mark.parametrize(
    ("records", "error", "status", "text"),
    [
        ([HOLDS, OPEN], None, 0, "1 checks hold, 0 fail, 1 are left open"),
        ([HOLDS, failed("exact")], None, 1, "✗ two (corrected) another: 9; band [0, 2]"),
        ([HOLDS, failed("derived")], None, 1, "try other seeds"),
        ([HOLDS], "'w'", 1, "stopped at KeyError: 'w'"),
        ([], None, 1, "it was not executed"),
    ],
)
def test_a_notebook_that_papermill_ran(tmp_path, capsys, records, error, status, text):
    assert main(["check", str(notebook(tmp_path, *records, error=error))]) == status
    printed = capsys.readouterr().out
    assert text in printed and ("other seeds" in printed) == (failed("derived") in records)


@pytest.mark.parametrize(("strict", "status"), [([], 0), (["--strict"], 1)])
def test_what_is_left_open_is_named_with_its_reason_and_fails_on_request(tmp_path, capsys, strict, status):
    assert main(["check", str(notebook(tmp_path, HOLDS, OPEN)), *strict]) == status
    counts, line = capsys.readouterr().out.splitlines()
    assert line == "  ○ three open: no network: a < b & c"
    assert counts.endswith("1 are left open" + ", which --strict forbids" * status)
    assert main(["check", str(notebook(tmp_path, HOLDS)), *strict]) == 0


@pytest.mark.parametrize("killed", [{"count": None}, {"end": None}])
def test_a_notebook_that_was_killed(tmp_path, capsys, killed):
    assert main(["check", str(notebook(tmp_path, HOLDS, **killed))]) == 1
    assert "incomplete: not all of its cells" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"), [("none.ipynb", "no such file"), ("README.md", "is not a notebook"), ("list.json", "is not a")]
)
def test_files_that_are_not_notebooks(tmp_path, capsys, name, text):
    (tmp_path / "README.md").write_text("# none")
    (tmp_path / "list.json").write_text("[1]")
    assert main(["check", str(tmp_path / name)]) == 2
    assert f"nbutils check: {tmp_path / name}" in (error := capsys.readouterr().err) and text in error


def test_a_folder_and_ctrl_c_end_in_a_line(tmp_path, capsys, monkeypatch):
    assert main(["check", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"nbutils check: {tmp_path}: Is a directory\n"

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("nbutils.__main__.judge", interrupted)
    assert main(["check", "out.ipynb"]) == 130
    assert capsys.readouterr().err == "nbutils check: stopped\n"


# The schema of Jenkins' xUnit plugin, junit-10.xsd: attributes that must be there, others, and what may lie in it.
SECONDS = r"\d+(\.\d*)?"
OUTCOME = ((), ("type", "message"), ())
SCHEMA = {
    "testsuites": ((), ("name", "time", "tests", "failures", "errors"), ("testsuite",)),
    "testsuite": (
        ("name", "tests", "failures", "errors"), ("group", "time", "skipped", "timestamp", "hostname", "id", "package",
        "file", "log", "url"), ("testsuite", "properties", "testcase", "system-out", "system-err"),
    ),
    "testcase": (
        ("name",), ("time", "classname", "group"), ("skipped", "error", "failure", "system-out", "system-err")
    ),
    "failure": OUTCOME, "error": OUTCOME, "skipped": OUTCOME,
}  # fmt: skip


def conforms(element):
    needed, optional, children = SCHEMA[element.tag]
    assert {*needed} <= {*element.keys()} <= {*needed, *optional}, element.tag
    assert {child.tag for child in element} <= {*children}, element.tag
    if element.tag.startswith("testsuite"):
        assert re.fullmatch(SECONDS, element.get("time"))
        outcomes = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
        for count in outcomes.keys() & element.keys():
            assert int(element.get(count)) == len(list(element.iter(outcomes[count]))), (element.attrib, count)
    for child in element:
        conforms(child)


@pytest.mark.parametrize("strict", [False, True])
def test_junit_has_a_suite_for_each_notebook_and_a_case_for_each_check(tmp_path, strict):
    """With measured value, band or reason where it failed, was left open or stopped; as Jenkins' schema has it."""
    paths = [
        notebook(tmp_path, HOLDS, failed("derived"), OPEN, name="a & b.ipynb"),
        notebook(tmp_path, HOLDS, error="no 'w' in x\nmore", name="stopped.ipynb"),
        notebook(tmp_path, HOLDS, count=None, name="killed.ipynb"),
        notebook(tmp_path, name="none.ipynb"),
        notebook(tmp_path, HOLDS, name="sound.ipynb"),
    ]
    words = ["check", *map(str, paths), "--junit", str(tmp_path / "junit.xml"), *["--strict"] * strict]
    assert main(words) == 1
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    conforms(root)
    assert root.tag == "testsuites" and [suite.get("name") for suite in root] == list(map(str, paths))
    assert [int(root.get(count)) for count in ("tests", "failures", "errors")] == [9, 1 + strict, 3]
    first = root[0]
    assert first.get("timestamp") == "2026-11-27T20:45:00" and float(first.get("time")) == 3.5
    assert [(case.get("classname"), case.get("name"), case.get("time")) for case in first] == [
        ("t5.one", "a number", "3.500"), ("t5.two", "another", "0.000"), ("t5.three", "open", "0.000"),
    ]  # fmt: skip
    holds, fails, left_open = first
    assert not len(holds)
    assert fails[0].tag == "failure" and fails[0].attrib == {"type": "derived", "message": "measured 9; band [0, 2]"}
    assert left_open[0].tag == ("failure" if strict else "skipped") and left_open[0].get("message") == OPEN.reason
    assert [suite[-1][0].get("message") for suite in root[1:4]] == [
        "stopped at KeyError: no 'w' in x",
        "incomplete: not all of its cells were run to their end",
        "no checks: it was not executed, or is not a chapter of the book",
    ]
    assert not root[4].findall("*/*")


def test_junit_holds_any_text_that_a_notebook_may_hold(tmp_path):
    """Markup is escaped; colours of a terminal, zeros and halves of characters, which XML cannot hold, are replaced."""
    nasty = "\x1b[31m<b>\x00 & \ud800 ]]> \uffff \"quoted\" 'too' ρ² 𝜃"
    record = Record("two", nasty, "stated", kind="exact", measured=9.0, band=(0.0, 2.0), holds=False, chapter="t5")
    path = notebook(tmp_path, record, Record("x", "open", "open", reason=nasty), error=nasty)
    assert main(["check", str(path), "--junit", str(tmp_path / "junit.xml")]) == 1
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    conforms(root)
    readable = "�[31m<b>� & � ]]> � \"quoted\" 'too' ρ² 𝜃"
    assert root.find(".//testcase").get("name") == readable
    assert root.find(".//skipped").get("message") == readable
    assert root.find(".//error").get("message") == f"stopped at KeyError: {readable}"


def test_a_check_at_two_seeds_has_two_names(tmp_path):
    """GitLab shows one of several cases of one name."""
    paths = [notebook(tmp_path, replace(HOLDS, seed=seed), name=f"{seed}.ipynb") for seed in (0, 7)]
    assert main(["check", *map(str, paths), "--junit", str(tmp_path / "junit.xml")]) == 0
    cases = ElementTree.parse(tmp_path / "junit.xml").iter("testcase")
    assert [case.get("name") for case in cases] == ["a number", "a number, seed 7"]


def test_a_place_where_no_file_can_be_written_is_named(tmp_path, capsys):
    place = tmp_path / "none" / "junit.xml"
    assert main(["check", str(notebook(tmp_path, HOLDS)), "--junit", str(place)]) == 2
    assert capsys.readouterr().err == f"nbutils check: {place}: No such file or directory\n"
