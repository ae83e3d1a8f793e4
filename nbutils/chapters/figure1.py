"""The networks of Figure 1: five sublayers, as §4.2 describes them and as the authors' released code has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nbutils.sublayers import BIASES, Sublayer

SUBLAYERS = {  # those of Fig. 1: kind, with biases, with residual connection
    "attention": ("attention", True, True),
    "attention, no biases": ("attention", False, True),
    "feed-forward": ("feedforward", True, True),
    "feed-forward, no biases": ("feedforward", False, True),
    "feed-forward, no biases or residual": ("feedforward", False, False),
}
WIDTH = 10  # and number of classes


class Affine(nn.Module):
    """A random affine layer on top of a sublayer: part of the loss (buffers) or of the network (parameters).

    >>> generator = torch.Generator().manual_seed(0)
    >>> tops = [Affine(nn.Identity(), 4, 3, scaled=scaled, generator=generator) for scaled in (False, True)]
    >>> [sum(p.numel() for p in top.parameters()) for top in tops]
    [0, 15]
    """

    def __init__(self, body: nn.Module, dim: int, classes: int, *, scaled: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.body = body
        weight = torch.randn(classes, dim, generator=generator, dtype=torch.float64) / dim**0.5
        bias = torch.randn(classes, generator=generator, dtype=torch.float64) / 2
        for name, value in (("weight", weight), ("bias", bias)):
            if scaled:
                self.register_parameter(name, nn.Parameter(value, requires_grad=False))
            else:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., dim)`` to logits ``(..., classes)``."""
        return self.body(x) @ self.weight.mT + self.bias


def figure1(name: str, *, released: bool = False, affine: str | None = "loss", generator: torch.Generator) -> nn.Module:
    """One of the five sublayers of Fig. 1, with its random parameters, in float64.

    As described in §4.2 a sublayer of BERT (post-norm, two heads, output projection), with a random affine layer on
    top: ``affine="loss"`` counts it as part of the loss, so that it is not scaled, ``"network"`` as part of θ, and
    None leaves it out. As ``released`` (``transformer_scale_test.py`` of the authors' repository): one head, no output
    projection, scores not divided by √d, torch's uniform initialization, ε = 1e-5, and no affine layer.

    Raises:
        ValueError: unknown name or affine layer.

    >>> generator, name = torch.Generator().manual_seed(0), "feed-forward, no biases"
    >>> nets = [figure1(name, affine=affine, generator=generator) for affine in ("loss", "network")]
    >>> [sum(p.numel() for p in net.parameters()) for net in nets]  # 2 · 10 · 20 + 2 · 10, and 10 · 10 + 10 more
    [420, 530]
    """
    if name not in SUBLAYERS:
        raise ValueError(f"unknown sublayer {name!r}: choose one of {'; '.join(SUBLAYERS)}")
    if affine not in ("loss", "network", None):
        raise ValueError(f"unknown affine layer {affine!r}: choose 'loss', 'network' or None")
    kind, biases, residual = SUBLAYERS[name]
    if released:
        return _released_sublayer(kind, WIDTH, hidden=WIDTH, biases=biases, residual=residual, generator=generator)
    placement, names = "post" if residual else "simplified", BIASES[kind] if biases else ()
    body = Sublayer(kind, WIDTH, placement=placement, biases=names, generator=generator)
    return body if affine is None else Affine(body, WIDTH, WIDTH, scaled=affine == "network", generator=generator)


def _released_sublayer(
    kind: str, dim: int, *, hidden: int, biases: bool, residual: bool, generator: torch.Generator
) -> Sublayer:
    attention, placement = kind == "attention", "post" if residual else "simplified"
    names = [b for b in BIASES[kind] if biases and not (attention and b == "output")]
    options: dict[str, Any] = {"heads": 1, "hidden": hidden, "eps": 1e-5, "generator": generator}
    layer = Sublayer(kind, dim, placement=placement, biases=names, project=not attention, **options)
    layer.key_dim = 1  # the released scores are not divided by √d
    for name, value in layer.named_parameters():
        if name.startswith("norm."):
            value.data.fill_(1.0 if name == "norm.gain" else 0.0)
        else:
            fan_in = hidden if name.startswith("output") else dim
            value.data = (2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1) * fan_in**-0.5
    return layer


def released_transformer(depth: int, dim: int, *, generator: torch.Generator) -> nn.Module:
    """The released code's larger network: ``depth`` post-norm layers of attention and feed-forward, all with biases.

    The hidden layer is ten times as wide.

    >>> net = released_transformer(1, 4, generator=torch.Generator().manual_seed(0))
    >>> net(torch.eye(3, 4, dtype=torch.float64)).norm(dim=-1).round(decimals=3).tolist()  # a layer norm comes last: √4
    [2.0, 2.0, 2.0]
    """
    kinds = depth * ("attention", "feedforward")
    layers = (
        _released_sublayer(kind, dim, hidden=10 * dim, biases=True, residual=True, generator=generator)
        for kind in kinds
    )
    return nn.Sequential(*layers)
