"""The few networks of the book that are not sublayers (``nbutils.sublayers``)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class HomogeneousMLP(nn.Module):
    """ReLU network without biases: homogeneous in its parameters, its degree is the number of linear layers.

    Args:
        widths: ``(n_in, hidden…, n_out)``; the degree is ``len(widths) - 1``.
        dtype: of the parameters.
        generator: for the weights, normal with variance 2 / fan-in (1 / fan-in in the last layer).

    Raises:
        ValueError: fewer than two widths.

    >>> net = HomogeneousMLP((4, 8, 8, 1))
    >>> net.degree, net(torch.ones(5, 4, dtype=torch.float64)).shape
    (3, torch.Size([5, 1]))
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        dtype: torch.dtype = torch.float64,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if len(widths) < 2:
            raise ValueError(f"widths {tuple(widths)}: give at least the input's and the output's, (n_in, …, n_out)")
        self.degree = len(widths) - 1
        self.weights = nn.ParameterList()
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths), start=1):
            std = ((2 if layer < self.degree else 1) / fan_in) ** 0.5
            device = "cpu" if generator is None else generator.device
            drawn = torch.randn(fan_out, fan_in, generator=generator, dtype=dtype, device=device)
            self.weights.append(nn.Parameter(std * drawn))

    def forward(self, x: Tensor) -> Tensor:
        """``(..., n_in)`` to ``(..., n_out)``."""
        *hidden, last = self.weights  # a slice of a ParameterList would cut functional_call's gradients
        for weight in hidden:
            x = torch.relu(x @ weight.mT)
        return x @ last.mT
