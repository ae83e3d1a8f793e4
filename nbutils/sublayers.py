"""Layer norm and its placement in a sublayer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["LayerNorm", "apply_placement", "fixed_normal", "standardise"]


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis, with gain and shift.

    Unlike ``nn.LayerNorm``, ε is 0 by default, and gain (around 1) and shift (around 0) are random and not trained.

    >>> norm, x = LayerNorm(4, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 2.0, 3.0, 5.0])
    >>> torch.allclose(norm(1000 * x), norm(x))  # degree 0 in its input, since ε = 0
    True
    """

    def __init__(self, dim: int, *, eps: float = 0.0, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.gain = fixed_normal((dim,), 0.2, generator, mean=1.0)
        self.shift = fixed_normal((dim,), 0.2, generator)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * standardise(x, eps=self.eps) + self.shift


def apply_placement(
    placement: str, x: Tensor, core: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply core, residual connection and layer norm in the order of ``placement``."""
    match placement:
        case "simplified":
            return norm(core(x))
        case "post":
            return norm(x + core(x))
        case "pre":
            return x + core(norm(x))
    return x + norm(core(x))  # residual-post; or none, where the norm is the identity


def fixed_normal(
    shape: Sequence[int], std: float, generator: torch.Generator | None, mean: float = 0.0
) -> nn.Parameter:
    """Normal numbers in float64, as a parameter that is not trained."""
    standard_normal = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return nn.Parameter(mean + std * standard_normal, requires_grad=False)


def standardise(x: Tensor, *, eps: float = 0.0) -> Tensor:
    """Subtract the mean over the last axis and divide by the standard deviation: LayerNorm without its affine map.

    >>> standardise(torch.tensor([1.0, 3.0]))
    tensor([-1.,  1.])
    """
    centred = x - x.mean(-1, keepdim=True)
    if eps == 0:  # divide by the largest entry first, or outputs of degree 17 and more overflow when squared
        centred = centred / centred.abs().amax(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
