"""Optimizers, schedules, the training loop and its record."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from nbutils.devices import generator
from nbutils.experiments.counting import Classifier
from nbutils.models import CausalLM
from nbutils.optimizers import OPTIMIZERS, optimizer
from nbutils.shared_runs.recipes_t5 import small_t5
from nbutils.training import batch_loss, noise_gradients, train
from normgrowth.layers import layer_of

BATCHES = [torch.randint(0, 13, (6, 9), generator=generator(i, "cpu")) for i in range(3)]


def model(seed=0, dtype=torch.float64, **options):
    return CausalLM(13, 8, 2, 2, 8, generator=generator(seed, "cpu"), **options).to(dtype)


def run(steps=12, net=None, **options):
    return train(net or model(), BATCHES, steps=steps, **{"device": "cpu", "progress": False} | options)


# optimizers and schedules


def gradients_of(*shapes, seed=0):
    rng = generator(seed, "cpu")
    parameters = [nn.Parameter(torch.randn(*shape, generator=rng, dtype=torch.float64)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=rng, dtype=torch.float64)
    return parameters


@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_the_first_step_of_adafactor_is_relative_to_the_parameter(size):
    """A vector moves by η max(1e-3, RMS) against the sign of each of its gradients; the rest is of transformers."""
    (theta,) = gradients_of((5,))
    before = theta.detach().mul_(size).clone()
    optimizer("adafactor", [theta], 0.3).step()
    step = 0.3 * max(1e-3, before.square().mean().sqrt()) * theta.grad.sign()
    torch.testing.assert_close(theta.detach(), before - step, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("layout", ["transposed", "every second column"])
def test_adamw_and_noise_are_right_in_any_layout(layout):
    """The fused kernel on CPU takes gradient and moments to lie in memory as their parameter does."""
    data = torch.arange(12.0).reshape(2, 6)
    ours, plain = (nn.Parameter(x.mT if layout == "transposed" else x[:, ::2]) for x in (data.clone(), data.clone()))
    ours.grad = plain.grad = torch.arange(float(ours.numel())).reshape(ours.shape)
    optimizer("adamw", [ours], 0.1, eps=1.0).step()
    torch.optim.AdamW([plain], 0.1, eps=1.0, weight_decay=0.0, fused=False).step()
    assert torch.equal(ours, plain)
    noise_gradients([ours], generator(0, "cpu"))
    assert ours.grad.stride() == torch.empty_like(ours).stride()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown optimizer 'adam': choose one of sgd, adamw, adafactor"):
        optimizer("adam", [])
    with pytest.raises(ValueError, match="unknown gradients 'none': choose one of loss, noise"):
        run(gradients="none")


# the loop


def test_loss_of_each_form_of_batch():
    net, tokens = model(), BATCHES[0]
    log_p = net(tokens[:, :-1]).log_softmax(-1)
    expected = -log_p.gather(-1, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(batch_loss(net, tokens), expected)
    torch.testing.assert_close(batch_loss(net, (tokens[:, :-1], tokens[:, 1:])), expected)
    masked = tokens[:, 1:].clone()
    masked[:, 3:] = -100
    fewer = -log_p.gather(-1, tokens[:, 1:, None])[:, :3].mean()
    torch.testing.assert_close(batch_loss(net, (tokens[:, :-1], masked)), fewer)
    classes = Classifier(13, 8, 1, 2, 9, classes=2, generator=generator(0, "cpu"))
    assert batch_loss(classes, (tokens, tokens[:, 0] % 2)).ndim == 0
    t5 = small_t5(13, 8, 1, heads=2)
    assert batch_loss(t5, {"input_ids": tokens, "labels": tokens}).ndim == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_history_adds_up(name):
    done = run(optimizer=name, schedule=0.02, by=layer_of)
    for table in (done.history, *(part for _, part in done.layers.groupby("layer"))):
        rho_sq, step = table["norm"].to_numpy() ** 2, table.iloc[1:]
        np.testing.assert_allclose(np.diff(rho_sq), step.step_norm**2 + 2 * step.inner, atol=1e-12 * rho_sq.max())
    summed = done.layers.assign(sq=done.layers["norm"] ** 2).groupby("step").sq.sum()
    np.testing.assert_allclose(summed, done.history["norm"] ** 2, rtol=1e-12)
    assert list(done.history.step) == list(range(13)) and set(done.layers.layer) >= {"embeddings", "block 0", "block 1"}
    assert done.settings["optimizer"] and done.settings["steps"] == 12


def test_loss_and_projection_are_those_before_the_step():
    net = model()
    loss = batch_loss(net, BATCHES[0])
    gradient = torch.autograd.grad(loss, list(net.parameters()))
    projection = sum((p * g).sum() for p, g in zip(net.parameters(), gradient, strict=True))
    first = run(steps=1, net=net, optimizer="sgd", schedule=0.1).history.iloc[1]
    assert first.loss == pytest.approx(loss.item(), rel=1e-12)
    assert first.projection == pytest.approx(projection.item(), rel=1e-9)
    assert first.inner == pytest.approx(-0.1 * projection.item(), rel=1e-9)  # plain gradient descent
    assert first.alignment == pytest.approx(first.inner / (first.step_norm * model_norm(model())), rel=1e-9)


def model_norm(net):
    return sum(float(p.detach().square().sum()) for p in net.parameters()) ** 0.5


def test_it_learns():
    line = torch.arange(13).repeat(2)[:9].repeat(6, 1)
    done = train(model(), [line], steps=150, schedule=1e-2, device="cpu", progress=False)
    assert done.history.loss.iloc[1] > 2 and done.history.loss.iloc[-1] < 0.05


def test_same_seed_same_bits():
    global_state = torch.random.get_rng_state()
    first, again = (run(net=model(dropout=0.3, dtype=torch.float32), seed=5, by=layer_of) for _ in "ab")
    other = run(net=model(dropout=0.3, dtype=torch.float32), seed=6)
    pd.testing.assert_frame_equal(first.history, again.history, check_exact=True)
    pd.testing.assert_frame_equal(first.layers, again.layers, check_exact=True)
    assert not first.history.loss.equals(other.history.loss)  # other dropout
    assert torch.equal(global_state, torch.random.get_rng_state())


def test_an_optimizer_keeps_the_rates_of_its_groups():
    """δ = −η ∇L with each group's η; the rate 0 moves nothing."""
    net, fresh = model(), model()
    own, rest = ([p for n, p in x.named_parameters() if not n.startswith("embedding")] for x in (net, fresh))
    gradients = torch.autograd.grad(batch_loss(fresh, BATCHES[0]), rest)
    steps = torch.optim.SGD([{"params": [net.embedding.weight], "lr": 0.0}, {"params": own, "lr": 0.5}])
    history = run(steps=1, net=net, optimizer=steps).history
    assert torch.equal(net.embedding.weight, fresh.embedding.weight)
    length = 0.5 * sum(float(g.square().sum()) for g in gradients) ** 0.5
    assert history.step_norm[1] == pytest.approx(length, rel=1e-9)
    assert [group["lr"] for group in steps.param_groups] == [0.0, 0.5]
    with pytest.raises(ValueError, match="keeps the rates of its groups: leave schedule out"):
        run(net=net, optimizer=steps, schedule=0.1)


def test_rates_of_an_optimizer_by_name():
    assert run(steps=1).history.lr[1] == 1e-3
    assert run(steps=2, schedule=0.5).history.lr.tolist()[1:] == [0.5, 0.5]
    assert run(steps=2, schedule=lambda t: 0.1 / (t + 1)).history.lr.tolist()[1:] == [0.1, 0.05]


# the null model


def test_noise_has_its_scale_and_its_own_seed():
    theta, again = ([p.requires_grad_(i > 0) for i, p in enumerate(model().parameters())] for _ in "ab")
    for parameters in (theta, again):
        noise_gradients(parameters, generator(0, "cpu"))
    drawn = torch.cat([p.grad.flatten() for p in theta[1:]])
    assert drawn.std().item() == pytest.approx(1, rel=0.1) and abs(drawn.mean().item()) < 0.1
    assert theta[0].grad is None, "a frozen one has none"
    assert torch.equal(drawn, torch.cat([p.grad.flatten() for p in again[1:]]))


def test_noise_walks_at_random():
    """SGD on noise is the random walk: E ρ²_t = ρ²_0 + η² n t."""
    net = model(dtype=torch.float32)
    n = sum(p.numel() for p in net.parameters())
    history = run(steps=60, net=net, optimizer="sgd", schedule=0.1, gradients="noise").history
    growth = history["norm"].iloc[-1] ** 2 - history["norm"].iloc[0] ** 2
    assert growth / (0.01 * n * 60) == pytest.approx(1, abs=0.3) and history.loss.isna().all()
    assert abs(history.alignment.iloc[1:]).mean() < 0.1


def test_a_callback_at_each_step():
    seen, net = {}, model()
    done = run(net=net, callback=lambda step: seen.update({step: model_norm(net)}))
    assert list(seen) == list(range(13))
    np.testing.assert_allclose(list(seen.values()), done.history["norm"], rtol=1e-12)


def test_too_few_batches_are_refused():
    with pytest.raises(ValueError, match="the batches have ended: give one for each step"):
        train(model(), iter(BATCHES), steps=5, device="cpu", progress=False)


def test_a_record_every_third_step_has_the_rate_and_loss_of_that_step():
    often = run(steps=7, schedule=lambda t: 0.01 * (t + 1))
    seldom = run(steps=7, schedule=lambda t: 0.01 * (t + 1), every=3)
    assert seldom.history.step.tolist() == [0, 3, 6] and seldom.settings["every"] == 3
    assert seldom.history.lr.tolist()[1:] == [0.03, 0.06] and not often.layers.size
    same = ["norm", "step_norm", "inner", "grad_norm"]
    np.testing.assert_allclose(seldom.history[same][1:], often.history[same].iloc[[3, 6]], rtol=1e-6)
    assert seldom.history.loss.tolist()[1:] == often.history.loss[[3, 6]].tolist()


def test_adamw_does_not_decay_unless_it_is_asked_to():
    """Without a gradient nothing moves; with a decay of 0.1 and a rate of 0.5 a twentieth is lost."""
    for options, left in (({}, 1.0), ({"weight_decay": 0.1}, 0.95)):
        p = nn.Parameter(torch.ones(3, dtype=torch.float64))
        p.grad = torch.zeros_like(p)
        optimizer("adamw", [p], 0.5, **options).step()
        assert p.tolist() == pytest.approx([left] * 3)
