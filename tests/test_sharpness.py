"""The table of nearest wrong values: what a check would pass, and planted values that turn a run red."""

import random

import pytest

from maintenance import sharpness
from nbutils.claims.records import Record

POPULATION = Record(
    "one", "a share", "stated", "population", "empirical", 0.9, band=(0.5, 1.0), holds=True, chapter="01-one", n=20,
    interval=(0.8, 0.97),
)  # fmt: skip
BOUND = Record("one", "margins", "stated", "smallest", "exact", 0.25, band=(0.0, None), holds=True, chapter="01-one")
WIDE = Record("one", "about 0.15", "stated", "band", "published", 0.14, band=(0.1, 0.2), holds=True, chapter="01-one")


@pytest.fixture
def entries(monkeypatch, tmp_path):
    """``entries(text)`` is the file of the alternatives of a chapter."""

    def write(text):
        (tmp_path / "01-one.yml").write_text(text)
        monkeypatch.setattr(sharpness, "ALTERNATIVES", tmp_path)
        sharpness.alternatives.cache_clear()

    yield write
    sharpness.alternatives.cache_clear()


@pytest.mark.parametrize(
    ("record", "value", "holds"),
    [
        (POPULATION, 0.9, True),
        (POPULATION, 0.55, False),  # its interval would reach below the band
        (WIDE, 0.2, True),  # ends belong to a band
        (WIDE, 0.21, False),
        (BOUND, -1e-9, False),
    ],
)
def test_a_check_is_judged_as_if_it_had_measured_the_wrong_value(record, value, holds):
    assert sharpness.with_value(record, value).holds is holds


@pytest.mark.parametrize(
    ("record", "text", "state"),
    [
        (BOUND, "{}", "by form"),
        (WIDE, "{}", "no entry"),
        (WIDE, "one: {about *: {wrong: the double, value: [0.3, 0.2]}}", "passes"),
        (WIDE, "one: {about *: {wrong: the double, value: 0.3}}", "sharp"),
        (POPULATION, "one: {a share: {wrong: chance, value: 0.5}}", "sharp"),
    ],
)
def test_a_check_is_sharp_if_it_fails_at_the_nearest_wrong_value(entries, record, text, state):
    entries(text)
    assert sharpness.sharpness(record).state == state


def test_an_entry_says_what_would_be_wrong_and_belongs_to_a_check(entries):
    entries("one: {about 0.15: {value: 0.3}}")
    with pytest.raises(ValueError, match="give `wrong` and `value`"):
        sharpness.sharpness(WIDE)
    entries("one: {gone: {wrong: w, value: 1}, about *: {wrong: w, value: 1}}")
    assert sharpness.unused([WIDE], ["01-one"]) == [("01-one", "one", "gone")]


def test_a_planted_wrong_value_turns_the_run_red(entries, monkeypatch):
    entries("one: {about *: {wrong: the double, value: 0.3}}")
    claim = {"chapters": ["01-one"], "expected": "confirmed"}
    monkeypatch.setattr(sharpness.book, "claims", lambda: {"one": claim})
    monkeypatch.setattr(sharpness.book, "chapters", lambda: ["01-one"])
    ((planted, problems),) = sharpness.plant([BOUND, WIDE], 20, random.Random(0))
    assert planted.check == "about 0.15" and {problem.claim for problem in problems} == {"one"}
