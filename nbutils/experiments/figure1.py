"""The networks of Figure 1: five sublayers, as described in §4.2 and as written in the authors' released code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nbutils.experiments.encoder_sublayers import BIASES, Sublayer

SUBLAYERS = {  # the five of Fig. 1: kind, whether there are biases, placement of the layer norm
    "attention": ("attention", True, "post"),
    "attention, no biases": ("attention", False, "post"),
    "feed-forward": ("feedforward", True, "post"),
    "feed-forward, no biases": ("feedforward", False, "post"),
    "feed-forward, no biases or residual": ("feedforward", False, "simplified"),
}
WIDTH = 10  # also the number of classes
KINDS = ("attention", "feedforward")  # the sublayers of a transformer's layer


class Affine(nn.Module):
    """A sublayer with a random affine layer on top that belongs to the loss: its weights are buffers, not parameters.

    Used in ``biases`` and ``figure-1``.

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

    As described in §4.2, it is a sublayer of BERT (post-norm, two heads, output projection), with a random affine layer
    on top that belongs to the loss. As ``released`` (``transformer_scale_test.py`` of the authors' repository) it has
    one head, no output projection, scores that are not divided by √d, torch's uniform initialization, ε = 1e-5, and no
    affine layer. Variants of one kind that are drawn from the same state of the generator share the values of all
    weights that both variants have.

    Raises:
        KeyError: ``name`` is not in ``SUBLAYERS``.

    Used in ``biases`` and ``figure-1``.

    >>> generator = torch.Generator()
    >>> net = figure1("feed-forward", generator=generator.manual_seed(0))
    >>> without_biases = figure1("feed-forward, no biases", generator=generator.manual_seed(0))
    >>> sum(p.numel() for p in without_biases.parameters())  # 2 · 10 · 20, and a layer norm's 2 · 10
    420
    >>> sum(p.numel() for p in net.parameters())  # 20 + 10 more
    450
    >>> bool((net.body.inner_weight == without_biases.body.inner_weight).all())
    True
    """
    kind, has_biases, placement = SUBLAYERS[name]
    if released:
        return _released_sublayer(kind, WIDTH, WIDTH, has_biases=has_biases, placement=placement, generator=generator)
    biases = BIASES[kind] if has_biases else ()
    sublayer = Sublayer(kind, WIDTH, placement=placement, biases=biases, generator=generator)
    return Affine(sublayer, WIDTH, WIDTH, generator=generator)


def _released_sublayer(
    kind: str,
    dim: int,
    hidden: int,
    *,
    heads: int = 1,
    has_biases: bool = True,
    placement: str = "post",
    generator: torch.Generator,
) -> Sublayer:
    """A sublayer as ``transformer_scale_test.py`` builds and initializes it.

    ``hidden`` is the inner width of a feed-forward sublayer. Scores of attention are not divided by √d.
    """
    is_attention = kind == "attention"
    project = not is_attention or heads > 1  # a single head has no output projection
    biases = [name for name in BIASES[kind] if project or name != "output"]
    options: dict[str, Any] = {"heads": heads, "hidden": hidden, "eps": 1e-5, "generator": generator}
    layer = Sublayer(kind, dim, placement=placement, biases=biases, project=project, **options)
    layer.key_dim = 1  # the released scores are not divided by √d
    for name, parameter in layer.named_parameters():
        if name == "norm.gain":
            parameter.data.fill_(1.0)
        elif name.startswith("norm."):
            parameter.data.fill_(0.0)
        else:
            fan_in = hidden if name.startswith("output") and not is_attention else dim
            parameter.data = _uniform(parameter.shape, fan_in, generator)
    if not has_biases:  # removed only after the draw, so that both variants share all other weights
        for name in biases:
            setattr(layer, f"{name}_bias", None)
    return layer


def _uniform(shape: Sequence[int], fan_in: int, generator: torch.Generator) -> Tensor:
    """Uniform in ±1/√fan_in, as ``nn.Linear`` draws its weights."""
    return (2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1) * fan_in**-0.5


def released_transformer(
    depth: int, dim: int, *, kinds: Sequence[str] = KINDS, generator: torch.Generator
) -> nn.Module:
    """The stacks of ``transformer_scale_test.py``: ``depth`` post-norm layers of width ``dim``, with biases.

    Each layer consists of the sublayers ``kinds``. The hidden width of a feed-forward sublayer is 10 · ``dim``.

    Used in ``figure-1``.

    >>> net = released_transformer(1, 4, generator=torch.Generator().manual_seed(0))
    >>> net(torch.eye(3, 4, dtype=torch.float64)).norm(dim=-1).round(decimals=3).tolist()  # a layer norm comes last: √4
    [2.0, 2.0, 2.0]
    """
    layer = tuple(kinds)
    sublayers = [_released_sublayer(kind, dim, 10 * dim, generator=generator) for kind in depth * layer]
    return nn.Sequential(*sublayers)


class ReleasedModel(nn.Module):
    """The network of ``transformer_scale_test_softmax.py``: embedding, six layers of width 240, readout.

    It has twelve heads, hidden width 50, 100 words, 512 positions, and biases. The input is one sequence of tokens.

    Used in ``figure-1``.

    >>> model = ReleasedModel(24, generator=torch.Generator().manual_seed(0))
    >>> tuple(model(torch.arange(5)).shape), sum(p.numel() for p in model.parameters())
    ((5, 24), 1692324)
    """

    def __init__(self, classes: int, *, generator: torch.Generator) -> None:
        super().__init__()
        dim = 240
        word = torch.randn(100, dim, generator=generator, dtype=torch.float64)
        position = torch.randn(512, dim, generator=generator, dtype=torch.float64)
        # pairs, since the keys of a dictionary would be sorted
        self.embedding = nn.ParameterDict([("word", word), ("position", position)])
        sublayers = [_released_sublayer(kind, dim, 50, heads=12, generator=generator) for kind in 6 * KINDS]
        self.layers = nn.Sequential(*sublayers)
        self.weight = nn.Parameter(_uniform((classes, dim), dim, generator))
        self.bias = nn.Parameter(_uniform((classes,), dim, generator))
        self.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(T,)``, T ≤ 512, to logits of every token, ``(T, classes)``."""
        x = self.embedding["word"][tokens] + self.embedding["position"][: len(tokens)]
        return self.layers(x) @ self.weight.mT + self.bias
