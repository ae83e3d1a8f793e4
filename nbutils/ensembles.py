"""Ensembles: many networks of one shape, trained at once. The first axis of every tensor counts the networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm.auto import tqdm

from nbutils.training import Batch, batch_loss, endless, to_device

__all__ = ["Step", "loss_gradients", "stack", "stored_gradients", "train", "unstack"]


class Step(NamedTuple):
    """One step of an ensemble. Lists have one tensor ``(networks, …)`` for each parameter."""

    losses: Tensor | None  # (networks,), before the step; None for gradients without a loss, such as noise
    before: list[Tensor]  # copies of the parameters before the step
    gradients: list[Tensor]  # without the parameters that have none
    after: list[Tensor]  # the parameters themselves, which the next step changes


GradientSource = Callable[[list[Tensor]], Tensor | None]  # writes ``.grad`` and returns the losses (networks,)


def train(
    theta: Sequence[Tensor],
    gradients: GradientSource,
    make_optimizer: Callable[[list[Tensor]], Any],
    steps: int,
    *,
    rate: Callable[[int], float] | None = None,
    name: str | None = None,
) -> Iterator[Step]:
    """Train an ensemble in place; the iterator makes a step whenever the next one is requested.

    One operation serves all networks, which saves its fixed cost but no arithmetic. That pays for small networks and on
    GPUs.

    Args:
        theta: the parameters, each ``(networks, …)``, as ``stack`` returns them.
        gradients: called with the parameters before each step; writes their gradients, of each network's own loss
            (``loss_gradients``) or noise, and returns the losses ``(networks,)`` or None.
        steps: number of steps.
        make_optimizer: from the parameters to the optimizer. An optimizer that works element by element, as SGD and
            Adam do, treats the networks independently.
        rate: learning rate at step t = 1, 2, …; ``None`` keeps the optimizer's own.
        name: label of a progress bar; ``None`` shows none.

    Raises:
        ValueError: the batches of ``gradients`` have ended before the last step.

    >>> nets = [nn.Linear(1, 2, bias=False) for _ in range(2)]
    >>> theta = [torch.zeros(2, 2, 1, requires_grad=True)]
    >>> batch = torch.ones(2, 1, 1), torch.tensor([[0], [1]])  # an example for each network, of class 0 and of class 1
    >>> steps = train(theta, loss_gradients(nets[0], [batch]), lambda p: torch.optim.SGD(p, lr=2.0), 1)
    >>> [step.after[0].flatten().tolist() for step in steps]  # ∇L is ½ at each logit
    [[1.0, -1.0, -1.0, 1.0]]
    """
    theta = [w.requires_grad_() for w in theta]
    optimizer = make_optimizer(theta)
    for t in tqdm(range(1, steps + 1), desc=name, leave=False, disable=name is None):
        for w in theta:
            w.grad = None
        losses = gradients(theta)
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(t)
        before = [w.detach().clone() for w in theta]
        optimizer.step()
        yield Step(losses, before, stored_gradients(theta), [w.detach() for w in theta])


def stored_gradients(theta: Sequence[Tensor]) -> list[Tensor]:
    """The gradients in ``.grad``; parameters without a gradient are left out."""
    return [w.grad for w in theta if w.grad is not None]


def stack(models: Sequence[nn.Module]) -> list[Tensor]:
    """Copies of the parameters of models of one shape, each ``(models, …)``, in the order of ``named_parameters``.

    >>> [tuple(p.shape) for p in stack([nn.Linear(2, 3), nn.Linear(2, 3)])]
    [(2, 3, 2), (2, 3)]
    """
    parameters, _ = stack_module_state(list(models))
    return list(parameters.values())


@torch.no_grad()
def unstack(theta: Sequence[Tensor], models: Sequence[nn.Module]) -> None:
    """Copy stacked parameters, each ``(models, …)``, back into the models."""
    for model, values in zip(models, zip(*theta, strict=True), strict=True):
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def loss_gradients(model: nn.Module, batches: Iterable[Batch], *, shared: bool = False) -> GradientSource:
    """The gradients of ``batch_loss``, for an ensemble of networks shaped like ``model``; dropout is not supported.

    The first axis of a batch counts the networks. With ``shared``, all networks get the same batches, which then lack
    that axis.
    """
    names = [name for name, _ in model.named_parameters()]
    stream = endless(batches)

    def network_loss(parameters: dict[str, Tensor], batch: Batch) -> Tensor:
        return batch_loss(lambda *inputs: functional_call(model, parameters, inputs), batch)

    ensemble_losses = vmap(network_loss, (0, None if shared else 0))

    def write_gradients(theta: list[Tensor]) -> Tensor:
        batch = to_device(next(stream), theta[0].device)
        parameters = dict(zip(names, theta, strict=True))
        with sdpa_kernel(SDPBackend.MATH):  # the fast kernels have no batching rule
            losses = ensemble_losses(parameters, batch)
        losses.sum().backward()  # networks are independent, so the sum has the gradient of each
        return losses.detach()

    return write_gradients
