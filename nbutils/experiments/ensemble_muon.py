"""Muon for an ensemble of networks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

MOMENTUM = 0.95
RMS = 0.2  # root mean square of the entries of a step, per unit rate
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a, b, c of a X + b (XXᵀ) X + c (XXᵀ)² X
ROUNDS = 5  # of Newton and Schulz
EPSILON = 1e-7  # least norm that a matrix is divided by


def orthogonalised(updates: Tensor) -> Tensor:
    """Matrices ``(…, A, B)`` with singular values near 1 in place of their own, in bfloat16, as ``torch.optim.Muon``.

    Its five steps round after the same operations as those of torch do. A matrix is torch's to the bit, but for the
    few (about one in a thousand) in which products of many matrices at once add in another order.

    Used in ``today``.

    >>> values = torch.linalg.svdvals(orthogonalised(torch.diag(torch.tensor([1.0, 0.1]))).float())
    >>> bool(((values > 0.65) & (values < 1.2)).all())
    True
    """
    a, b, c = NEWTON_SCHULZ
    x = updates.bfloat16().reshape(-1, *updates.shape[-2:])
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # rounded once, as torch's addmm is
        x = torch.baddbmm(x, polynomial, x, beta=a)
    x = x.mT if is_tall else x
    return x.reshape(updates.shape)


class EnsembleMuon(Optimizer):
    """Muon for an ensemble: ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, for many matrices at once.

    A step moves a matrix ``(A, B)`` by its rate times 0.2 √max(A, B) times the orthogonalised momentum of Nesterov, so
    the root mean square of the step's entries is about 0.2 times the rate, as AdamW's is (Liu et al. 2025).

    Used in ``today``.

    Args:
        params: tensors ``(networks, A, B)``.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, *, momentum: float = MOMENTUM) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Apply one update of Muon to every network."""
        for group in self.param_groups:
            of_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                of_shape[p.shape].append(p)
            for shape, matrices in of_shape.items():  # one operation for all matrices of a shape
                updates = orthogonalised(torch.stack([self._momentum(p, group["momentum"]) for p in matrices]))
                length = RMS * max(shape[-2:]) ** 0.5
                for p, update in zip(matrices, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * length)

    def _momentum(self, p: Tensor, momentum: float) -> Tensor:
        """Nesterov's momentum of the gradient of a parameter."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        return p.grad.lerp(state["momentum"].lerp_(p.grad, 1 - momentum), momentum)
