"""The command: what it prints, writes and draws, and how it fails."""

import csv
import io
import json
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
import torch

from normgrowth import checkpoints
from normgrowth.__main__ import main
from normgrowth.checkpoints.table import COLUMNS
from normgrowth.report.summary import budget, exponents, growth, summarise, undetermined
from tests.checkpoint_files import save


@pytest.fixture
def run(tmp_path):
    """A walk of 12 checkpoints in ``run/``, with a copy, a broken one, a mask and one without a step."""
    rng = torch.Generator().manual_seed(0)
    state = {"wte.weight": torch.zeros(20, 16), "h.0.w": torch.zeros(16, 64), "h.1.w": torch.zeros(16, 64)}
    for step in range(1, 13):
        state = {k: v + torch.randn(v.shape, generator=rng) for k, v in state.items()}
        save({**state, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "run" / f"step{step}k")
    for name in ("step13k", "final"):
        save(state, tmp_path / "run" / name)
    (tmp_path / "run" / "step14k").mkdir()
    (tmp_path / "run" / "step14k" / "model.safetensors").write_bytes(b"")
    return tmp_path / "run"


def test_table_plot_and_summary(run, tmp_path, capsys):
    out, figure = tmp_path / "norms.csv", tmp_path / "norms.png"
    assert main(["norms", str(run), "--by", "layer", "--out", str(out), "--plot", str(figure)]) == 0
    table = pd.read_csv(out)
    assert list(table.columns) == ["step", "layer", "norm", "cos_similarity", "displacement_sq", "inner"]
    assert list(table.layer[:4]) == ["total", "embeddings", "block 0", "block 1"] and len(table) == 48
    pd.testing.assert_frame_equal(table, checkpoints.series(run, by="layer").table)
    assert out.read_text().splitlines()[1].endswith(",,,") and figure.stat().st_size > 10_000
    printed = capsys.readouterr()
    for words in (
        "12 checkpoints, steps 1000 to 12000; 2,368 parameters", "a·tᵖ: a = ", "steps): 1500–3000: ", "norm budget",
        "block 1:", "step13k: its weights are those of", "step14k/model.safetensors: cut short, damaged",
        "final: no step in its name", "h.0.attn.bias: attention mask",
    ):  # fmt: skip
        assert words in printed.out, words


def test_what_never_changes_is_named_and_can_be_left_out(tmp_path, capsys):
    for step in (1, 2):
        state = {"h.0.weight": torch.full((4,), float(step)), "h.0.scale": torch.full((3,), 2.0)}
        save(state, tmp_path / f"step{step}")
    assert main(["norms", str(tmp_path)]) == 0
    assert "h.0.scale: 42.86% of ρ²" in capsys.readouterr().err  # 12 of 28
    assert main(["norms", str(tmp_path), "--trained", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["norm"] for row in document["table"]] == [2.0, 4.0] and document["constant"] == {}
    assert document["left_out"] == {"h.0.scale": "the same in all checkpoints"}
    assert main(["norms", str(tmp_path / "step1"), "--trained"]) == 2
    assert "one checkpoint alone does not say what was trained" in capsys.readouterr().err


def test_without_a_file_the_table_is_printed_and_the_summary_beside_it(run, capsys):
    assert main(["norms", str(run)]) == 0
    printed = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(printed.out)))
    assert len(rows) == 12 and {row["layer"] for row in rows} == {"total"} and "norm budget" in printed.err


def test_json_has_all_of_the_result_and_nothing_else(run, capsys):
    assert main(["norms", str(run), "--json", "--by", "type", "--no-keep"]) == 0
    found, result = json.loads(capsys.readouterr().out), checkpoints.series(run, by="type")
    table = pd.DataFrame(found["table"])
    pd.testing.assert_frame_equal(table, result.table, check_dtype=False, rtol=1e-14)
    assert [tuple(skip.values()) for skip in found["skipped"] + found["duplicates"]] == [
        tuple(skip) for skip in result.skipped + result.duplicates
    ]
    assert found["parameters"] == 2368 and found["left_out"] == {"h.0.attn.bias": "attention mask"}


@pytest.mark.parametrize("exponent", [0.3, 0.5, 1.0])
def test_exponent_lies_in_its_interval(exponent):
    step = np.arange(1, 61) * 500
    noise = 0.01 * np.random.default_rng(0).standard_normal(60)
    total = pd.DataFrame({"step": step, "norm": 3 * step**exponent * (1 + noise), "displacement_sq": 0.0})
    power = next(line for line in growth(total) if "a·tᵖ: " in line)
    low, high = (float(x) for x in power.split("p = ")[1].split("[")[1].split("]")[0].split(", "))
    assert low < exponent < high and high - low < 0.05
    octaves = exponents(total).exponent
    assert len(octaves) == 5 and octaves.mean() == pytest.approx(exponent, abs=0.02)


@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.02, 0), (0.1, 0), (0.1, 1)])
def test_a_logarithm_is_printed_and_a_power_beside_an_offset_is_not(noise, seed):
    """Here p → 0, a → ∞ and b → −∞: what a fit gives is where its search stopped."""
    step = np.arange(1, 31) * 500
    rho = 30 + 3 * np.log(step) + noise * np.random.default_rng(seed).standard_normal(30)
    lines = growth(pd.DataFrame({"step": step, "norm": rho}))
    power = next(line for line in lines if "a·tᵖ + b: " in line)
    assert power.startswith("  a·tᵖ + b: not determined by this series (p ")
    assert power.endswith(" 0: a logarithm fits as well)")
    log = next(line for line in lines if "a·ln(1+t) + b: " in line)
    assert float(log.split("a = ")[1].split(" ")[0]) == pytest.approx(3, rel=0.03)


@pytest.mark.parametrize(
    ("a", "p", "why"),
    [
        ((3.0, 2.9, 3.1), (0.5, 0.49, 0.51), ""),
        ((4.0, 2.9, 3.1), (0.5, 0.49, 0.51), "a = 4 lies outside its own interval [2.9, 3.1]"),
        ((50.0, 49.9, 50.1), (0.003, 0.002, 0.004), "p = 0.003 [0.002, 0.004] may be 0: a logarithm fits as well"),
    ],
)  # fmt: skip
def test_an_estimate_outside_its_interval_is_not_printed_as_one(a, p, why):
    b = (1e-9, 2e-9, 3e-9)  # outside by rounding
    assert undetermined({"a": a, "p": p, "b": b}, 60.0) == why


def test_exponents_are_those_of_the_steps_that_are_named():
    """With a step 0 the first norm printed is not that of the first step of the exponent."""
    step, norm = [0, 1000, 3000, 8000], [1.0, 2.0, 3.0, 4.0]
    rows = [pd.DataFrame({"step": step, "layer": name, "norm": norm}) for name in ("total", "head")]
    table = pd.concat(rows, ignore_index=True).assign(displacement_sq=np.nan, inner=np.nan)
    lines = summarise(checkpoints.MeasuredSeries(table, [], [], {}, 9)).splitlines()
    assert lines[1] == "norm 1 to 4; exponent 0.333 from step 1000 to 8000"
    assert lines[-1] == "  head: 1 to 4; exponent 0.333 from step 1000 to 8000"
    assert lines[2].startswith("no fit") and lines[2].endswith("there are 3")
    # as in your-own: 1000, 2000, 4000, 8000; ρ at 2000 and 4000 on straight lines in log–log
    two = 2 * 1.5 ** (np.log(2) / np.log(3))
    four = 3 * (4 / 3) ** (np.log(4 / 3) / np.log(8 / 3))
    slopes = np.log2([two / 2, four / two, 4 / four])
    named = ", ".join(f"{a}–{2 * a}: {s:.3f}" for a, s in zip((1000, 2000, 4000), slopes, strict=True))
    assert lines[3] == f"exponent d ln ρ / d ln t by octave (interpolated between steps): {named}"


def test_five_norms_that_differ_are_fitted_and_four_are_not():
    rows = pd.DataFrame({"step": [0, 10, 20, 40, 80, 160], "norm": [9.0, 10.0, 12.0, 15.0, 19.0, 25.0]})
    assert growth(rows[:5])[0].startswith("no fit: ") and growth(rows)[0].startswith("fits over steps 10 to 160, ")
    for count in (5, 6, 7):
        steps = np.arange(1, count + 1)
        *_, power, offset = growth(pd.DataFrame({"step": steps, "norm": 3 * steps**0.3}))
        assert "a = 3 [3, 3], p = 0.3 [0.3, 0.3]" in power and ("7 norms are needed" in offset) == (count < 7)


def test_a_short_series_is_not_fitted_and_shares_are_those_of_the_whole_growth():
    table = pd.DataFrame({"step": [1, 2, 3], "layer": "total", "norm": [1.0, 2.0, 3.0]})
    table = table.assign(displacement_sq=[np.nan, 3.0, 3.0], inner=[np.nan, 1.0, 1.0])
    assert "moved by 8 = ‖Δ‖² 6 + 2θ·Δ 2, 75.0% and 25.0%" in budget(table)[0]
    assert "no fit: at least 5 norms" in summarise(checkpoints.MeasuredSeries(table, [], [], {}, 9))
    assert "norm budget" not in summarise(checkpoints.MeasuredSeries(table[:1], [], [], {}, 9))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["{tmp}/nowhere"], "no such folder"), (["{tmp}/run/step14k"], "step14k/model.safetensors: cut short, damaged"),
        (["{tmp}/run", "--out", "{tmp}/nowhere/norms.csv"], "its folder does not exist"),
        (["{tmp}/run", "--plot", "{tmp}/norms.txt"], "give a name that ends in .png"),
        (["{tmp}/run", "--step", "("], "--step '(' is not a regular expression"),
        (["{tmp}"], "{tmp}: no checkpoint with a step in its name"),
    ],
)  # fmt: skip
def test_failures_are_one_message_and_exit_code_2(run, tmp_path, capsys, words, why):
    assert main(["norms", *(word.format(tmp=tmp_path) for word in words)]) == 2
    assert why.format(tmp=tmp_path) in capsys.readouterr().err


def test_interrupted(run, tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("normgrowth.checkpoints.series"), "sums_by_tensor", interrupted)
    assert main(["norms", str(run), "--out", str(tmp_path / "norms.csv")]) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    monkeypatch.setattr("normgrowth.__main__._saturation", interrupted)
    assert main(["saturation", "runs/mine/step2000"]) == 130
    assert capsys.readouterr().err == "normgrowth saturation: stopped\n", "it has no --out to go on from"


@pytest.mark.parametrize(
    ("words", "named"),
    [(["norms", "--help"], COLUMNS), (["--help"], ["direction and norm budget along a series"])],
)
def test_help_says_what_a_command_does_and_writes(capsys, words, named):
    with pytest.raises(SystemExit) as stop:
        main(words)
    printed = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and all(each in printed for each in named)
