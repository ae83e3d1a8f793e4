"""One of two processes over gloo: ``python tests/two_processes.py FILE RANK``. Fails where a sharded norm is wrong."""

import itertools
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from normgrowth.norms import NoiseGradients, NormTracker

SHARDED = {
    "FSDP2": lambda net, mesh: fully_shard(net, mesh=mesh),
    "tensor parallel": lambda net, mesh: parallelize_module(
        net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    ),
}


def network():
    rng = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 7 + 1), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5))  # 5 rows: uneven shards
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=rng, dtype=torch.float64)
    return net


def run(net, several=False):
    parameters = list(net.parameters())
    parts = [parameters[:2], parameters[2:]] if several else [parameters]
    optimizers = [torch.optim.AdamW(part, lr=0.05) for part in parts]
    tracker = NormTracker(net.named_parameters(), by=lambda name: name.split(".")[0], gradients=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the optimizers' parameters are the tracked ones, and nothing else moves
        for optimizer in optimizers:
            tracker.attach(optimizer)
        for seed in range(4):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for optimizer in optimizers:
                optimizer.zero_grad()
            net(x).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():
                net(x)  # FSDP2 leaves the whole parameters in the model
            if dist.get_rank() == 0:
                tracker.latest()  # waits for no other process
                tracker.identity_error()
        return tracker.history()


def whole_gradients(net):
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()]
    return [gradient.clone() for gradient in gradients]


def check_noise(net):
    """Noise has the norm of the whole gradient, and no shard has the draws of another."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    NoiseGradients(optimizer)
    net(torch.ones(4, 6, dtype=torch.float64)).square().sum().backward()
    before = whole_gradients(net)
    optimizer.step()
    for gradient, noise in zip(before, whole_gradients(net), strict=True):
        assert abs(noise.norm() / gradient.norm() - 1) < 1e-12
        values = noise.flatten()
        assert len(values.unique()) == len(values)
        others = [torch.empty_like(noise) for _ in range(2)]
        dist.all_gather(others, noise.contiguous())
        assert torch.equal(*others), "copies of a parameter have the same noise"


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
    whole = run(network())
    for name, several in itertools.product(SHARDED, (False, True)):
        net = network()
        SHARDED[name](net, init_device_mesh("cpu", (2,)))
        parts = run(net, several)
        for column in ("norm", "step_norm", "inner", "projection", "grad_norm"):
            here, there = parts[column].to_numpy(), whole[column].to_numpy()
            gap = abs(here[~(there != there)] / there[~(there != there)] - 1).max()
            assert gap < 1e-9, (name, column, gap)
        # exact: against the full tensors of the same run
        square = sum(float(p.full_tensor().detach().double().square().sum() if hasattr(p, "full_tensor") else
                           p.detach().double().square().sum()) for p in net.parameters())  # fmt: skip
        assert abs(parts.norm.iloc[-1] ** 2 / square - 1) < 1e-12, (name, parts.norm.iloc[-1] ** 2, square)
        net = network()
        SHARDED[name](net, init_device_mesh("cpu", (2,)))
        check_noise(net)
    wrapped = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    for refuse in (
        lambda: NormTracker(wrapped.named_parameters()),
        lambda: NoiseGradients(torch.optim.SGD(wrapped.parameters(), lr=0.05)),
    ):
        try:
            refuse()
        except ValueError as error:
            assert "FSDP1" in str(error)
        else:
            raise AssertionError("FSDP1 was taken")
