"""Flows against exact solutions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import integrate, stats

from nbutils.devices import generator
from nbutils.experiments import flows
from nbutils.experiments.homogeneous import HomogeneousMLP

F64 = torch.float64


def log_time(u, k):
    """log t where θ^k = u on the flow of one weight from u = t = 1: k²(t − 1) = ∫ (1 + e^s) s^(2/k − 2) ds."""
    return math.log(1 + integrate.quad(lambda s: (1 + math.exp(s)) * s ** (2 / k - 2), 1, u, epsrel=1e-11)[0] / k**2)


@given(st.floats(-700, 700))
@example(21.0)  # above the threshold that torch has by itself
def test_the_loss_of_a_margin_is_its_logarithm(q):
    expected = math.log(max(-q, 0) + math.log1p(math.exp(-abs(q))) if q < 30 else math.exp(-q))
    assert flows._log_loss(torch.tensor([q, q], dtype=F64)).item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_gradient_survives_where_the_loss_underflows():
    ell, grad, q = flows.log_loss_gradient(lambda theta: theta, torch.tensor([[1e5, 2e5]], dtype=F64))
    assert q.shape == (1, 2) and ell.item() == pytest.approx(-1e5 - math.log(2))
    torch.testing.assert_close(grad, torch.tensor([[-1.0, 0.0]], dtype=F64))


def test_mlp_margins_are_those_of_the_networks():
    rng, y = generator(0, "cpu"), torch.tensor([1.0, -1.0, 1.0], dtype=F64)
    nets, x = [HomogeneousMLP((4, 5, 1), generator=rng) for _ in "ab"], torch.randn(3, 4, generator=rng, dtype=F64)
    theta = torch.stack([torch.cat([w.detach().flatten() for w in net.weights]) for net in nets])
    wanted = torch.stack([y * net(x)[:, 0] for net in nets])
    torch.testing.assert_close(flows.mlp_margins((4, 5, 1), x, y)(theta), wanted)


def test_separable_points_are_moved_from_a_plane_through_the_middle():
    near, far = (flows.separable_data(1, 400, 3, gap=gap, generator=generator(4, "cpu")) for gap in (0.0, 2.0))
    moved = (far[0] - near[0])[0] * near[1][0][:, None]  # the same vector for all, of the length of the gap
    torch.testing.assert_close(moved, moved[:1].expand(400, 3))
    assert moved[0].norm() == pytest.approx(2) and (near[0][0] @ moved[0] * near[1][0] > 0).all()
    assert 100 < int((far[1] > 0).sum()) < 300


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_flow_of_one_weight_is_the_reduced_flow(k):
    path = flows.flow(lambda theta: theta**k, torch.ones(1, 1, dtype=F64), [2, 5, 30, 90], tol=1e-7, shortest_step=1e-3)
    np.testing.assert_allclose(path.log_time[:, 0], [log_time(u, k) for u in path.margin[:, 0]], atol=1e-4)
    np.testing.assert_allclose(path.length, path.norm - 1, rtol=1e-4)
    np.testing.assert_allclose(path.log_inv_loss[:, 0], [2, 5, 30, 90], rtol=1e-4)


def test_the_interval_of_the_coefficient_is_students_and_what_the_window_moves():
    """Three networks of p = 1, 1.5 and 2.3: exact laws have no drift; a bias s·u^−½ has."""
    u, p = np.geomspace(10, 50, 9)[:, None] * np.ones(3), np.array([1.0, 1.5, 2.3])
    found = flows.fit_loglog(u - p * (np.log(u) - 1 / u), u)
    wanted = stats.t.interval(0.999, 2, p.mean(), stats.sem(p))
    np.testing.assert_allclose(found, [p.mean(), *wanted, 3], rtol=1e-6)
    biased = flows.fit_loglog(u - 1.5 * (np.log(u) - 1 / u) - 2 * u**-0.5, u)  # all alike: no spread, only drift
    x, y = (np.log(u) - 1 / u)[:, 0], (1.5 * (np.log(u) - 1 / u) + 2 * u**-0.5)[:, 0]
    moved = 2.5 * abs(np.polyfit(x[:5], y[:5], 1)[0] - np.polyfit(x[4:], y[4:], 1)[0])
    assert biased.high - biased.low == pytest.approx(2 * moved, rel=1e-6)
    assert moved == pytest.approx(abs(biased.value - 1.5), rel=0.15) and moved > 0.1, "it is about the bias"


def test_plain_steps_are_those_of_torch():
    theta = torch.tensor([1.0], dtype=F64, requires_grad=True)
    optimizer = torch.optim.SGD([theta], 0.1)
    for _ in range(10):
        optimizer.zero_grad()
        torch.nn.functional.softplus(-(theta**2)).sum().backward()
        optimizer.step()
    path = flows.descent(lambda theta: theta**2, torch.ones(1, 1, dtype=F64), [10, 500], 0.1)
    assert path.norm[0, 0] == pytest.approx(theta.item(), rel=1e-12)
    np.testing.assert_allclose(path.log_time[:, 0], np.log([1, 50]), atol=1e-12)


def test_normalised_steps_have_their_length():
    """Two networks, of two weights each, on straight lines away from 0."""
    start = torch.tensor([[0.6, 0.8], [3.0, 4.0]], dtype=F64)
    path = flows.descent(lambda theta: theta @ start[:1].mT, start, [1000, 2000], 1.0, normalised=True)
    np.testing.assert_allclose(path.norm, [[1001, 1005], [2001, 2005]])
    np.testing.assert_allclose(path.length, [[1000, 1000], [2000, 2000]])


@pytest.mark.parametrize("bend", [5.0, 50.0])
def test_a_step_over_a_kink_is_taken_again(bend):
    """Before the kink the rate is 1, behind it 1/(1 + bend): one long step across would end far beyond its target."""
    margin = lambda theta: theta + bend * torch.relu(theta - 6)  # noqa: E731
    path = flows.flow(margin, torch.ones(1, 1, dtype=F64), [30.0], tol=1e-6, shortest_step=1e-6)
    assert path.log_inv_loss.item() == pytest.approx(30, abs=1e-3)
    assert path.norm.item() == pytest.approx((30 + 6 * bend) / (1 + bend), abs=1e-4)  # where the margin is 30


def test_networks_that_flow_together_flow_as_alone():
    """Four networks of two weights, of sizes 1 to 8: nothing is shared but the clock of the program."""
    start = torch.tensor([[1.0, 0.5], [2.0, 1.0], [4.0, 2.0], [8.0, 1.0]], dtype=F64) / 2
    margin = lambda theta: theta[:, :1] * theta[:, 1:] + theta[:, :1]  # noqa: E731
    together = flows.flow(margin, start, [3.0, 40.0], tol=1e-6, shortest_step=1e-4)
    for i in range(4):
        alone = flows.flow(margin, start[i : i + 1], [3.0, 40.0], tol=1e-6, shortest_step=1e-4)
        np.testing.assert_allclose(together.theta[:, i], alone.theta[:, 0], rtol=1e-10)


def test_a_start_is_there_where_the_mean_loss_is_log_2_over_twice_the_examples():
    margins = flows.mlp_margins((2, 16, 1), *flows.separable_data(6, 8, 2, gap=0.5, generator=generator(2, "cpu")))
    theta, done = flows.separated_start((2, 16, 1), 6, margins, generator=generator(3, "cpu"))
    reached = flows.log_loss_gradient(margins, theta)[0][done]
    edge = math.log(math.log(2) / 16)
    assert done.any() and (reached < edge).all() and (reached > edge - 0.3).all(), "and not much later"
