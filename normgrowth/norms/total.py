"""The norm of all parameters of a model, each counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor, nn


def norm(parameters: nn.Module | Mapping[str, Tensor] | Iterable[Tensor]) -> float:
    """‖θ‖ of a model, a state dict or any tensors, with squares in float64; a tensor that comes twice counts once.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> layer.weight.data = torch.tensor([[3.0, 4.0]])
    >>> norm(torch.nn.ModuleList([layer, layer]))
    5.0
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Mapping):
        parameters = parameters.values()
    distinct = {id(tensor): tensor for tensor in parameters}.values()
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in distinct))
