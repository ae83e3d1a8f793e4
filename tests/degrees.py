"""Networks of known degree, for the tests of rules, algebra and measurement."""

import torch
import torch.nn.functional as F
from torch import nn

SHAPE, IMAGE, TOKENS = (2, 3, 4), (2, 3, 8, 8), (2, 5, 8)  # of inputs
INDICES = torch.tensor([[0, 3, 1], [2, 2, 4]])


class Net(nn.Module):
    """A network given by a function of (module, *inputs), its parts and its buffers."""

    def __init__(self, function, buffers=None, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape))


def linear(inputs=4, outputs=4, bias=False):
    return nn.Linear(inputs, outputs, bias=bias)


def norm(kind=nn.LayerNorm, **options):
    return kind(4, eps=0.0, **options)


def norm_without_gain():
    return norm(elementwise_affine=False)


def attention(**options):
    return nn.MultiheadAttention(8, 2, batch_first=True, **options)


def encoder(**options):
    """A layer of torch.nn."""
    torch.manual_seed(1)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, layer_norm_eps=0.0, **options)


def shifted(batch_norm):
    """A batch norm whose running mean is not 0."""
    batch_norm.running_mean += torch.arange(3) + 1.0
    batch_norm.running_var *= 2
    return batch_norm


def in_place(m, x):
    h = m.f(x)
    h += m.g(x)
    h *= 2
    return F.relu(h, inplace=True)


def build(make, shape):
    """A network in eval mode with all parameters random, and a tuple of its inputs."""
    torch.manual_seed(0)
    net = make().eval()
    with torch.no_grad():
        for weights in net.parameters():
            weights.normal_()
    if isinstance(shape, torch.Tensor):
        return net, (shape,)
    return net, (torch.randn(*shape),)
