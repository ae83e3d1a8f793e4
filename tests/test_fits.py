"""Fits: parameters of known curves, the bootstrap's calibration, local exponents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from nbutils import data, fits

T = np.linspace(1, 5000, 80)
TRUTH = {
    "sqrt": {"a": 3.0, "b": 20.0},
    "square": {"c": 7.0, "A": 900.0},
    "power": {"a": 2.0, "p": 0.4},
    "power_offset": {"a": 2.0, "p": 0.6, "b": 30.0},
    "linear": {"a": 0.02, "b": 5.0},
    "quarter": {"a": 9.0, "b": 4.0},
    "log": {"a": 11.0, "b": 2.0},
}


@pytest.mark.parametrize("form", fits.FORMS)
def test_each_form_finds_its_own_parameters(form):
    law = fits.FORMS[form]
    rho = law.rho(T, *(TRUTH[form][name] for name in law.parameters))
    found = fits.fit(form, T, rho)
    assert found.values == pytest.approx(TRUTH[form], rel=1e-4)
    assert found.r2 == pytest.approx(1.0, abs=1e-9)


def test_a_curve_that_levels_off_has_a_negative_power():
    """The search begins at p = ½ and cannot pass p = 0."""
    found = fits.fit("power_offset", T, 50 - 30 * T**-0.4)
    assert found.values == pytest.approx({"a": -30.0, "p": -0.4, "b": 50.0}, rel=1e-4)
    logarithm = fits.fit("power_offset", T, 2 + 3 * np.log(T))
    assert abs(logarithm.values["p"]) < fits.P_NEAR_0 and logarithm.r2 == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("a", "p", "b"), [(5.0, 0.88, 29.0), (5.0, 1.15, 9.0)])
def test_a_search_ends_at_the_law_also_from_a_square_root(a, p, b):
    t = np.arange(1.0, 1000.0)
    assert fits.fit("power_offset", t, a * t**p + b).values == pytest.approx({"a": a, "p": p, "b": b}, rel=1e-4)


def test_the_true_form_has_the_lowest_aic():
    rng = np.random.default_rng(0)
    for form in ("sqrt", "square", "linear"):
        law = fits.FORMS[form]
        rho = law.rho(T, *TRUTH[form].values()) + rng.normal(size=len(T)) * 0.5
        two_parameters = ("sqrt", "square", "linear", "quarter", "log")
        assert min(two_parameters, key=lambda other: fits.fit(other, T, rho).aic) == form


def test_r2_and_lag1_by_hand():
    rho = np.array([1.0, 2.0, 2.0, 4.0, 5.0])
    found = fits.fit("linear", np.arange(5.0), rho)
    slope, intercept = np.polyfit(np.arange(5.0), rho, 1)
    residuals = rho - slope * np.arange(5.0) - intercept
    assert found.r2 == pytest.approx(1 - (residuals**2).sum() / ((rho - rho.mean()) ** 2).sum())
    assert found.lag1 == pytest.approx((residuals[1:] * residuals[:-1]).sum() / (residuals**2).sum())


@pytest.mark.filterwarnings("ignore:Covariance of the parameters")  # any exponent fits a factor of 0
@pytest.mark.parametrize("form", fits.FORMS)
@pytest.mark.parametrize("rho", [0.1, 5.0, 77.7])  # the mean of 80 times 0.1 is not 0.1
def test_a_curve_that_does_not_move_has_a_fit_and_no_r2(form, rho):
    found = fits.fit(form, T, np.full(len(T), rho))
    np.testing.assert_allclose(found.fitted, rho, rtol=1e-6)
    assert np.isnan(found.r2)


def test_published_fit_of_t5():
    curve = data.published("t5_norm")
    found = fits.fit("sqrt", curve["step"], curve["norm"])
    np.testing.assert_allclose(found.fitted, curve["plotted_sqrt_fit"], rtol=1e-4)


@pytest.mark.parametrize(
    ("form", "t", "said"),
    [
        ("cube", [1, 2, 3, 4, 5], "unknown form 'cube'"),
        ("sqrt", [1, 2, 3], "at least 4 points"),
        ("sqrt", [1, 2, 2, 3, 4], "increasing"),
    ],
)
def test_bad_fits_are_named(form, t, said):
    with pytest.raises(ValueError, match=said):
        fits.fit(form, t, np.ones(len(t)))


def test_moving_blocks_are_blocks():
    rng = np.random.default_rng(0)
    index = fits.moving_blocks(23, 5, rng)
    assert len(index) == 23 and index.min() >= 0 and index.max() < 23
    assert all((np.diff(index[start : start + 5]) == 1).all() for start in range(0, 20, 5))
    assert {int(fits.moving_blocks(7, 5, rng)[0]) for _ in range(100)} == {0, 1, 2}, "the last block counts"
    with pytest.raises(ValueError, match="between 1 and n"):
        fits.moving_blocks(5, 6, rng)


def test_bootstrap_keeps_correlation_that_single_points_lose():
    """Spread of the slope of a line with AR(1) residuals: blocks come close to the truth, single points fall short."""
    rng, t = np.random.default_rng(1), np.arange(1.0, 201.0)

    def curve():
        noise = np.zeros(200)
        for i in range(1, 200):
            noise[i] = 0.9 * noise[i - 1] + rng.normal()
        return 0.1 * t + noise

    def slope(t, rho):
        return np.polyfit(t, rho, 1)[0]

    true = np.std([slope(t, curve()) for _ in range(400)])
    spread = {block: [] for block in (1, 25)}
    for _ in range(20):
        law = fits.fit("linear", t, curve())
        for block in spread:
            spread[block].append(np.std(fits.bootstrap(law, t, slope, block=block, samples=60, seed=0)))
    assert np.mean(spread[1]) < 0.45 * true < 0.65 * true < np.mean(spread[25])


def test_the_bootstraps_law_is_the_fitted_curve():
    """A power has residuals with a mean: it must not be added to each draw."""
    law = fits.fit("power", T, 40 + 2 * T**0.6)
    assert abs(law.residuals.mean()) > 0.5
    means = fits.bootstrap(law, T, lambda t, rho: rho.mean(), block=1, samples=400, seed=3)
    error = law.residuals.std() / np.sqrt(len(T)) / np.sqrt(400)
    assert means.mean() == pytest.approx(law.fitted.mean(), abs=5 * error)
    assert means.std() == pytest.approx(law.residuals.std() / np.sqrt(len(T)), rel=0.15)


@pytest.mark.parametrize("form", ["sqrt", "linear", "quarter", "log", "square", "power", "power_offset"])
def test_a_search_begins_with_a_curve_through_the_ends(form):
    """Through the last point; with an offset also through the first."""
    t, rho = np.array([1.0, 5, 30, 400]), np.array([3.0, 4, 9, 17])
    law = fits.FORMS[form]
    begun = law.rho(t, *law.start(t, rho))
    assert begun[-1] == pytest.approx(rho[-1])
    assert form == "power" or begun[0] == pytest.approx(rho[0])


def test_bootstrap_is_repeatable():
    law = fits.fit("sqrt", T, 3 * np.sqrt(T) + np.sin(T))
    first, second = (fits.bootstrap(law, T, lambda t, rho: rho.mean(), block=5, samples=3, seed=7) for _ in range(2))
    assert (first == second).all() and len(np.unique(first)) == 3


def test_local_exponents_of_powers():
    t = np.arange(1.0, 1000.0)
    np.testing.assert_allclose(fits.local_exponents(t, 5 * t**0.37, [2, 17, 300, 999]), 0.37, rtol=1e-12)
    with pytest.raises(ValueError, match="within the positive times"):
        fits.local_exponents(t, t, [1, 2000])


def test_aic_by_hand():
    rho = np.array([1.0, 2.0, 2.0, 4.0, 5.0, 5.5])
    for form, parameters in (("linear", 3), ("power_offset", 4)):  # the variance is one of them
        found = fits.fit(form, np.arange(1.0, 7.0), rho)
        assert found.aic == pytest.approx(6 * np.log((found.residuals**2).sum() / 6) + 2 * parameters)


@given(
    arrays(np.float64, st.integers(2, 12), elements=st.floats(-1e3, 1e3)),
    st.floats(0.5, 0.9999),
    st.floats(0, 10),
)
def test_mean_interval_is_students(each, level, widen):
    mean, (low, high) = fits.mean_interval(each, level=level, widen=widen)
    error = stats.sem(each)
    wanted = stats.t.interval(level, len(each) - 1, each.mean(), error) if error > 0 else (mean, mean)
    np.testing.assert_allclose((low, high), (wanted[0] - widen, wanted[1] + widen), rtol=1e-9, atol=1e-9)


def test_mean_interval_of_one_value_is_the_whole_line():
    assert fits.mean_interval([3.0]) == (3.0, (-np.inf, np.inf))


def test_a_second_search_that_does_not_end_leaves_what_the_first_found(monkeypatch):
    """A curve that a power below 0 fits; that search is made to give up."""
    t = np.arange(1.0, 60)
    rho = 5 - 2 * t**-0.3
    search, asked = fits._least_squares, []

    def gives_up(law, t, rho, start):
        asked.append(start)
        if len(asked) > 1:
            raise RuntimeError("no end")
        return np.array([1.0, 1e-6, 1.0])

    monkeypatch.setattr(fits, "_least_squares", gives_up)
    assert fits.fit("power_offset", t, rho).values["p"] == 1e-6 and len(asked) == 2
    monkeypatch.setattr(fits, "_least_squares", search)
    assert fits.fit("power_offset", t, rho).values["p"] == pytest.approx(-0.3, abs=1e-3)


@pytest.mark.parametrize("form", fits.FORMS)
def test_two_points_more_than_parameters_are_enough_and_one_more_is_not(form):
    points = len(fits.FORMS[form].parameters) + 2
    t = np.arange(1.0, points + 1)
    rho = 2 * np.sqrt(t) + 1 + 0.01 * np.cos(t)
    fits.fit(form, t, rho)
    with pytest.raises(ValueError, match=f"at least {points} points"):
        fits.fit(form, t[:-1], rho[:-1])
