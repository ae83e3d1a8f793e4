"""Descent on one weight: false stops where predicted, and Adam against torch and its derived speed."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbutils.chapters import one_weight


@pytest.mark.parametrize(("rate", "naive"), [(1, False), (8, False), (100, False), (100, True)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rounding_stops_descent_where_predicted(dtype, rate, naive):
    predicted = one_weight.predicted_stop(dtype, rate, naive=naive)
    assert one_weight.first_fixed(dtype, rate, naive=naive) == pytest.approx(predicted, abs=0.03)
    if dtype == np.float16:
        stop, _ = one_weight.descend_to_stop(dtype, rate, naive=naive, start=predicted - 0.5)
        assert stop == pytest.approx(predicted, abs=0.2)


def test_still_moving_is_said():
    with pytest.raises(RuntimeError, match="still moving after 10 steps"):
        one_weight.descend_to_stop(np.float64, 1, naive=False, start=1, most=10)


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_adam_is_torch_s(eps):
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=0.01, eps=eps)
    for _ in range(50):
        optimizer.zero_grad()
        torch.nn.functional.softplus(-theta).backward()
        optimizer.step()
    assert one_weight.adam(50, 0.01, eps=eps)[-1] == pytest.approx(theta.item(), rel=1e-9)


@given(st.floats(1e-6, 1), st.floats(0.5, 0.95), st.floats(0.96, 0.9999))  # beyond, rounding at the end of the bracket
def test_adams_speed_solves_its_equation(rate, b1, b2):
    """δ (1 − β₁e^δ) √(1 − β₂) = η (1 − β₁) √(1 − β₂e^2δ), below ½ log(1/β₂) and of one root there."""
    d = one_weight.adam_speed(rate, (b1, b2))
    assert 0 < d <= np.log(1 / b2) / 2
    left = d * (1 - b1 * np.exp(d)) * np.sqrt(1 - b2)
    for side in (-1, 1):  # where the right side, which falls, crosses the left one
        near = d * (1 + side * 1e-6)
        right = rate * (1 - b1) * np.sqrt(max(0.0, 1 - b2 * np.exp(2 * near)))
        assert side * (right - near * (1 - b1 * np.exp(near)) * np.sqrt(1 - b2)) <= 1e-5 * left, side


@pytest.mark.parametrize("rate", [1e-4, 1e-3])
def test_adam_without_epsilon_has_its_speed(rate):
    path = one_weight.adam(40_000, rate, eps=0.0)
    assert (path[-1] - path[20_000]) / 19_999 == pytest.approx(one_weight.adam_speed(rate), rel=0.02)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_plain_descent_takes_the_gradient_of_its_loss(degree):
    theta, wanted = torch.tensor(0.7, dtype=torch.float64, requires_grad=True), []
    for _ in range(4):
        (gradient,) = torch.autograd.grad(torch.nn.functional.softplus(-(theta**degree)), theta)
        theta = (theta - 0.5 * gradient).detach().requires_grad_()
        wanted.append(theta.item() ** degree)
    found = one_weight.scalar_descent(degree, [1, 2, 4], 0.5, theta=0.7)
    assert found == pytest.approx(np.array(wanted)[[0, 1, 3]], rel=1e-12)


@pytest.mark.parametrize("naive", [True, False])
def test_residual_where_nothing_rounds(naive):
    for theta in (0.0, 0.5, 3.0):
        found = one_weight.residual(np.float64(theta), naive=naive)
        assert found == pytest.approx(1 / (1 + math.exp(theta)), rel=1e-12)


def test_the_speed_of_adam_is_that_of_its_usual_betas():
    assert one_weight.adam_speed(1e-3) == one_weight.adam_speed(1e-3, (0.9, 0.999))
