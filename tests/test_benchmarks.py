"""The benchmarks: what a row says, and that no row outlives what it measured."""

import json

import pytest

from benchmarks import kept, timing

ROW = {"what": "a pair", "ratio": 0.5, "low": 0.4, "high": 0.6, "bound": 2, "holds": False, "modules": ["nbutils.fits"]}


def test_a_row_of_other_code_is_not_shown_and_is_replaced_by_name(tmp_path, monkeypatch):
    code = {"nbutils.fits": "today", "nbutils.heads": "today"}
    monkeypatch.setattr(kept.sources, "modules", lambda: code)
    monkeypatch.setattr(kept.sources, "of_modules", lambda names: code[names[0]])
    file = tmp_path / "kept.json"
    file.write_text('{"pairs": []}')
    kept.keep(kept.stamped([ROW, ROW | {"what": "another", "modules": ["nbutils.heads"]}]), file)
    kept.keep(kept.stamped([ROW | {"ratio": 3.0}]), file)
    assert [(row["what"], row["ratio"]) for row in kept.load(file)] == [("a pair", 3.0), ("another", 0.5)]
    code["nbutils.fits"] = "an edit"
    assert [row["what"] for row in kept.load(file)] == ["another"]
    del code["nbutils.heads"]
    assert kept.load(file) == [] and len(json.loads(file.read_text())["pairs"]) == 2
    assert kept.table(kept.load(file)) == kept.NONE


def test_the_command_is_red_where_a_pair_does_not_hold(monkeypatch, capsys):
    from benchmarks import __main__ as command

    asked = []
    monkeypatch.setattr(command, "pairs", lambda names: asked.append(names) or [ROW | {"holds": "loops" in names[:1]}])
    assert (command.main([]), command.main(["loops"])) == (1, 0)
    assert asked == [list(command.FILES), ["loops"]] and "| a pair |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["nothing"])


@pytest.mark.slow
def test_both_sides_of_every_pair_agree(monkeypatch):
    """One turn each: what they assert of their two sides is what counts here, not the time."""
    from benchmarks import __main__ as command

    once = timing.compare
    for file in command.FILES.values():
        monkeypatch.setattr(file, "compare", lambda *a, **more: once(*a, **more | {"repeats": 1}))
    assert all(row["ratio"] > 0 for row in command.pairs(list(command.FILES)))
