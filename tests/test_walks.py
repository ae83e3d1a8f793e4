"""Walks: exact laws against step-by-step simulation and against formulas."""

import numpy as np
import pytest
import torch
from scipy import stats

from nbutils.devices import generator
from nbutils.experiments import walks

LAWS = {"gaussian": walks.gaussian, "signs": walks.signs, "bursts": walks.bursts(0.3), "stable": walks.stable(1.3)}


@pytest.mark.parametrize("name", LAWS)
def test_a_long_increment_has_the_law_of_its_steps(name):
    """Two-sample Kolmogorov–Smirnov test: the norm after 7 steps at once, and after 7 steps one by one."""
    law, rng = LAWS[name], generator(3, "cpu")
    at_once = law(7, (4000, 2), rng).double().norm(dim=1)
    one_by_one = sum(law(1, (4000, 2), rng).double() for _ in range(7)).norm(dim=1)
    assert stats.ks_2samp(at_once.numpy(), one_by_one.numpy()).pvalue > 1e-3


def test_mean_norm_of_walks_follows_the_law():
    times = walks.log_times(10_000, 2)
    norms = walks.walk_norms(walks.gaussian, n=5, times=times, walks=20_000, generator=generator(0, "cpu"))
    theory = np.sqrt(times) * stats.chi(5).mean()
    error = norms.std(0) / np.sqrt(len(norms))
    assert (abs(norms.mean(0) - theory) < 5 * error).all()


def test_one_walk_is_one_path():
    """Squared norms at t and at 2t are correlated 1/2 in squares: cov(‖θ_t‖², ‖θ_2t‖²) = var ‖θ_t‖²."""
    norms = walks.walk_norms(
        walks.gaussian, n=4, times=np.array([50, 100]), walks=20_000, generator=generator(1, "cpu")
    )
    assert np.corrcoef(norms.T**2)[0, 1] == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("law", "bad"), [(walks.bursts, -0.5), (walks.bursts, 0), (walks.stable, 2.0)])
def test_bad_parameters_are_named(law, bad):
    with pytest.raises(ValueError, match="must lie in"):
        law(bad)


@pytest.mark.parametrize(("name", "variance"), [("gaussian", 1.0), ("signs", 1.0), ("bursts", 0.3)])
def test_long_increments_are_centred_with_the_variance_of_their_steps(name, variance):
    steps, draws = 10_000, 20_000
    scaled = LAWS[name](steps, (draws, 1), generator(5, "cpu")).double() / np.sqrt(steps * variance)
    assert abs(float(scaled.mean())) < 5 / np.sqrt(draws)
    assert float((scaled**2).mean()) == pytest.approx(1, abs=5 * np.sqrt(2 / draws))


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.8])
def test_stable_increments_are_those_of_scipy(alpha):
    seed = int(torch.randint(2**31, (1,), generator=generator(6, "cpu")))
    theirs = stats.levy_stable.rvs(alpha, 0, size=(500, 2), random_state=np.random.default_rng(seed))
    np.testing.assert_allclose(walks.stable(alpha)(1, (500, 2), generator(6, "cpu")), theirs, rtol=1e-12)


def test_norms_accumulate_in_float64():
    """Three million equal float32 coordinates: a float32 sum of squares loses the fifth digit."""

    def constant(steps, shape, generator):
        return torch.full(shape, 0.1) * steps

    norm = walks.walk_norms(constant, n=3_000_000, times=np.array([1]), walks=1, generator=generator(0, "cpu"))[0, 0]
    assert norm == pytest.approx(float(torch.tensor(0.1)) * np.sqrt(3e6), rel=1e-10)
