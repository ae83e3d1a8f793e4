"""AdamW for an ensemble of networks that differ in learning rate and decay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbutils import ensembles


class EnsembleAdamW(Optimizer):
    """AdamW for an ensemble, with a learning rate and a decay for every network.

    Used in ``language-models`` and ``weight-decay``.

    Args:
        params: tensors ``(networks, …)``.
        lr, weight_decay: a value for every network; the decay is decoupled, as in torch.

    >>> p = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    >>> p.grad = torch.zeros_like(p)
    >>> EnsembleAdamW([p], lr=[0.1, 0.1], weight_decay=[0.0, 1.0]).step()
    >>> p[:, 0].tolist()  # the gradient is 0, so only the decay acts
    [1.0, 0.9]
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: Sequence[float],
        weight_decay: Sequence[float],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"betas": betas, "eps": eps})
        for p in self.param_groups[0]["params"]:
            shape = (-1, *[1] * (p.ndim - 1))  # (networks, 1, …, 1)
            self.state[p] = {
                "lr": p.new_tensor(lr).view(shape),
                "weight_decay": p.new_tensor(weight_decay).view(shape),
                "t": 0,
                "first": torch.zeros_like(p),
                "second": torch.zeros_like(p),
            }

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Apply one update of AdamW to every network."""
        (group,) = self.param_groups
        beta_1, beta_2 = group["betas"]
        for p in group["params"]:
            state = self.state[p]
            state["t"] += 1
            t = state["t"]
            first = state["first"]
            second = state["second"]
            p *= 1 - state["lr"] * state["weight_decay"]
            first.lerp_(p.grad, 1 - beta_1)
            second.mul_(beta_2).addcmul_(p.grad, p.grad, value=1 - beta_2)
            root = (second.sqrt() / (1 - beta_2**t) ** 0.5).add_(group["eps"])
            p -= state["lr"] / (1 - beta_1**t) * (first / root)


def train_on_windows(
    nets: Sequence[nn.Module],
    windows: Iterable[Tensor],
    rates: Sequence[float],
    decays: Sequence[float],
    lengths: Sequence[int],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
) -> list[list[dict[str, Tensor]]]:
    """Train language models of one shape by AdamW, all on the same windows of tokens.

    Used in ``language-models`` and ``weight-decay``.

    Args:
        nets: the untrained networks; they are left as they are.
        windows: batches of tokens ``(batch, T + 1)``, one for each step.
        rates, decays: a value for every network.
        lengths: numbers of steps, in rising order.
        betas: of AdamW.

    Returns:
        For each of the lengths the parameters of every network, by name, on the CPU.

    >>> nets = [nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3)) for _ in range(2)]
    >>> [trained] = train_on_windows(nets, [torch.tensor([[0, 1, 2]])], [0.0, 0.1], [0.0, 0.0], (1,))
    >>> [torch.equal(one["1.bias"], net[1].bias) for one, net in zip(trained, nets)]  # the first has the rate 0
    [True, False]
    """
    theta = ensembles.stack(nets)
    gradients = ensembles.loss_gradients(nets[0], windows, shared=True)
    adamw = partial(EnsembleAdamW, lr=rates, weight_decay=decays, betas=betas)
    names = [name for name, _ in nets[0].named_parameters()]
    trained = []
    training = ensembles.train(theta, gradients, adamw, lengths[-1], name="training")
    for step, _ in enumerate(training, start=1):
        if step in lengths:
            copies = [weights.detach().cpu().clone() for weights in theta]
            trained.append([dict(zip(names, network, strict=True)) for network in zip(*copies, strict=True)])
    return trained
