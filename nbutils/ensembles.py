"""Many networks of one shape, trained at once: parameters, gradients and steps with one more axis in front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm.auto import tqdm

from nbutils.training import Batch, batch_loss, endless, to_device


class Step(NamedTuple):
    """One step of networks that train together; the first axis of every tensor counts the networks."""

    losses: Tensor | None  # (networks,), at ``before``; None where gradients are of no loss
    before: list[Tensor]
    gradients: list[Tensor]
    after: list[Tensor]  # the parameters themselves, which the next step changes


Gradients = Callable[[list[Tensor]], Tensor | None]  # puts them into ``.grad`` and returns the losses (networks,)


def train_together(
    theta: Sequence[Tensor],
    gradients: Gradients,
    optimizer: Callable[[list[Tensor]], Any],
    steps: int,
    *,
    rate: Callable[[int], float] | None = None,
    name: str | None = None,
) -> Iterator[Step]:
    """Train networks of one shape at once, in place: an iterator over the steps, each made when it is asked for.

    One operation for all networks saves its fixed cost and no arithmetic: it pays for small networks and on GPUs.

    Args:
        theta: the parameters, each ``(networks, …)``; ``stacked`` makes them of modules.
        gradients: of each network's own loss (``loss_gradients``), or noise.
        optimizer: from parameters to the optimizer. One that works element by element, as SGD and Adam do, treats
            the networks apart from each other; ``optimizers.EachAdamW`` has a rate and a decay for each.
        rate: learning rate at step t = 1, 2, …; ``None`` for the optimizer's own.
        name: label of a progress bar; ``None`` for none.

    Raises:
        ValueError: the batches have ended.

    >>> nets = [nn.Linear(1, 2, bias=False) for _ in range(2)]
    >>> theta = [torch.zeros(2, 2, 1, requires_grad=True)]
    >>> batch = torch.ones(2, 1, 1), torch.tensor([[0], [1]])  # one example each, of class 0 and of class 1
    >>> run = train_together(theta, loss_gradients(nets[0], [batch]), lambda p: torch.optim.SGD(p, lr=2.0), 1)
    >>> [step.after[0].flatten().tolist() for step in run]  # ∇L is ½ at each logit
    [[1.0, -1.0, -1.0, 1.0]]
    """
    theta = [w.requires_grad_() for w in theta]
    opt = optimizer(theta)
    for t in tqdm(range(1, steps + 1), desc=name, leave=False, disable=name is None):
        for w in theta:
            w.grad = None
        losses = gradients(theta)
        if rate is not None:
            for group in opt.param_groups:
                group["lr"] = rate(t)
        before = [w.detach().clone() for w in theta]
        opt.step()
        yield Step(losses, before, gradients_of(theta), [w.detach() for w in theta])


def gradients_of(theta: Sequence[Tensor]) -> list[Tensor]:
    """What ``.grad`` holds; parameters without are left out."""
    return [w.grad for w in theta if w.grad is not None]


def stacked(models: Sequence[nn.Module]) -> list[Tensor]:
    """Copies of the parameters of models of one shape, each ``(models, …)``, in the order of ``named_parameters``.

    >>> [tuple(p.shape) for p in stacked([nn.Linear(2, 3), nn.Linear(2, 3)])]
    [(2, 3, 2), (2, 3)]
    """
    return list(stack_module_state(list(models))[0].values())


@torch.no_grad()
def unstack(theta: Sequence[Tensor], models: Sequence[nn.Module]) -> None:
    """Put stacked parameters back into the models."""
    for model, values in zip(models, zip(*theta, strict=True), strict=True):
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def loss_gradients(model: nn.Module, batches: Iterable[Batch], *, shared: bool = False) -> Gradients:
    """Gradients of ``batch_loss`` of networks shaped as ``model``, on batches with one more axis in front, theirs.

    ``shared`` gives all networks the same batches, without that axis. No dropout.
    """
    names, source = [name for name, _ in model.named_parameters()], endless(batches)

    def one(parameters: dict[str, Tensor], batch: Batch) -> Tensor:
        return batch_loss(lambda *inputs: functional_call(model, parameters, inputs), batch)

    def fill(theta: list[Tensor]) -> Tensor:
        batch = to_device(next(source), theta[0].device)
        with sdpa_kernel(SDPBackend.MATH):  # the fast kernels have no batching rule
            losses = vmap(one, (0, None if shared else 0))(dict(zip(names, theta, strict=True)), batch)
        losses.sum().backward()  # networks are independent, so the sum has the gradient of each
        return losses.detach()

    return fill
