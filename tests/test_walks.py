"""Walks: exact laws against step-by-step simulation and against formulas."""

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from scipy import stats

from nbutils.chapters import growth, walks
from nbutils.devices import generator

LAWS = {"gaussian": walks.gaussian, "signs": walks.signs, "bursts": walks.bursts(0.3), "stable": walks.stable(1.3)}


@pytest.mark.parametrize("name", LAWS)
def test_a_long_increment_has_the_law_of_its_steps(name):
    """Two-sample Kolmogorov–Smirnov test: the norm after 7 steps at once, and after 7 steps one by one."""
    law, rng = LAWS[name], generator(3, "cpu")
    at_once = law(7, (4000, 2), rng).double().norm(dim=1)
    one_by_one = sum(law(1, (4000, 2), rng).double() for _ in range(7)).norm(dim=1)
    assert stats.ks_2samp(at_once.numpy(), one_by_one.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("n", [1, 2, 30, 100_000])
def test_mean_norm_formula(n):
    exact = stats.chi(n).mean()
    assert walks.gaussian_mean_norm(n) == pytest.approx(exact, rel=1e-9)
    assert walks.gaussian_mean_norm(n, variance=9.0) == pytest.approx(3 * exact, rel=1e-9)


def test_mean_norm_keeps_its_digits_in_high_dimension():
    n = 10.0**13
    assert (1 - walks.gaussian_mean_norm(n) / np.sqrt(n)) * 4 * n == pytest.approx(1.0, abs=0.05)


def test_mean_norm_of_walks_follows_the_law():
    times = walks.log_times(10_000, 2)
    norms = walks.walk_norms(walks.gaussian, n=5, times=times, walks=20_000, generator=generator(0, "cpu"))
    theory = np.sqrt(times) * walks.gaussian_mean_norm(5)
    error = norms.std(0) / np.sqrt(len(norms))
    assert (abs(norms.mean(0) - theory) < 5 * error).all()


def test_one_walk_is_one_path():
    """Squared norms at t and at 2t are correlated 1/2 in squares: cov(‖θ_t‖², ‖θ_2t‖²) = var ‖θ_t‖²."""
    norms = walks.walk_norms(
        walks.gaussian, n=4, times=np.array([50, 100]), walks=20_000, generator=generator(1, "cpu")
    )
    assert np.corrcoef(norms.T**2)[0, 1] == pytest.approx(0.5, abs=0.03)


def test_memory_does_not_grow_with_time_nor_with_walks():
    def peak(t_max, count):
        tracemalloc.start()
        before = torch.randn(1)  # torch's own buffers are outside tracemalloc: the bound is on batches
        walks.walk_norms(
            walks.gaussian,
            n=100,
            times=walks.log_times(t_max, 1),
            walks=count,
            generator=generator(0, "cpu"),
            batch_elements=10_000,
        )
        del before
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    assert peak(10**6, 100) < peak(10, 100) + 50_000
    assert peak(10, 2000) < peak(10, 100) + 8 * 2000 * 2 + 50_000


def test_batches_change_nothing_but_the_draws():
    times = np.array([1, 10])
    small = walks.walk_norms(walks.gaussian, n=3, times=times, walks=9, generator=generator(0, "cpu"), batch_elements=6)
    assert small.shape == (9, 2) and (small > 0).all() and len(np.unique(small)) == 18


@pytest.mark.parametrize("times", [[], [0, 1], [2, 1], [3, 3]])
def test_bad_times_are_named(times):
    with pytest.raises(ValueError, match="positive and increasing"):
        walks.walk_norms(walks.gaussian, n=1, times=np.array(times), walks=1, generator=generator(0, "cpu"))


@pytest.mark.parametrize("bad", [lambda: walks.bursts(0), lambda: walks.stable(2.0), lambda: walks.log_times(0)])
def test_bad_parameters_are_errors(bad):
    with pytest.raises(ValueError):
        bad()


def test_log_times():
    times = walks.log_times(10**6, 4)
    assert times[0] == 1 and times[-1] == 10**6 and (np.diff(times) > 0).all() and len(times) == 25


def test_exponent_of_an_exact_power():
    rng, times = np.random.default_rng(0), np.array([1, 10, 100])
    norms = rng.uniform(1, 2, size=(400, 1)) * times**0.7
    found = walks.growth_exponent(times, norms)
    assert found.estimate == pytest.approx(0.7, abs=1e-12) and found.each.shape == (20,)
    noisy = walks.growth_exponent(times, norms * rng.uniform(0.5, 1.5, size=norms.shape))
    assert noisy.interval[0] < 0.7 < noisy.interval[1]
    with pytest.raises(ValueError, match="too few"):
        walks.growth_exponent(times, norms[:10])


def test_the_interval_of_an_exponent_is_as_wide_as_its_noise():
    """Noise of deviation s in each ln ρ moves a slope over N walks by s / √(N Σ(ln t − mean)²)."""
    rng, times, s = np.random.default_rng(1), np.array([1, 10, 100, 1000]), 0.1
    norms = np.exp(s * rng.normal(size=(2000, 4))) * times**0.5
    centred = np.log(times) - np.log(times).mean()
    deviation = s / np.sqrt(2000 * (centred**2).sum())
    low, high = walks.growth_exponent(times, norms).interval
    assert 0.5 < (high - low) / 2 / (3.88 * deviation) < 1.7  # Student's t, 19 degrees of freedom, 99.9 %


def toy(pull, turn, seed=0):
    rng = generator(seed, "cpu")
    return growth.orthogonal_walk(n=20, steps=3000, lr=0.1, pull=pull, turn=turn, walks=2, generator=rng)


@pytest.mark.parametrize(("pull", "turn"), [(0, 0), (3, 0), (0, 2), (1, 1)])
def test_every_step_of_the_toy_is_orthogonal(pull, turn):
    walk = toy(pull, turn)
    step, before = np.diff(walk.theta, axis=1), walk.theta[:, :-1]
    cosine = (step * before).sum(2) / np.linalg.norm(step, axis=2) / np.linalg.norm(before, axis=2)
    assert abs(cosine).max() < 1e-10 and walk.worst_alignment < 1e-12
    assert (walk.theta[:, -1] ** 2).sum(1) - 1 == pytest.approx(walk.squares, rel=1e-10)
    assert not np.isclose(*walk.theta[:, -1]).any(), "the walks are independent"


def test_interval_shares_of_known_paths():
    angle = np.arange(41) * np.pi / 20
    spiral = np.sqrt(1 + np.arange(41))[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    ends = (spiral[-1] ** 2).sum() - 1
    assert growth.interval_shares(spiral, np.array([40]))[0] == pytest.approx(
        ((spiral[-1] - spiral[0]) ** 2).sum() / ends
    )
    radial = np.outer([1.0, 2.0, 4.0], [1, 0])  # Δ = 1 and 2: 5 of 15; at once 9 of 15
    np.testing.assert_allclose(growth.interval_shares(radial, np.array([1, 2])), [5 / 15, 9 / 15])


def test_what_holds_the_direction_lowers_the_share_and_what_turns_it_raises_it():
    spans = np.array([1, 300])
    free, held, turning = (growth.interval_shares(toy(*force).theta[0], spans) for force in ((0, 0), (3, 0), (0, 1)))
    assert held[1] < 0.8 < free[1] < 1.2 < turning[1]
    assert [share[0] for share in (free, held, turning)] == pytest.approx([1, 1, 1])


def test_the_toy_needs_an_even_dimension():
    with pytest.raises(ValueError, match="even dimension"):
        growth.orthogonal_walk(n=3, steps=1, lr=0.1, pull=0, turn=0, walks=1, generator=generator(0, "cpu"))


def test_a_million_steps_in_a_hundred_thousand_dimensions():
    """100 walks in a fresh process: under 20 s of CPU time and 1 GB, whatever t."""
    code = (
        "import json, time, torch\n"
        "from nbutils.chapters import walks\n"
        "from nbutils.devices import generator\n"
        "torch.set_num_threads(1)\n"
        "start = time.process_time()\n"
        "times = walks.log_times(10**6, 4)\n"
        "norms = walks.walk_norms(walks.gaussian, n=10**5, times=times, walks=100, generator=generator(0, 'cpu'))\n"
        "ratio = norms[:, -1].mean() / (1000 * walks.gaussian_mean_norm(10**5))\n"
        # not ru_maxrss: a forked child begins with its parent's peak
        "status = open('/proc/self/status').read()\n"
        "peak = int(status.split('VmHWM:')[1].split()[0]) / 1024\n"
        "print(json.dumps([time.process_time() - start, peak, ratio]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, megabytes, ratio = json.loads(done.stdout)
    assert seconds < 20 and megabytes < 1000 and abs(ratio - 1) < 2e-3


@pytest.mark.parametrize(("name", "variance"), [("gaussian", 1.0), ("signs", 1.0), ("bursts", 0.3)])
def test_long_increments_are_centred_with_the_variance_of_their_steps(name, variance):
    steps, draws = 10_000, 20_000
    scaled = LAWS[name](steps, (draws, 1), generator(5, "cpu")).double() / np.sqrt(steps * variance)
    assert abs(float(scaled.mean())) < 5 / np.sqrt(draws)
    assert float((scaled**2).mean()) == pytest.approx(1, abs=5 * np.sqrt(2 / draws))


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.6])
def test_stable_increments_scale_by_their_index(alpha):
    draw, rng = walks.stable(alpha), generator(6, "cpu")
    one, many = (draw(steps, (40_000, 1), rng).abs().median() for steps in (1, 10**6))
    assert float(many / one) ** alpha == pytest.approx(1e6, rel=0.1)


def test_norms_accumulate_in_float64():
    """Three million equal float32 coordinates: a float32 sum of squares loses the fifth digit."""

    def constant(steps, shape, generator):
        return torch.full(shape, 0.1) * steps

    norm = walks.walk_norms(constant, n=3_000_000, times=np.array([1]), walks=1, generator=generator(0, "cpu"))[0, 0]
    assert norm == pytest.approx(float(torch.tensor(0.1)) * np.sqrt(3e6), rel=1e-10)


@pytest.mark.parametrize("p", [-0.5, 0.0, 1.5, 2.0])
def test_a_probability_is_one(p):
    with pytest.raises(ValueError, match="must lie in"):
        walks.bursts(p)
