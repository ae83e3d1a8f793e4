"""Each rule gives the degree that is measured, in networks of our own and in generated ones."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from degrees import (
    IMAGE,
    INDEX,
    TOKENS,
    Net,
    X,
    attention_of_normed,
    build,
    encoder,
    linear,
    mha,
    moved,
    no_bias,
    norm,
    par,
    plain,
    seq,
    sq,
)
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from torch import nn

from normgrowth.homogeneity import NotHomogeneous, degree, explain, measure_degree, one_minus_cosine, scalable

# name: (network, input shape or tensors, input_degree, degree). Exact.
EXACT = {
    "linear": (lambda: linear(4, 3), X, 1, 2),
    "mlp": (lambda: seq(linear(4, 5), nn.ReLU(), linear(5, 5), nn.LeakyReLU(0.1), linear(5, 2)), X, 0, 3),
    "bias in the first layer": (lambda: seq(linear(4, 5, bias=True), nn.ReLU(), linear(5, 2)), X, 0, 2),
    "residual behind layer norm": (lambda: Net(lambda m, x: m.ln(x) + m.b, ln=norm(), b=par(4)), X, 1, 1),
    "embedding": (lambda: nn.Embedding(5, 4), INDEX, 0, 1),
    "embedding, norm, head": (lambda: seq(nn.Embedding(5, 4), norm(bias=False), linear(4, 2)), INDEX, 1, 2),
    "tied embedding": (lambda: Net(lambda m, x: m.e(x) @ m.e.weight.T, e=nn.Embedding(5, 4)), INDEX, 0, 2),
    "conv2d with bias": (lambda: nn.Conv2d(3, 2, 3), IMAGE, 0, 1),
    "conv net": (
        lambda: seq(
            nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2, bias=False),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(4, 2),
        ), IMAGE, 0, 3,
    ),
    "one layer twice": (lambda: (lambda f: seq(f, nn.ReLU(), f))(sq()), X, 0, 2),
    "layer norm": (lambda: norm(), X, 5, 1),
    "layer norm without affine": (lambda: plain(), X, 5, 0),
    "ε does not matter at degree 0": (lambda: nn.LayerNorm(4, eps=0.3), X, 0, 1),
    "rms norm": (lambda: seq(sq(), norm(nn.RMSNorm), linear(4, 2)), X, 1, 2),
    "rms norm without affine": (lambda: norm(nn.RMSNorm, elementwise_affine=False), X, 1, 0),
    "group norm": (lambda: seq(nn.Conv2d(3, 4, 3, bias=False), nn.GroupNorm(2, 4, eps=0.0)), IMAGE, 0, 1),
    "batch norm, running mean 0": (lambda: seq(linear(4, 3), nn.BatchNorm1d(3, affine=False)), X, 1, 2),
    "batch norm, running mean": (lambda: moved(nn.BatchNorm1d(3)), X, 0, 1),
    "square root of a norm": (
        lambda: Net(lambda m, x: m.f(x).norm(dim=-1).sqrt(), f=linear(4, 3)), X, 0, Fraction(1, 2)
    ),
    "quotient": (lambda: Net(lambda m, x: m.f(x) / m.f(m.f(x)).abs().sum(), f=sq()), X, 0, -1),
    "product with a gate of degree 0": (
        lambda: Net(lambda m, x: torch.sigmoid(m.n(x)) * m.f(x), f=sq(), n=plain()), X, 1, 2
    ),
    "gelu at degree 0": (lambda: seq(plain(), nn.GELU(), linear(4, 2)), X, 1, 1),
    "residual of equal degrees": (lambda: Net(lambda m, x: m.f(x) + m.w * x, f=sq(), w=par(4)), X, 1, 2),
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
        lambda: Net(attention_of_normed, q=sq(), k=sq(), v=sq(), norm=plain()), X, 1, 2
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
    "buffers are constants": (lambda: Net(lambda m, x: m.f(x * m.s), {"s": torch.ones(4) * 3}, f=sq()), X, 1, 2),
    "position buffer at degree 0": (lambda: Net(lambda m, x: m.f(x + m.p), {"p": torch.ones(3, 4)}, f=sq()), X, 0, 1),
    "where and masked_fill": (
        lambda: Net(lambda m, x: torch.where(x > 0, m.f(x), 0.0).masked_fill(x.isnan(), 0), f=sq()), X, 1, 2
    ),
    "cosine head": (lambda: Net(lambda m, x: F.cosine_similarity(m.f(x), x, dim=-1, eps=0.0), f=sq()), X, 1, 0),
}  # fmt: skip

# The same, asymptotically: measured at large scales.
ASYMPTOTIC = {
    "mlp with biases": (lambda: seq(linear(4, 5, bias=True), nn.ReLU(), linear(5, 2, bias=True)), X, 1, 3),
    "gelu": (lambda: seq(linear(4, 8), nn.GELU(), linear(8, 2)), X, 0, 2),
    "gated": (lambda: Net(lambda m, x: F.silu(m.f(x)) * m.g(x), f=linear(4, 8), g=linear(4, 8)), X, 1, 4),
    "prelu": (lambda: seq(linear(4, 8), nn.PReLU(), linear(8, 2)), X, 0, 3),
    "softmax head": (lambda: seq(linear(4, 5), nn.Softmax(-1), linear(5, 2)), X, 1, 1),
    "tanh": (lambda: seq(linear(4, 5), nn.Tanh(), linear(5, 5), nn.Sigmoid(), linear(5, 2)), X, 1, 1),
    "clamp to bounds": (lambda: Net(lambda m, x: m.f(x).clamp(-1, 1), f=sq()), X, 1, 0),
    "residual": (lambda: Net(lambda m, x: x + m.f(x), f=sq()), X, 1, 2),
    "running mean of batch norm": (lambda: moved(nn.BatchNorm1d(3)), X, 1, 2),
    "log-softmax": (lambda: seq(linear(4, 5), nn.LogSoftmax(-1)), X, 1, 2),
    "attention": (lambda: mha(bias=False), (TOKENS,) * 3, 1, 3),
    "attention with biases": (lambda: mha(), (TOKENS,) * 3, 1, 3),
    "post-norm": (lambda: encoder(), TOKENS, 1, 1),
    "post-norm, the second norm without gain": (lambda: encoder(bias=False, plain="norm2"), TOKENS, 1, 0),
    "pre-norm": (lambda: encoder(norm_first=True), TOKENS, 1, 3),
    "pre-norm, gelu": (lambda: encoder(norm_first=True, activation="gelu"), TOKENS, 1, 3),
    "three pre-norm layers": (lambda: encoder(norm_first=True, bias=False, depth=3), TOKENS, 1, 3),
    "addmm, no bias": (lambda: Net(lambda m, x: torch.addmm(m.w**3, x, m.w, beta=0), w=par(4, 4)), (4, 4), 0, 1),
    "ε of layer norm": (lambda: seq(sq(), nn.LayerNorm(4)), X, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_exact_degree_is_the_measured_one(name):
    make, shapes, input_degree, expected = EXACT[name]
    net, inputs = build(make, shapes)
    assert degree(net, inputs, input_degree, check=True) == expected
    # an exact degree is asymptotic too
    assert degree(net, inputs, input_degree, approximate=True, check=True) == expected
    measured = measure_degree(net, inputs, [0.5, 1, 10], input_degree=input_degree)
    assert measured.euler.to_numpy() == pytest.approx(float(expected), abs=1e-9)
    assert measured.residual.max() < 1e-9
    assert measured.log_ratio[:-1].to_numpy() == pytest.approx(float(expected), abs=1e-9)
    with scalable(net, inputs, input_degree) as output, torch.no_grad():
        f, small, large = (output(c) / c ** float(expected) for c in (1.0, 0.5, 10.0))
    for other in (small, large):
        assert (other - f).abs().max() < 1e-9 and float(one_minus_cosine(other, f)) < 1e-20


@pytest.mark.parametrize("name", ASYMPTOTIC)
def test_asymptotic_degree_is_the_measured_one(name):
    make, shapes, input_degree, expected = ASYMPTOTIC[name]
    net, inputs = build(make, shapes)
    assert degree(net, inputs, input_degree, approximate=True, check=True) == expected
    measured = measure_degree(net, inputs, [1e3, 1e5], input_degree=input_degree)
    assert measured.euler[1] == pytest.approx(expected, abs=1e-3)
    assert measured.log_ratio[0] == pytest.approx(expected, abs=1e-2)
    with scalable(net, inputs, input_degree) as output, torch.no_grad():
        near, far, limit = (output(c) for c in (1e3, 1e4, 1e6))
    assert float(one_minus_cosine(far, limit)) <= max(float(one_minus_cosine(near, limit)), 1e-28)


OPERATIONS = """
-x; abs(x); x - 2 * x.flip(0); 1 / x; x / x.sum(); x**2; x**-1; x**0; x.pow(1.5); x.sqrt(); x.rsqrt(); x.square()
x.var(); x.std(-1); x.norm(); torch.linalg.norm(x); x.mean(0); x.amax(-1); x.max(); x.max(-1)[0]; x.min(dim=1)[0]
torch.maximum(x, 3 * x.flip(0)); x.clamp(min=0); x.relu(); F.leaky_relu(x, 0.1); x.sign(); x.sort(-1).values
x.topk(2).values; x.cumsum(0); x.T; x[..., :2]; x[:, None]; x.view(-1); x.view(x.shape[1] // 2, -1); x.reshape(3, 1, 4)
x.t().contiguous(); x.permute(1, 0); x.unsqueeze(0).expand(2, 3, 4); x.repeat(2, 1); x.chunk(2, -1)[1]; x.unbind(0)[1]
x.tril(); x.diagonal(); x.roll(1); torch.stack([x, x]); torch.cat(tensors=[x, 2 * x], dim=1); x.double() * 2
torch.einsum("ij,kj,kl->il", x, x, x); torch.outer(x[0], x[1]); torch.bmm(x[None], x.T[None]); torch.dot(x[0], x[1])
x @ x.mT; F.linear(input=x, weight=x, bias=None); torch.addmm(x @ x.mT, x, x.mT); x.reciprocal(); x * x.shape[0]
F.pad(x, (1, 1)); F.normalize(x, eps=0.0); F.layer_norm(x, (4,), eps=0.0); F.rms_norm(x, (4,), eps=0.0)
F.dropout(x, 0.5, False); F.max_pool1d(x, 2); F.avg_pool1d(x, 2); F.adaptive_avg_pool1d(x, 2); F.max_pool2d(x[None], 2)
F.conv1d(x[None], x[None]); F.interpolate(x[None], scale_factor=2); F.softmax(x / x.norm(), -1); (x / x.sum()).exp()
torch.where(x > x.mean(), x, -x); x.masked_fill(x < 0, 0.0); x * (x > 0); x.detach().argmax(-1) * x.sum()
torch.logsumexp(x / x.norm(), -1); x.gather(-1, x.argsort(-1)); x.masked_fill(x < x.mean(), -torch.inf).amax(-1)
F.scaled_dot_product_attention(F.normalize(x, eps=0.0)[None], F.normalize(x, eps=0.0)[None], x[None])
"""


@pytest.mark.parametrize("text", [line.strip() for line in OPERATIONS.replace("\n", ";").split(";") if line.strip()])
def test_rules_of_operations(text):
    net = Net(lambda m, x: eval(text, {"torch": torch, "F": F, "x": x}))
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.1
    measured = measure_degree(net, x, [1, 3, 9], input_degree=2)
    assert measured.log_ratio[:-1].to_numpy() == pytest.approx(float(degree(net, x, 2)), abs=1e-9)
    assert "detach" in text or measured.residual.max() < 1e-9


# --- Generated networks: a random program over values of shape (4 tokens, 4 features), with its degrees ---------------

PARTS = {
    "linear": lambda: sq(),
    "linear_bias": lambda: linear(4, 4, bias=True),
    "norm": lambda: plain(),
    "norm_affine": norm,
    "rms": lambda: norm(nn.RMSNorm),
    "batch_norm": lambda: no_bias(nn.BatchNorm1d(4)),
}  # steps that are modules; all others but the own parameters are functions
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
LAWS = (  # the degree of one step's value from those of its sources; None where there is none
    ("linear weight batch_norm", lambda k: k + 1),
    ("relu leaky abs scale mean permute", lambda k: k),
    ("norm unit", lambda k: 0),
    ("norm_affine rms", lambda k: 1),
    ("square", lambda k: 2 * k),
    ("root", lambda k: k / 2),
    ("softmax tanh gelu", lambda k: 0 if k == 0 else None),
    ("bias", lambda k: 1 if k == 1 else None),
    ("linear_bias", lambda k: 1 if k == 0 else None),
)
LAWS_OF_TWO = (
    ("add maximum cat where", lambda k, j: k if k == j else None),
    ("mul matmul", lambda k, j: k + j),
    ("div", lambda k, j: k - j),
)
UNARY, BINARY = ({op: law for ops, law in laws for op in ops.split()} for laws in (LAWS, LAWS_OF_TWO))


class Program(nn.Module):
    """Steps (operation, sources): each works on values made before (sources are counted round) and makes one."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.parts = nn.ModuleDict({f"step{i}": PARTS[op]() for i, (op, *_) in enumerate(steps) if op in PARTS})
        needed = {f"p{i}": par(4) for i, (op, *_) in enumerate(steps) if op in ("weight", "bias")}
        self.own = nn.ParameterDict(needed)

    def forward(self, x):
        values = [x]
        for i, (op, *sources) in enumerate(self.steps):
            xs = [values[j % len(values)] for j in sources]
            if op in PARTS:
                values.append(self.parts[f"step{i}"](xs[0]))
            elif op in ("weight", "bias"):
                values.append(xs[0] * self.own[f"p{i}"] if op == "weight" else xs[0] + self.own[f"p{i}"])
            else:
                values.append(WILD[op](*xs[: 1 if op in UNARY else 2]))
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
    assert degree(net, x, degrees[0]) == degrees[-1]
    try:
        measured = measure_degree(net, x, [0.7, 1.0, 1.9], input_degree=degrees[0])
    except ValueError:  # zero or 0/0: no degree to measure
        assume(False)
    assume(not measured.euler.isna().any())  # √x at 0
    assert measured.euler.to_numpy() == pytest.approx(degrees[-1], abs=1e-6)
    assert measured.residual.max() < 1e-6
    assert measured.log_ratio[:-1].to_numpy() == pytest.approx(degrees[-1], abs=1e-6)


@quick
@given(programs(), st.sampled_from(["add", "maximum", "cat", "where"]), st.integers(0, 8))
def test_generated_breaks_are_found(drawn, op, which):
    """Join two values of unequal degrees: the algebra stops at that step, with these degrees."""
    steps, degrees, seed = drawn
    last, other = len(degrees) - 1, which % len(degrees)
    assume(degrees[last] != degrees[other])
    net, x = make_program([*steps, (op, last, other)], seed)
    with pytest.raises(NotHomogeneous):
        degree(net, x, degrees[0])
    stopped = explain(net, x, degrees[0]).iloc[-1]
    assert stopped.operation == {"where": "gt"}.get(op, op) and stopped.note.startswith("✗")
    assert {*map(Fraction, stopped["degree in"].split(", "))} == {Fraction(degrees[last]), Fraction(degrees[other])}


def set_part(x, y):
    x = x.clone()
    x[1:3] = y[:2]
    return x


def add_part(x, y):
    (part := x.clone()).view(2, 8)[0].add_(y.view(-1)[:8])
    return part


def set_by_another(x, y):
    (x := x.clone()).data = y
    return x


# Steps that keep to no rule: views, changes in place, casts, reductions, branches, numbers, places, constants.
WILD = DO | {
    "in_place_add": lambda x, y: x.clone().add_(y),
    "in_place_mul": lambda x, y: x.clone().mul_(y),
    "in_place_view": lambda x, y: [z := x.clone(), z.view(-1)[3:7].mul_(y[0])][0],
    "set_part": set_part,
    "add_part": add_part,
    "set_by_another": set_by_another,
    "filled": lambda x, y: set_part(torch.zeros_like(x), y) + set_part(torch.empty_like(x).copy_(x), x),
    "out": lambda x, y: [z := x.clone(), torch.abs(y, out=z)][0],
    "cast": lambda x, y: x.to(torch.complex128).real.to(y) + y,
    "int": lambda x, y: (10 * x).int() * y,
    "int_sum": lambda x, y: x.sum(dtype=torch.int64) * y,
    "bits": lambda x, y: x.contiguous().view(torch.int64) % 1000 * y,
    "branch": lambda x, y: y if x.sum() > 0.5 else y * y,
    "sign_branch": lambda x, y: y if x[0, 0] > 0 else y * y,
    "item": lambda x, y: x.mean().item() * y,
    "numpy": lambda x, y: torch.from_numpy(np.tanh(x.numpy(force=True))) + y,
    "tolist": lambda x, y: torch.tensor(x.tolist(), dtype=torch.float64) * y,
    "places": lambda x, y: y.gather(-1, x.argsort(-1)),
    "count": lambda x, y: (x > 0).sum() * y + y,
    "truth": lambda x, y: y + (x > y).double(),
    "zero_times": lambda x, y: 0 * x + y,
    "rectified_away": lambda x, y: torch.relu(-x.abs()) + y,
    "one": lambda x, y: y + 1,
    "clamp": lambda x, y: x.clamp(-0.5, 0.5) * y,
    "guard": lambda x, y: y / x.norm(dim=-1, keepdim=True).clamp(min=1e-300),
    "masked": lambda x, y: x.masked_fill(y > 0, -1e9).softmax(-1) * y,
    "lowest": lambda x, y: x + torch.full_like(x, torch.finfo(torch.float32).min).triu(1) + y,
    "random": lambda x, y: F.dropout(x, 0.1) + y,
}


STEPS = st.tuples(st.sampled_from([*PARTS, "weight", "bias", *WILD]), st.integers(0, 5), st.integers(0, 5))


@settings(quick, max_examples=300)
@given(st.lists(STEPS, min_size=1, max_size=5), st.sampled_from([0, 1, 2]), st.integers(0, 2**20))
def test_of_wild_networks_each_is_right_or_refused(steps, input_degree, seed):
    torch.manual_seed(seed)
    net, x = Program(steps).double().eval(), torch.randn(4, 4, dtype=torch.float64)
    try:
        k = degree(net, x, input_degree)
    except (ValueError, LookupError) as error:
        event(type(error).__name__)
        return
    event("a degree")
    with scalable(net, x, input_degree) as output, torch.no_grad():
        small, large = output(1.0), output(3.0)
    assume(small.isfinite().all() and small.norm() < 1e100)
    torch.testing.assert_close(large, small * 3.0 ** float(k), rtol=1e-6, atol=1e-9 * float(large.norm()))
