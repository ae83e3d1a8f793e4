"""Noise in place of gradients: of their size, of nothing else, with optimizers as their authors wrote them."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from normgrowth import callbacks
from normgrowth.norms import NoiseGradients, NormTracker
from tests.test_callbacks import LR, Regression, batches, trainer_of

SIZES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.01, torch.float16: 0.002}


def network(dtype=torch.float32):
    rng = torch.Generator().manual_seed(3)
    net = nn.Sequential(nn.Linear(48, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False))
    for p in net.parameters():
        p.data = (torch.randn(p.shape, generator=rng) * p.shape[1] ** -0.5).to(dtype)
    return net


def backward(net, seed=0):
    """A loss that training lowers: the targets are fixed."""
    rng = torch.Generator().manual_seed(seed)
    dtype = next(net.parameters()).dtype
    x, y = torch.randn(64, 48, generator=rng).to(dtype), torch.randn(64, 32, generator=rng).to(dtype)
    loss = (net(x) - y).square().mean()
    loss.backward()
    return loss.item()


def transformers_adafactor(parameters):
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)


OPTIMIZERS = {  # by name: how it is made, and whether a step depends on the gradients of earlier steps by momentum
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05), False),
    "SGD foreach": (lambda p: torch.optim.SGD(p, lr=0.05, foreach=True), False),
    "SGD momentum": (lambda p: torch.optim.SGD(p, lr=0.005, momentum=0.9), True),
    "Adam without momentum": (lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.0, 0.999)), False),
    "Adam": (lambda p: torch.optim.Adam(p, lr=1e-3), True),
    "AdamW fused": (lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True, weight_decay=0.0), True),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3), False),
    "Adafactor of torch": (lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.0), False),
    "Adafactor of transformers": (transformers_adafactor, False),
    "Muon": (lambda p: torch.optim.Muon(p, lr=1e-3, weight_decay=0.0), True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_noise_nothing_is_learned_and_squares_add_up(name):
    """θ·g averages 0 and the loss does not fall; without momentum ρ² = ρ₀² + Σ‖δ‖², but for the walk's own error."""
    make, has_momentum = OPTIMIZERS[name]
    net = network()
    optimizer = make(list(net.parameters()))
    tracker = NormTracker(net, gradients=True)
    tracker.attach(optimizer)
    NoiseGradients(optimizer, seed=1)
    losses = []
    for _ in range(400):
        optimizer.zero_grad()
        losses.append(backward(net))
        optimizer.step()
    history = tracker.history()
    rows = history[history.layer == "total"]
    before, after = rows.norm.to_numpy()[:-1], rows[1:]
    # given θ, the product of a tensor with its noise z has mean 0 and variance ‖θ‖²‖z‖²/n
    n = min(p.numel() for p in net.parameters())  # at most this error for the sum of both tensors
    error = np.sqrt((before**2 * after.grad_norm**2 / n).sum())
    assert abs(after.projection.sum()) < 4 * error
    assert np.mean(losses[-20:]) > 0.99 * losses[0]
    if not has_momentum:
        error = np.sqrt((4 * before**2 * after.step_norm**2 / n).sum())
        grown = rows.norm.iloc[-1] ** 2 - rows.norm.iloc[0] ** 2
        assert abs(grown - (after.step_norm**2).sum()) < 4 * error


def test_momentum_adds_its_own_drift():
    """Squares of a walk with momentum β add up to (1 + β)/(1 − β) times the squares of its steps."""
    theta = nn.Parameter(torch.zeros(20000, dtype=torch.float64))
    optimizer = torch.optim.SGD([theta], lr=1.0, momentum=0.9)
    tracker = NormTracker([("theta", theta)], by=None)
    tracker.attach(optimizer)
    NoiseGradients(optimizer)
    steps = 400
    for _ in range(steps):
        theta.grad = torch.ones_like(theta)
        optimizer.step()
    rows = tracker.history()
    t = np.arange(1, steps + 1)
    position = ((1 - 0.9 ** (steps - t + 1)) / 0.1) ** 2  # each draw's part in the end, squared
    length = np.array([(0.81 ** np.arange(s)).sum() for s in t])
    assert rows.norm.iloc[-1] ** 2 == pytest.approx(theta.numel() * position.sum(), rel=0.05)
    ratio = rows.norm.iloc[-1] ** 2 / (rows.step_norm[1:] ** 2).sum()
    assert ratio == pytest.approx(position.sum() / length.sum(), rel=0.05)
    assert position.sum() / length.sum() == pytest.approx(19, rel=0.1)


@pytest.mark.parametrize("dtype", SIZES)
def test_each_tensor_keeps_the_norm_of_its_gradient_and_nothing_else_of_it(dtype):
    net = network(dtype)
    net.append(nn.Linear(32, 1).to(dtype))  # unused: None
    net[2].bias = nn.Parameter(torch.zeros(32, dtype=dtype))
    net.scale = nn.Parameter(torch.ones((), dtype=dtype))
    groups = [{"params": list(net[:2].parameters())}, {"params": [*net[2:].parameters(), net.scale], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, LR)
    backward(net[:3])
    net[2].bias.grad.zero_()
    net.scale.grad = torch.full((), 0.3, dtype=dtype)
    before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    NoiseGradients(optimizer)
    optimizer.step()
    for p, g in zip(net.parameters(), before, strict=True):
        if g is None:
            assert p.grad is None
            continue
        assert p.grad.dtype == dtype and p.grad.stride() == g.stride()
        assert p.grad.double().norm() == pytest.approx(g.double().norm().item(), rel=SIZES[dtype], abs=0)
        if p.numel() > 100:
            cosine = torch.cosine_similarity(p.grad.double().flatten(), g.double().flatten(), dim=0)
            assert abs(cosine) < 5 / math.sqrt(p.numel())
    assert not net[2].bias.grad.any()


@pytest.mark.parametrize("noise_first", [True, False])
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_tracker_sees_the_noise_in_any_order(noise_first, closed, fused):
    """Under plain SGD θ·δ = −η θ·g and ‖δ‖ = η‖g‖ for the g that the optimizer used."""
    net = network(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), LR, fused=fused)
    tracker = NormTracker(net, gradients=True, by=None)
    hang = [lambda: tracker.attach(optimizer), lambda: NoiseGradients(optimizer)]
    for each in reversed(hang) if noise_first else hang:
        each()

    def loss_of():
        optimizer.zero_grad()
        return backward(net)

    for _ in range(3):
        optimizer.step(loss_of) if closed else (loss_of(), optimizer.step())
    rows = tracker.history()[1:]
    np.testing.assert_allclose(rows.inner, -LR * rows.projection, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(rows.step_norm, LR * rows.grad_norm, rtol=1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_scales_noise_back_and_still_skips_steps(fused):
    plain, scaled = network(), network()
    histories = []
    for net, scale in ((plain, 1.0), (scaled, 1024.0)):
        optimizer = torch.optim.SGD(net.parameters(), LR, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        tracker = NormTracker(net, by=None, gradients=True)
        tracker.attach(optimizer)
        noise = NoiseGradients(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss = (net(torch.ones(4, 48)) - 1).square().mean()
            scaler.scale(loss * (math.inf if scale > 1 and step == 1 else 1.0)).backward()
            if scale == 1.0 and step == 1:
                continue
            scaler.step(optimizer)
            scaler.update()
        assert noise.steps == tracker.steps == 3
        histories.append(tracker.history())
    np.testing.assert_allclose(histories[0].norm, histories[1].norm, rtol=1e-6)
    np.testing.assert_allclose(histories[0].grad_norm, histories[1].grad_norm, rtol=1e-5)


def step_once(seed=0, steps=0, frozen=()):
    """Gradients as replaced at one step."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), LR)
    NoiseGradients(optimizer, seed=seed, steps=steps)
    for i in frozen:
        net[i].requires_grad_(False)
    backward(net)
    optimizer.step()
    return net[2].weight.grad


def test_draws_depend_on_seed_step_and_place_alone():
    first = step_once()
    torch.testing.assert_close(first, step_once(frozen=[0]), rtol=1e-6, atol=0)
    for other in (step_once(seed=1), step_once(steps=1)):
        assert abs(torch.cosine_similarity(first.flatten(), other.flatten(), dim=0)) < 5 / math.sqrt(first.numel())


def test_a_training_that_is_resumed_goes_on_with_its_noise():
    net, whole = network(), network()
    optimizer, optimizer_of_whole = (torch.optim.Adam(model.parameters()) for model in (net, whole))
    first = NoiseGradients(optimizer, seed=5)
    NoiseGradients(optimizer_of_whole, seed=5)

    def go(model, optimizer):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()

    for _ in range(4):
        go(whole, optimizer_of_whole)
    for _ in range(2):
        go(net, optimizer)
    resumed, optimizer_resumed = copy.deepcopy(net), None
    optimizer_resumed = torch.optim.Adam(resumed.parameters())
    optimizer_resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    NoiseGradients(optimizer_resumed).load_state_dict(first.state_dict())
    for _ in range(2):
        go(resumed, optimizer_resumed)
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


def shared(parameters):
    """All gradients are one tensor."""
    gradient = torch.ones(1000)
    for p in parameters:
        p.grad = gradient


def expanded(parameters):
    """As the derivative of a sum is: a single number."""
    for p in parameters:
        p.grad = torch.ones(1).expand(1000)


def overlapping(parameters):
    """Windows of one buffer."""
    buffer = torch.ones(2000)
    for i, p in enumerate(parameters):
        p.grad = buffer[500 * i : 500 * i + 1000]


@pytest.mark.parametrize("share", [shared, expanded, overlapping])
def test_each_parameter_has_noise_of_its_own_though_gradients_share_memory(share):
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, LR)
    NoiseGradients(optimizer)
    share(parameters)
    optimizer.step()
    noise = torch.stack([p.grad for p in parameters])
    torch.testing.assert_close(noise.norm(dim=1), torch.full((3,), 1000**0.5))
    assert (torch.corrcoef(noise) - torch.eye(3)).abs().max() < 5 / 1000**0.5
    torch.testing.assert_close(noise, torch.stack([-p.detach() / LR for p in parameters]))


def test_gradients_side_by_side_in_one_buffer_stay_there():
    parameters = [nn.Parameter(torch.zeros(100)) for _ in range(3)]
    buffer = torch.ones(300)
    for p, gradient in zip(parameters, buffer.split(100), strict=True):
        p.grad = gradient
    optimizer = torch.optim.SGD(parameters, LR)
    NoiseGradients(optimizer)
    optimizer.step()
    assert torch.equal(buffer, torch.cat([p.grad for p in parameters]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_single_large_number_keeps_its_size(dtype):
    """‖g‖/‖noise‖ overflows float32 where the only draw is small."""
    for seed in range(20):
        p = nn.Parameter(torch.zeros(1, dtype=dtype))
        p.grad = torch.full_like(p, 2e38)
        optimizer = torch.optim.SGD([p], LR)
        NoiseGradients(optimizer, seed=seed)
        optimizer.step()
        assert p.grad.abs().item() == pytest.approx(2e38, rel=SIZES[dtype])


def test_it_is_removed_and_refused_twice():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), LR)
    with NoiseGradients(optimizer), pytest.raises(ValueError, match="noise is on this SGD already"):
        NoiseGradients(optimizer)
    backward(net)
    before = net[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(before, net[0].weight.grad)


class WithoutGradients(torch.optim.SGD):
    """An optimizer that is stepped while gradients lie elsewhere, as those that step within backward are."""


def sparse():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    return [embedding.weight]


def filled(value, dtype=torch.float32, shape=(3, 4)):
    p = nn.Parameter(torch.ones(shape, dtype=dtype))
    p.grad = torch.full_like(p, value)
    return [p]


def concentrated():
    """Spread over a million elements of float16 the norm 1e-6 is 1e-9 each, which is 0."""
    p = nn.Parameter(torch.ones(1000, 1000, dtype=torch.float16))
    p.grad = torch.zeros_like(p)
    p.grad[0, 0] = 1e-6
    return [p]


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        (lambda: [nn.Parameter(torch.ones(2))], "no parameter of SGD has a gradient in .grad when it steps"),
        (sparse, r"parameter 0 of the optimizer, of shape \(5, 3\), has a sparse gradient"),
        (lambda: filled(math.nan), r"gradient of parameter 0 of the optimizer, of shape \(3, 4\), is not finite"),
        (lambda: filled(math.inf), "is not finite"),
        (lambda: filled(1.0, torch.complex64), "is complex"),
        (concentrated, "leaves the range of float16"),
        (lambda: filled(6e4, torch.float16, (1000,)), "leaves the range of float16 .*: train in bfloat16"),
        (lambda: filled(2e38, torch.bfloat16, (1000,)), "leaves the range of bfloat16 .*: the loss diverges here"),
        (lambda: filled(2e38, torch.float32, (1000,)), "noise of norm 6.32e\\+39 .* leaves the range of float32"),
        (lambda: filled(1e200, torch.float64), "is finite, but the sum of its squares overflows float64"),
    ],
)
def test_what_noise_cannot_replace_is_refused(parameters, why):
    theta = parameters()
    before = [p.detach().clone() for p in theta]
    optimizer = torch.optim.SGD(theta, LR)
    NoiseGradients(optimizer)
    with pytest.raises(ValueError, match=why):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(theta, before, strict=True))


def test_a_search_along_a_loss_is_refused_and_strangers_are():
    net = network()
    optimizer = torch.optim.LBFGS(net.parameters())
    NoiseGradients(optimizer)
    with pytest.raises(ValueError, match="LBFGS evaluates its closure twice in a step"):
        optimizer.step(lambda: (optimizer.zero_grad(), backward(net))[1])
    with pytest.raises(TypeError, match="object is not an optimizer of torch"):
        NoiseGradients(object())


@pytest.mark.parametrize("tracker_first", [True, False])
def test_the_trainer_with_noise_and_norms_clipped_and_resumed(tmp_path, tracker_first):
    def trained(steps, **options):
        trainer = trainer_of(tmp_path, steps)
        add = [lambda: callbacks.for_trainer(trainer, gradients=True), lambda: callbacks.noise_for_trainer(trainer)]
        both = [each() for each in (add if tracker_first else reversed(add))]
        norms, noise = both if tracker_first else reversed(both)
        trainer.train(**options)
        assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks
        return norms.tracker.history().query("layer == 'total'"), noise.noise, trainer.model

    rows, noise, _ = trained(2)
    assert noise.steps == 2
    np.testing.assert_allclose(rows.inner[1:], -LR * rows.projection[1:], rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(rows.grad_norm[1:], 0.1, rtol=1e-4)  # as clipped
    resumed, noise, model = trained(4, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    whole, _, model_of_whole = trained(4)
    assert noise.steps == 4
    np.testing.assert_allclose(resumed.norm, whole.norm, rtol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model_of_whole.parameters(), strict=True))


def test_lightning_steps_with_noise():
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Regression()

        def training_step(self, batch, _):
            return self.net(batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), LR)

    norms, noise = callbacks.for_lightning(gradients=True), callbacks.noise_for_lightning(seed=2)
    trainer = pl.Trainer(
        max_steps=3, accelerator="cpu", callbacks=[norms, noise], logger=False, accumulate_grad_batches=2,
        gradient_clip_val=0.5, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(batches(40), batch_size=None))
    rows = norms.tracker.history().query("layer == 'total'")[1:]
    assert noise.noise.steps == 3
    np.testing.assert_allclose(rows.inner, -LR * rows.projection, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(rows.grad_norm, 0.5, rtol=1e-4)  # clipped within the closure
