"""Degrees by algebra against degrees by measurement; and the node at which a network stops being homogeneous."""

import copy
import math
import warnings
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from nbutils.homogeneity import degree, explain, measure_degree, one_minus_cosine, scaling_error
from nbutils.homogeneity.algebra import EVERY, RULES, EpsilonWarning, NoRule, NotHomogeneous, rule


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


def encoder(norm_first=False, bias=True, activation="relu", depth=1):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, norm_first=norm_first, bias=bias, activation=activation, batch_first=True, layer_norm_eps=0.0
    )
    return layer if depth == 1 else nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def mha(**options):
    return nn.MultiheadAttention(8, 2, batch_first=True, **options)


X, IMAGE, TOKENS = (2, 3, 4), (2, 3, 8, 8), (2, 5, 8)  # shapes of inputs
INDEX = torch.tensor([[0, 3, 1], [2, 2, 4]])
seq = nn.Sequential

# name: (network, input shape or tensors, k_in, degree). Exact.
EXACT = {
    "linear": (lambda: linear(4, 3), X, 1, 2),
    "linear with bias, input fixed": (lambda: linear(4, 3, bias=True), X, 0, 1),
    "mlp": (lambda: seq(linear(4, 5), nn.ReLU(), linear(5, 5), nn.LeakyReLU(0.1), linear(5, 2)), X, 0, 3),
    "bias in the first layer": (lambda: seq(linear(4, 5, bias=True), nn.ReLU(), linear(5, 2)), X, 0, 2),
    "residual behind layer norm": (lambda: Net(lambda m, x: m.ln(x) + m.b, ln=norm(), b=par(4)), X, 1, 1),
    "bilinear": (lambda: Two(lambda m, x, y: m.f(x, y), f=nn.Bilinear(4, 4, 3, bias=False)), (X, X), 1, 3),
    "bilinear with bias": (lambda: Two(lambda m, x, y: m.f(x, y), f=nn.Bilinear(4, 4, 3)), (X, X), 0, 1),
    "bilinear, inputs of degrees 2 and −1": (lambda: nn.Bilinear(4, 4, 3, bias=False), (X, X), [2, -1], 2),
    "embedding": (lambda: nn.Embedding(5, 4), INDEX, 0, 1),
    "embedding, norm, head": (lambda: seq(nn.Embedding(5, 4), norm(bias=False), linear(4, 2)), INDEX, 1, 2),
    "tied embedding": (lambda: Net(lambda m, x: m.e(x) @ m.e.weight.T, e=nn.Embedding(5, 4)), INDEX, 0, 2),
    "conv1d": (lambda: nn.Conv1d(3, 2, 3, bias=False), X, 1, 2),
    "conv2d with bias": (lambda: nn.Conv2d(3, 2, 3), IMAGE, 0, 1),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 2, 3, bias=False), IMAGE, 2, 3),
    "conv net": (
        lambda: seq(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 2, bias=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            linear(4, 2),
        ),
        IMAGE,
        0,
        3,
    ),
    "layer norm": (lambda: norm(), X, 5, 1),
    "layer norm without affine": (lambda: plain(), X, 5, 0),
    "ε does not matter at degree 0": (lambda: nn.LayerNorm(4, eps=0.3), X, 0, 1),
    "rms norm": (lambda: seq(sq(), norm(nn.RMSNorm), linear(4, 2)), X, 1, 2),
    "rms norm without affine": (lambda: norm(nn.RMSNorm, elementwise_affine=False), X, 1, 0),
    "group norm": (lambda: seq(nn.Conv2d(3, 4, 3, bias=False), nn.GroupNorm(2, 4, eps=0.0)), IMAGE, 0, 1),
    "batch norm, running mean 0": (lambda: seq(linear(4, 3), nn.BatchNorm1d(3, affine=False)), X, 1, 2),
    "batch norm, running mean 0, weight": (lambda: Net(lambda m, x: m.bn(x), bn=no_bias(nn.BatchNorm1d(3))), X, 1, 2),
    "batch norm, running mean": (lambda: moved(nn.BatchNorm1d(3)), X, 0, 1),
    "batch norm of the batch": (lambda: nn.BatchNorm1d(3, eps=1e-30, track_running_stats=False), X, 3, 1),
    "square": (lambda: Net(lambda m, x: m.f(x) ** 2, f=linear(4, 3)), X, 0, 2),
    "square root of a norm": (
        lambda: Net(lambda m, x: m.f(x).norm(dim=-1).sqrt(), f=linear(4, 3)),
        X,
        0,
        Fraction(1, 2),
    ),
    "quotient": (lambda: Net(lambda m, x: m.f(x) / m.f(m.f(x)).abs().sum(), f=sq()), X, 0, -1),
    "product with a gate of degree 0": (
        lambda: Net(lambda m, x: torch.sigmoid(m.n(x)) * m.f(x), f=sq(), n=plain()),
        X,
        1,
        2,
    ),
    "gelu at degree 0": (lambda: seq(plain(), nn.GELU(), linear(4, 2)), X, 1, 1),
    "residual of equal degrees": (lambda: Net(lambda m, x: m.f(x) + m.w * x, f=sq(), w=par(4)), X, 1, 2),
    "cat and split": (lambda: Net(lambda m, x: torch.cat(m.f(x).chunk(2, -1)[::-1], -1), f=sq()), X, 1, 2),
    "stack and max": (lambda: Net(lambda m, x: torch.stack([m.f(x), m.g(x)]).max(0).values, f=sq(), g=sq()), X, 1, 2),
    "einsum": (lambda: Net(lambda m, x: torch.einsum("bti,ij,buj->btu", x, m.w, x), w=par(4, 4)), X, 1, 3),
    "causal mask of 0 and −∞": (
        lambda: Net(
            lambda m, x: (m.f(x) @ x.mT + m.mask).amax(-1), {"mask": torch.full((3, 3), -math.inf).triu(1)}, f=sq()
        ),
        X,
        1,
        3,
    ),
    "attention of normed queries and keys": (
        lambda: Net(attention_of_normed, q=sq(), k=sq(), v=sq(), norm=plain()),
        X,
        1,
        2,
    ),
    "fused attention of normed values": (
        lambda: Net(
            lambda m, x: F.scaled_dot_product_attention(m.n(x), m.n(x), m.v(x), is_causal=True), n=plain(), v=sq()
        ),
        X,
        1,
        2,
    ),
    "attention on input of degree −1": (lambda: mha(bias=False), (TOKENS,) * 3, -1, 1),
    "attention, other sizes of keys": (lambda: mha(bias=False, kdim=6, vdim=3), (TOKENS, (2, 5, 6), (2, 5, 3)), -1, 1),
    "prelu at a fixed slope": (
        lambda: Net(lambda m, x: F.prelu(m.f(x), m.a), {"a": torch.ones(1) / 4}, f=sq()),
        X,
        1,
        2,
    ),
    "buffers are constants": (lambda: Net(lambda m, x: m.f(x * m.s), {"s": torch.ones(4) * 3}, f=sq()), X, 1, 2),
    "position buffer at degree 0": (lambda: Net(lambda m, x: m.f(x + m.p), {"p": torch.ones(3, 4)}, f=sq()), X, 0, 1),
    "learned positions": (lambda: Net(lambda m, x: m.e(x) + m.p, e=nn.Embedding(5, 4), p=par(3, 4)), INDEX, 0, 1),
    "dropout in eval": (lambda: seq(sq(), nn.Dropout(0.5), linear(4, 2)), X, 0, 2),
    "in place, same degree": (lambda: Net(in_place, f=sq(), g=sq()), X, 1, 2),
    "where and masked_fill": (
        lambda: Net(lambda m, x: torch.where(x > 0, m.f(x), 0.0).masked_fill(x.isnan(), 0), f=sq()),
        X,
        1,
        2,
    ),
    "shapes are no degrees": (
        lambda: Net(lambda m, x: m.f(x).reshape(x.shape[0], -1) / x.size(-1) ** 0.5, f=sq()),
        X,
        1,
        2,
    ),
    "cosine head": (lambda: Net(lambda m, x: F.cosine_similarity(m.f(x), x, dim=-1, eps=0.0), f=sq()), X, 1, 0),
}

# The same, asymptotically: measured at large scales.
ASYMPTOTIC = {
    "mlp with biases": (lambda: seq(linear(4, 5, bias=True), nn.ReLU(), linear(5, 2, bias=True)), X, 1, 3),
    "gelu": (lambda: seq(linear(4, 8), nn.GELU(), linear(8, 2)), X, 0, 2),
    "silu": (lambda: seq(linear(4, 8), nn.SiLU(), linear(8, 2)), X, 1, 3),
    "gated": (lambda: Net(lambda m, x: F.silu(m.f(x)) * m.g(x), f=linear(4, 8), g=linear(4, 8)), X, 1, 4),
    "prelu": (lambda: seq(linear(4, 8), nn.PReLU(), linear(8, 2)), X, 0, 3),
    "softmax head": (lambda: seq(linear(4, 5), nn.Softmax(-1), linear(5, 2)), X, 1, 1),
    "tanh": (lambda: seq(linear(4, 5), nn.Tanh(), linear(5, 5), nn.Sigmoid(), linear(5, 2)), X, 1, 1),
    "clamp to bounds": (lambda: Net(lambda m, x: m.f(x).clamp(-1, 1), f=sq()), X, 1, 0),
    "residual": (lambda: Net(lambda m, x: x + m.f(x), f=sq()), X, 1, 2),
    "running mean of batch norm": (lambda: moved(nn.BatchNorm1d(3)), X, 1, 2),
    "log-softmax": (lambda: seq(linear(4, 5), nn.LogSoftmax(-1)), X, 1, 2),
    "attention on fixed input": (lambda: mha(bias=False), (TOKENS,) * 3, 0, 2),
    "attention": (lambda: mha(bias=False), (TOKENS,) * 3, 1, 3),
    "attention with biases": (lambda: mha(), (TOKENS,) * 3, 1, 3),
    "attention on fixed input with biases": (lambda: mha(add_zero_attn=True), (TOKENS,) * 3, 0, 2),
    "post-norm": (lambda: encoder(), TOKENS, 1, 1),
    "post-norm without biases": (lambda: encoder(bias=False), TOKENS, 1, 1),
    "pre-norm": (lambda: encoder(norm_first=True), TOKENS, 1, 3),
    "pre-norm, gelu": (lambda: encoder(norm_first=True, activation="gelu"), TOKENS, 1, 3),
    "pre-norm on large input": (lambda: encoder(norm_first=True), TOKENS, 4, 4),
    "three post-norm layers": (lambda: encoder(depth=3), TOKENS, 1, 1),
    "three pre-norm layers": (lambda: encoder(norm_first=True, bias=False, depth=3), TOKENS, 1, 3),
    "ε of layer norm": (lambda: seq(sq(), nn.LayerNorm(4)), X, 1, 1),
}


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


@pytest.mark.parametrize("name", EXACT)
def test_exact_degree_is_the_measured_one(name):
    make, shapes, k_in, expected = EXACT[name]
    net, inputs = build(make, shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name == "batch norm of the batch" else "error", EpsilonWarning)
        assert degree(net, k_in) == expected
    assert degree(net, k_in, approximate=True) == expected  # what is exact is asymptotic too
    measured = measure_degree(net, inputs, [0.5, 1, 10], k_in=k_in)
    assert measured.euler.to_numpy() == pytest.approx(float(expected), abs=1e-9)
    assert measured.residual.max() < 1e-9
    assert measured.log_ratio[:-1].to_numpy() == pytest.approx(float(expected), abs=1e-9)
    error = scaling_error(net, inputs, [0.5, 10], k_in=k_in)
    assert error.relative.max() < 1e-9 and error.one_minus_cosine.max() < 1e-20


@pytest.mark.parametrize("name", ASYMPTOTIC)
def test_asymptotic_degree_is_the_measured_one(name):
    make, shapes, k_in, expected = ASYMPTOTIC[name]
    net, inputs = build(make, shapes)
    assert degree(net, k_in, approximate=True) == expected
    measured = measure_degree(net, inputs, [1e3, 1e5], k_in=k_in)
    assert measured.euler[1] == pytest.approx(expected, abs=1e-3)
    assert measured.log_ratio[0] == pytest.approx(expected, abs=1e-2)
    error = scaling_error(net, inputs, [1e3, 1e4], k_in=k_in, reference=1e6)
    assert error.one_minus_cosine[1] <= max(error.one_minus_cosine[0], 1e-28)


OPERATIONS = """
-x; abs(x); x + x; x - 2 * x.flip(0); 1 / x; x / x.sum(); x @ x.mT; x**2; x**-1; x**0; x.pow(1.5); x.sqrt(); x.rsqrt()
x.square(); x.var(); x.std(-1); x.norm(); torch.linalg.norm(x); x.mean(0); x.amax(-1); x.max(); x.max(-1)[0]; x.min()
x.max(-1).values; torch.maximum(x, 3 * x.flip(0)); x.clamp(min=0); x.relu(); F.leaky_relu(x, 0.1); x.sign()
x.sort(-1).values; x.topk(2).values; x / x.median()
x.median(-1).values; x.cumsum(0); x.T; x.mT; x[..., :2]; x[:, None]; x.view(-1); x.reshape(3, 1, 4)
x.t().contiguous(); x.permute(1, 0); x.unsqueeze(0).expand(2, 3, 4); x.repeat(2, 1); x.chunk(2, -1)[1]; x.unbind(0)[1]
x.tril(); x.diagonal(); x.roll(1); torch.stack([x, x]); torch.cat([x, 2 * x], dim=1); torch.cat(tensors=[x, x])
torch.einsum("ij,kj,kl->il", x, x, x); torch.outer(x[0], x[1]); torch.bmm(x[None], x.T[None])
torch.dot(x[0], x[1]); x.inner(x)
F.pad(x, (1, 1)); F.normalize(x, eps=0.0); F.layer_norm(x, (4,), eps=0.0); F.rms_norm(x, (4,), eps=0.0)
F.linear(x, x); F.linear(input=x, weight=x, bias=None); F.bilinear(x, x, x.new_zeros(2, 4, 4) + 1)
F.dropout(x, 0.5, False); x.min(dim=1)[0]
F.max_pool1d(x, 2); F.avg_pool1d(x, 2); F.adaptive_avg_pool1d(x, 2); F.max_pool2d(x[None], 2); F.avg_pool2d(x[None], 2)
F.conv1d(x[None], x[None]); F.interpolate(x[None], scale_factor=2); F.softmax(x / x.norm(), -1); (x / x.sum()).exp()
torch.where(x > x.mean(), x, -x); x.masked_fill(x < 0, 0.0); x * (x > 0); x * (x == x); torch.addmm(x @ x.mT, x, x.mT)
x * x.shape[0]; x / x.size(-1) ** 0.5; x.detach().argmax(-1) * x.sum(); x * torch.ones_like(x)
x.double() * 2
torch.logsumexp(x / x.norm(), -1); x.gather(-1, x.argsort(-1)); x.mul(x).div(x.abs().sum())
x.double().to(torch.float64)
x.masked_fill(x < x.mean(), -torch.inf).amax(-1); F.cosine_similarity(x, x.flip(0), eps=0.0)
x.view(x.shape[1] // 2, -1)
F.scaled_dot_product_attention(F.normalize(x, eps=0.0)[None], F.normalize(x, eps=0.0)[None], x[None])
"""


@pytest.mark.parametrize("text", [line.strip() for line in OPERATIONS.replace("\n", ";").split(";") if line.strip()])
def test_rules_of_operations(text):
    net = Net(lambda m, x: eval(text, {"torch": torch, "F": F, "x": x}))
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.1
    measured = measure_degree(net, x, [1, 3, 9], k_in=2)
    assert measured.log_ratio[:-1].to_numpy() == pytest.approx(float(degree(net, 2)), abs=1e-9)
    assert "detach" in text or measured.residual.max() < 1e-9


def test_enough_networks():
    assert len(EXACT) + len(ASYMPTOTIC) >= 40


# --- Generated networks: a random program over values of shape (4 tokens, 4 features), with its degrees ---------------

UNARY = {
    "linear": lambda k: k + 1,
    "weight": lambda k: k + 1,
    "relu": lambda k: k,
    "leaky": lambda k: k,
    "abs": lambda k: k,
    "scale": lambda k: k,
    "mean": lambda k: k,
    "permute": lambda k: k,
    "norm": lambda k: 0,
    "norm_affine": lambda k: 1,
    "rms": lambda k: 1,
    "square": lambda k: 2 * k,
    "root": lambda k: k / 2,
    "unit": lambda k: 0,
    "batch_norm": lambda k: k + 1,
    "softmax": lambda k: 0 if k == 0 else None,
    "tanh": lambda k: 0 if k == 0 else None,
    "gelu": lambda k: 0 if k == 0 else None,
    "bias": lambda k: 1 if k == 1 else None,
    "linear_bias": lambda k: 1 if k == 0 else None,
}
BINARY = {
    "add": lambda k, j: k if k == j else None,
    "maximum": lambda k, j: k if k == j else None,
    "cat": lambda k, j: k if k == j else None,
    "where": lambda k, j: k if k == j else None,
    "mul": lambda k, j: k + j,
    "matmul": lambda k, j: k + j,
    "div": lambda k, j: k - j,
}
DO = {
    "relu": torch.relu,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "abs": torch.abs,
    "scale": lambda x: 0.7 * x,
    "mean": lambda x: x + x.mean(0, keepdim=True),
    "permute": lambda x: x.T.reshape(2, 8).flip(-1).view(4, 4),
    "square": lambda x: x**2,
    "root": lambda x: x.abs().sqrt(),
    "unit": lambda x: x / x.norm(dim=-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "add": lambda x, y: x + 0.7 * y,
    "maximum": torch.maximum,
    "cat": lambda x, y: torch.cat([x[:2], y[2:]]),
    "where": lambda x, y: torch.where(x > y, x, y),
    "mul": lambda x, y: x * y,
    "matmul": lambda x, y: x @ y.T,
    "div": lambda x, y: x / y.abs().sum(-1, keepdim=True),
}
PARTS = {
    "linear": lambda: sq(),
    "linear_bias": lambda: linear(4, 4, bias=True),
    "norm": lambda: plain(),
    "norm_affine": norm,
    "rms": lambda: norm(nn.RMSNorm),
    "batch_norm": lambda: no_bias(nn.BatchNorm1d(4)),
}


class Program(nn.Module):
    """Steps (operation, sources): each works on values made before and makes one."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.parts = nn.ModuleDict({f"step{i}": PARTS[op]() for i, (op, *_) in enumerate(steps) if op in PARTS})
        needed = {f"p{i}": par(4) for i, (op, *_) in enumerate(steps) if op in ("weight", "bias")}
        self.own = nn.ParameterDict(needed)

    def forward(self, x):
        values = [x]
        for i, (op, *sources) in enumerate(self.steps):
            xs = [values[j] for j in sources]
            if op in PARTS:
                values.append(self.parts[f"step{i}"](*xs))
            elif op in ("weight", "bias"):
                p = self.own[f"p{i}"]
                values.append(xs[0] * p if op == "weight" else xs[0] + p)
            else:
                values.append(DO[op](*xs))
        return values[-1]


@st.composite
def programs(draw):
    """Steps that keep to the rules, and the degree of every value by the small table above."""
    degrees, steps = [draw(st.sampled_from([0, 1, 2]))], []
    for _ in range(draw(st.integers(2, 9))):
        last = len(degrees) - 1
        other = draw(st.integers(0, last))
        allowed = [(op, last, f(degrees[last])) for op, f in UNARY.items()]
        allowed += [(op, last, other, f(degrees[last], degrees[other])) for op, f in BINARY.items() if other != last]
        allowed = [step for step in allowed if step[-1] is not None and abs(step[-1]) <= 6]
        *step, k = draw(st.sampled_from(allowed))
        steps.append(tuple(step))
        degrees.append(k)
    return steps, degrees, draw(st.integers(0, 2**20))


quick = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def make_program(steps, seed):
    torch.manual_seed(seed)
    net = Program(steps).double().eval()
    for parameter in net.parameters():
        parameter.data.normal_()
    return net, torch.randn(4, 4, dtype=torch.float64)


@quick
@given(programs())
def test_generated_networks(drawn):
    steps, degrees, seed = drawn
    net, x = make_program(steps, seed)
    assert degree(net, degrees[0]) == degrees[-1]
    try:
        measured = measure_degree(net, x, [0.7, 1.0, 1.9], k_in=degrees[0])
    except ValueError:  # zero or 0/0: no degree to measure
        assume(False)
    assume(not measured.euler.isna().any())  # √x at 0
    assert measured.euler.to_numpy() == pytest.approx(degrees[-1], abs=1e-6)
    assert measured.residual.max() < 1e-6
    assert measured.log_ratio[:-1].to_numpy() == pytest.approx(degrees[-1], abs=1e-6)


@quick
@given(programs(), st.sampled_from(["add", "maximum", "cat", "where"]), st.integers(0, 8), st.integers(0, 3))
def test_generated_breaks_are_found(drawn, op, which, more):
    """Join two values of unequal degrees and go on: the algebra stops at that step, with these degrees."""
    steps, degrees, seed = drawn
    last, other = len(degrees) - 1, which % len(degrees)
    assume(degrees[last] != degrees[other])
    broken = [*steps, (op, last, other), *[("relu", last + 1 + i) for i in range(more)]]
    net, _ = make_program(broken, seed)
    with pytest.raises(NotHomogeneous) as caught:
        degree(net, degrees[0])
    error = caught.value
    assert error.operation == {"where": "gt"}.get(op, op) and set(error.degrees) == {degrees[last], degrees[other]}
    table = explain(net, degrees[0])
    assert table.node.iloc[-1] == error.node.name and table.note.iloc[-1].startswith("✗")


# --- Where it breaks --------------------------------------------------------------------------------------------------


def broken_sum(m, x):
    return m.g(m.f(x) + x)


# name: (network, k_in, operation, module path, degrees, approximate)
BROKEN = {
    "bias behind a layer": (lambda: seq(sq(), linear(4, 4, bias=True)), 1, "Linear", "1", (3, 1), False),
    "residual": (lambda: Net(broken_sum, f=sq(), g=linear(4, 2)), 1, "add", "", (2, 1), False),
    "inside a part": (lambda: seq(sq(), Net(broken_sum, f=sq(), g=linear(4, 2))), 1, "add", "1", (3, 2), False),
    "ε written out": (
        lambda: Net(lambda m, x: x / (x.var(-1, keepdim=True) + 1e-5).sqrt()),
        1,
        "add",
        "",
        (2, 0),
        False,
    ),
    "softmax": (lambda: seq(sq(), nn.Softmax(-1)), 1, "Softmax", "1", (2,), False),
    "tanh of a falling value": (lambda: Net(lambda m, x: torch.tanh(1 / x)), 1, "tanh", "", (-1,), True),
    "gelu": (lambda: seq(sq(), nn.GELU()), 0, "GELU", "1", (1,), False),
    "exp": (lambda: Net(lambda m, x: m.f(x).exp(), f=sq()), 1, "exp", "", (2,), True),
    "cat": (lambda: Net(lambda m, x: torch.cat([m.f(x), x]), f=sq()), 1, "cat", "", (2, 1), True),
    "mask of large numbers": (
        lambda: Net(lambda m, x: m.f(x).masked_fill(x > 0, -1e9), f=sq()),
        1,
        "masked_fill",
        "",
        (2, 0),
        True,
    ),
    "threshold": (lambda: Net(lambda m, x: (x > 1) * m.f(x), f=sq()), 1, "gt", "", (1, 0), False),
    "prelu": (lambda: seq(sq(), nn.PReLU()), 1, "PReLU", "1", (2, 3), False),
    "running mean": (lambda: seq(linear(4, 3), moved(nn.BatchNorm1d(3))), 1, "sub", "1.running_mean", (2, 0), False),
    "bias of batch norm": (lambda: seq(linear(4, 3), nn.BatchNorm1d(3)), 1, "BatchNorm1d", "1", (3, 1), False),
    "bias of queries": (lambda: mha(), 1, "linear", "in_proj.q", (2, 1), False),
    "scores": (lambda: mha(bias=False), 0, "softmax", "attention.weights", (2,), False),
    "post-norm residual": (lambda: encoder(bias=False), -1, "add", "residual1", (-1, 1), False),
    "in a stack": (
        lambda: encoder(bias=False, depth=2),
        1,
        "softmax",
        "layers.0.self_attn.attention.weights",
        (4,),
        False,
    ),
    "dropout": (lambda: seq(sq(), nn.Dropout(0.5)).train(), 1, "Dropout", "1", (2,), False),
    "degree changed in place": (lambda: Net(lambda m, x: m.f(x).mul_(x), f=sq()), 1, "mul_", "", (2, 3), False),
    "constant of the code": (
        lambda: Net(lambda m, x: m.f(x) + torch.tensor([1.0, 0, 0, 0]), f=sq()),
        1,
        "add",
        "",
        (2, 0),
        False,
    ),
    "power of a value": (lambda: Net(lambda m, x: 2**x), 1, "pow", "", (0, 1), True),
    "renormed embedding": (lambda: nn.Embedding(5, 4, max_norm=1.0), 0, "Embedding", "", (0,), True),
}


@pytest.mark.parametrize("name", BROKEN)
def test_breaks_point_at_the_node(name):
    make, k_in, operation, path, degrees, approximate = BROKEN[name]
    net = make()
    net = net if name == "dropout" else net.eval()
    with pytest.raises(NotHomogeneous) as caught:
        degree(net, k_in, approximate=approximate)
    error = caught.value
    assert (error.operation, error.module_path, error.degrees) == (operation, path, degrees)
    assert isinstance(error.node, torch.fx.Node) and error.node.name in str(error) and operation in str(error)
    assert not [name for name in vars(net) if "tensor_constant" in name]
    table = explain(net, k_in, approximate=approximate)
    row = table[table.note.str.contains("✗")].squeeze()
    assert (row["operation"], row["module"], row["degree out"]) == (operation, path, "–")


# --- What is not known is not guessed ---------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * self.weight)


class Renamed(nn.Linear):
    """Another class with the forward of nn.Linear."""


def hooked():
    layer = linear(4, 4)
    layer.register_forward_hook(lambda module, args, out: out + 1)
    return seq(layer)


def parametrized(function):
    layer = sq()
    nn.utils.parametrize.register_parametrization(layer, "weight", Net(function))
    return layer


def test_only_rules_that_hold_are_used():
    assert degree(seq(Renamed(4, 4, bias=False))) == 2
    assert degree(seq(Doubled(4, 4, bias=False))) == 3  # looked into
    with pytest.raises(NoRule, match=r"no rule for Linear at node '_0' in module '0' .*hooks"):
        degree(hooked())
    with pytest.raises(NoRule, match="WeightNorm"):  # the weight is no parameter any more
        degree(seq(nn.utils.parametrizations.weight_norm(sq())))
    assert degree(seq(parametrized(lambda m, w: w * w))) == 3
    with pytest.raises(NotHomogeneous) as caught:
        degree(parametrized(lambda m, w: w.exp()))
    assert caught.value.module_path == "parametrizations.weight.0"
    with pytest.raises(NoRule, match="does not know these arguments"):
        degree(Net(lambda m, x: torch.div(x, x, rounding_mode="floor")))


def kept_after_relu6(m, x):
    h = m.f(x)
    F.relu6(h, inplace=True)
    return h


def divided_by_silu(m, x):
    h = m.f(x)
    F.silu(h, True)
    return 1 / h


REFUSED = {
    "log of sigmoid": lambda m, x: torch.log(torch.sigmoid(m.f(x))),
    "log of softmax": lambda m, x: m.f(x).softmax(-1).log(),
    "log of a part": lambda m, x: torch.cat([m.f(x).sigmoid(), m.f(x).tanh()])[0].log(),
    "quotient": lambda m, x: 1 / (1 + torch.relu(m.f(x))),
    "reciprocal": lambda m, x: (1 + torch.relu(m.f(x))).sqrt().reciprocal(),
    "negative power": lambda m, x: F.gelu(m.f(x)) ** -1,
    "floor": lambda m, x: torch.tanh(m.f(x)).floor(),
    "one bound": lambda m, x: m.f(x).clamp(-math.inf, 1),
    "bound at a buffer": lambda m, x: m.f(x).clamp(m.low, 1),
    "maximum": lambda m, x: torch.maximum(m.f(x), -m.f(m.f(x)).abs()),
    "max": lambda m, x: torch.max(m.f(x), x),
    "relu6 in place": kept_after_relu6,
    "silu in place": divided_by_silu,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_leading_term_does_not_tell_is_refused(name):
    with pytest.raises(NotHomogeneous):
        degree(Net(REFUSED[name], {"low": torch.full((4,), -math.inf)}, f=sq()), approximate=True)


def test_the_shape_of_a_leading_term_divides():
    for size in lambda h: h.size(-1), lambda h: h.shape[-1]:
        net = Net(lambda m, x, size=size: F.gelu(m.f(x)) / size(F.gelu(m.f(x))) ** 0.5, f=sq())
        assert degree(net, approximate=True) == 2


def test_infinite_bounds_are_none():
    for bounded in lambda h: h.clamp(0, math.inf), lambda h: F.hardtanh(h, 0, math.inf), nn.Hardtanh(0, math.inf):
        net = seq(sq(), bounded if isinstance(bounded, nn.Module) else Net(lambda m, x, to=bounded: to(x)))
        assert degree(net) == degree(net, approximate=True) == 2
        assert measure_degree(net, torch.randn(3, 4), [1, 1e4]).log_ratio[0] == pytest.approx(2)
    for bounded in nn.ReLU6(), nn.Hardtanh(), F.relu6, F.hardtanh:
        assert (
            degree(
                seq(sq(), bounded if isinstance(bounded, nn.Module) else Net(lambda m, x, to=bounded: to(x))),
                approximate=True,
            )
            == 0
        )


@pytest.mark.parametrize(
    "cast", [lambda mask: mask, lambda mask: mask.float(), lambda mask: (~mask[None]).to(torch.float)]
)
def test_a_boolean_factor_is_no_mask_of_zeros_and_infinities(cast):
    net = Two(lambda m, x, mask: m.f(x) * cast(mask) + m.b, f=sq(), b=par(4))
    for k_in in ([2, EVERY], [2, 0]):
        with pytest.raises(NotHomogeneous):
            degree(net, k_in)
    assert degree(net, [0, 0]) == 1
    mask = torch.ones(3, 4, dtype=torch.bool).triu()
    assert measure_degree(net, (torch.randn(3, 4), mask), [1, 3], k_in=[0, 0]).residual.max() < 1e-12
    as_mask = Two(lambda m, x, mask: m.f(x).masked_fill(~mask[None], 0) + m.f(x), f=sq())
    assert degree(as_mask, [1, EVERY]) == 2
    attend = Two(lambda m, x, mask: F.scaled_dot_product_attention(m.n(x), m.n(x), m.f(x), mask), f=sq(), n=plain())
    assert degree(attend, [1, EVERY]) == 2


def test_norms_of_order_zero_count():
    x = torch.randn(3, 4)
    for count in lambda m, x: x.norm(0), lambda m, x: x.norm(p=0), lambda m, x: torch.linalg.vector_norm(x, ord=0):
        assert degree(Net(count), 2) == 0
        assert measure_degree(Net(count), x, [1, 3], k_in=2).log_ratio[0] == pytest.approx(0)
    with pytest.raises(NotHomogeneous, match="order 0"):
        degree(Net(lambda m, x: F.normalize(x, p=0)))


def test_a_renormed_embedding_is_refused():
    lookup = Net(lambda m, i: F.embedding(i, m.w, max_norm=1.0), w=par(5, 4))
    with pytest.raises(NotHomogeneous, match="max_norm"):
        degree(lookup, 0)


def test_a_patched_forward_has_no_rule():
    layer = sq()
    layer.forward = lambda x: F.linear(x, layer.weight).exp()
    with pytest.raises((NoRule, NotHomogeneous)):
        degree(seq(layer))


@pytest.mark.parametrize(
    ("function", "named", "key"),
    [
        (lambda m, x: torch.erfinv(x), "erfinv", "<the function erfinv>"),
        (lambda m, x: x.erfinv(), "erfinv", "'erfinv'"),
        (lambda m, x: m.f(x)[0], "LSTM", "LSTM"),
    ],
)
def test_an_unknown_operation_is_named(function, named, key):
    net = Net(function, f=nn.LSTM(4, 4))
    with pytest.raises(NoRule) as caught:
        degree(net)
    assert f"no rule for {named} at node" in str(caught.value) and f"homogeneity.rule({key})" in str(caught.value)
    assert "✗ no rule" in explain(net).note.iloc[-1]


def test_a_rule_can_be_added(monkeypatch):
    monkeypatch.setattr("nbutils.homogeneity.algebra.RULES", RULES | {})

    class Cube(nn.Module):
        def forward(self, x):
            return x**3 if x.sum() > 0 else -((-x) ** 3)  # torch.fx cannot look into this

    with pytest.raises(torch.fx.proxy.TraceError) as caught:
        degree(seq(Cube()))
    assert "a rule" in caught.value.__notes__[0]

    @rule(Cube)
    def cube(algebra, module, x):
        return algebra.pow(x, 3)

    assert degree(seq(sq(), Cube())) == 6
    assert measure_degree(seq(sq(), Cube()), torch.randn(4), [1, 2]).euler[0] == pytest.approx(6)


# --- What a rule must not overlook ------------------------------------------------------------------------------------


def written_elsewhere(m, x):
    g = m.f(x) * x
    torch.abs(m.f(x), out=g)
    return g


SLOPE, VALUE = "an argument that the rule does not read", "a value of the graph"
OVERLOOKED = {  # name: (function, what is refused, error, what it says); m.a is a frozen parameter without dimensions
    "out": (written_elsewhere, NoRule, "out= changes another value"),
    "slope of leaky_relu": (lambda m, x: F.leaky_relu(m.f(x), m.a), NotHomogeneous, SLOPE),
    "slope by name": (lambda m, x: F.leaky_relu(m.f(x), negative_slope=m.a), NotHomogeneous, SLOPE),
    "alpha of elu": (lambda m, x: F.elu(m.n(x), m.a), NotHomogeneous, SLOPE),
    "beta of softplus": (lambda m, x: F.softplus(m.n(x), beta=m.a), NotHomogeneous, SLOPE),
    "scale of attention": (
        lambda m, x: F.scaled_dot_product_attention(m.n(x), m.n(x), x, scale=m.a), NotHomogeneous, SLOPE
    ),
    "ε": (lambda m, x: F.layer_norm(m.f(x), (4,), eps=m.a), NotHomogeneous, VALUE),
    "name of a type": (lambda m, x: m.f(x).type("torch.IntTensor"), NoRule, "give a torch.dtype"),
    "name of a float type": (lambda m, x: m.f(x).type("torch.DoubleTensor"), NoRule, "give a torch.dtype"),
    "type of another value": (lambda m, x: m.f(x).to(x.argmax(-1)), NotHomogeneous, "needs degree 0"),
}  # fmt: skip


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("name", OVERLOOKED)
def test_what_a_rule_does_not_read_is_refused(name, approximate):
    function, error, said = OVERLOOKED[name]
    net = Net(function, f=sq(), n=plain(), a=nn.Parameter(torch.tensor(0.3), requires_grad=False))
    with pytest.raises(error, match=said):
        degree(net, 1, approximate=approximate)


def test_a_factor_of_a_sum_counts():
    """``alpha`` and ``beta`` are factors: they add their degree, and two wrongs may make a right."""
    scalar = nn.Parameter(torch.tensor(0.3), requires_grad=False)
    for function in (
        lambda m, x: torch.add(m.f(x), x, alpha=m.a),
        lambda m, x: m.f(x).sub(x, alpha=m.a),
        lambda m, x: torch.addmm(x, x, m.w, beta=m.a),
    ):
        net, x = Net(function, f=sq(), w=par(4, 4), a=scalar), torch.randn(3, 4)
        assert degree(net, 1) == 2
        with pytest.warns(RuntimeWarning, match="against 2 at scale"):  # torch takes the number out of the graph
            assert measure_degree(net, x, [1, 3]).log_ratio[0] == pytest.approx(2, abs=1e-9)
    with pytest.raises(NotHomogeneous, match="equal degrees"):
        degree(Net(lambda m, x: torch.add(m.f(x), m.f(x), alpha=m.a), f=sq(), a=scalar), 1)


def test_einsum_with_lists_of_subscripts():
    for function, k in (
        (lambda m, x: torch.einsum(x, [0, 1], m.w, [1, 2], [0, 2]), 2),
        (lambda m, x: torch.einsum(x, [0, 1], m.w, [1, 2], m.w, [2, 3]), 3),
    ):
        net, x = Net(function, w=par(4, 4)), torch.randn(3, 4)
        assert degree(net, 1) == k
        assert measure_degree(net, x, [1, 3]).log_ratio[0] == pytest.approx(k, abs=1e-9)
    with pytest.raises(NotHomogeneous, match="equal degrees"):
        degree(Net(lambda m, x: x + torch.einsum(x, [0, 1], m.w, [1, 2], [0, 2]), w=par(4, 4)), 1)


def test_a_slope_that_a_module_learns_is_no_part_of_its_rule():
    net = seq(sq(), nn.LeakyReLU())
    assert degree(net, 1) == 2
    net[1].negative_slope = nn.Parameter(torch.tensor(0.1))
    with pytest.raises(NoRule, match="a parameter more"):
        degree(net, 1)


def test_values_that_lend_their_shape_or_type_may_have_any_degree():
    assert degree(Net(lambda m, x: m.f(x).view_as(x).expand_as(x).reshape_as(x).to(x), f=sq()), 1) == 2


# --- Inputs, outputs, notes -------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """An optional mask, an optional switch, and a constant of the code."""

    def __init__(self):
        super().__init__()
        self.f = linear(4, 4)

    def forward(self, x, mask=None, twice=False):
        h = self.f(x) * torch.tensor([1.0, 2, 3, 4])
        h = h if mask is None else h + mask
        return (self.f(h) if twice else h), mask


def test_degrees_of_inputs():
    net = Masked()
    before = set(vars(net))
    assert degree(net) == degree(net, 1) == degree(net, [1, EVERY]) == degree(net, {"x": 1, "mask": 2}) == 2
    assert degree(net, Fraction(1, 2)) == Fraction(3, 2)
    with pytest.raises(NotHomogeneous):
        degree(net, [1, 1])
    assert degree(net, [1, 1], approximate=True) == 2
    for wrong in ({"mask": 1}, {"x": 1, "y": 1}, []):
        with pytest.raises(ValueError, match="k_in gives a degree for"):
            degree(net, wrong)
    assert set(vars(net)) == before
    x, mask = torch.randn(3, 4), torch.randn(3, 4)
    assert measure_degree(net, (x, mask), [1, 2], k_in={"x": 1, "mask": 2}).residual.max() < 1e-12
    assert measure_degree(net, (x, mask), [1, 2], k_in=[1, 1]).residual.max() > 1e-2


def test_zero_has_every_degree():
    assert degree(Net(lambda m, x: x + 0)) == 1
    assert degree(Net(lambda m, x: x.clamp(min=0) + torch.zeros_like(x))) == 1
    assert degree(Net(lambda m, x: sum([x, x]))) == 1
    with pytest.raises(ValueError, match="every degree"):
        degree(Net(lambda m, x: 0 * x))
    with pytest.raises(NotHomogeneous, match="divisor"):
        degree(Net(lambda m, x: x / torch.zeros_like(x)))


def test_masks_of_attention():
    net, x = mha(bias=False).eval(), torch.randn(*TOKENS)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    own = Net(lambda m, x: m.f(x, x, x, attn_mask=m.mask)[0], {"mask": causal}, f=net)
    boolean = Net(lambda m, x: m.f(x, x, x, attn_mask=m.mask)[0], {"mask": causal < 0}, f=net)
    large = Net(lambda m, x: m.f(x, x, x, attn_mask=m.mask)[0], {"mask": causal.clamp(min=-1e9)}, f=net)
    for masked in own, boolean:
        assert degree(masked, -1) == 1
        assert measure_degree(masked, x, [1, 3], k_in=-1).residual.max() < 1e-12
    assert degree(large, -1) == 1  # scores of degree 0 and a mask of degree 0
    with pytest.raises(NotHomogeneous) as caught:
        degree(large, 1)
    assert caught.value.module_path == "f.attention.scores" and caught.value.degrees == (4, 0)


def test_epsilon_is_said():
    net = seq(sq(), nn.LayerNorm(4), linear(4, 2))
    with pytest.warns(EpsilonWarning, match="for ε = 0 only, in 1"):
        assert degree(net) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert degree(net, approximate=True) == 2
        assert degree(seq(nn.LayerNorm(4)), k_in=0) == 1
    table = explain(net)
    assert table.note.tolist() == ["", "", "ε = 1e-05 taken as 0", ""]
    with pytest.raises(NotHomogeneous, match="outgrows"):
        degree(nn.LayerNorm(4), -1, approximate=True)
    small = measure_degree(nn.LayerNorm(4), torch.randn(3, 4) * 1e-3, [1, 1e6])
    assert small.euler[0] > 1.1 and small.euler[1] == pytest.approx(1, abs=1e-6)  # below √ε it is nearly linear in x


def test_explain_is_a_table_of_nodes():
    table = explain(encoder(bias=False).eval(), approximate=True)
    assert list(table.columns) == ["node", "module", "operation", "degree in", "degree out", "note"]
    assert dict(zip(table.module, table["degree out"], strict=True))["norm2"] == 1
    row = table[table.module == "residual1"].squeeze()
    assert row["degree in"] == "1, 3" and row["degree out"] == 3 and row["note"] == "asymptotic: of 1, 3 the largest"
    assert "<table" in table._repr_html_()


def test_measuring_leaves_the_module_as_it_is():
    net = seq(linear(4, 3, bias=True), nn.BatchNorm1d(3), nn.ReLU())  # in training mode: statistics would move
    x, before = torch.randn(5, 4, 4)[0], copy.deepcopy(net.state_dict())
    fused = torch.backends.mha.get_fastpath_enabled()
    measure_degree(net, x, [1, 10])
    scaling_error(net, x, [1, 10], k=1)
    assert net.training and torch.backends.mha.get_fastpath_enabled() is fused
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert {tensor.dtype for tensor in net.parameters()} == {torch.float32}
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())


def test_measuring_what_has_no_degree():
    with pytest.raises(ValueError, match=r"norm 0\.0 at scale 2\.0"):
        measure_degree(seq(sq(), nn.Threshold(0, 0)), torch.zeros(4), [2])
    net, x = build(lambda: seq(sq(), linear(4, 4, bias=True)), X)
    measured = measure_degree(net, x, [1, 1e6])
    assert measured.residual[0] > 0.01 and measured.residual[1] < 1e-9  # 3 and 1 meet; far out 3 is left


@pytest.mark.parametrize(
    ("function", "euler", "true"),
    [
        (lambda m, x: x @ m.w.detach(), 1, 2),
        (lambda m, x: m.f(x) / m.f(x).detach().norm(), 2, 0),
        (lambda m, x: F.layer_norm(m.f(x), (4,), eps=0.0).float() * m.f(x).detach(), 0, 2),
    ],
)
def test_a_derivative_that_is_not_of_the_outputs_is_said(function, euler, true):
    """Euler's identity is asked of autograd, which believes ``detach``; the residual is that of rounding."""
    net, (x,) = build(lambda: Net(function, w=par(4, 4), f=sq()), X)
    with pytest.warns(RuntimeWarning, match=f"against {true:.4g} at scale 1, .* at scale 3") as caught:
        measured = measure_degree(net, x, [1, 3])
    assert measured.euler[0] == pytest.approx(euler, abs=1e-6) and measured.residual[0] < 1e-6
    assert measured.log_ratio[0] == pytest.approx(true, abs=1e-6) and caught[0].filename == __file__


def test_scaling_error_of_a_bias_is_its_size():
    """f = W x + b, input scaled: f(cθ) − c² f(θ) = (c − c²) b, known exactly."""
    net, (x,) = build(lambda: linear(4, 3, bias=True), X)
    table = scaling_error(net, x, [1, 2, 10])
    b = float(net.bias.detach().abs().max())
    assert table.absolute.to_numpy() == pytest.approx([0, 2 * b, 90 * b], rel=1e-12)
    assert table.relative.to_numpy() == pytest.approx([0, b / 2, 0.9 * b], rel=1e-12)
    assert table.one_minus_cosine[0] == 0 < table.one_minus_cosine[2]


@given(st.floats(1e-12, 3.1), st.floats(1e-150, 1e150), st.integers(0, 100))
def test_one_minus_cosine_does_not_cancel(angle, size, seed):
    generator = torch.Generator().manual_seed(seed)
    frame = torch.linalg.qr(torch.randn(6, 2, generator=generator, dtype=torch.float64))[0]
    a, b = frame[:, 0] * size, (frame @ torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)) / size
    assert float(one_minus_cosine(a, b)) == pytest.approx(
        2 * math.sin(angle / 2) ** 2, rel=1e-3 if angle < 1e-9 else 1e-6
    )


def test_one_minus_cosine_shapes():
    a, b = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert one_minus_cosine(a, b, dim=1).shape == (2, 4) and one_minus_cosine(a, b).dtype == torch.float64
    assert one_minus_cosine(a, -2 * a).numpy() == pytest.approx(2) and torch.isnan(one_minus_cosine(a, 0 * b)).all()


def test_a_model_that_fx_cannot_trace_is_told_to_measure():
    """With many optional arguments torch.fx gives up on its own words; a reader needs to know what to do instead."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 9, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with pytest.raises((ValueError, TypeError, torch.fx.proxy.TraceError)) as raised:
        degree(model, {"input_ids": 0}, approximate=True)
    assert "measure_degree" in "".join(raised.value.__notes__)
