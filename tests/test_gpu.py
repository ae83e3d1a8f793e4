"""What is trained and measured on a GPU is what the CPU trains and measures, but for rounding.

``python -m pytest -m gpu tests`` runs these tests, and needs neither a browser nor what makes notebooks and pages.
"""

import pandas as pd
import pytest
import torch
from torch import nn

from nbutils import devices, ensembles, models, optimizers, training
from nbutils.experiments.ensemble_adamw import EnsembleAdamW
from normgrowth import homogeneity, saturation
from normgrowth.norms import NoiseGradients, NormTracker, norm

pytestmark = pytest.mark.gpu

WHERE = ("cpu", "cuda")
# Float32 training on two devices: 20 steps, each with relative errors of some 1e-6, which do not grow much in 20 steps.
ACROSS_DEVICES = 1e-4


def network(seed=0):
    """Weights are drawn on the CPU."""
    return models.CausalLM(64, 32, depth=2, heads=2, length=16, generator=devices.generator(seed, "cpu"))


def batches(count=20):
    drawn = devices.generator(1, "cpu")
    return [torch.randint(64, (8, 17), generator=drawn) for _ in range(count)]


@pytest.mark.parametrize("gradients", ["loss", "noise"])
def test_training_on_cuda_is_that_on_the_cpu(gradients):
    """Weights, batches and noise are drawn on the CPU in both, so only rounding differs."""
    runs = [
        training.train(network(), batches(), steps=20, gradients=gradients, device=where, progress=False).history
        for where in WHERE
    ]
    columns = ["norm", "step_norm", "loss"]
    pd.testing.assert_frame_equal(*(run[columns] for run in runs), rtol=ACROSS_DEVICES)


def test_an_ensemble_on_cuda_is_that_on_the_cpu():
    norms = []
    for where in WHERE:
        nets = [network(seed).to(where) for seed in range(3)]
        on_device = [batch.to(where) for batch in batches()]
        fill = ensembles.loss_gradients(nets[0], on_device, shared=True)
        theta = ensembles.stack(nets)
        rates = [1e-3, 1e-2, 1e-1]
        steps = list(ensembles.train(theta, fill, lambda theta, r=rates: EnsembleAdamW(theta, r, [0.0] * 3), 20))
        norms.append(sum(part.detach().double().square().flatten(1).sum(1) for part in steps[-1].after).sqrt().cpu())
    torch.testing.assert_close(*norms, rtol=1e-3, atol=0)  # the largest rate multiplies rounding


def test_a_tracker_on_cuda_gives_the_norms_of_float64_and_its_identity():
    """As far as its docstring promises for float32 on CUDA."""
    net = network().to("cuda")
    optimizer = optimizers.optimizer("adamw", net.parameters())
    tracker = NormTracker(net, gradients=True)
    tracker.attach(optimizer)
    for batch in batches():
        optimizer.zero_grad()
        training.batch_loss(net, batch.to("cuda")).backward()
        optimizer.step()
    last = tracker.history().query("layer == 'total'")["norm"].iloc[-1]
    assert last == pytest.approx(norm([p.detach().cpu().double() for p in net.parameters()]), rel=1e-6)
    assert tracker.identity_error() < 1e-6


def test_noise_on_cuda_has_each_gradients_own_size():
    net = network().to("cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    NoiseGradients(optimizer, seed=0)
    training.batch_loss(net, batches(1)[0].to("cuda")).backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    optimizer.step()
    noise = [p.grad for p in net.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(noise, gradients, strict=True))
    assert [norm([x]) for x in noise] == pytest.approx([norm([x]) for x in gradients], rel=1e-5)


def test_saturation_and_degree_on_cuda_are_those_on_the_cpu():
    layers = []
    for where in WHERE:
        inputs = [{"input_ids": batches(1)[0].to(where)[:, :16]}]
        measured = saturation.compare(network().to(where), inputs, c=1000.0, dtype=torch.float64)
        layers.append(torch.as_tensor(measured.raw).cpu())
    torch.testing.assert_close(*layers, rtol=1e-6, atol=0)
    two = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).to("cuda")
    assert homogeneity.degree(two, torch.ones(5, 3, device="cuda"), check=True) == 2


@pytest.mark.slow
def test_chapters_agree_between_cpu_and_cuda(tmp_path):
    """CPU and CUDA draw other numbers from one seed: random checks agree as two seeds do, each within its band."""
    pytest.importorskip("papermill")
    from test_determinism import CHAPTER, as_run, execute

    from workflow.compare import compare

    for chapter in ("random-walk", CHAPTER):
        folders = {where: tmp_path / f"{chapter}-{where}" for where in WHERE}
        a, b = (execute(folder, chapter=chapter, where=where)[0] for where, folder in folders.items())
        found = compare(as_run(a), as_run(b))
        assert not (found.verdicts or found.failing), (chapter, found)
