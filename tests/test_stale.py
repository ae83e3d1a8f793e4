"""Which kept results count: whole, of today's text, of this device. What could not be had is tried again."""

import json

import pytest

from workflow import dependencies, launch, report, retry, stale


@pytest.fixture
def result(tmp_path):
    """A kept notebook, beside its statistics."""
    notebook = tmp_path / "01-one.ipynb"
    outputs = [
        {"output_type": "display_data", "data": {report.MIME: {"claim": "one", "check": "open", "role": "open"}}}
    ]
    notebook.write_text(json.dumps({"cells": [{"cell_type": "code", "outputs": outputs}]}))
    said = {"files": {notebook.name: stale.digest(notebook.read_bytes())}, "made_from": "a text", "device": "cpu"}
    notebook.with_suffix(".json").write_text(json.dumps(said))
    return notebook


def test_a_result_counts_if_it_is_whole_of_this_text_and_of_this_device(result):
    folder, stats = result.parent, result.with_suffix(".json")
    assert stale.fault(folder, stats, "a text", "cpu") == ""
    assert stale.fault(folder, stats, "a new text", "cpu") == stale.OLDER
    assert stale.fault(folder, stats, "a text", "cuda") == "of another device"
    assert stale.fault(folder, folder / "none.json", "a text", "cpu") == "damaged"
    result.write_text(result.read_text()[:-5])
    assert stale.fault(folder, stats, "a text", "cpu") == "damaged"


def test_all_files_of_a_training_but_its_statistics_are_looked_at(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.csv", "sub/b.npz", "stats.json", "sub/stats.json"):
        (tmp_path / name).write_text(name)
    found = stale.digests(tmp_path)
    assert list(found) == ["a.csv", "sub/b.npz", "sub/stats.json"] and found["a.csv"] == stale.digest(b"a.csv")


def test_what_is_unsound_is_removed_at_every_seed(result, monkeypatch):
    """Of two chapters and a training: the result of another text, and nothing else."""
    folder = result.parent
    monkeypatch.setattr(stale, "run_folder", lambda profile, seed: folder if seed == 3 else folder / "none")
    monkeypatch.setattr(stale.dependencies, "trainings_of", lambda chapter: ["lm"] if chapter == "01-one" else [])
    texts = {"01-one": "a text", "02-two": "t", "lm": "its text"}
    monkeypatch.setattr(stale, "sources_of_chapter", texts.__getitem__)
    monkeypatch.setattr(stale, "sources_of_training", texts.__getitem__)
    training = folder / "trainings" / "lm"
    training.mkdir(parents=True)
    (training / "history.csv").write_text("1")
    said = {"files": stale.digests(training), "made_from": "its text", "device": "cpu"}
    (training / "stats.json").write_text(json.dumps(said))
    assert list(stale.remove_unsound("smoke", [1, 3], list(texts)[:2], "cpu")) == [] and result.exists()
    texts |= {"01-one": "a new text"}
    assert list(stale.remove_unsound("smoke", [1, 3], list(texts)[:2], "cpu")) == [(result, stale.OLDER)]
    assert not result.exists() and not result.with_suffix(".json").exists() and training.exists()
    (training / "history.csv").write_text("2")
    assert list(stale.remove_unsound("smoke", [1, 3], list(texts)[:2], "cpu")) == [(training, "damaged")]
    assert not training.exists()


@pytest.mark.parametrize(
    ("expected", "answers", "again"),
    [("open or refined", True, True), ("open or refined", False, False), ("open", True, False)],
)
def test_what_was_left_open_for_want_of_the_hub_is_tried_again(result, monkeypatch, capsys, expected, answers, again):
    """A claim that is open by its nature is not: its chapter would run anew each time."""
    monkeypatch.setattr(retry, "run_folder", lambda profile, seed: result.parent)
    monkeypatch.setattr(retry.report, "load_claims", lambda: {"one": {"chapters": ["01-one"]}})
    monkeypatch.setattr(retry.report, "load_verdicts", lambda: {"one": expected, "gone": "open or refined"})
    monkeypatch.setattr(retry, "hub_answers", lambda: answers)
    retry.left_open("smoke", 0, ["02-two"])
    assert result.exists(), "another chapter was asked for"
    retry.left_open("smoke", 0, ["01-one"])
    assert result.exists() == result.with_suffix(".json").exists() == (not again)
    assert ("01-one left one open; the Hub answers now" in capsys.readouterr().out) == again
    retry.left_open("smoke", 0, ["01-one"])  # also where there is no result


def test_a_hub_that_is_not_there_or_not_wanted_does_not_answer(monkeypatch):
    for address in ("http://127.0.0.1:9", "no address"):  # nobody listens on the first
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert not retry.hub_answers()
    monkeypatch.setattr(retry.urllib.request, "urlopen", lambda *what, **how: pytest.fail("it asked"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not retry.hub_answers()


def test_a_cell_that_is_no_python_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "book" / "notebooks"
    folder.mkdir(parents=True)
    cells = [{"cell_type": "code", "source": [text]} for text in ("x = 1", "y = 2\nfor")]
    (folder / "01-one.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["for"]}, *cells]}))
    monkeypatch.setattr(dependencies, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="01-one: code cell 2, line 2: invalid syntax"):
        dependencies.code_of.__wrapped__("01-one")


def test_a_key_that_is_nowhere_is_one_line(monkeypatch):
    def sync():
        raise KeyError("nobody2020")

    monkeypatch.setattr(launch.notebooks, "sync", sync)
    with pytest.raises(ValueError, match=r"a chapter names 'nobody2020', which is neither in references\.bib nor"):
        launch.bring_notebooks_in_step()


@pytest.mark.parametrize(
    "text", ["{", "[]", "1", "{}", '{"files": 1}', '{"files": []}', '{"files": {"none": "x"}}', '{"files": {}}',
             '{"files": {}, "made_from": "a text"}', b"\xff"],
)  # fmt: skip
def test_statistics_that_say_too_little_are_damaged(tmp_path, text):
    (tmp_path / "s.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert stale.fault(tmp_path, tmp_path / "s.json", "a text", "cpu") == "damaged"


@pytest.mark.parametrize(("made_from", "device"), [("A", "m"), ("z", "m"), ("k", "A"), ("k", "z")])
def test_another_text_or_device_does_not_count_wherever_it_stands_in_the_alphabet(tmp_path, made_from, device):
    (tmp_path / "s.json").write_text(json.dumps({"files": {}, "made_from": made_from, "device": device}))
    found = stale.fault(tmp_path, tmp_path / "s.json", "k", "m")
    assert found == ("of an older text" if made_from != "k" else "of another device")


def test_half_a_result_is_removed_too(tmp_path, monkeypatch):
    monkeypatch.setattr(stale, "run_folder", lambda profile, seed: tmp_path)
    monkeypatch.setattr(stale.dependencies, "trainings_of", lambda chapter: [])
    monkeypatch.setattr(stale, "sources_of_chapter", lambda chapter: "a text")
    for ending in ("ipynb", "json"):
        half = tmp_path / f"01-one.{ending}"
        half.write_text("{}")
        assert list(stale.remove_unsound("smoke", [1], ["01-one"], "cpu")) == [(tmp_path / "01-one.ipynb", "damaged")]
        assert not half.exists()
