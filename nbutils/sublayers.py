"""Transformer sublayers with a switch for every bias and residual, and how fast they saturate under scaling.

Appendix B of the paper, in float64 and with LayerNorm's ε = 0 unless asked otherwise. A network is scaled by
``functional_call``: its own parameters never change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit
from torch import Tensor, nn
from torch.func import functional_call

from nbutils.homogeneity import one_minus_cosine

Array = NDArray[np.float64]

BIASES = {"attention": ("output", "value", "query", "key"), "feedforward": ("output", "inner")}
PLACEMENTS = ("simplified", "post", "pre", "residual-post", "none")


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis with a learned affine map; ε = 0 by default, unlike torch's.

    >>> norm, x = LayerNorm(4, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 2.0, 3.0, 5.0])
    >>> torch.allclose(norm(1000 * x), norm(x))  # degree 0 in its input, since ε = 0
    True
    """

    def __init__(self, dim: int, *, eps: float = 0.0, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.gain = _normal((dim,), 0.2, generator, mean=1.0)
        self.shift = _normal((dim,), 0.2, generator)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * standardise(x, eps=self.eps) + self.shift


class Sublayer(nn.Module):
    """One attention or feed-forward sublayer, Definitions 5 to 7 of the paper and what they leave out.

    ==================  =====================================
    placement           output, for the core f
    ==================  =====================================
    ``simplified``      LN(f(x)): the paper's, no residual
    ``post``            LN(x + f(x)): BERT's
    ``pre``             x + f(LN(x)): the usual pre-norm
    ``residual-post``   x + LN(f(x))
    ``none``            x + f(x)
    ==================  =====================================

    Args:
        kind: ``attention`` (f = W·concat(heads)) or ``feedforward`` (f = W·ReLU(W'x)).
        dim: width of input and output; ``hidden`` is that of the feed-forward layer, ``2 * dim`` if not given.
        biases: names out of ``BIASES[kind]``.
        project: False leaves out the last W; a feed-forward layer is then as wide as its input.

    Raises:
        ValueError: unknown kind, placement or bias, heads that do not divide the width.

    >>> layer = Sublayer("feedforward", 4, generator=torch.Generator().manual_seed(0))
    >>> round(degree_at(layer, torch.eye(2, 4, dtype=torch.float64), 10.0, method="core"), 9)  # two matrices
    2.0
    """

    def __init__(
        self,
        kind: str,
        dim: int,
        *,
        placement: str = "simplified",
        biases: Iterable[str] = (),
        project: bool = True,
        heads: int = 2,
        hidden: int | None = None,
        eps: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        biases = set(biases)
        if kind not in BIASES:
            raise ValueError(f"unknown kind {kind!r}: choose one of {', '.join(BIASES)}")
        if placement not in PLACEMENTS:
            raise ValueError(f"unknown placement {placement!r}: choose one of {', '.join(PLACEMENTS)}")
        if not biases <= set(BIASES[kind]):
            raise ValueError(f"unknown bias {biases - set(BIASES[kind])}: {kind} has {', '.join(BIASES[kind])}")
        if kind == "attention" and dim % heads:
            raise ValueError(f"{heads} heads do not divide the width {dim}")
        self.kind, self.placement, self.heads = kind, placement, heads
        inner = dim if kind == "attention" or not project else hidden or 2 * dim
        names = ("query", "key", "value") if kind == "attention" else ("inner",)
        self.key_dim = dim // heads if kind == "attention" else 0
        # every weight and bias is drawn, used or not: switches do not change the rest of a network of the same seed
        for name in names:
            self._linear(name, dim, inner, name in biases, generator)
        self._linear("output", inner, dim, "output" in biases, generator)
        if not project:
            del self.output_weight
        self.norm = None if placement == "none" else LayerNorm(dim, eps=eps, generator=generator)

    def _linear(self, name: str, fan_in: int, fan_out: int, bias: bool, generator: torch.Generator | None) -> None:
        weight, vector = (
            _normal((fan_out, fan_in), fan_in**-0.5, generator),
            _normal((fan_out,), 0.5, generator),
        )
        self.register_parameter(f"{name}_weight", weight)
        self.register_parameter(f"{name}_bias", vector if bias else None)

    def _map(self, name: str, x: Tensor) -> Tensor:
        weight = getattr(self, f"{name}_weight", None)  # absent: the output projection that is left out
        x = x if weight is None else x @ weight.mT
        bias = getattr(self, f"{name}_bias")
        return x if bias is None else x + bias

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores before softmax ``(..., heads, T, T)`` and values ``(..., heads, T, d)`` of ``(..., T, dim)``."""
        q, k, v = (
            self._map(name, x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for name in ("query", "key", "value")
        )
        return q @ k.mT / self.key_dim**0.5, v

    def head(self, x: Tensor) -> Tensor:
        """Concatenated heads H, or the hidden layer of a feed-forward sublayer: what the last W multiplies."""
        if self.kind == "feedforward":
            return torch.relu(self._map("inner", x))
        scores, values = self.attend(x)
        return (scores.softmax(-1) @ values).transpose(-2, -3).flatten(-2)

    def core(self, x: Tensor) -> Tensor:
        """The sublayer without normalisation and residual: WH + b."""
        return self._map("output", self.head(x))

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(..., T, dim)`` in and out."""
        match self.placement:
            case "simplified":
                return self.norm(self.core(x))
            case "post":
                return self.norm(x + self.core(x))
            case "pre":
                return x + self.core(self.norm(x))
            case "residual-post":
                return x + self.norm(self.core(x))
        return x + self.core(x)


class Encoder(nn.Module):
    """An embedding and ``depth`` layers of attention and feed-forward; input ``(..., T, vocab)`` of one-hot rows.

    ``final_norm`` ends the stack by a layer norm, as pre-norm transformers do.

    >>> encoder = Encoder(5, 4, depth=1, placement="pre", generator=torch.Generator().manual_seed(0))
    >>> x = torch.eye(5, dtype=torch.float64)
    >>> torch.allclose(encoder(x.flip(0)), encoder(x).flip(0))  # no positions: the order of tokens does not matter
    True
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        depth: int,
        *,
        placement: str,
        biases: bool = False,
        final_norm: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.embedding = _normal((vocab, dim), 1.0, generator)
        self.layers = nn.Sequential(
            *(
                Sublayer(kind, dim, placement=placement, biases=BIASES[kind] if biases else (), generator=generator)
                for _ in range(depth)
                for kind in ("attention", "feedforward")
            )
        )
        self.norm = LayerNorm(dim, generator=generator) if final_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layers(x @ self.embedding))


def _normal(shape: Sequence[int], std: float, generator: torch.Generator | None, mean: float = 0.0) -> nn.Parameter:
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return nn.Parameter(mean + std * drawn, requires_grad=False)


def standardise(x: Tensor, *, eps: float = 0.0) -> Tensor:
    """Subtract the mean over the last axis and divide by the standard deviation: LayerNorm without its affine map.

    >>> standardise(torch.tensor([1.0, 3.0]))
    tensor([-1.,  1.])
    """
    centred = x - x.mean(-1, keepdim=True)
    # by the largest entry first: outputs of degree 17 and more would overflow when squared
    size = centred.abs().amax(-1, keepdim=True) if eps == 0 else torch.ones_like(centred[..., :1])
    centred = centred / size
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def batch_standardise(x: Tensor) -> Tensor:
    """Batch normalisation's first half: mean and deviation of each feature over all tokens, ``(..., T, dim)``.

    >>> batch_standardise(torch.tensor([[1.0, 0.0], [3.0, 4.0]])).tolist()
    [[-1.0, -1.0], [1.0, 1.0]]
    """
    flat = x.flatten(0, -2)
    return ((flat - flat.mean(0)) / flat.std(0, correction=0)).view_as(x)


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


class Rate(NamedTuple):
    """Exponent r of errors ∝ c^−r over a window of scales."""

    estimate: float
    interval: tuple[float, float]
    local: Array  # (networks, scales − 1): slope between neighbouring scales


def saturation_rate(scales: ArrayLike, errors: ArrayLike, *, level: float = 0.999) -> Rate:
    """Fit errors ∝ c^−r for each network, errors ``(networks, scales)``, and give r over the networks.

    The interval is Student's over the networks, widened on both sides by what the window does: the mean distance
    between the fits of its first and of its second half. A law that is a power only in the limit has such a drift.

    Raises:
        ValueError: fewer than 2 networks or 4 scales, an error that is not positive.

    >>> c = np.array([10.0, 20.0, 40.0, 80.0])
    >>> round(saturation_rate(c, [3 * c**-4, 5 * c**-4]).estimate, 9)
    4.0
    """
    log_c, errors = np.log(np.asarray(scales, dtype=np.float64)), np.asarray(errors, dtype=np.float64)
    if errors.ndim != 2 or len(errors) < 2 or errors.shape[1] != len(log_c) or len(log_c) < 4:
        raise ValueError(f"errors have shape {errors.shape} for {len(log_c)} scales: give (networks ≥ 2, scales ≥ 4)")
    if not (errors > 0).all():
        raise ValueError("an error is not positive: it has reached rounding, or the networks are exactly homogeneous")
    log_e = np.log(errors)

    def slopes(part: slice) -> Array:
        return -np.polyfit(log_c[part], log_e[:, part].T, 1)[0]

    fitted, half = slopes(slice(None)), len(log_c) // 2 + 1
    drift = abs(slopes(slice(None, half)) - slopes(slice(-half, None))).mean()
    n = len(fitted)
    arm = stdtrit(n - 1, (1 + level) / 2) * fitted.std(ddof=1) / math.sqrt(n) + drift
    estimate = float(fitted.mean())
    return Rate(estimate, (float(estimate - arm), float(estimate + arm)), -np.diff(log_e) / np.diff(log_c))
