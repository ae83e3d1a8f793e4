"""Transformer sublayers with a switch for every bias and residual.

Appendix B of the paper, in float64 and with LayerNorm's ε = 0 unless asked otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

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

    >>> from nbutils.chapters.rates import degree_at
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
        self.norm = nn.Identity() if placement == "none" else LayerNorm(dim, eps=eps, generator=generator)

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
