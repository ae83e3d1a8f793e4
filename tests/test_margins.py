"""θ·∇L of a homogeneous network: by example, by batch, on a ray and in training."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.special import expit, logit

from nbutils.devices import generator
from nbutils.experiments import margins
from nbutils.experiments.homogeneous import HomogeneousMLP

UNIT = st.lists(st.floats(-100, 100).filter(lambda m: abs(m) > 1e-3), min_size=1, max_size=12)


def projection(m, k):
    """θ·∇L of an example with margin m."""
    return -k * m * expit(-m)


def case(k, n=30, seed=0):
    rng = generator(seed, "cpu")
    net = HomogeneousMLP((4, *[12] * (k - 1), 1), generator=rng)
    x = torch.randn(n, 4, generator=rng, dtype=torch.float64)
    return net, x, (torch.rand(n, generator=rng) < 0.5).double()


@given(st.floats(0, 700))
def test_right_examples_pull_by_at_most_the_largest_pull(m):
    assert -projection(m, 1) <= margins.LARGEST_PULL * (1 + 1e-12)
    assert -projection(1 + margins.LARGEST_PULL, 1) == pytest.approx(margins.LARGEST_PULL)


@given(UNIT, st.integers(1, 6))
def test_equilibrium_is_the_only_change_of_sign(unit, k):
    unit = np.array(unit)
    rho = margins.equilibrium(unit, k)
    right, wrong = unit[unit > 0].sum(), -unit[unit < 0].sum()
    assume(abs(right - wrong) > 1e-9 * (right + wrong))
    assert (rho > 0) == (right > wrong) and (rho == np.inf) == (wrong == 0)
    reference = rho if 0 < rho < np.inf else 1.0
    for scale in (1e-3, 0.5, 0.999, 1.001, 2.0, 1e3):
        s = (scale * reference) ** k
        if (abs(s * unit) < 300).all():
            grows = projection(s * unit, k).sum() < 0
            assert grows == (rho > scale * reference)


@given(UNIT, st.floats(1e-3, 100), st.integers(1, 6))
def test_confidence_equals_weighted_accuracy_there(unit, wrong, k):
    """The right examples together outweigh the wrong ones, of which there is one at least."""
    unit = np.array([*unit, -wrong])
    unit = np.append(unit, max(-unit.sum(), 0) + 1)
    rho = margins.equilibrium(unit, k)
    confidence = np.average(expit(rho**k * abs(unit)), weights=abs(unit))
    assert confidence == pytest.approx(unit[unit > 0].sum() / abs(unit).sum(), abs=1e-9)


@given(UNIT, st.integers(1, 6), st.data())
def test_turning_a_wrong_example_right_raises_it(unit, k, data):
    unit = np.array(unit)
    assume((unit < 0).any())
    i = data.draw(st.sampled_from(list(np.flatnonzero(unit < 0))))
    turned = unit.copy()
    turned[i] *= -1
    before, after = margins.equilibrium(unit, k), margins.equilibrium(turned, k)
    assert after > before or before == after == 0


@given(st.integers(1, 99), st.floats(1e-100, 1e100), st.integers(1, 6))
def test_logit_law_at_a_common_margin(right, size, k):
    unit = size * np.where(np.arange(100) < right, 1, -1)
    wanted = max(0.0, logit(right / 100) / size) ** (1 / k)
    assert margins.equilibrium(unit, k) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("unit", "said"), [([], "at least one"), ([0, 0], "at least one"), ([1, np.nan], "finite")])
def test_equilibrium_names_bad_margins(unit, said):
    with pytest.raises(ValueError, match=said):
        margins.equilibrium(unit, 1)


@pytest.mark.parametrize("k", range(1, 7))
def test_autograd_agrees(k):
    net, x, y = case(k)
    c = torch.linspace(0.2, 2, len(x), dtype=torch.float64)
    f, value = margins.measured_projection(net, x, y, c)
    wanted = []
    for i in range(len(x)):  # plain backward passes
        theta = [(c[i] * weight).detach().requires_grad_() for weight in net.weights]
        copy = HomogeneousMLP([4, *[12] * (k - 1), 1])
        copy.weights = torch.nn.ParameterList(theta)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(copy(x[i]).squeeze(), y[i])
        gradients = torch.autograd.grad(loss, list(copy.weights))
        wanted.append(sum(float((w.detach() * g).sum()) for w, g in zip(copy.weights, gradients, strict=True)))
    np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(value, projection((2 * y - 1) * f, k), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("k", [1, 3])
def test_measured_equilibrium(k):
    net, x, y = case(k)
    norm = sum(float(w.detach().square().sum()) for w in net.weights) ** 0.5
    for label in (y, 1 - y):
        unit = ((2 * label - 1) * net(x).squeeze(-1)).detach().numpy() / norm**k
        found, wanted = margins.measured_equilibrium(net, x, label), margins.equilibrium(unit, k)
        assert found == pytest.approx(wanted, rel=1e-9)
    right = (net(x).squeeze(-1) > 0).double()
    assert margins.measured_equilibrium(net, x, right) == np.inf
    assert margins.measured_equilibrium(net, x, 1 - right) == 0


def test_descent_is_gradient_descent():
    nets = [case(2, seed=s)[0] for s in (1, 2)]
    _, x, y = case(2)
    seen = margins.descend(nets, x, y, rate=0.1, times=[0, 1, 3])
    theta = [w.detach().clone().requires_grad_() for w in nets[1].weights]
    for _ in range(3):
        f = (torch.relu(x @ theta[0].mT) @ theta[1].mT).squeeze(-1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(f, y)
        theta = [
            (w - 0.1 * g).detach().requires_grad_()
            for w, g in zip(theta, torch.autograd.grad(loss, theta), strict=True)
        ]
    start = case(2, seed=1)[0]
    assert seen.equilibria(2)[0, 0] == pytest.approx(margins.measured_equilibrium(start, x, y), rel=1e-9)
    assert seen.norm[-1, 1] == pytest.approx(sum(float(w.square().sum()) for w in theta) ** 0.5)
    assert seen.margins.shape == (3, 2, 30)
    np.testing.assert_array_equal(seen.accuracy, (seen.margins > 0).sum(2) / 30)
