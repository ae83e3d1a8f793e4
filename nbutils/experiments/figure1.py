"""The networks of Figure 1: five sublayers, as §4.2 describes them and as the authors' released code has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nbutils.sublayers import BIASES, Sublayer

SUBLAYERS = {  # those of Fig. 1: kind, with biases, placement of the layer norm
    "attention": ("attention", True, "post"),
    "attention, no biases": ("attention", False, "post"),
    "feed-forward": ("feedforward", True, "post"),
    "feed-forward, no biases": ("feedforward", False, "post"),
    "feed-forward, no biases or residual": ("feedforward", False, "simplified"),
}
WIDTH = 10  # and number of classes


class Affine(nn.Module):
    """A random affine layer on top of a sublayer, as part of the loss: its weights are buffers, no parameters.

    >>> top = Affine(nn.Identity(), 4, 3, generator=torch.Generator().manual_seed(0))
    >>> tuple(top(torch.ones(2, 4, dtype=torch.float64)).shape), [*top.parameters()]
    ((2, 3), [])
    """

    def __init__(self, body: nn.Module, dim: int, classes: int, *, generator: torch.Generator) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("weight", torch.randn(classes, dim, generator=generator, dtype=torch.float64) / dim**0.5)
        self.register_buffer("bias", torch.randn(classes, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., dim)`` to logits ``(..., classes)``."""
        return self.body(x) @ self.weight.mT + self.bias


def figure1(name: str, *, released: bool = False, generator: torch.Generator) -> nn.Module:
    """One of the five sublayers of Fig. 1, with its random parameters, in float64.

    As described in §4.2 a sublayer of BERT (post-norm, two heads, output projection), with a random affine layer on
    top that belongs to the loss. As ``released`` (``transformer_scale_test.py`` of the authors' repository): one head,
    no output projection, scores not divided by √d, torch's uniform initialization, ε = 1e-5, and no affine layer.
    Variants of one kind drawn from the same state of the generator share all weights that they both have.

    >>> draw = torch.Generator()
    >>> nets = [figure1(name, generator=draw.manual_seed(0)) for name in ("feed-forward", "feed-forward, no biases")]
    >>> [sum(p.numel() for p in net.parameters()) for net in nets]  # 2 · 10 · 20 + 2 · 10, and 20 + 10 more with biases
    [450, 420]
    >>> bool((nets[0].body.inner_weight == nets[1].body.inner_weight).all())
    True
    """
    kind, biases, placement = SUBLAYERS[name]
    if released:
        return _released(kind, WIDTH, WIDTH, biases=biases, placement=placement, generator=generator)
    body = Sublayer(kind, WIDTH, placement=placement, biases=BIASES[kind] if biases else (), generator=generator)
    return Affine(body, WIDTH, WIDTH, generator=generator)


def _released(
    kind: str,
    dim: int,
    hidden: int,
    *,
    heads: int = 1,
    biases: bool = True,
    placement: str = "post",
    generator: torch.Generator,
) -> Sublayer:
    attention = kind == "attention"
    project = not attention or heads > 1  # one head is left as it is
    names = [b for b in BIASES[kind] if project or b != "output"]
    options: dict[str, Any] = {"heads": heads, "hidden": hidden, "eps": 1e-5, "generator": generator}
    layer = Sublayer(kind, dim, placement=placement, biases=names, project=project, **options)
    layer.key_dim = 1  # the released scores are not divided by √d
    for name, value in layer.named_parameters():
        if name.startswith("norm."):
            value.data.fill_(1.0 if name == "norm.gain" else 0.0)
        else:
            fan_in = hidden if name.startswith("output") and not attention else dim
            value.data = _uniform(value.shape, fan_in, generator)
    for bias in [] if biases else names:  # drawn all the same: variants share the rest
        setattr(layer, f"{bias}_bias", None)
    return layer


def _uniform(shape: Sequence[int], fan_in: int, generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1) * fan_in**-0.5


KINDS = ("attention", "feedforward")


def released_transformer(
    depth: int, dim: int, *, kinds: Sequence[str] = KINDS, generator: torch.Generator
) -> nn.Module:
    """The stacks of ``transformer_scale_test.py``: ``depth`` post-norm layers of attention and feed-forward, biases.

    The hidden layer is ten times as wide. ``kinds`` are the sublayers of a layer.

    >>> net = released_transformer(1, 4, generator=torch.Generator().manual_seed(0))
    >>> net(torch.eye(3, 4, dtype=torch.float64)).norm(dim=-1).round(decimals=3).tolist()  # a layer norm comes last: √4
    [2.0, 2.0, 2.0]
    """
    layers = (_released(kind, dim, 10 * dim, generator=generator) for kind in depth * tuple(kinds))
    return nn.Sequential(*layers)


class ReleasedModel(nn.Module):
    """The network of ``transformer_scale_test_softmax.py``: embedding, six layers of width 240, readout.

    Twelve heads, hidden width 50, 100 words, 512 positions, and biases. The input is one sequence of tokens.

    >>> model = ReleasedModel(24, generator=torch.Generator().manual_seed(0))
    >>> tuple(model(torch.arange(5)).shape), sum(p.numel() for p in model.parameters())
    ((5, 24), 1692324)
    """

    def __init__(self, classes: int, *, generator: torch.Generator) -> None:
        super().__init__()
        dim, rows = 240, {"word": 100, "position": 512}
        normal = {name: torch.randn(n, dim, generator=generator, dtype=torch.float64) for name, n in rows.items()}
        self.embedding = nn.ParameterDict(normal.items())  # in this order; a dictionary would be sorted
        layers = (_released(kind, dim, 50, heads=12, generator=generator) for kind in 6 * KINDS)
        self.layers = nn.Sequential(*layers)
        self.weight = nn.Parameter(_uniform((classes, dim), dim, generator))
        self.bias = nn.Parameter(_uniform((classes,), dim, generator))
        self.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every token, ``(T, classes)``."""
        x = self.embedding["word"][tokens] + self.embedding["position"][: len(tokens)]
        return self.layers(x) @ self.weight.mT + self.bias
