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


def orthogonalised(updates: Tensor) -> Tensor:
    """Matrices ``(…, A, B)`` with singular values near 1 in place of their own, in bfloat16, as ``torch.optim.Muon``.

    Used in ``today``.

    >>> values = torch.linalg.svdvals(orthogonalised(torch.diag(torch.tensor([1.0, 0.1]))).float())
    >>> bool(((values > 0.65) & (values < 1.2)).all())
    True
    """
    a, b, c = NEWTON_SCHULZ
    x = updates.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


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
