"""One weight: false stops where predicted, and Adam's speed against its equation and torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbutils.chapters import one_weight


@pytest.mark.parametrize(("rate", "naive"), [(1, False), (8, False), (100, False), (100, True)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_step_changes_nothing_from_the_predicted_stop_on(dtype, rate, naive):
    """1 − σ(θ) = 1/(1 + e^θ), by that subtraction or as e^−θ/(1 + e^−θ), in the arithmetic of the format."""

    def moves(at):
        theta, small = dtype(at), np.exp(-dtype(at))
        residual = dtype(1) - dtype(1) / (dtype(1) + small) if naive else small / (dtype(1) + small)
        return theta + dtype(rate) * residual != theta

    stop = one_weight.predicted_stop(dtype, rate, naive=naive)
    assert moves(stop - 0.03) and not moves(stop + 0.03)


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


def test_torchs_adam_without_epsilon_has_that_speed():
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer, at = torch.optim.Adam([theta], lr=0.01, betas=(0.9, 0.99), eps=0.0), []
    for _ in range(3000):
        theta.grad = -torch.exp(-theta.detach())
        optimizer.step()
        at.append(theta.item())
    assert (at[-1] - at[1999]) / 1000 == pytest.approx(one_weight.adam_speed(0.01, (0.9, 0.99)), rel=0.02)


def test_the_speed_of_adam_is_that_of_its_usual_betas():
    assert one_weight.adam_speed(1e-3) == one_weight.adam_speed(1e-3, (0.9, 0.999))
