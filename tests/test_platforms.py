"""Platforms: a switch counts where it changes bits, what moves is told, and red is red."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from workflow import platforms

DERIVATIVES = """
import torch
rng = torch.Generator().manual_seed(0)
a, b = (torch.randn(301, 301, generator=rng, dtype=torch.float32).requires_grad_() for _ in range(2))
out = (a @ b).tanh().sum() + torch.nn.functional.linear(a, b, b[0]).mean()
out.backward()
print(out.item().hex(), a.grad.double().sum().item().hex(), (a.detach() @ b.detach()).double().norm().item())
"""


def run(code, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_sums_in_another_order_round_otherwise_and_are_the_same_numbers():
    plain, reverse = run(DERIVATIVES), run(DERIVATIVES, **platforms.REVERSED)
    assert plain[:2] != reverse[:2], "values and derivatives"
    for x, y in zip(plain[:2], reverse[:2], strict=True):
        assert float.fromhex(y) == pytest.approx(float.fromhex(x), rel=1e-3, abs=1e-3)
    assert float(reverse[2]) == pytest.approx(float(plain[2]), rel=1e-6)
    assert run(DERIVATIVES, PYTHONPATH=platforms.REVERSED["PYTHONPATH"]) == plain, (
        "without the variable nothing changes"
    )


def test_the_probe_sees_an_order_and_is_the_same_twice():
    plain = platforms.bits(platforms.Platform({}))
    assert len(plain) == 64 and plain == platforms.bits(platforms.Platform({"UNKNOWN_SWITCH": "1"}))
    assert plain != platforms.bits(platforms.PLATFORMS["sums in another order"])


def test_a_platform_counts_once_and_only_where_it_runs(monkeypatch):
    monkeypatch.setattr(platforms, "bits", lambda platform: "plain")
    why = platforms.not_counted({"none": "plain", "old": "a", "older": "a", "reversed": "b", "new": ""})
    assert why.pop("old") == why.pop("reversed") == ""
    assert why["none"] == "it rounds here as this processor does" and why["older"] == "it rounds here as old does"
    assert "needs instructions" in why["new"]


def metrics(measured=1.0, *, holds=True, green=True, **more):
    record = {"chapter": "01-one", "claim": "one", "check": "a", "role": "stated", "kind": "exact"}
    record |= {"measured": measured, "band": [0.0, 2.0], "holds": holds, **more}
    problems = [] if green else [{"chapter": "01-one", "claim": "one", "what": "does not hold: a"}]
    return {"run": {"green": green}, "records": [record], "problems": problems, "verdicts": {}}


def measured(**entries):
    return {"profile": "smoke", "seed": 0, "hardware": "h", "versions": {}, "green": True, "platforms": entries}


def test_what_moved_is_told_with_its_size():
    entry = platforms.against(metrics(), metrics(1.5))
    assert (entry["moved"], entry["most"]) == (1, [["01-one", "one", "a", 0.5, "half band"]])
    assert platforms.against(metrics(), metrics())["moved"] == 0


def test_red_by_a_platform_by_the_plain_run_and_by_too_few():
    good, bad = (
        platforms.against(metrics(), metrics()),
        platforms.against(metrics(), metrics(3.0, holds=False, green=False)),
    )
    six = {str(number): good for number in range(6)}
    assert platforms.red(measured(**six)) == []
    assert platforms.red(measured(**six, seventh=bad)) == ["seventh"]
    assert platforms.red(measured(**six, none=platforms.against(metrics(), None))) == ["none"]
    assert platforms.red(measured(**six) | {"green": False}) == ["the run without switches"]
    few = {**{str(number): good for number in range(5)}, "x": {"not counted": "it dies"}}
    assert platforms.red(measured(**few)) == ["only 5 platforms take effect; six are needed"]


def test_the_page_names_what_takes_no_effect(tmp_path, monkeypatch):
    monkeypatch.setattr(platforms, "kept_in", lambda profile: tmp_path / "kept.json")
    assert "Not measured yet" in platforms.markdown("smoke")
    noted = platforms.against(metrics(), metrics(3.0, holds=False, noted=True))
    (tmp_path / "kept.json").write_text(json.dumps(measured(old={"not counted": "it dies"}, new=noted)))
    page = platforms.markdown("smoke")
    assert "not counted: it dies" in page and "1 of 1 checks moved, 1 noted" in page and "on h." in page


def test_the_emulation_is_of_this_checkout():
    assert (ROOT / "workflow" / "emulate" / "sitecustomize.py").samefile(
        platforms.REVERSED["PYTHONPATH"] + "/sitecustomize.py"
    )
