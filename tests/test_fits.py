"""Fits: parameters of known curves, resamples, local exponents."""

import numpy as np
import pytest

from nbutils import data
from normgrowth import fits

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


def test_each_form_is_what_its_label_says():
    by_hand = {"sqrt": 32, "square": 1012**0.5, "power": 2 * 2**1.6, "power_offset": 2 * 2**2.4 + 30}
    by_hand |= {"linear": 5.32, "quarter": 22, "log": 11 * np.log(17) + 2}
    for name, law in fits.FORMS.items():
        assert law.rho(16.0, *(TRUTH[name][each] for each in law.parameters)) == pytest.approx(by_hand[name]), law.label


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


def test_r2_and_aic_by_hand():
    t, rho = np.arange(1.0, 7.0), np.array([1.0, 2.0, 2.0, 4.0, 5.0, 5.5])
    residuals = rho - np.polyval(np.polyfit(t, rho, 1), t)
    assert fits.fit("linear", t, rho).r2 == pytest.approx(1 - (residuals**2).sum() / ((rho - rho.mean()) ** 2).sum())
    for form, parameters in (("linear", 3), ("power_offset", 4)):  # the variance is one of them
        found = fits.fit(form, t, rho)
        assert found.aic == pytest.approx(6 * np.log((found.residuals**2).sum() / 6) + 2 * parameters)


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
    ("form", "t", "text"),
    [
        ("sqrt", [1, 2, 3], "at least 4 points"),
        ("sqrt", [1, 2, 2, 3, 4], "increasing"),
    ],
)
def test_bad_fits_are_named(form, t, text):
    with pytest.raises(ValueError, match=text):
        fits.fit(form, t, np.ones(len(t)))


def test_resamples_are_whole_blocks_of_the_residuals():
    """With residuals that number the points: within a block neighbours stay neighbours, and the last block counts."""
    law = fits.fit("linear", T[:23], T[:23])._replace(fitted=np.zeros(23), residuals=np.arange(23.0))
    drawn = fits.bootstrap(law, T[:23], lambda t, rho: rho + 11, block=5, samples=200, seed=0)
    assert drawn.shape == (200, 23) and set(drawn[:, 0]) == set(range(19)) and set(drawn.ravel()) == set(range(23))
    assert all((np.diff(drawn[:, start : start + 5]) == 1).all() for start in range(0, 20, 5))
    with pytest.raises(ValueError, match="between 1 and n"):
        fits.bootstrap(law, T[:23], lambda t, rho: rho, block=24, samples=1, seed=0)


def test_the_bootstraps_law_is_the_fitted_curve():
    """A power has residuals with a mean: it must not be added to each draw."""
    law = fits.fit("power", T, 40 + 2 * T**0.6)
    assert abs(law.residuals.mean()) > 0.5
    means = fits.bootstrap(law, T, lambda t, rho: rho.mean(), block=1, samples=400, seed=3)
    error = law.residuals.std() / np.sqrt(len(T)) / np.sqrt(400)
    assert means.mean() == pytest.approx(law.fitted.mean(), abs=5 * error)
    assert means.std() == pytest.approx(law.residuals.std() / np.sqrt(len(T)), rel=0.15)


def test_local_exponents_of_powers():
    t = np.arange(1.0, 1000.0)
    np.testing.assert_allclose(fits.local_exponents(t, 5 * t**0.37, [2, 17, 300, 999]), 0.37, rtol=1e-12)
    with pytest.raises(ValueError, match="within the positive times"):
        fits.local_exponents(t, t, [1, 2000])
