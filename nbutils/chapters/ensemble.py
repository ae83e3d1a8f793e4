"""Many trainings of one small architecture at once: learning rates, weight decays and seeds as a batch dimension."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm.auto import tqdm

from nbutils import devices
from nbutils.training import Batch, batch_loss, endless, next_batch, to_device


@dataclass(frozen=True)
class Member:
    """Settings of one training: ``lr`` multiplies the schedule, ``seed`` is that of its initial values.

    >>> Member(lr=0.1)
    Member(lr=0.1, weight_decay=0.0, seed=0)
    """

    lr: float
    weight_decay: float = 0.0
    seed: int = 0


def grid(learning_rates: Iterable[float], weight_decays: Iterable[float], seeds: Iterable[int] = (0,)) -> list[Member]:
    """All combinations.

    >>> len(grid((1e-3, 1e-2), (0.0, 0.1), (0, 1, 2)))
    12
    """
    return [Member(*values) for values in itertools.product(learning_rates, weight_decays, seeds)]


def train_ensemble(
    make_model: Callable[[int], nn.Module],
    batches: Iterable[Batch],
    members: Sequence[Member],
    *,
    steps: int,
    optimizer: str = "adamw",
    schedule: Callable[[int], float] = lambda t: 1.0,
    loss: Callable[[nn.Module, Batch], Tensor] = batch_loss,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float = 0.0,
    every: int = 1,
    device: str = "auto",
    progress: bool = True,
) -> tuple[pd.DataFrame, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Train every member on the same batches, at the same time; each comes out as it does alone, to rounding.

    The members are rows of one matrix of parameters: one forward and backward pass (``torch.func.vmap``) and one
    update for all. That saves the fixed cost of each operation and no arithmetic: it pays for small models and on GPUs.

    Args:
        make_model: a new model for a seed; models without dropout.
        optimizer: ``adamw`` (decoupled weight decay) or ``sgd`` (weight decay added to the gradient), as in torch.
        schedule: factor on every member's learning rate, by number of steps done.

    Returns:
        A history with the columns ``member, lr, weight_decay, seed, step, loss, norm`` and the rows of ``train``; the
        trained parameters of each member by name; and in the same form the squared steps of each entry, summed.

    Raises:
        ValueError: no members, an optimizer that is not here, too few batches.

    >>> history, _, squares = train_ensemble(
    ...     lambda seed: nn.Linear(2, 1, bias=False), [torch.zeros(1, 2)], grid([0.1], [0.0, 1.0]), steps=2,
    ...     optimizer="sgd", loss=lambda model, x: model(x).sum(), device="cpu", progress=False)
    >>> norms = history.pivot(index="step", columns="weight_decay", values="norm")
    >>> (norms.loc[2] / norms.loc[0]).round(4).tolist()  # no gradient, so decay alone: (1 − 0.1)²
    [1.0, 0.81]
    >>> [bool(one["weight"].sum() > 0) for one in squares]
    [False, True]
    """
    if optimizer not in ("adamw", "sgd"):
        raise ValueError(f"optimizer {optimizer!r} has no batched form: choose one of adamw, sgd")
    if not members:
        raise ValueError("no members: give at least one")
    place = torch.device(devices.resolve(device))
    models = {seed: make_model(seed).to(place) for seed in {member.seed for member in members}}
    template = models[members[0].seed].train()
    shapes = {name: p.shape for name, p in template.named_parameters()}
    flat = {seed: torch.cat([p.detach().flatten() for p in model.parameters()]) for seed, model in models.items()}
    theta = torch.stack([flat[member.seed] for member in members]).requires_grad_()  # (members, parameters)
    column = {
        key: theta.new_tensor([[getattr(member, key)] for member in members], dtype=theta.dtype, device=place)
        for key in ("lr", "weight_decay")
    }

    def one(row: Tensor, batch: Batch) -> Tensor:
        return loss(_Called(template, _unflatten(row, shapes)), batch)

    first, second = torch.zeros_like(theta), torch.zeros_like(theta)
    squares = torch.zeros_like(theta, dtype=torch.float64)
    source = endless(batches)
    rows = [(0, torch.full_like(theta[:, 0], torch.nan), _norms(theta))]  # as in train: a row is about the step before
    for t in tqdm(range(steps), desc=f"training {len(members)} members", disable=not progress):
        batch = to_device(next_batch(source, t, steps), place)
        with sdpa_kernel(SDPBackend.MATH):  # the fast kernels have no batching rule
            losses = vmap(one, (0, None))(theta, batch)
        (gradient,) = torch.autograd.grad(losses.sum(), theta)  # members are independent: each row is its own
        with torch.no_grad():
            before = theta.clone()
            lr = column["lr"] * schedule(t)
            if optimizer == "adamw":
                theta *= 1 - lr * column["weight_decay"]
                first.lerp_(gradient, 1 - betas[0])
                second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
                root = (second.sqrt() / (1 - betas[1] ** (t + 1)) ** 0.5).add_(eps)
                theta -= lr / (1 - betas[0] ** (t + 1)) * (first / root)
            else:
                gradient = gradient + column["weight_decay"] * theta
                first.mul_(momentum).add_(gradient)
                theta -= lr * first
            squares += (theta - before).double().square()
        if (t + 1) % every == 0:
            rows.append((t + 1, losses.detach(), _norms(theta)))
    frames = [
        pd.DataFrame({"member": range(len(members)), "step": t, "loss": value.cpu(), "norm": norm.cpu()})
        for t, value, norm in rows
    ]
    table = pd.DataFrame([{"member": i} | vars(member) for i, member in enumerate(members)])
    history = table.merge(pd.concat(frames)).sort_values(["member", "step"], ignore_index=True)
    trained, walked = (
        [{name: p.clone() for name, p in _unflatten(row, shapes).items()} for row in of_members]
        for of_members in (theta.detach(), squares)
    )
    return history, trained, walked


def _norms(theta: Tensor) -> Tensor:
    return theta.detach().double().square().sum(1).sqrt()


class _Called:
    """A model with other parameters, to be called as a model is."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self.model, self.parameters = model, parameters

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return functional_call(self.model, dict(self.parameters), inputs, named)


def _unflatten(row: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    parts = row.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
