"""How fast sublayers saturate when all their parameters grow: measured, and by the degrees of their terms.

Appendix B of the paper, in float64. A network is scaled by ``functional_call``: its own parameters never change.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.func import functional_call

from nbutils.homogeneity import one_minus_cosine
from nbutils.sublayers import BIASES, Sublayer

Array = NDArray[np.float64]


def scaled(module: nn.Module, x: Tensor, c: float, *, input_degree: int = 0, method: str = "forward") -> Tensor:
    """Output of ``module`` with all parameters times ``c``, on the input ``c ** input_degree * x``.

    ``method`` names another method than ``forward``, such as ``head`` of a ``Sublayer``.

    >>> layer, x = nn.Linear(2, 2, bias=False), torch.ones(2)
    >>> torch.allclose(scaled(layer, x, 10.0, input_degree=1), 100 * layer(x))
    True
    """
    parameters = {f"module.{name}": c * value for name, value in module.named_parameters()}
    return functional_call(_Call(module, method), parameters, (c**input_degree * x,))


class _Call(nn.Module):
    """A method of a module as a module: ``functional_call`` wants one."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.module, self.method)(x)


def saturation_errors(
    module: nn.Module, x: Tensor, scales: ArrayLike, *, limit: float, input_degree: int = 0, by_token: bool = False
) -> Array:
    """1 − cos between the outputs at each scale and at the scale ``limit``, all tokens as one vector.

    Shape ``(len(scales),)``; with ``by_token`` ``(len(scales), *tokens)``. The reference is the network at a finite
    scale, as in the paper's Fig. 5 (there 1000): with ``limit`` far above every scale it may be taken for the limit.

    Raises:
        ValueError: a scale that is not below ``limit``.

    >>> layer = Sublayer("feedforward", 4, placement="post", generator=torch.Generator().manual_seed(0))
    >>> near, far = saturation_errors(layer, torch.eye(2, 4, dtype=torch.float64), [100, 200], limit=1e6)
    >>> round(float(near / far), 1)  # c^−4: x of degree 0 meets f(x) of degree 2
    16.0
    """
    scales = np.atleast_1d(np.asarray(scales, dtype=np.float64))
    if scales.max() >= limit:
        raise ValueError(f"scale {scales.max():g}: all scales must lie below the reference scale {limit:g}")

    def output(c: float) -> Tensor:
        y = scaled(module, x, c, input_degree=input_degree)
        return y if by_token else y.flatten()

    reference = output(limit)
    return np.array([one_minus_cosine(output(c), reference).numpy() for c in scales])


def degree_at(module: nn.Module, x: Tensor, c: float, *, input_degree: int = 0, method: str = "forward") -> float:
    """Degree seen at scale ``c``: log₂ of ‖f(2cθ)‖ / ‖f(cθ)‖.

    >>> round(degree_at(nn.Linear(3, 3, bias=False).double(), torch.ones(3, dtype=torch.float64), 5.0), 9)
    1.0
    """
    small, large = (scaled(module, x, k * c, input_degree=input_degree, method=method) for k in (1, 2))
    size = float(small.detach().abs().max())
    return math.log2(float((large.detach() / size).norm() / (small.detach() / size).norm()))


def arriving_degrees(kind: str, term: str, input_degree: int, *, project: bool = True) -> tuple[int, int]:
    """Degrees of the main term and of ``term`` (a bias or ``residual``) where they meet, right before the norm.

    The main term has a degree of the input, one more by the values or the inner map, one more by the projection.

    >>> arriving_degrees("attention", "output", 1), arriving_degrees("feedforward", "residual", 0)
    ((3, 1), (2, 0))
    """
    last = int(project)
    main = input_degree + 1 + last
    low = {"residual": input_degree, "output": 1, "value": 1 + last, "inner": 1 + last}
    if term not in low or term not in ("residual", *BIASES[kind]):
        raise ValueError(f"{term!r} of {kind} does not meet the main term by addition before the norm")
    return main, low[term]


def predicted_rate(kind: str, term: str | None, input_degree: int, *, project: bool = True) -> float:
    """The r in 1 − cos ∝ c^−r: twice the difference of degrees that meet, or inf: faster than every power, or exact.

    >>> predicted_rate("attention", "residual", 1), predicted_rate("feedforward", "inner", 0)
    (4, inf)
    """
    if term is None or term in ("query", "key"):  # nothing meets, or inside softmax
        return math.inf
    main, low = arriving_degrees(kind, term, input_degree, project=project)
    return 2 * (main - low) if low < main else math.inf


class HardAttention(NamedTuple):
    """How far attention is from its argmax, a number for each query, ``(..., T)``."""

    gap: Tensor  # between the best score and the next
    distance: Tensor  # ‖Σ_j A_j v_j − v*‖, with v* the value of the best key
    bound: Tensor  # (T − 1) e^(−gap) · max_j ‖v_j − v*‖, never less than the distance


def hard_attention(scores: Tensor, values: Tensor) -> HardAttention:
    """Compare softmax attention with its argmax: scores ``(..., T, T)`` before softmax, values ``(..., T, d)``.

    The bound is a line: Σ_j A_j v_j − v* = Σ_j A_j (v_j − v*), and A_j ≤ e^(−gap) for all T − 1 other keys.

    >>> found = hard_attention(torch.tensor([[9.0, 1.0], [1.0, 9.0]]).log(), torch.tensor([[0.0], [1.0]]))
    >>> found.distance, found.bound  # 1/10 of the weight is elsewhere, at most 1/9
    (tensor([0.1000, 0.1000]), tensor([0.1111, 0.1111]))
    """
    best = scores.topk(2, -1)
    weights = scores.softmax(-1)
    apart = (
        values.unsqueeze(-3)
        - values.gather(-2, best.indices[..., :1].expand(*scores.shape[:-1], values.shape[-1]))[..., None, :]
    )  # (..., T queries, T keys, d)
    gap = best.values[..., 0] - best.values[..., 1]
    distance = (weights[..., None] * apart).sum(-2).norm(dim=-1)
    return HardAttention(gap, distance, (scores.shape[-1] - 1) * (-gap).exp() * apart.norm(dim=-1).amax(-1))


def main_term(layer: Sublayer, x: Tensor) -> Tensor:
    """The term of highest degree before the norm, at c = 1: every bias dropped, softmax replaced by its argmax.

    >>> layer = Sublayer("feedforward", 4, biases=["inner"], generator=torch.Generator().manual_seed(0))
    >>> x = torch.eye(2, 4, dtype=torch.float64)
    >>> torch.allclose(main_term(layer, 2 * x), 2 * main_term(layer, x))  # core has a bias, this has none
    True
    """
    bare = {name for name in BIASES[layer.kind] if getattr(layer, f"{name}_bias") is not None}
    kept = {name: getattr(layer, f"{name}_bias") for name in bare}
    for name in bare:
        setattr(layer, f"{name}_bias", None)
    try:
        if layer.kind == "feedforward":
            return layer.core(x)
        scores, values = layer.attend(x)
        best = scores.argmax(-1, keepdim=True).expand(*scores.shape[:-1], values.shape[-1])
        return layer._map("output", values.gather(-2, best).transpose(-2, -3).flatten(-2))
    finally:
        for name, bias in kept.items():
            setattr(layer, f"{name}_bias", bias)


def lower_term(layer: Sublayer, x: Tensor, term: str) -> Tensor:
    """What ``term`` (``residual`` or a bias outside softmax) adds to the main term before the norm, at c = 1.

    Raises:
        ValueError: a query or key bias, which acts inside softmax, or a bias that the layer does not have.

    >>> layer = Sublayer("feedforward", 4, biases=["output"], generator=torch.Generator().manual_seed(0))
    >>> x = torch.eye(2, 4, dtype=torch.float64)
    >>> torch.allclose(main_term(layer, x) + lower_term(layer, x, "output"), layer.core(x))
    True
    """
    if term == "residual":
        return x
    bias = getattr(layer, f"{term}_bias", None)
    if bias is None or term in ("query", "key"):
        raise ValueError(f"the layer adds no {term!r} bias to its main term")
    if term == "inner":  # through ReLU only where it is open
        bias = bias * (x @ layer.inner_weight.mT > 0)
    weight = getattr(layer, "output_weight", None)
    through = bias if term == "output" or weight is None else bias @ weight.mT
    return through.expand_as(x)


def leading_coefficient(norm: nn.Module, main: Tensor, low: Tensor) -> float:
    """The K in 1 − cos(norm(main + e·low), norm(main)) = K e² + O(e³), all tokens as one vector.

    >>> leading_coefficient(nn.Identity(), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))  # of 1 − 1/√(1 + e²)
    0.5
    """
    y, dy = torch.func.jvp(norm, (main,), (low,))
    y, dy = y.flatten(), dy.flatten()
    across = dy - (dy @ y) / (y @ y) * y
    return float(across @ across / (y @ y)) / 2
