"""Descent on one weight: false stops where predicted, and Adam against torch and its derived speed."""

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("rate", [1e-4, 1e-3])
def test_adam_without_epsilon_has_its_speed(rate):
    path = one_weight.adam(40_000, rate, eps=0.0)
    assert (path[-1] - path[20_000]) / 19_999 == pytest.approx(one_weight.adam_speed(rate), rel=0.02)
