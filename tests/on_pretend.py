"""The path to a GPU on the pretend device, and planted faults; ``test_pretend.py`` runs it in a process of its own."""

from contextlib import ExitStack

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from maintenance import pretend
from nbutils import devices, ensembles, models, optimizers, training
from nbutils.experiments.ensemble_adamw import EnsembleAdamW
from normgrowth import heads, homogeneity, norms, saturation

BATCHES = [torch.randint(9, (4, 7), generator=devices.generator(1, "cpu")) for _ in range(8)]


@pytest.fixture(autouse=True)
def device():
    pretend.waits.clear()
    with ExitStack() as stack:
        pretend.install_device(stack)
        yield


def network(seed=0):
    return models.CausalLM(9, 8, depth=1, heads=2, length=6, generator=devices.generator(seed, "cpu"))


def train(steps=8, **options):
    return training.train(network(), BATCHES, steps=steps, progress=False, **options)


def train_ensemble(steps, callback=lambda step: None):
    nets = [network(seed).to("cuda") for seed in range(2)]
    fill = ensembles.loss_gradients(nets[0], BATCHES, shared=True)
    run = ensembles.train(
        ensembles.stack(nets), fill, lambda theta: EnsembleAdamW(theta, [0.1, 0.2], [0.0, 0.0]), steps
    )
    return [(step.losses, callback(step)) for step in run]


def waits(work):
    """How often 8 steps wait for the device, and 4."""
    found = []
    for steps in (8, 4):
        pretend.waits.clear()
        work(steps)
        found.append(pretend.waits.total())
    return found


def test_a_seed_means_the_same_on_both_devices():
    for source in ("loss", "noise"):
        runs = [train(gradients=source, device=where) for where in ("auto", "cpu")]
        assert [run.settings["device"] for run in runs] == ["cuda", "cpu"]
        pd.testing.assert_frame_equal(runs[0].history, runs[1].history, rtol=1e-5)


def test_no_step_of_a_training_waits_for_the_device():
    assert len(set(waits(train))) == len(set(waits(train_ensemble))) == 1
    few, many = waits(lambda steps: train_ensemble(steps, lambda step: step.losses.sum().item()))[::-1]
    assert many - few == 4, "a planted one"


def test_the_tracker():
    net = network().to("cuda")
    tracker = norms.NormTracker(net.named_parameters(), by=str, gradients=True)
    adamw = optimizers.optimizer("adamw", net.parameters())
    for batch in BATCHES:
        training.batch_loss(net, batch.to("cuda")).backward()
        tracker.before()
        adamw.step()
        tracker.after(stepped=True)
    assert pretend.waits.total() == 0 and np.isfinite(tracker.history()["norm"]).all()


def test_measures():
    net, batch = network().to("cuda"), {"input_ids": BATCHES[0][:, :-1].to("cuda")}
    scores = heads.attention_scores(net, batch)[0]
    assert saturation.compare(net, [batch]).raw.shape == (2,)
    assert heads.summarise(heads.saturated(scores), scores > -torch.inf).share.max() <= 1
    two = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).to("cuda")
    assert homogeneity.degree(two, torch.ones(5, 3, device="cuda"), check=True) == 2


@pytest.mark.parametrize(("fault", "says"), [
    (lambda x: x + torch.ones(3), "same device"), (lambda x: torch.ones(3)[x.long()], "same device"),
    (lambda x: training.batch_loss(network().to(x.device), BATCHES[0]), "same device"),
    (lambda x: x.numpy(), "numpy"), (lambda x: np.asarray(x), "numpy"),
    (lambda x: nn.Parameter(x).data.numpy(), "numpy"),
    (lambda x: torch.randn(3, device="cuda", generator=devices.generator(0, "cpu")), "generator"),
    (lambda x: torch.randn(3, generator=devices.generator(0)), "generator"),
    (lambda x: x.normal_(generator=devices.generator(0, "cpu")), "generator"),
])  # fmt: skip
def test_planted_faults(fault, says):
    with pytest.raises((RuntimeError, TypeError), match=says):
        fault(torch.ones(3, device="cuda"))
