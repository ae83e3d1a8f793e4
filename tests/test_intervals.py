"""Intervals against their definitions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from nbutils import intervals


@given(arrays(np.float64, st.integers(2, 20), elements=st.floats(-1e3, 1e3)), st.floats(0.5, 0.9999), st.floats(0, 10))
def test_mean_is_students_interval(values, level, widen):
    found = intervals.mean(values, level, widen=widen, min_size=2)
    error = stats.sem(values)
    low, high = stats.t.interval(level, len(values) - 1, values.mean(), error) if error > 0 else [values.mean()] * 2
    np.testing.assert_allclose((found.low, found.high), (low - widen, high + widen), rtol=1e-9, atol=1e-9)
    assert found.n == len(values) and found.value == values.mean()


@given(st.integers(8, 60))
def test_the_medians_interval_is_the_narrowest_of_its_confidence(n):
    """Of order statistics k and n + 1 − k the coverage is 1 − 2 P(X < k), X binomial; the next k has too little."""
    found = intervals.median(np.arange(1.0, n + 1))
    out = int(found.low)
    assert found.low + found.high == n + 1
    assert 1 - 2 * stats.binom.cdf(out - 1, n, 0.5) >= 0.95 > 1 - 2 * stats.binom.cdf(out, n, 0.5)


@given(st.integers(8, 40), st.data())
def test_share_is_clopper_and_pearson(n, data):
    k = data.draw(st.integers(0, n))
    found = intervals.share([True] * k + [False] * (n - k))
    exact = stats.binomtest(k, n).proportion_ci(0.95, "exact")
    assert (found.value, found.low, found.high) == pytest.approx((k / n, exact.low, exact.high), abs=1e-9)


def test_what_is_no_population():
    for statistic in intervals.STATISTICS.values():
        with pytest.raises(ValueError, match=r"7 replicates.*at least 8"):
            statistic([1] * 7)
    with pytest.raises(ValueError, match=r"true and false; got 0.5"):
        intervals.share([0.5] * 9)
    assert math.isnan(intervals.mean([math.inf] + [1.0] * 8).value) and math.isnan(intervals.median([math.nan] * 9).low)
    assert intervals.median([math.inf] * 2 + [1.0] * 9).value == 1.0
    assert intervals.mean([3.0], min_size=1) == (3.0, -math.inf, math.inf, 1)


@pytest.mark.parametrize("bits", [24, 53])
def test_no_order_of_a_sum_leaves_the_bound_of_rounding(bits):
    dtype = np.float32 if bits == 24 else np.float64
    rng = np.random.default_rng(bits)
    values = rng.normal(size=500).astype(dtype)
    exact, scale = sum(map(Fraction, values.tolist())), sum(abs(Fraction(x)) for x in values.tolist())
    for _ in range(20):
        total = dtype(0)
        for x in rng.permutation(values):
            total = dtype(total + x)
        assert abs(Fraction(float(total)) - exact) <= Fraction(intervals.rounding(500, bits)) * scale
    with pytest.raises(ValueError, match="no bound"):
        intervals.rounding(0)
