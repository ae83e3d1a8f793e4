"""The ledger: each kind of check turns red on a wrong value, and verdicts follow from checks."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbutils import claims
from nbutils.claims import Ledger, prediction_band, verdict


@pytest.fixture
def ledger():
    return Ledger("01-test", profile="smoke", seed=0, device="cpu")


def test_band_right_and_wrong(ledger):
    assert ledger.check("c", "inside", 1.0, (0.9, 1.1))
    assert ledger.check("c", "at the edge", 1.1, (0.9, 1.1))
    assert not ledger.check("c", "above", 1.2, (0.9, 1.1))
    assert not ledger.check("c", "below", 0.8, (0.9, 1.1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_band_refuses_what_is_no_number(ledger, value):
    assert not ledger.check("c", "not finite", value, (0, None))


def test_band_that_passes_anything_is_an_error(ledger):
    with pytest.raises(ValueError, match="would pass anything"):
        ledger.check("c", "no bounds", 1.0, (None, None))
    with pytest.raises(ValueError, match="would pass anything"):
        ledger.check("c", "infinite bounds", 1.0, (-math.inf, math.inf))
    with pytest.raises(ValueError, match="empty band"):
        ledger.check("c", "crossed", 1.0, (2, 1))


def test_inequality_over_all_samples(ledger):
    assert ledger.check_all("c", "all positive", np.array([0.5, 0.0, 2.0]))
    assert not ledger.check_all("c", "one sample fails", np.array([0.5, -1e-9, 2.0]))
    assert ledger.check_all("c", "within rounding", np.array([0.5, -1e-9, 2.0]), slack=1e-8)
    assert not ledger.check_all("c", "a NaN", np.array([0.5, math.nan]))
    assert ledger.check_all("c", "logarithm of an error of exactly 0", np.array([0.5, math.inf]))
    assert not ledger.check_all("c", "no samples", np.array([]))


def test_exponent_with_interval(ledger):
    assert ledger.check_exponent("c", "right", 0.50, (0.49, 0.51), expected=0.5, max_width=0.05)
    assert not ledger.check_exponent("c", "excluded", 0.60, (0.59, 0.61), expected=0.5, max_width=0.05)
    assert not ledger.check_exponent("c", "too wide to say", 0.60, (0.0, 1.2), expected=0.5, max_width=0.05)
    assert not ledger.check_exponent("c", "no interval", 0.5, (math.nan, math.nan), expected=0.5, max_width=0.05)
    assert not ledger.check_exponent("c", "no estimate", math.nan, (0.49, 0.51), expected=0.5, max_width=0.05)


def test_order(ledger):
    assert not ledger.check_order("c", "one that overflowed", [0.0, 1.0, math.inf])
    assert ledger.check_order("c", "rising", [1.0, 2.0, 3.0])
    assert not ledger.check_order("c", "falling once", [1.0, 2.0, 1.9])
    assert not ledger.check_order("c", "a tie", [1.0, 1.0, 2.0])
    assert not ledger.check_order("c", "too little", [1.0, 1.1, 1.2], margin=0.2)
    assert not ledger.check_order("c", "one value", [1.0])


def test_counterexample(ledger):
    assert ledger.check("c", "works", 0.8, (0.75, 0.85), role="counterexample", claimed=1.0)
    assert not ledger.check("c", "does not work", 1.0, (0.75, 0.85), role="counterexample", claimed=1.0)
    with pytest.raises(ValueError, match="has the claimed"):
        ledger.check("c", "band holds the claim", 0.8, (0.75, 1.05), role="counterexample", claimed=1.0)
    with pytest.raises(ValueError, match="name the value"):
        ledger.check("c", "no claimed value", 0.8, (0.75, 0.85), role="counterexample")


def test_names_and_roles(ledger):
    ledger.check("c", "once", 1.0, (0, 2))
    with pytest.raises(ValueError, match="unique"):
        ledger.check("c", "once", 1.0, (0, 2))
    with pytest.raises(ValueError, match="unknown role"):
        ledger.check("c", "role", 1.0, (0, 2), role="mine")


def seeds(monkeypatch, **checks):
    monkeypatch.setattr(claims, "_baselines", lambda name: checks if name == "smoke" else {})


def test_seed_band_right_and_wrong(ledger, monkeypatch):
    kept = {"mean": 1.02, "sd": 0.01, "n": 20}
    seeds(monkeypatch, **{"c/theory": kept, "c/mean": kept, "c/far": kept})
    assert ledger.check("c", "theory", 1.03, expected=1.0)
    assert not ledger.check("c", "far", 1.05, expected=1.0)
    assert ledger.check("c", "mean", 1.05)  # around the mean over seeds


def test_no_baseline_does_not_hold(ledger, monkeypatch):
    seeds(monkeypatch)
    assert not ledger.check("c", "unknown", 1.0, expected=1.0)


def test_noise_that_covers_the_claim_refutes_nothing(ledger, monkeypatch):
    seeds(monkeypatch, **{"c/noisy": {"mean": 0.8, "sd": 0.2, "n": 20}})
    assert not ledger.check("c", "noisy", 0.8, expected=0.8, role="counterexample", claimed=1.0)


def test_prediction_band_has_its_coverage():
    rng, outside, trials = np.random.default_rng(0), 0, 20_000
    for _ in range(trials):
        sample = rng.normal(size=12)
        low, high = prediction_band(sample.mean(), sample.std(ddof=1), 12)
        outside += not low <= rng.normal() <= high
    assert outside / trials == pytest.approx(claims.FALSE_ALARM, abs=7e-4)


def test_a_band_needs_seeds():
    with pytest.raises(ValueError, match="at least 3"):
        prediction_band(1.0, 0.1, 2)


ROLE_VERDICTS = [
    (["stated"], "confirmed"),
    (["stated", "corrected"], "refined"),
    (["stated", "counterexample", "corrected"], "refined"),
    (["counterexample", "corrected"], "refuted"),
    (["open"], "open"),
    (["stated", "open"], "open"),
    (["counterexample"], "failed"),
    (["corrected"], "failed"),
    (["stated", "counterexample"], "failed"),
    ([], "failed"),
]


@pytest.mark.parametrize(("roles", "expected"), ROLE_VERDICTS)
def test_verdict_from_roles(roles, expected):
    records = [{"role": role, "holds": None if role == "open" else True} for role in roles]
    assert verdict(records) == expected


@given(st.lists(st.sampled_from(claims.ROLES), min_size=1, max_size=6), st.data())
def test_one_failing_check_is_never_a_verdict(roles, data):
    broken = data.draw(st.integers(0, len(roles) - 1))
    records = [{"role": role, "holds": index != broken} for index, role in enumerate(roles)]
    assert verdict(records) == "failed"


def test_record_is_whole_and_is_json(capsys, monkeypatch):
    kept = []
    monkeypatch.setattr(claims, "_show", lambda record, anchor: kept.append(record))
    ledger = Ledger("01-test", profile="smoke", seed=3, device="cpu")
    ledger.check("c", "number", math.nan, (0, 1), expected=0.5)
    ledger.leave_open("d", "no network")
    record = json.loads(json.dumps(kept[0]))
    assert {
        "claim",
        "chapter",
        "check",
        "measured",
        "expected",
        "band",
        "holds",
        "seed",
        "profile",
        "device",
        "versions",
    } <= set(record)
    assert (record["seed"], record["chapter"], record["measured"], record["holds"]) == (3, "01-test", "nan", False)
    assert kept[1]["holds"] is None and verdict([kept[1]]) == "open"


def test_outside_a_notebook_a_check_prints_one_line(ledger, capsys):
    ledger.check("c", "number", 1.0, (0, 2))
    assert capsys.readouterr().out == "✓ c (stated) number: 1, band [0, 2]\n"


def test_prediction_band_by_hand():
    from scipy import stats

    half = stats.t.ppf(0.9995, 4) * 0.2 * math.sqrt(1.2)
    assert prediction_band(3.0, 0.2, 5) == pytest.approx((3 - half, 3 + half))
    assert prediction_band(3.0, 0.2, 5, expected=2.5) == pytest.approx((2.5 - half, 2.5 + half))


def test_records_are_kept_where_the_reader_says(tmp_path, monkeypatch):
    monkeypatch.setenv("NBUTILS_RESULTS", str(tmp_path))
    for _ in range(2):  # running the notebook again replaces the records
        ledger = claims.Ledger("03-t5", profile="smoke", seed=4, device="cpu")
        ledger.check("some-claim", "a number", 1.0, (0, 2))
    (file,) = (tmp_path / "records").iterdir()
    (record,) = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert file.name == "03-t5-smoke-cpu-seed-4.jsonl" and record["measured"] == 1.0 and record["holds"]


def test_a_chapter_alone_says_how_long_it_takes(capsys, monkeypatch, tmp_path):
    kept = {"smoke": {"hardware": ["a machine"], "jobs": {"03-t5": {"alone_seconds": 90}}}}
    (tmp_path / "resources.json").write_text(json.dumps(kept))
    monkeypatch.setattr(claims.data, "path", lambda name: tmp_path / name.split("/")[1])
    monkeypatch.delenv("NBUTILS_BOOK", raising=False)
    claims.Ledger("03-t5", profile="smoke", seed=0, device="cpu")
    assert "took 1.5 min on a machine" in capsys.readouterr().out
    claims.Ledger("01-random-walk", profile="smoke", seed=0, device="cpu")
    assert "not timed yet" in capsys.readouterr().out
    monkeypatch.setenv("NBUTILS_BOOK", "1")
    claims.Ledger("03-t5", profile="smoke", seed=0, device="cpu")
    assert capsys.readouterr().out == ""
