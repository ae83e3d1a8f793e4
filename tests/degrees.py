"""Networks of known degree, for the tests of rules, algebra and measurement."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """A network given by a function of (module, *inputs), its parts and its buffers."""

    def __init__(self, function, buffers=None, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return self.function(self, x)


class Two(Net):
    def forward(self, x, y):
        return self.function(self, x, y)


def par(*shape):
    return nn.Parameter(torch.randn(*shape))


def linear(*sizes, bias=False):
    return nn.Linear(*sizes, bias=bias)


def sq():
    return linear(4, 4)


def norm(kind=nn.LayerNorm, **options):
    return kind(4, eps=0.0, **options)


def plain():
    return norm(elementwise_affine=False)


def attention_of_normed(m, x):
    """Queries and keys normalized without affine: the scores have degree 0, so the softmax is exact."""
    scores = m.norm(m.q(x)) @ m.norm(m.k(x)).transpose(-1, -2)
    return scores.softmax(-1) @ m.v(x)


def encoder(norm_first=False, bias=True, activation="relu", depth=1, plain=None):
    """Layers of torch.nn; ``plain`` names a norm that has neither gain nor bias."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, norm_first=norm_first, bias=bias, activation=activation, batch_first=True, layer_norm_eps=0.0
    )
    if plain:
        setattr(layer, plain, nn.LayerNorm(8, eps=0.0, elementwise_affine=False))
    return layer if depth == 1 else nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def mha(**options):
    return nn.MultiheadAttention(8, 2, batch_first=True, **options)


X, IMAGE, TOKENS = (2, 3, 4), (2, 3, 8, 8), (2, 5, 8)  # shapes of inputs
INDEX = torch.tensor([[0, 3, 1], [2, 2, 4]])
seq = nn.Sequential


def moved(bn):
    """A batch norm that has seen data."""
    bn.running_mean += torch.arange(3) + 1.0
    bn.running_var *= 2
    return bn


def no_bias(bn):
    bn.bias = None
    return bn


def in_place(m, x):
    h = m.f(x)
    h += m.g(x)
    h *= 2
    return F.relu(h, inplace=True)


def build(make, shapes):
    """A network in eval mode with all parameters random, and inputs."""
    torch.manual_seed(0)
    net = make().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_()
    if isinstance(shapes, torch.Tensor):
        return net, shapes
    shapes = shapes if isinstance(shapes[0], tuple) else (shapes,)
    return net, tuple(torch.randn(*shape) for shape in shapes)
