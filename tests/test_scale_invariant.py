"""Scale-invariant networks: the exact laws of their growth under plain steps and momentum."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.optimization import Adafactor

from nbutils.devices import generator
from nbutils.experiments import scale_invariant as si

SGD = torch.optim.SGD


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_loss_does_not_see_the_scale_of_either_matrix(seed, first, second):
    data = si.problem(2, samples=16, generator=generator(seed, "cpu"))
    scaled = [c * w for c, w in zip((first, second), data.weights, strict=True)]
    expected = si.losses(data.weights, data.x, data.y)
    torch.testing.assert_close(si.losses(scaled, data.x, data.y), expected, rtol=1e-9, atol=0)


def test_epsilon_breaks_it():
    data = si.problem(2, samples=16, generator=generator(0, "cpu"))
    halved = [w / 100 for w in data.weights]
    apart = si.losses(halved, data.x, data.y, eps=1e-3) - si.losses(data.weights, data.x, data.y, eps=1e-3)
    assert (apart.abs() > 1e-3).all()


@pytest.mark.parametrize("batch", [None, 4])
def test_plain_steps_are_orthogonal_and_obey_the_quartic_law(batch):
    rng = generator(1, "cpu")
    data, eta = si.problem(3, samples=32, generator=rng), 0.3
    run = si.record_steps(
        data.weights, si.problem_gradients(data, batch=batch, generator=rng), lambda p: SGD(p, lr=eta), 40
    )
    assert all(part.shape == (40, 2, 3) for part in run)
    assert abs(run.gradient_cos()).max() < 1e-12
    sphere = run.gradient * run.before  # G²
    np.testing.assert_allclose(run.after**2, run.before**2 + 2 * eta**2 * sphere + (eta**2 * sphere / run.before) ** 2)


@pytest.mark.parametrize("turn", [0.0, 60.0, 90.0, 180.0])
def test_cosines_of_a_step_at_a_known_angle(turn):
    """A parameter of length 5, a step of length 2 that is turned from it: descent goes against the gradient."""
    theta, angle = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64), np.deg2rad(turn)
    unit, across = theta / 5, torch.tensor([[[-0.8, 0.6]]], dtype=torch.float64)
    gradient = -4 * (np.cos(angle) * unit + np.sin(angle) * across)

    def fill(weights):
        weights[0].grad = gradient.clone()

    run = si.record_steps([theta], fill, lambda p: SGD(p, lr=0.5), 1)
    assert run.gradient_cos().item() == pytest.approx(-np.cos(angle), abs=1e-12)
    assert [part.item() for part in run.total()] == pytest.approx(
        [25, 29 + 20 * np.cos(angle), 4, 10 * np.cos(angle), -20 * np.cos(angle), 16])  # fmt: skip


def test_momentum_has_its_inner_product_from_the_step_before():
    rng = generator(4, "cpu")
    start = [torch.randn(2, 8, 8, generator=rng, dtype=torch.float64)]
    fill = si.random_gradients(orthogonal=True, generator=rng)
    run = si.record_steps(start, fill, lambda p: SGD(p, lr=0.01, momentum=0.8), 60)
    np.testing.assert_allclose(run.inner[1:], 0.8 * (run.inner[:-1] + run.step[:-1]), atol=1e-12)


def test_runs_do_not_touch_each_other_nor_the_start():
    rng = generator(5, "cpu")
    data = si.problem(3, samples=16, generator=rng)
    kept = [w.clone() for w in data.weights]
    both = si.record_steps(
        data.weights, si.problem_gradients(data, generator=rng), lambda p: torch.optim.Adam(p, lr=0.1), 10
    )
    assert all(torch.equal(a, b) for a, b in zip(kept, data.weights, strict=True))
    one = si.Problem(data.x[1:2], data.y[1:2], [w[1:2] for w in data.weights])
    alone = si.record_steps(
        one.weights, si.problem_gradients(one, generator=rng), lambda p: torch.optim.Adam(p, lr=0.1), 10
    )
    np.testing.assert_allclose(alone.after[..., 0], both.after[..., 1], rtol=1e-9)


def test_noise_across_is_the_gradient_of_a_scale_invariant_loss():
    theta = torch.randn(1, 3, 4, generator=generator(6, "cpu"), dtype=torch.float64).requires_grad_()
    si.random_gradients(orthogonal=True, generator=generator(7, "cpu"))([theta])
    g = torch.randn(1, 3, 4, generator=generator(7, "cpu"), dtype=torch.float64)
    (by_autograd,) = torch.autograd.grad((g * theta).sum() / theta.norm(), theta)
    torch.testing.assert_close(theta.grad, by_autograd)


def test_products_of_float32_are_summed_in_float64():
    """A million entries: their squares are rounded one by one, which averages out; a float32 sum has 7 digits."""
    rng = generator(0, "cpu")
    start = torch.rand(1, 1000, 1000, generator=rng)
    found = si.record_steps([start], si.random_gradients(generator=rng), lambda theta: SGD(theta, lr=0.0), 1)
    assert found.before[0, 0, 0] == pytest.approx(float((start.double() ** 2).sum()), rel=1e-9)
    assert found.inner[0, 0, 0] == 0 and found.step[0, 0, 0] == 0


@pytest.mark.parametrize("step", [1, 9, 150, 9_999, 10_001, 10**6])  # from 10,000 on Adafactor's own rate falls
@pytest.mark.parametrize("relative", [True, False])
def test_adafactors_rate_is_that_of_transformers_run_by_run(step, relative):
    group = {"relative_step": relative, "scale_parameter": True, "warmup_init": False, "eps": (1e-30, 1e-3), "lr": 0.5}
    sizes = [1e-5, 0.3, 7.0]
    ours = si.RunwiseAdafactor._get_lr(group, {"step": step, "RMS": torch.tensor(sizes, dtype=torch.float64)})
    theirs = [Adafactor._get_lr(group, {"step": step, "RMS": size}) for size in sizes]
    assert ours.tolist() == pytest.approx(theirs, rel=1e-12)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("options", [{}, {"lr": 1.0, "relative_step": False}])
def test_adafactor_treats_runs_as_it_treats_one_alone(options):
    rng = generator(8, "cpu")
    start = [size * torch.randn(3, 6, 5, generator=rng, dtype=torch.float64) for size in (1.0, 1e-5)]  # ε₂ = 1e-3
    sizes = np.random.default_rng(0).lognormal(size=(20, 3))
    noise = [g for _ in range(20) for g in torch.randn(2, 3, 6, 5, generator=rng, dtype=torch.float64)]

    def given(runs):
        rows = iter(zip(noise[::2], noise[1::2], sizes, strict=True))

        def fill(theta):
            *parts, size = next(rows)
            for w, g in zip(theta, parts, strict=True):
                w.grad = (g * torch.as_tensor(size)[:, None, None])[runs].clone()

        return fill

    together = si.record_steps(start, given(slice(None)), lambda p: si.RunwiseAdafactor(p, **options), 20)
    for r in range(3):
        own = [w[r : r + 1] for w in start]
        alone = si.record_steps(own, given(slice(r, r + 1)), lambda p: Adafactor(p, **options), 20)
        np.testing.assert_allclose(together.after[..., r], alone.after[..., 0], rtol=1e-10)
