"""Transformer sublayers of appendix B of the preprint, in float64, with a switch for every bias and residual."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nbutils.sublayers import LayerNorm, apply_placement, fixed_normal

BIASES = {"attention": ("output", "value", "query", "key"), "feedforward": ("output", "inner")}
SUBLAYER_PLACEMENTS = ("simplified", "post", "pre", "residual-post", "none")


class Sublayer(nn.Module):
    """An attention or feed-forward sublayer: Definitions 5 to 7 of the preprint, and the variants that they leave out.

    ==================  =====================================
    placement           output, for the core f
    ==================  =====================================
    ``simplified``      LN(f(x)): the preprint's, no residual
    ``post``            LN(x + f(x)): BERT's
    ``pre``             x + f(LN(x)): the usual pre-norm
    ``residual-post``   x + LN(f(x)): the published version's
    ``none``            x + f(x)
    ==================  =====================================

    Args:
        kind: ``attention`` (f = W·concat(heads)) or ``feedforward`` (f = W·ReLU(W'x)).
        dim, hidden: width of input and output, and of the feed-forward layer (``2 * dim`` by default).
        biases: names from ``BIASES[kind]``.
        project: False leaves out the last W; a feed-forward layer is then as wide as its input.

    Raises:
        ValueError: unknown placement or bias.

    Used in ``sublayers``, ``biases`` and ``figure-1``.

    >>> layer, x = Sublayer("feedforward", 4, biases=["output"]), torch.eye(2, 4, dtype=torch.float64)
    >>> torch.allclose(layer.core(2 * x) - layer.output_bias, 2 * (layer.core(x) - layer.output_bias))
    True
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
        if placement not in SUBLAYER_PLACEMENTS:
            raise ValueError(f"unknown placement {placement!r}: choose one of {', '.join(SUBLAYER_PLACEMENTS)}")
        if not biases <= set(BIASES[kind]):
            raise ValueError(f"unknown bias {biases - set(BIASES[kind])}: {kind} has {', '.join(BIASES[kind])}")
        self.kind = kind
        self.placement = placement
        self.heads = heads
        self.key_dim = dim // heads
        if kind == "attention":
            names: tuple[str, ...] = ("query", "key", "value")
            inner = dim
        else:
            names = ("inner",)
            inner = (hidden or 2 * dim) if project else dim
        # Every weight and bias is drawn, used or not, so that a switch leaves the other draws of a seed unchanged.
        for name in names:
            self._add_linear(name, dim, inner, name in biases, generator)
        self._add_linear("output", inner, dim, "output" in biases, generator)
        if not project:
            del self.output_weight
        self.norm = nn.Identity() if placement == "none" else LayerNorm(dim, eps=eps, generator=generator)

    def _add_linear(self, name: str, fan_in: int, fan_out: int, bias: bool, generator: torch.Generator | None) -> None:
        weight = fixed_normal((fan_out, fan_in), fan_in**-0.5, generator)
        shift = fixed_normal((fan_out,), 0.5, generator)
        self.register_parameter(f"{name}_weight", weight)
        self.register_parameter(f"{name}_bias", shift if bias else None)

    def _apply_linear(self, name: str, x: Tensor) -> Tensor:
        weight = getattr(self, f"{name}_weight", None)  # None for an output projection that is left out
        bias = getattr(self, f"{name}_bias")
        if weight is not None:
            x = x @ weight.mT
        if bias is not None:
            x = x + bias
        return x

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores before softmax ``(..., heads, T, T)`` and values ``(..., heads, T, d)`` of ``(..., T, dim)``."""
        projections = (self._apply_linear(name, x) for name in ("query", "key", "value"))
        q, k, v = (projection.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for projection in projections)
        return q @ k.mT / self.key_dim**0.5, v

    def head(self, x: Tensor, *, hard: bool = False) -> Tensor:
        """The input of the last W: concatenated heads, or the hidden layer of a feed-forward sublayer.

        ``hard`` replaces softmax by argmax.
        """
        if self.kind == "feedforward":
            return torch.relu(self._apply_linear("inner", x))
        scores, values = self.attend(x)
        weights = _argmax_weights(scores) if hard else scores.softmax(-1)
        return (weights @ values).transpose(-2, -3).flatten(-2)

    def core(self, x: Tensor, *, hard: bool = False) -> Tensor:
        """The sublayer without normalisation and residual: WH + b."""
        return self._apply_linear("output", self.head(x, hard=hard))

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(..., T, dim)`` in and out."""
        return apply_placement(self.placement, x, self.core, self.norm)


def _argmax_weights(scores: Tensor) -> Tensor:
    return nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)
