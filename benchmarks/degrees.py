"""The degree of a 12-layer encoder by algebra against its numerical measurement."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor, nn

from benchmarks.timing import Row, compare
from nbutils import homogeneity
from nbutils.device import generator


def encoder(depth: int, d: int = 768) -> nn.Module:
    """A pre-norm encoder of torch, without biases, every weight drawn."""
    layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True, bias=False)
    made, rng = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False).eval(), generator(0, "cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) / parameter.shape[-1] ** 0.5)
    return made


K_IN = 3  # the degree of a pre-norm sublayer without biases, and so of the input: a gain and two matrices


def tokens(d: int = 768) -> Tensor:
    return torch.randn(1, 16, d, generator=generator(1, "cpu"))


def twelve_layers() -> Row:
    """The size of BERT-base: width 768; 16 tokens. The plain side runs the network twice.

    One log-ratio is the least there is: it has to choose scales and a tolerance, and it does not say where the degree
    comes from. Attention is homogeneous in the limit only, so the scales are 1000 and 2000.
    """
    net, x = encoder(12), tokens()
    with homogeneity.scalable(net, x, K_IN) as output, torch.no_grad():

        def ours() -> int | Fraction:
            return homogeneity.degree(net, K_IN, approximate=True)

        def plain() -> float:
            return float((output(2000.0).norm() / output(1000.0).norm()).log2())

        assert abs(plain() - ours()) < 1e-6, f"the two sides disagree: {ours()} and {plain()}"
        what = "degree of a 12-layer encoder of width 768 by algebra, against running it at two scales"
        return compare(what, ours, plain, 20, repeats=3)


PAIRS = (twelve_layers,)
