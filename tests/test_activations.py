"""Scaling errors of softmax against many-digit arithmetic, and what the gap says of them."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from nbutils.experiments import activations

SCALES = (1.0, 1 + 1e-12, 1.01, 2.0, 7.5, 1e3, 1e12, np.inf)
entries = st.one_of(st.integers(-4, 4).map(float), st.floats(-40, 40, allow_subnormal=False))  # whole numbers tie
spread = st.lists(entries, min_size=1, max_size=7).map(np.array)
# Where a norm says nothing of the gap: entries near each other, however large they are.
close = st.builds(
    lambda level, depths: level - np.array(depths),
    st.sampled_from([0.0, 7.0, -1e3, 1e6]),
    st.lists(st.sampled_from([0.0, 2.0**-30, 0.125, 1.0, 20.0]), min_size=1, max_size=5),
)
vectors = st.one_of(spread, close)
scales = st.sampled_from(SCALES)


def exact_log_errors(x, c):
    """ln |softmax(cx) − softmax(x)| in 4,000 digits; −inf for 0."""
    with mpmath.workdps(4000):
        top = mpmath.mpf(float(max(x)))
        depth = [top - mpmath.mpf(float(value)) for value in x]
        if np.isinf(c):
            then = [mpmath.mpf(d == 0) for d in depth]
        else:
            then = [mpmath.exp(-mpmath.mpf(float(c)) * d) for d in depth]
        now = [mpmath.exp(-d) for d in depth]
        errors = [abs(a / sum(then) - b / sum(now)) for a, b in zip(then, now, strict=True)]
        return np.array([float(mpmath.log(e)) if e > mpmath.mpf(10) ** -3900 else -np.inf for e in errors])


@pytest.mark.parametrize("c", SCALES)
@pytest.mark.parametrize(
    "x",
    [
        [2.0],
        [1.5, 1.5],
        [1.0, 0.9, 0.0],
        [3, 3, 1, 1, -2],
        [1e6, 1e6 - 1],
        [900, 0, -900],
        [2, 2, -3000.0],
        [1e-9, 0, -1],
    ],
)
def test_softmax_error_to_many_digits(x, c):
    measured, exact = activations.log_softmax_error(x, c), exact_log_errors(x, c)
    np.testing.assert_array_equal(np.isneginf(measured), np.isneginf(exact))
    np.testing.assert_allclose(measured, exact, rtol=1e-13, atol=1e-11)


@settings(deadline=None)
@given(vectors, scales.filter(lambda c: c < 1e4))
def test_softmax_error_is_that_of_the_plain_function(x, c):
    plain = abs(softmax(c * x) - softmax(x))
    np.testing.assert_allclose(
        np.exp(activations.log_softmax_error(x, c)), plain, atol=1e-14 * max(1, c * abs(x).max())
    )


@settings(deadline=None)
@given(vectors.filter(lambda x: len(set(x)) > 1), scales)
def test_worst_entry(x, c):
    """sup over c of the largest error is max(S/m, exp(−gap))/(m + S): between exp(−gap)/n and (n − 1) exp(−gap)."""
    m, gap, rest = activations.gaps(x)
    supremum = max(rest - np.log(m), -gap) - np.logaddexp(np.log(m), rest)
    assert activations.log_softmax_error(x, c).max() <= supremum + 1e-9
    assert activations.log_softmax_error(x, np.inf).max() == pytest.approx(supremum, abs=1e-9)
    assert -np.log(len(x)) - gap - 1e-9 <= supremum <= np.log(len(x) - 1) - gap + 1e-9


def test_masked_and_huge_scores():
    masked = activations.log_softmax_error([1.0, 0.0, -np.inf], 3.0)
    np.testing.assert_allclose(masked[:2], activations.log_softmax_error([1.0, 0.0], 3.0))
    assert np.isneginf(masked[2])
    assert not np.isnan(activations.log_softmax_error([1e308, -1e308, 1e308], [1.0, 2.0, np.inf])).any()
    assert activations.log_softmax_error([1e5, 0.0], np.inf) == pytest.approx(-1e5)
