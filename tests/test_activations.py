"""Scaling errors against many-digit arithmetic, and the bounds against attacks."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, log_expit, softmax

from nbutils.chapters import activations

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
@given(vectors, scales)
def test_every_bound_holds(x, c):
    error, n = activations.log_softmax_error(x, c), len(x)
    m, gap, rest = activations.gaps(x)
    assert (error <= activations.log_softmax_bound(x) + 1e-9).all()
    assert np.logaddexp.reduce(error) - np.log(2) <= activations.log_mass_below(x) + 1e-9  # total variation
    if n > m:
        assert (error <= np.log(n - 1) - gap + 1e-9).all()
        assert rest >= -gap - 1e-9
    else:
        assert np.isneginf(error).all() and np.isinf(gap) and np.isneginf(rest)


@settings(deadline=None)
@given(vectors)
def test_suprema_are_reached_in_the_limit(x):
    error, bound = activations.log_softmax_error(x, np.inf), activations.log_softmax_bound(x)
    top = x == x.max()
    np.testing.assert_allclose(error[top], bound[top], rtol=0, atol=1e-9)
    np.testing.assert_allclose(np.logaddexp.reduce(error) - np.log(2), activations.log_mass_below(x), rtol=0, atol=1e-9)
    if (~top).sum() == 1:
        np.testing.assert_allclose(error[~top], bound[~top], rtol=0, atol=1e-9)


@settings(deadline=None)
@given(vectors.filter(lambda x: len(set(x)) > 1), scales)
def test_worst_entry(x, c):
    """sup over c of the largest error is max(S/m, exp(−gap))/(m + S): between exp(−gap)/n and (n − 1) exp(−gap)."""
    m, gap, rest = activations.gaps(x)
    supremum = max(rest - np.log(m), -gap) - np.logaddexp(np.log(m), rest)
    assert activations.log_softmax_error(x, c).max() <= supremum + 1e-9
    assert activations.log_softmax_error(x, np.inf).max() == pytest.approx(supremum, abs=1e-9)
    assert -np.log(len(x)) - gap - 1e-9 <= supremum <= np.log(len(x) - 1) - gap + 1e-9


@given(vectors, scales.filter(lambda c: c < 10))
def test_a_lesser_entry_never_gains_more_than_a_maximum(x, c):
    gain = softmax(c * x) - softmax(x)
    assert gain.max() <= gain[np.argmax(x)] + 1e-12


def test_a_lesser_entry_may_gain_with_three_scores_but_not_with_two():
    assert softmax([2.0, 1.8, 0.0])[1] > softmax([1.0, 0.9, 0.0])[1]
    lead = np.linspace(0.001, 3, 200)[:, None]
    pairs = np.hstack([lead, 0 * lead])
    assert (softmax(1.1 * pairs, axis=1)[:, 1] < softmax(pairs, axis=1)[:, 1]).all()


@pytest.mark.parametrize("level", [1.0, 1e3, 1e6, 1e12])
def test_the_error_falls_along_a_ray_and_not_with_the_norm(level):
    """(M, M − 1) errs by σ(−1) in the limit, at any M; r·(1, 0) by σ(−r)."""
    assert np.exp(activations.log_softmax_error([level, level - 1], np.inf)) == pytest.approx(expit(-1.0), rel=1e-12)
    along = activations.log_softmax_error(min(level, 1e3) * np.array([1.0, 0.0]), np.inf)
    assert along == pytest.approx(log_expit(-min(level, 1e3)), rel=1e-12)


def test_masked_and_huge_scores():
    masked = activations.log_softmax_error([1.0, 0.0, -np.inf], 3.0)
    np.testing.assert_allclose(masked[:2], activations.log_softmax_error([1.0, 0.0], 3.0))
    assert np.isneginf(masked[2])
    assert not np.isnan(activations.log_softmax_error([1e308, -1e308, 1e308], [1.0, 2.0, np.inf])).any()
    assert activations.log_softmax_error([1e5, 0.0], np.inf) == pytest.approx(-1e5)


def test_shapes_broadcast():
    error = activations.log_softmax_error(np.zeros((4, 1, 3)), np.array([1.0, 2.0]))
    assert error.shape == (4, 2, 3)
    assert activations.log_sigmoid_error(np.ones((5, 1)), np.array([1.0, 2.0])).shape == (5, 2)


@given(st.floats(-700, 700), st.floats(1, 100))
def test_scalar_errors(x, c):
    if x < 0:  # here plain float64 has no cancellation
        plain = expit(x) - expit(c * x)
        if plain > 1e-300 and (c - 1) * -x > 1e-3:
            assert activations.log_sigmoid_error(x, c) == pytest.approx(np.log(plain), abs=1e-9)
    plain = abs(np.tanh(c * x) - np.tanh(x))
    assert np.exp(activations.log_tanh_error(x, c)) == pytest.approx(plain, abs=1e-14)


@given(st.floats(-1e4, 1e4).filter(bool), st.one_of(st.just(np.inf), st.floats(1, 1e6)))
def test_scalar_bounds(x, c):
    assert activations.log_sigmoid_error(x, c) <= -np.logaddexp(0, abs(x)) + 1e-9
    assert activations.log_tanh_error(x, c) <= min(np.log(2) - 2 * abs(x), -abs(x)) + 1e-9


@given(st.floats(-300, 300).filter(bool))
def test_scalar_suprema_are_reached_in_the_limit(x):
    """|σ(cx) − σ(x)| → σ(−|x|), |tanh cx − tanh x| → 1 − tanh|x| = 2σ(−2|x|)."""
    assert activations.log_sigmoid_error(x, np.inf) == pytest.approx(log_expit(-abs(x)), rel=1e-12)
    assert activations.log_tanh_error(x, np.inf) == pytest.approx(np.log(2) + log_expit(-2 * abs(x)), rel=1e-12)


@pytest.mark.parametrize("x", [[], 3.0, [np.nan, 1], [np.inf, 1], [-np.inf, -np.inf]])
def test_names_bad_scores(x):
    with pytest.raises(ValueError, match="scores"):
        activations.gaps(x)


@pytest.mark.parametrize("c", [0.5, -1, np.nan])
def test_names_bad_scales(c):
    with pytest.raises(ValueError, match="scales must be at least 1"):
        activations.log_softmax_error([1.0, 2.0], c)


def test_the_first_scale_below_one_is_named():
    with pytest.raises(ValueError, match=r"got 0\.5"):
        activations.log_softmax_error(np.array([1.0, 2.0]), np.array([2.0, 0.5, 0.1]))
