"""A network that is homogeneous in its parameters, with any number of layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class HomogeneousMLP(nn.Module):
    """ReLU network without biases, in float64: homogeneous in its parameters, with the number of layers as degree.

    Args:
        widths: ``(n_in, hidden…, n_out)``; the degree is ``len(widths) - 1``.
        generator: for the weights, normal with variance 2 / fan-in (1 / fan-in in the last layer).

    Used in ``right-pulls``, ``training-turns`` and ``divergence``.

    >>> net = HomogeneousMLP((4, 8, 8, 1))
    >>> net.degree, net(torch.ones(5, 4, dtype=torch.float64)).shape
    (3, torch.Size([5, 1]))
    """

    def __init__(self, widths: Sequence[int], *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.degree = len(widths) - 1
        self.weights = nn.ParameterList()
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths), start=1):
            gain = 2 if layer < self.degree else 1
            std = (gain / fan_in) ** 0.5
            standard_normal = torch.randn(fan_out, fan_in, generator=generator, dtype=torch.float64)
            self.weights.append(nn.Parameter(std * standard_normal))

    def forward(self, x: Tensor) -> Tensor:
        """``(..., n_in)`` to ``(..., n_out)``."""
        *hidden, last = self.weights  # a slice, self.weights[:-1], would make new parameters, unknown to torch.func
        for weight in hidden:
            x = torch.relu(x @ weight.mT)
        return x @ last.mT
