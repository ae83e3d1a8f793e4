"""Relative steps follow their law, and orthogonal walks are orthogonal."""

import numpy as np
import pandas as pd
import pytest
import torch

from nbutils.experiments import growth
from normgrowth.norms import NormTracker

COLUMNS = ("step_norm", "inner", "projection", "grad_norm")


def relative_walk(alpha, u, kappa, steps, warmup=1, rho=1.0):
    """A table of the recursion itself, with constant u and κ, and its rates."""
    rate = alpha / np.sqrt(np.maximum(np.arange(steps), warmup))
    norm, length, inner = [rho], [np.nan], [np.nan]
    for t in range(1, steps + 1):
        s, cos = rate[t - 1] * u, kappa / np.sqrt(t)
        length.append(s * norm[-1])
        inner.append(s * cos * norm[-1] ** 2)
        norm.append(norm[-1] * np.sqrt(1 + s * s + 2 * s * cos))
    table = pd.DataFrame({"step": range(steps + 1), "layer": "a", "norm": norm, "step_norm": length, "inner": inner})
    return growth.total(table.assign(projection=0.0, grad_norm=1.0)), np.append(np.nan, rate)


@pytest.mark.parametrize(("alpha", "u", "kappa"), [(1, 1, 0), (0.5, 0.9, -0.1), (2, 0.5, 0.3), (1, 0.8, 0.6)])
def test_constant_relative_steps_follow_the_law(alpha, u, kappa):
    table, rate = relative_walk(alpha, u, kappa, steps=20_000)
    exponent = np.log10(table["norm"][20_000] / table["norm"][2_000])
    assert exponent == pytest.approx(alpha**2 * u**2 / 2 + alpha * u * kappa, abs=2e-3)
    constants = growth.step_constants(table, rate, 2_000, 20_000)
    assert constants == pytest.approx((u, kappa))


def test_layers_together_are_the_whole():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    tracker = NormTracker(model.named_parameters(), gradients=True)
    optimizer, cosines = torch.optim.Adam(model.parameters(), 0.1), []
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        theta, gradient = (torch.cat([x.detach().flatten().double() for x in part]) for part in (
            model.parameters(), [p.grad for p in model.parameters()]))  # fmt: skip
        cosines.append(float(theta @ gradient / theta.norm() / gradient.norm()))
        with tracker.step():
            optimizer.step()
    rows = tracker.history()
    together, whole = growth.total(rows[rows["layer"] != "total"]), rows[rows["layer"] == "total"]
    for column in ("norm", "alignment", *COLUMNS):
        np.testing.assert_allclose(together[column], whole[column], rtol=1e-9)
    np.testing.assert_allclose(together["gradient_cos"][1:], cosines, rtol=1e-9)


@pytest.mark.parametrize(("pull", "turn"), [(0.0, 0.0), (2.0, 0.0), (0.0, 3.0), (1.5, -2.0)])
def test_the_orthogonal_walk_takes_the_steps_of_its_formula(pull, turn):
    """δ = lr (I − uuᵀ)(pull e₁ + turn Ju + noise)/ρ, by matrices, with the same noise."""
    n, steps, lr = 4, 6, 0.4
    options = dict(n=n, steps=steps, lr=lr, pull=pull, turn=turn)
    walk = growth.orthogonal_walk(**options, walks=2, generator=torch.Generator().manual_seed(3))
    rng, quarter = torch.Generator().manual_seed(3), np.kron(np.eye(2), [[0, -1], [1, 0]])
    theta = np.array([[0.0, 1.0, 0.0, 0.0]] * 2)
    for t in range(steps):
        noise = torch.randn(2, n, dtype=torch.float64, generator=rng).numpy()
        for i, before in enumerate(theta):
            rho = np.linalg.norm(before)
            u = before / rho
            force = noise[i] + turn * quarter @ u + pull * np.eye(n)[0]
            theta[i] = before + lr / rho * (np.eye(n) - np.outer(u, u)) @ force
        np.testing.assert_allclose(walk.theta[:, t + 1], theta, rtol=1e-9, atol=1e-12)
    assert walk.worst_alignment < 1e-12


def test_constants_are_means_over_log_time():
    """κ = ln t: its mean over ln t, from ln 100 to ln 10,000, is the mean of the two ends."""
    t = np.arange(10_001.0)
    alignment = np.log(np.maximum(t, 1)) / np.sqrt(np.maximum(t, 1)) / 20
    table = pd.DataFrame({"step": t, "norm": 1.0, "step_norm": 0.5, "alignment": alignment})
    found = growth.step_constants(table, np.ones(len(t)), 100, 10_000)
    assert found.kappa == pytest.approx((np.log(100) + np.log(10_000)) / 2 / 20, rel=1e-2)
