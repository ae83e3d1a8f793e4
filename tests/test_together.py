"""Networks that train together: each comes out as it does alone."""

import numpy as np
import pytest
import torch

from nbutils import ensembles, training
from nbutils.devices import generator
from nbutils.experiments.ensemble_adamw import EnsembleAdamW
from nbutils.models import CausalLM

BATCHES = [torch.randint(0, 13, (6, 9), generator=generator(i, "cpu")) for i in range(4)]
RATES, DECAYS = (1e-3, 1e-2, 0.05), (0.0, 0.3, 0.2)


def networks(count=3):
    # float64: a key's bias has gradient 0, and AdamW would make a step out of its rounding
    options = {"tied": False, "init_std": "standard"}
    return [CausalLM(13, 8, 2, 2, 8, generator=generator(seed, "cpu"), **options).double() for seed in range(count)]


OPTIMIZERS = {  # of networks together, and of the i-th alone
    "columns": (
        lambda p: EnsembleAdamW(p, RATES, DECAYS, betas=(0.3, 0.4), eps=1e-2),
        lambda p, i: torch.optim.AdamW(p, lr=RATES[i], weight_decay=DECAYS[i], betas=(0.3, 0.4), eps=1e-2),
    ),
    "columns, defaults": (
        lambda p: EnsembleAdamW(p, RATES, DECAYS),
        lambda p, i: torch.optim.AdamW(p, lr=RATES[i], weight_decay=DECAYS[i]),
    ),
    "fused AdamW": (
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p, _: torch.optim.AdamW(p, lr=0.01, fused=True),
    ),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p, _: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_network_is_the_training_alone(name, shared):
    nets, (many, one) = networks(), OPTIMIZERS[name]
    batches = BATCHES if shared else [torch.stack([b, b.flip(0), (b + 1) % 13]) for b in BATCHES]
    theta = ensembles.stack(nets)
    gradients = ensembles.loss_gradients(nets[0], batches, shared=shared)
    steps = []  # losses, and squared steps of the matrices
    for s in ensembles.train(theta, gradients, many, 6):
        moves = [after - before for after, before in zip(s.after, s.before, strict=True) if after.ndim == 3]
        steps.append((s.losses, sum(move.square().sum((1, 2)) for move in moves)))
    ensembles.unstack(theta, nets)
    for i, (net, alone) in enumerate(zip(nets, networks(), strict=True)):
        own = batches if shared else [batch[i] for batch in batches]
        sort = {name: "matrix" if p.ndim == 2 else "vector" for name, p in alone.named_parameters()}
        run = training.train(
            alone, own, steps=6, optimizer=one(alone.parameters(), i), device="cpu", progress=False, by=sort.get
        )
        moved = run.layers[run.layers.layer == "matrix"].step_norm.iloc[1:] ** 2
        np.testing.assert_allclose([float(loss[i]) for loss, _ in steps], run.history["loss"][1:], rtol=1e-6)
        np.testing.assert_allclose([float(move[i]) for _, move in steps], moved, rtol=1e-6)
        for found, expected in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_a_rate_by_step_and_a_gradient_of_no_loss(capsys):
    theta = [torch.zeros(2, 3, dtype=torch.float64)]

    def ones(theta):
        theta[0].grad = torch.ones_like(theta[0])

    run = ensembles.train(theta, ones, lambda p: torch.optim.SGD(p, lr=9.0), 3, rate=lambda t: 1 / t, name="a walk")
    seen = [(step.losses, float(step.before[0][0, 0]), float(step.after[0][0, 0])) for step in run]
    assert seen == [(None, 0, -1), (None, -1, -1.5), (None, -1.5, pytest.approx(-11 / 6))]
    assert "a walk:" in capsys.readouterr().err
