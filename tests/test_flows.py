"""Flows against exact solutions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from nbutils.chapters import flows, one_weight
from nbutils.devices import generator
from nbutils.models import HomogeneousMLP

F64 = torch.float64


@given(st.floats(-700, 700))
@example(21.0)  # above the threshold that torch has by itself
def test_log_softplus_is_the_logarithm(z):
    expected = math.log(max(z, 0) + math.log1p(math.exp(-abs(z))) if z > -30 else math.exp(z))
    assert flows.log_softplus(torch.tensor(z, dtype=F64)).item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_gradient_survives_where_the_loss_underflows():
    ell, grad, q = flows.gradient(lambda theta: theta, torch.tensor([[1e5, 2e5]], dtype=F64))
    assert q.shape == (1, 2) and ell.item() == pytest.approx(-1e5 - math.log(2))
    torch.testing.assert_close(grad, torch.tensor([[-1.0, 0.0]], dtype=F64))


def test_mlp_margins_are_those_of_the_networks():
    rng, y = generator(0, "cpu"), torch.tensor([1.0, -1.0, 1.0], dtype=F64)
    nets, x = [HomogeneousMLP((4, 5, 1), generator=rng) for _ in "ab"], torch.randn(3, 4, generator=rng, dtype=F64)
    theta = torch.stack([torch.cat([w.detach().flatten() for w in net.weights]) for net in nets])
    wanted = torch.stack([y * net(x)[:, 0] for net in nets])
    torch.testing.assert_close(flows.mlp_margins((4, 5, 1), x, y)(theta), wanted)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_separable_data_have_their_margin(seed):
    x, y = flows.separable(2, 10, 3, gap=0.5, generator=generator(seed, "cpu"))
    assert set(y.unique().tolist()) <= {-1.0, 1.0}
    assert all(flows.max_margin(a, b) >= 0.5 - 1e-6 for a, b in zip(x.numpy(), y.numpy(), strict=True))


@pytest.mark.parametrize("gap", [0.5, 2.0])
def test_of_many_separable_points_the_margin_is_the_gap(gap):
    x, y = flows.separable(1, 400, 3, gap=gap, generator=generator(4, "cpu"))
    assert flows.max_margin(x[0], y[0]) == pytest.approx(gap, abs=0.05)
    assert 100 < int((y > 0).sum()) < 300, "the plane goes through the middle"


def test_max_margin_of_known_points():
    assert flows.max_margin([[3, 4]], [-1]) == pytest.approx(5, rel=1e-6)
    assert flows.max_margin([[1, 1], [-1, 1]], [1, 1]) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_flow_of_one_weight_is_the_reduced_flow(k):
    path = flows.flow(lambda theta: theta**k, torch.ones(1, 1, dtype=F64), [2, 5, 30, 90], tol=1e-7, floor=1e-3)
    u = np.concatenate([[1.0], path.margin[:, 0]])
    np.testing.assert_allclose(path.log_time[:, 0], flows.reduced_log_time(u, k, math.log(k**2))[1:], atol=1e-4)
    np.testing.assert_allclose(path.length, path.norm - 1, rtol=1e-4)
    np.testing.assert_allclose(path.log_inv_loss[:, 0], [2, 5, 30, 90], rtol=1e-4)


def test_the_flow_takes_as_long_steps_as_its_tolerance_allows():
    """Its formulas have an error of third order, so a step may grow with the root ⅓: few steps reach far."""
    called = []

    def margins(theta):
        called.append(1)
        return theta**2

    flows.flow(margins, torch.ones(1, 1, dtype=F64), [16.0])
    assert len(called) < 400


def test_reduced_flow_of_degree_one_is_solved_by_hand():
    u = np.array([1.0, 2.0, 10.0, 600.0])  # u̇ = 1/(1 + e^u): t − 1 = u + e^u − (1 + e)
    t = 1 + u + np.exp(u) - (1 + math.e)
    np.testing.assert_allclose(flows.reduced_log_time(u, 1), np.log(t), atol=1e-8)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_reduced_flow_has_the_coefficient_of_the_second_logarithm(k):
    u = np.geomspace(1e4, 1e8, 20)
    log_t = flows.reduced_log_time(np.concatenate([[1.0], u]), k)[1:]
    fit = np.polyfit(np.log(log_t), u - log_t, 1)[0]
    assert fit == pytest.approx(2 - 2 / k, abs=1e-3)
    both = flows.fit_loglog(np.stack([log_t] * 2, 1), np.stack([u] * 2, 1))
    assert both.estimate == pytest.approx(2 - 2 / k, abs=1e-5)
    assert both.interval[1] - both.interval[0] < 1e-4


def test_the_interval_of_the_coefficient_is_students_and_what_the_window_moves():
    """Three networks of p = 1, 1.5 and 2.3: exact laws have no drift; a bias s·u^−½ has."""
    u, p = np.geomspace(10, 50, 9)[:, None] * np.ones(3), np.array([1.0, 1.5, 2.3])
    found = flows.fit_loglog(u - p * (np.log(u) - 1 / u), u)
    wanted = stats.t.interval(0.999, 2, p.mean(), stats.sem(p))
    np.testing.assert_allclose(found.each, p, rtol=1e-9)
    np.testing.assert_allclose([found.estimate, *found.interval], [p.mean(), *wanted], rtol=1e-6)
    biased = flows.fit_loglog(u - 1.5 * (np.log(u) - 1 / u) - 2 * u**-0.5, u)  # all alike: no spread, only drift
    x, y = (np.log(u) - 1 / u)[:, 0], (1.5 * (np.log(u) - 1 / u) + 2 * u**-0.5)[:, 0]
    moved = 2.5 * abs(np.polyfit(x[:5], y[:5], 1)[0] - np.polyfit(x[4:], y[4:], 1)[0])
    assert biased.interval[1] - biased.interval[0] == pytest.approx(2 * moved, rel=1e-6)
    assert moved == pytest.approx(abs(biased.estimate - 1.5), rel=0.15) and moved > 0.1, "it is about the bias"


def test_plain_descent_is_late_the_flow():
    u = np.linspace(1, 20, 500)
    at = np.interp(math.log(2000.0), flows.reduced_log_time(u, 2, math.log(4)), u)
    assert one_weight.scalar_descent(2, [20_000], 0.1)[0] == pytest.approx(at, abs=0.01)
    path = flows.descent(lambda theta: theta**2, torch.ones(1, 1, dtype=F64), [10, 500], 0.1)
    np.testing.assert_allclose(path.margin[:, 0], one_weight.scalar_descent(2, [10, 500], 0.1), rtol=1e-12)
    np.testing.assert_allclose(path.log_time[:, 0], np.log([1, 50]), atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_polyak_steps_are_the_flow_up_to_a_step(k):
    path = flows.descent(lambda theta: theta**k, torch.ones(1, 1, dtype=F64), [300], 0.1, scale="polyak")
    u = np.linspace(1, path.margin[0, 0], 50)
    assert path.log_time[0, 0] == pytest.approx(flows.reduced_log_time(u, k, math.log(k**2))[-1], abs=0.1)
    assert path.log_inv_loss[0, 0] > 25


def test_normalised_steps_have_their_length():
    path = flows.descent(lambda theta: theta, torch.ones(1, 1, dtype=F64), [1000, 2000], 1.0, scale="normalised")
    np.testing.assert_allclose(path.norm[:, 0], [1001, 2001])
    np.testing.assert_allclose(path.length[:, 0], [1000, 2000])
    with pytest.raises(ValueError, match="choose plain, polyak or normalised"):
        flows.descent(lambda theta: theta, torch.ones(1, 1, dtype=F64), [1], 1.0, scale="unit")


def test_with_margin_finds_the_place():
    ends = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=F64), torch.tensor([[-1.0, 1.0], [0.3, -1.0]], dtype=F64)
    found = flows.with_margin(lambda theta: theta[:, :1] + theta[:, 1:], *ends, 1e-3)
    torch.testing.assert_close(found.sum(1), torch.full((2,), 1e-3, dtype=F64), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2, dtype=F64))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: flows.reduced_log_time([2.0, 1.0], 2), "positive and increase"),
        (lambda: flows.reduced_log_time([1.0, 1.0], 2), "positive and increase"),
        (lambda: flows.reduced_log_time([0.0, 1.0], 2), "positive and increase"),
        (lambda: flows.fit_loglog(np.ones(5), np.ones(5)), "points ≥ 4, networks ≥ 2"),
        (lambda: flows.fit_loglog(np.ones((3, 2)), np.ones((3, 2))), "points ≥ 4, networks ≥ 2"),
    ],
)
def test_bad_input_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize("bend", [5.0, 50.0])
def test_a_step_over_a_kink_is_taken_again(bend):
    """Before the kink the rate is 1, behind it 1/(1 + bend): one long step across would end far beyond its target."""
    margin = lambda theta: theta + bend * torch.relu(theta - 6)  # noqa: E731
    path = flows.flow(margin, torch.ones(1, 1, dtype=F64), [30.0], tol=1e-6, floor=1e-6)
    assert path.log_inv_loss.item() == pytest.approx(30, abs=1e-3)
    assert path.norm.item() == pytest.approx((30 + 6 * bend) / (1 + bend), abs=1e-4)  # where the margin is 30


def test_networks_that_flow_together_flow_as_alone():
    """Four networks of two weights, of sizes 1 to 8: nothing is shared but the clock of the program."""
    start = torch.tensor([[1.0, 0.5], [2.0, 1.0], [4.0, 2.0], [8.0, 1.0]], dtype=F64) / 2
    margin = lambda theta: theta[:, :1] * theta[:, 1:] + theta[:, :1]  # noqa: E731
    together = flows.flow(margin, start, [3.0, 40.0], tol=1e-6, floor=1e-4)
    for i in range(4):
        alone = flows.flow(margin, start[i : i + 1], [3.0, 40.0], tol=1e-6, floor=1e-4)
        np.testing.assert_allclose(together.theta[:, i], alone.theta[:, 0], rtol=1e-10)


def test_a_start_is_no_further_than_it_must_be():
    """Right on every example from a loss of log 2 over their number on; half of that is asked for, and little more."""
    draw = torch.Generator().manual_seed(1)
    margins = flows.mlp_margins((2, 8, 1), *flows.separable(2, 12, 2, gap=1.0, generator=draw))
    theta, done = flows.separated_start((2, 8, 1), 2, margins, generator=draw)
    loss = flows.gradient(margins, theta)[0].exp()
    assert done.all() and (loss < math.log(2) / 24).all() and (loss > 0.25 * math.log(2) / 24).all()


def test_a_start_is_looked_for_in_steps_of_a_fiftieth_of_the_norm():
    margins = flows.mlp_margins((2, 5, 1), *flows.separable(3, 6, 2, gap=0.2, generator=generator(0, "cpu")))
    theta = [flows.separated_start((2, 5, 1), 3, margins, steps=n, generator=generator(1, "cpu"))[0] for n in (1, 2)]
    moved = (theta[1] - theta[0]).norm(dim=1) / theta[0].norm(dim=1)
    assert moved.tolist() == pytest.approx([0.02] * 3)


def test_a_start_is_there_where_the_mean_loss_is_log_2_over_twice_the_examples():
    margins = flows.mlp_margins((2, 16, 1), *flows.separable(6, 8, 2, gap=0.5, generator=generator(2, "cpu")))
    theta, done = flows.separated_start((2, 16, 1), 6, margins, generator=generator(3, "cpu"))
    reached = flows.gradient(margins, theta)[0][done]
    edge = math.log(math.log(2) / 16)
    assert done.any() and (reached < edge).all() and (reached > edge - 0.3).all(), "and not much later"


def test_with_margin_takes_ends_of_any_length():
    right = torch.tensor([[3.0, 0.0], [0.5, 0.0]], dtype=torch.float64)
    wrong = torch.tensor([[0.0, 0.1], [0.0, 7.0]], dtype=torch.float64)
    found = flows.with_margin(lambda theta: theta, right, wrong, 0.6)
    assert found.flatten().tolist() == pytest.approx([0.6, 0.8, 0.6, 0.8])
