"""What plain papermill leaves is judged by one command."""

import json

import pytest

from nbutils.__main__ import main
from nbutils.claims import MIME
from nbutils.claims.records import Record

HOLDS = Record("one", "a number", "stated", kind="exact", measured=1.0, band=(0.0, 2.0), holds=True)
OPEN = Record("three", "open", "open", reason="no network")


def notebook(folder, *records, error=None, count=1, end="12:00"):
    """An executed notebook with these records in its outputs; one that was killed has no count or no end."""
    outputs = [{"output_type": "display_data", "data": {MIME: record.as_dict()}} for record in records]
    if error:
        outputs.append({"output_type": "error", "ename": "KeyError", "evalue": error, "traceback": []})
    path = folder / "out.ipynb"
    cell = {"cell_type": "code", "source": ["x = 1"], "execution_count": count, "outputs": outputs}
    papermill = {"papermill": {"end_time": end}}
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown"}, cell], "metadata": papermill}))
    return path


def failed(kind):
    return Record("two", "another", "corrected", kind=kind, measured=9.0, band=(0.0, 2.0), holds=False)


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


@pytest.mark.parametrize("killed", [{"count": None}, {"end": None}])
def test_a_notebook_that_was_killed(tmp_path, capsys, killed):
    assert main(["check", str(notebook(tmp_path, HOLDS, **killed))]) == 1
    assert "incomplete: not all of its cells" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "text"), [("none.ipynb", "no such file"), ("README.md", "is not a notebook")])
def test_files_that_are_not_notebooks(tmp_path, capsys, name, text):
    (tmp_path / "README.md").write_text("# none")
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
