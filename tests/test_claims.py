"""The ledger: each kind of check turns red on a wrong value, and verdicts follow from checks."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from nbutils import claims
from nbutils.claims import Ledger, verdict
from nbutils.claims.records import Record, format_band, line


@pytest.fixture
def ledger():
    return Ledger("01-test", profile="smoke", seed=0, device="cpu")


def test_band_right_and_wrong(ledger):
    assert ledger.check("c", "inside", 1.0, (0.9, 1.1), kind="derived")
    assert ledger.check("c", "at the edge", 1.1, (0.9, 1.1), kind="derived")
    assert not ledger.check("c", "above", 1.2, (0.9, 1.1), kind="derived")
    assert not ledger.check("c", "below", 0.8, (0.9, 1.1), kind="derived")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_band_refuses_what_is_no_number(ledger, value):
    assert not ledger.check("c", "not finite", value, (0, None), kind="derived")


def test_band_that_passes_anything_is_an_error(ledger):
    with pytest.raises(ValueError, match="would pass anything"):
        ledger.check("c", "no bounds", 1.0, (None, None), kind="derived")
    with pytest.raises(ValueError, match="would pass anything"):
        ledger.check("c", "infinite bounds", 1.0, (-math.inf, math.inf), kind="derived")
    with pytest.raises(ValueError, match="empty band"):
        ledger.check("c", "crossed", 1.0, (2, 1), kind="derived")


@pytest.mark.parametrize(
    ("values", "ends", "holds", "worst"),
    [
        ([0.5, 0.0, 2.0], {}, True, 0.0),  # margins, unless told
        ([0.5, -1e-9, 2.0], {}, False, -1e-9),
        ([0.5, -1e-9, 2.0], {"at_least": -1e-8}, True, -1e-9),
        ([1e-9, 3e-7, 0.0], {"at_most": 1e-6}, True, 3e-7),  # errors: the largest, not what is left of the band
        ([1e-9, 3e-6, 0.0], {"at_most": 1e-6}, False, 3e-6),
        ([0.2, 0.9, 0.5], {"at_least": 0, "at_most": 1}, True, 0.9),
        ([0.05, 0.9, 0.5], {"at_least": 0, "at_most": 1}, True, 0.05),
        ([0.5, 1.5, -0.1], {"at_least": 0, "at_most": 1}, False, 1.5),
        ([0.5, math.inf], {}, True, 0.5),  # logarithm of an error of exactly 0
        ([math.inf], {}, True, "inf"),
        ([-math.inf, 2.0], {"at_most": 3}, True, 2.0),
        ([math.inf], {"at_most": 3}, False, "inf"),
        ([0.5, math.nan], {}, False, "nan"),
        ([math.nan, 0.5], {"at_most": 1}, False, "nan"),
        ([], {}, False, "nan"),
        ([], {"at_most": 1}, False, "nan"),
    ],
)
def test_all_of_many_values(values, ends, holds, worst, ledger, capsys):
    assert ledger.check_all("c", "values", np.array(values), kind="exact", **ends) is holds
    which = "largest" if list(ends) == ["at_most"] else "nearest an end" if len(ends) == 2 else "smallest"
    shown = worst if isinstance(worst, str) else f"{worst:.5g}"
    assert f"values: {which} {shown}; band " in capsys.readouterr().out


def test_all_of_many_values_needs_a_band_with_room(ledger):
    with pytest.raises(ValueError, match="empty band"):
        ledger.check_all("c", "crossed", [1.0], at_least=2, at_most=1, kind="exact")


def test_exponent_with_interval(ledger):
    assert ledger.check_exponent("c", "right", 0.50, (0.49, 0.51), expected=0.5, max_width=0.05, kind="exact")
    assert not ledger.check_exponent("c", "excluded", 0.60, (0.59, 0.61), expected=0.5, max_width=0.05, kind="exact")
    assert not ledger.check_exponent(
        "c", "too wide to say", 0.60, (0.0, 1.2), expected=0.5, max_width=0.05, kind="exact"
    )
    assert not ledger.check_exponent(
        "c", "no interval", 0.5, (math.nan, math.nan), expected=0.5, max_width=0.05, kind="exact"
    )
    assert not ledger.check_exponent(
        "c", "no estimate", math.nan, (0.49, 0.51), expected=0.5, max_width=0.05, kind="exact"
    )


def test_order(ledger):
    assert not ledger.check_order("c", "one that overflowed", [0.0, 1.0, math.inf], kind="exact")
    assert ledger.check_order("c", "rising", [1.0, 2.0, 3.0], kind="exact")
    assert not ledger.check_order("c", "falling once", [1.0, 2.0, 1.9], kind="exact")
    assert not ledger.check_order("c", "a tie", [1.0, 1.0, 2.0], kind="exact")
    assert not ledger.check_order("c", "too little", [1.0, 1.1, 1.2], margin=0.2, kind="exact")
    assert not ledger.check_order("c", "one value", [1.0], kind="exact")


def test_counterexample(ledger):
    assert ledger.check("c", "works", 0.8, (0.75, 0.85), role="counterexample", claimed=1.0, kind="derived")
    assert not ledger.check("c", "does not work", 1.0, (0.75, 0.85), role="counterexample", claimed=1.0, kind="derived")
    with pytest.raises(ValueError, match="has the claimed"):
        ledger.check("c", "band holds the claim", 0.8, (0.75, 1.05), role="counterexample", claimed=1.0, kind="derived")
    with pytest.raises(ValueError, match="name the value"):
        ledger.check("c", "no claimed value", 0.8, (0.75, 0.85), role="counterexample", kind="derived")


def test_names_and_roles(ledger):
    ledger.check("c", "once", 1.0, (0, 2), kind="derived")
    with pytest.raises(ValueError, match="unique"):
        ledger.check("c", "once", 1.0, (0, 2), kind="derived")
    with pytest.raises(ValueError, match="unknown role"):
        ledger.check("c", "role", 1.0, (0, 2), role="mine", kind="derived")


def test_a_check_says_its_kind(ledger):
    with pytest.raises(TypeError, match="kind"):
        ledger.check("c", "none", 1.0, (0, 2))
    with pytest.raises(ValueError, match=r"unknown kind 'certain'.*exact, derived, empirical"):
        ledger.check("c", "wrong", 1.0, (0, 2), kind="certain")
    with pytest.raises(ValueError, match="on how many trainings"):
        ledger.check("c", "of how many?", 1.0, (0, 2), kind="empirical")
    assert ledger.check("c", "of one", 1.0, (0, 2), kind="empirical", n=1)


def test_mean_of_replicates_against_theory(ledger):
    """The band is the replicates' own error: ±4.78 standard errors for 10 (Student's 0.05 % point, 9 degrees)."""
    sample = np.array([0.9, 1.1] * 5)  # mean 1, sd 0.1054, standard error 1/30
    assert ledger.check_mean("c", "right", sample, expected=1.15, resolution=0.2)
    assert not ledger.check_mean("c", "beyond the error", sample, expected=1.17, resolution=0.2)
    assert not ledger.check_mean("c", "too noisy to tell", sample, expected=1.0, resolution=0.15)
    assert not ledger.check_mean("c", "a NaN", [*sample, math.nan], expected=1.0, resolution=0.2)
    with pytest.raises(ValueError, match="at least 8"):
        ledger.check_mean("c", "few", sample[:7], expected=1.0, resolution=0.2)


def test_mean_that_refutes(ledger):
    sample = np.array([0.9, 1.1] * 5)
    more = {"role": "counterexample", "resolution": 0.2}
    assert ledger.check_mean("c", "excludes 2", sample, expected=1.0, claimed=2.0, **more)
    assert not ledger.check_mean("c", "cannot exclude 1.1", sample, expected=1.0, claimed=1.1, **more)
    with pytest.raises(ValueError, match="name the value"):
        ledger.check_mean("c", "nothing claimed", sample, expected=1.0, **more)


def test_a_population_is_asked_by_its_interval(ledger):
    nine = [1, 1, 2, 3, 4, 5, 5, 6, 9]  # the median's interval leaves out one value at each end
    assert ledger.check_population("c", "median", nine, (1, 6))
    assert not ledger.check_population("c", "the median alone is inside", nine, (2, 6))
    assert not ledger.check_population("c", "too high", nine, (None, 5))
    assert not ledger.check_population("c", "a NaN", [*nine, math.nan], (0, 10))
    assert ledger.check_population("c", "share", [True] * 12, (0.7, None), statistic="share")
    assert not ledger.check_population("c", "a share of few", [True] * 8, (0.7, None), statistic="share")
    with pytest.raises(ValueError, match="at least 8"):
        ledger.check_population("c", "few", nine[:7], (0, 10))
    with pytest.raises(ValueError, match="unknown statistic 'mode'"):
        ledger.check_population("c", "mode", nine, (0, 10), statistic="mode")
    with pytest.raises(ValueError, match="would pass anything"):
        ledger.check_population("c", "any", nine, (None, None))


def test_a_noted_check_counts_as_held_and_says_so():
    values = [{"seed": 1, "measured": 0.5, "holds": True}, {"seed": 2, "measured": 0.6, "holds": True}]
    facts = {"measured": 2.0, "band": (0.0, 1.0), "holds": False, "further": tuple(values)}
    noted, failed = (Record("c", "a", "stated", **facts, noted=said) for said in (True, False))
    assert verdict([noted]) == "confirmed" and verdict([failed]) == "failed"
    mark, text = claims.line(noted)
    assert mark == "◐" and "0.5 at seed 1 and 0.6 at seed 2" in text and "held at two others" in text
    mark, text = claims.line(failed)
    assert mark == "✗" and "looked at again" in text


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
    records = [Record("c", "a", role, holds=None if role == "open" else True) for role in roles]
    assert verdict(records) == expected


@given(st.lists(st.sampled_from(claims.ROLES), min_size=1, max_size=6), st.data())
def test_one_failing_check_is_never_a_verdict(roles, data):
    broken = data.draw(st.integers(0, len(roles) - 1))
    records = [Record("c", "a", role, holds=index != broken) for index, role in enumerate(roles)]
    assert verdict(records) == "failed"


def test_record_is_whole_and_is_json(capsys, monkeypatch):
    kept = []
    monkeypatch.setattr(claims, "_show", kept.append)
    ledger = Ledger("01-test", profile="smoke", seed=0, device="cpu")
    ledger.check("c", "number", math.nan, (0, 1), expected=0.5, kind="derived")
    ledger.leave_open("d", "no network")
    record = json.loads(json.dumps(kept[0].as_dict()))
    assert Record.of(record) == kept[0] and record["versions"]["torch"]
    assert (record["seed"], record["chapter"], record["measured"], record["holds"]) == (0, "01-test", "nan", False)
    assert kept[1].holds is None and verdict([kept[1]]) == "open"


def test_a_record_keeps_what_it_has_and_no_more():
    """A number of 0 and a seed of 0 are there; what is absent, false or empty takes no room."""
    always = {"claim", "check", "role", "form", "kind", "measured", "expected", "band", "holds", "seed"}
    texts = {"chapter", "profile", "device"}
    assert set(Record("c", "a", "stated").as_dict()) == always | texts
    more = {"n": 9, "claimed": 0.0, "noted": True, "further": ({"seed": 1},)}
    assert set(Record("c", "a", "stated", **more).as_dict()) == always | texts | set(more)


def test_bands_as_text():
    texts = {None: "no band", (None, None): "no band", (0.5, None): "≥ 0.5", (None, 2.0): "≤ 2", (0.0, 2.0): "[0, 2]"}
    for band, text in texts.items():
        assert format_band(Record("c", "a", "stated", band=band)) == text
    assert format_band(Record("c", "a", "stated", "order", band=(0.5, None))) == "> 0.5"


def test_outside_a_notebook_a_check_prints_one_line(ledger, capsys):
    ledger.check("c", "number", 1.0, (0, 2), kind="derived")
    assert capsys.readouterr().out == "✓ c (stated) number: 1; band [0, 2]\n"


def test_records_are_kept_where_the_reader_says(tmp_path, monkeypatch):
    monkeypatch.setenv("NBUTILS_RESULTS", str(tmp_path))
    for _ in range(2):  # running the notebook again replaces the records
        ledger = claims.Ledger("04-t5", profile="smoke", seed=4, device="cpu")
        ledger.check("some-claim", "a number", 1.0, (0, 2), kind="exact")
    (file,) = (tmp_path / "records").iterdir()
    (record,) = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert file.name == "04-t5-smoke-cpu-seed-4.jsonl" and record["measured"] == 1.0 and record["holds"]


def test_a_chapter_alone_says_how_long_it_takes(capsys, monkeypatch, tmp_path):
    kept = {"smoke": {"hardware": ["a machine"], "jobs": {"04-t5": {"alone_seconds": 90}}}}
    (tmp_path / "resources.json").write_text(json.dumps(kept))
    monkeypatch.setattr(claims.data, "path", lambda name: tmp_path / name.split("/")[1])
    monkeypatch.delenv("NBUTILS_BOOK", raising=False)
    claims.Ledger("04-t5", profile="smoke", seed=0, device="cpu")
    assert "took 1.5 min on a machine" in capsys.readouterr().out
    kept["smoke"]["jobs"]["04-t5"]["alone_seconds"] = 1
    (tmp_path / "resources.json").write_text(json.dumps(kept))
    claims.Ledger("04-t5", profile="smoke", seed=0, device="cpu")
    assert "took 0.1 min on a machine" in capsys.readouterr().out, "nothing takes no time"
    claims.Ledger("01-random-walk", profile="smoke", seed=0, device="cpu")
    assert "not timed yet" in capsys.readouterr().out
    monkeypatch.setenv("NBUTILS_BOOK", "1")
    claims.Ledger("04-t5", profile="smoke", seed=0, device="cpu")
    assert capsys.readouterr().out == ""


def test_a_record_cannot_be_changed_afterwards():
    with pytest.raises(AttributeError, match="cannot assign"):
        Record("c", "a", "stated", holds=False).holds = True


@pytest.fixture
def shown(monkeypatch):
    """The records that a ledger shows, in order."""
    seen = []
    monkeypatch.setattr(claims, "_show", seen.append)
    return seen


@pytest.mark.parametrize(
    ("estimate", "interval", "expected", "width", "holds", "band"),
    [
        (0.5, (0.4, 0.7), 0.5, 0.4, True, (0.3, 0.6)),
        (2.0, (1.0, 4.0), 1.0, 3.0, True, (-1.0, 2.0)),
        (2.0, (1.0, 4.0), 4.0, 3.0, True, (2.0, 5.0)),
        (2.0, (1.0, 4.0), 3.0, 2.9, False, (1.0, 4.0)),
        (2.0, (1.0, 4.0), 0.9, 3.0, False, (-1.1, 1.9)),
        (2.0, (1.0, 4.0), 4.1, 3.0, False, (2.1, 5.1)),
        (2.0, (2.0, 2.0), 2.0, 0.0, True, (2.0, 2.0)),
    ],
)
def test_an_exponent_holds_up_to_the_ends_of_its_interval(
    ledger, shown, estimate, interval, expected, width, holds, band
):
    said = ledger.check_exponent("c", "e", estimate, interval, expected=expected, max_width=width, kind="derived")
    assert said is holds and shown[0].band == pytest.approx(band) and shown[0].holds is holds
    assert (shown[0].measured, shown[0].expected, shown[0].max_width) == (estimate, expected, width)
    assert shown[0].interval == interval and shown[0].form == "exponent" and shown[0].role == "stated"


def test_an_exponent_that_is_no_number_or_whose_interval_is_empty_does_not_hold(ledger):
    assert not ledger.check_exponent("c", "nan", math.nan, (0, 1), expected=0.5, max_width=1, kind="derived")
    with pytest.raises(ValueError, match=r"check 'e' of 'c': empty interval \[2\.0, 1\.0\]"):
        ledger.check_exponent("c", "e", 1.5, (2, 1), expected=1.5, max_width=9, kind="derived")


@pytest.mark.parametrize(
    ("values", "options", "holds", "smallest"),
    [
        ([1, 1.5], {}, True, 0.5), ([1, 1], {}, False, 0.0), ([1, 3, 4, 9], {"margin": 1}, False, 1.0),
        ([1, 3, 4.5, 9], {"margin": 1}, True, 1.5), ([2, 1], {}, False, -1.0), ([1], {}, False, "nan"),
        ([], {}, False, "nan"), ([1, math.inf], {}, False, "nan"), ([math.nan, 2, 3], {}, False, "nan"),
        ([1, 2], {"margin": -1}, True, 1.0),
    ],
)  # fmt: skip
def test_an_order_is_strict_and_its_measure_the_smallest_step(ledger, shown, values, options, holds, smallest):
    assert ledger.check_order("c", "o", values, kind="derived", **options) is holds
    assert (shown[0].measured, shown[0].band, shown[0].role) == (smallest, (options.get("margin", 0), None), "stated")


def test_the_band_of_a_mean_is_the_students_point_times_the_standard_error(ledger, shown):
    values = np.random.default_rng(3).gamma(2.0, size=11)
    half = stats.t.ppf(1 - 0.0005, 10) * values.std(ddof=1) / math.sqrt(11)
    expected = values.mean() + half / 2
    assert ledger.check_mean("c", "wide enough", values, expected=expected, resolution=half * 1.001)
    assert not ledger.check_mean("c", "too noisy", values, expected=expected, resolution=half * 0.999)
    assert not ledger.check_mean("c", "far", values, expected=expected + half, resolution=half * 2)
    assert not ledger.check_mean("c", "far below", values, expected=expected - 2 * half, resolution=half * 2)
    assert shown[0].band == pytest.approx((expected - half, expected + half)) and shown[0].n == 11
    assert (shown[0].measured, shown[0].expected) == pytest.approx((values.mean(), expected))
    assert (shown[0].kind, shown[0].role, shown[0].resolution) == ("derived", "stated", half * 1.001)


@pytest.mark.parametrize(
    ("band", "holds"), [((2, 8), True), ((3, 8), False), ((2, 7), False), ((None, 8), True), ((2, None), True)]
)
def test_both_ends_of_the_interval_of_a_population_lie_in_the_band(ledger, shown, band, holds):
    """Of nine ordered values the 2nd and the 8th: P(at most 1 of 9 on one side of the median) = 10/512 < 2.5 %."""
    assert ledger.check_population("c", "p", [1, 2, 3, 4, 5, 6, 7, 8, 9], band) is holds
    assert shown[0].interval == (2, 8) and (shown[0].measured, shown[0].n, shown[0].statistic) == (5, 9, "median")


@pytest.mark.parametrize(
    ("measured", "band", "holds", "kept"),
    [
        (2.0, (2, 2), True, (2.0, 2.0)), (2.0, (-math.inf, 2), True, (None, 2.0)),
        (2.0, (2, math.inf), True, (2.0, None)), (2.1, (None, 2), False, (None, 2.0)),
        (1.9, (2, None), False, (2.0, None)), (0.0, (0, 0), True, (0.0, 0.0)),
    ],
)  # fmt: skip
def test_a_band_may_be_one_point_or_have_one_end(ledger, shown, measured, band, holds, kept):
    assert ledger.check("c", "b", measured, band, kind="exact") is holds
    assert shown[0].band == kept and shown[0].n is None and shown[0].role == "stated"


def test_anchors_stand_at_the_first_check_of_a_claim_and_at_those_that_fail(ledger, shown):
    for claim, name, value in (
        ("a", "1", 1),
        ("a", "2", 1),
        ("b", "1", 9),
        ("a", "3", 9),
        ("b", "2", 9),
        ("b", "3", 1),
    ):
        ledger.check(claim, name, value, (0, 2), kind="exact")
    ledger.leave_open("b", "no network")
    ledger.leave_open("c", "no network")
    anchors = [record.anchor for record in shown]
    assert anchors == ["claim-a", None, "claim-b", "failed-a-4", "failed-b-5", None, None, "claim-c"]
    assert [record.holds for record in shown] == [True, True, False, False, False, True, None, None]


@pytest.mark.parametrize(("seconds", "told"), [(3, "0.1"), (6, "0.1"), (12, "0.2"), (90, "1.5"), (3600, "60.0")])
def test_a_chapter_says_in_minutes_how_long_it_took(tmp_path, monkeypatch, seconds, told):
    kept = {"book": {"hardware": ["one", "two"], "jobs": {"01-one": {"alone_seconds": seconds}}}}
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    monkeypatch.setattr(claims.data, "path", lambda name: tmp_path / "kept.json")
    run = {"chapter": "01-one", "profile": "book", "device": "cpu"}
    assert claims.announcement(run).endswith(f"cores)): took {told} min on one, two")
    for other in ({"profile": "gpu"}, {"chapter": "02-two"}):
        assert "not timed yet" in claims.announcement(run | other)
    (tmp_path / "kept.json").unlink()
    assert "not timed yet" in claims.announcement(run)


def test_nothing_is_kept_of_what_is_not_there_but_zero_is():
    kept = Record(
        "c", "a", "stated", measured=0.0, band=(0, None), holds=False, n=0, claimed=0.0, noted=False
    ).as_dict()
    assert kept == {"claim": "c", "check": "a", "role": "stated", "form": "band", "kind": None, "measured": 0.0,
                    "expected": None, "band": (0, None), "holds": False, "chapter": "", "profile": "", "seed": 0,
                    "device": "", "n": 0, "claimed": 0.0}  # fmt: skip
    assert Record.of(json.loads(json.dumps(kept))).as_dict() == kept


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"measured": 2.0, "band": (None, 3.0), "holds": True}, ("✓", "(stated) a: 2; band ≤ 3")),
        ({"measured": 2.0, "band": (3.0, None), "holds": False}, ("✗", "(stated) a: 2; band ≥ 3")),
        ({"measured": 2.0, "band": (3.0, None), "form": "order", "holds": False},
         ("✗", "(stated) a: smallest step 2; band > 3")),
        ({"measured": 123456.7, "band": (0, 1), "form": "nearest", "holds": False},
         ("✗", "(stated) a: nearest an end 1.2346e+05; band [0, 1]")),
        ({"measured": 1.0, "band": (0, 2), "holds": True, "form": "population", "statistic": "share", "n": 9,
          "interval": (0.5, 1.5)}, ("✓", "(stated) a: share of 9: 1, interval [0.5, 1.5]; band [0, 2]")),
        ({"measured": 1.0, "band": None, "holds": True, "form": "smallest"},
         ("✓", "(stated) a: smallest 1; band no band")),
        ({"measured": 1.0, "band": (None, None), "holds": True}, ("✓", "(stated) a: 1; band no band")),
    ],
)  # fmt: skip
def test_what_a_reader_sees_of_a_check(facts, said):
    assert line(Record("c", "a", "stated", **facts)) == said


@pytest.mark.parametrize("interval", [(0.5, 0.6), (0.4, 0.5)])
def test_an_interval_that_ends_at_the_expected_exponent_has_it(interval):
    ledger = Ledger("99-none", profile="smoke", seed=0, device="cpu")
    assert ledger.check_exponent("a", "b", sum(interval) / 2, interval, expected=0.5, max_width=0.2, kind="exact")


@pytest.mark.parametrize("role", ["stated", "corrected", "counterexample"])
def test_only_what_is_open_is_told_with_a_reason_alone(role):
    said = line(Record("c", "a check", role, "band", "exact", measured=0.25, band=(0, 1), holds=True, reason="because"))
    assert said[1] == f"({role}) a check: 0.25; band [0, 1]"
