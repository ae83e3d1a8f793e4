"""What is not known is not guessed: what the algebra of degrees refuses, and what stands near a refusal and is kept."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from degrees import Net, Two, par, plain, seq, sq
from torch import nn

from nbutils.homogeneity import degree, explain, measure_degree, scalable
from nbutils.homogeneity.algebra import EVERY, RULES, NoRule, NotHomogeneous, rule


def in_place(change, start=lambda h: h):
    """A function that changes a value in place and returns the value itself."""

    def function(m, x):
        h = start(m.f(x))
        change(h)
        return h

    return function


silu_in_place = in_place(lambda h: F.silu(h, inplace=True))


def attend(m, x, **options):
    return F.scaled_dot_product_attention(m.n(x), m.n(x), m.f(x), **options)


def net_of(function):
    """m.f adds 1 to the degree, m.n has 0, m.a is a frozen number."""
    parts = {"f": sq(), "n": plain(), "w": par(4, 4), "e": par(5, 4), "pool": nn.MaxPool1d(2, return_indices=True)}
    parts |= {"lstm": nn.LSTM(4, 4), "mha": nn.MultiheadAttention(4, 2, bias=False, dropout=0.5)}
    parts["a"] = nn.Parameter(torch.tensor(0.3), requires_grad=False)
    return Net(function, {"low": torch.full((4,), -math.inf)}, **parts).eval()


# name: (function, degree at k_in = 1, whether only asymptotically)
KEPT = {
    "root of zeros": (lambda m, x: (0 * x) ** 0.5 + x, 1, False),
    "sum of zeros": (lambda m, x: (0 * x + 0 * x) + x, 1, False),
    "third root": (lambda m, x: x.abs() ** (1 / 3), Fraction(1, 3), False),
    "power 0 of a leading term": (lambda m, x: F.gelu(m.f(x)) ** 0, 0, True),
    "log of a softmax at degree 0": (lambda m, x: m.n(x).softmax(-1).log(), 0, False),
    "divided by a gelu at degree 0": (lambda m, x: x / F.gelu(m.n(x)), 1, False),
    "log of a clamp at degree 0": (lambda m, x: (m.n(x).clamp(-1, 1) + 2).log(), 0, False),
    "no lower bound": (lambda m, x: m.f(x).clamp(0, math.inf), 2, False),
    "hardtanh": (lambda m, x: F.hardtanh(m.f(x)), 0, True),
    "relu6": (lambda m, x: F.relu6(m.f(x)), 0, True),
    "order 0 counts": (lambda m, x: m.f(x).norm(0), 0, False),
    "dropout of nothing": (lambda m, x: F.dropout(x, 0.0), 1, False),
    "dropout outside of training": (lambda m, x: F.dropout(x, training=False), 1, False),
    "type": (lambda m, x: x.type(torch.float64), 1, False),
    "whole numbers at degree 0": (lambda m, x: (3 * m.n(x)).to(torch.int32).double() * x, 1, False),
    "shape and type of another": (lambda m, x: m.f(x).view_as(x).expand_as(x).reshape_as(x).to(x), 2, False),
    "number of axes": (lambda m, x: F.gelu(m.f(x)) / F.gelu(m.f(x)).ndim, 2, True),
    "fused attention": (lambda m, x: attend(m, x, dropout_p=0.0), 2, False),
    "attention": (lambda m, x: m.mha(x, x, x)[0], 3, True),
    "weights of attention": (lambda m, x: m.mha(x, x, x)[1], 0, True),  # each row sums to 1
    "subscripts without a result": (lambda m, x: torch.einsum(x.mT @ x, [0, 1], m.w, [1, 2]), 3, False),
    "subscripts of a diagonal": (lambda m, x: torch.einsum(x, [0, 1], m.w, [1, 1], [0]), 2, False),
    "factor of a sum": (lambda m, x: torch.add(m.f(x), x, alpha=m.a), 2, False),
    "largest of all": (lambda m, x: m.f(x).max(), 2, False),
    "place of the largest": (lambda m, x: m.f(x).min(dim=0)[1], 0, False),
    "median of all": (lambda m, x: m.f(x).median(), 2, False),
    "largest of two": (lambda m, x: torch.max(m.f(x), x @ m.f.weight), 2, False),
    "pooled": (lambda m, x: m.pool(m.f(x))[0], 2, False),
    "places of the pooled": (lambda m, x: m.pool(m.f(x))[1], 0, False),
    "rectified in place far out": (in_place(lambda h: F.relu(h, inplace=True), F.gelu), 2, True),
    "silu in place": (lambda m, x: F.silu(m.f(x), inplace=True), 2, True),
    "methods in place": (lambda m, x: m.f(x).relu_().abs_().mul_(2), 2, False),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_near_a_refusal_has_the_degree_that_is_measured(name):
    function, k, far = KEPT[name]
    torch.manual_seed(1)
    net, x = net_of(function), torch.randn(3, 4)
    assert degree(net, approximate=far) == degree(net, approximate=True) == k
    with scalable(net, x, 1) as output, torch.no_grad():
        small, large = (float(output(c).double().norm()) for c in ((1e5, 1e6) if far else (1.0, 10.0)))
    assert math.log10(large / small) == pytest.approx(float(k), abs=1e-3 if far else 1e-9)


READ, VALUE = "an argument that the rule does not read", "a value of the graph"
FAST, TRAINING = "needs degree 0", "dropout in training mode"
# name: (function, what is raised asymptotically, what it says); exactly they are refused, too
REFUSED = {
    "log of sigmoid": (lambda m, x: torch.log(torch.sigmoid(m.f(x))), NotHomogeneous, "exact, not asymptotic"),
    "log of a part": (lambda m, x: torch.cat([m.f(x).sigmoid(), m.n(x)])[0].log(), NotHomogeneous, "exact"),
    "quotient": (lambda m, x: 1 / (1 + torch.relu(m.f(x))), NotHomogeneous, "may vanish"),
    "floor": (lambda m, x: torch.tanh(m.f(x)).floor(), NotHomogeneous, "exact, not asymptotic"),
    "one bound": (lambda m, x: m.f(x).clamp(-math.inf, 1), NotHomogeneous, "equal degrees"),
    "bound at a buffer": (lambda m, x: m.f(x).clamp(m.low, 1), NotHomogeneous, "equal degrees"),
    "maximum": (lambda m, x: torch.maximum(m.f(x), -m.f(m.f(x)).abs()), NotHomogeneous, "equal degrees"),
    "relu6 in place": (in_place(lambda h: F.relu6(h, inplace=True)), NotHomogeneous, "in place"),
    "divided by silu in place": (lambda m, x: 1 / silu_in_place(m, x), NotHomogeneous, "in place"),
    "order that is computed": (lambda m, x: m.f(x).norm(p=m.f(x).sum()), NotHomogeneous, "is not a number"),
    "normalize of order 0": (lambda m, x: F.normalize(x, p=0), NotHomogeneous, "order 0"),
    "embedding that is renormed": (
        lambda m, x: F.embedding(x.argmax(-1), m.e, max_norm=1.0), NotHomogeneous, "max_norm"
    ),
    "out": (lambda m, x: torch.abs(m.f(x), out=m.f(x) * x), NoRule, "out= changes another value"),
    "slope": (lambda m, x: F.leaky_relu(m.f(x), m.a), NotHomogeneous, READ),
    "beta of softplus": (lambda m, x: F.softplus(m.n(x), beta=m.a), NotHomogeneous, READ),
    "scale of attention": (lambda m, x: attend(m, x, scale=m.a), NotHomogeneous, READ),
    "ε": (lambda m, x: F.layer_norm(m.f(x), (4,), eps=m.a), NotHomogeneous, VALUE),
    "name of a type": (lambda m, x: m.f(x).type("torch.DoubleTensor"), NoRule, "give a torch.dtype"),
    "type of another value": (lambda m, x: m.f(x).to(x.argmax(-1)), NotHomogeneous, FAST),
    "whole numbers": (lambda m, x: x.to(torch.int32), NotHomogeneous, FAST),
    "power 0 of zeros": (lambda m, x: (0 * x) ** 0, NotHomogeneous, "0 or infinity to the power 0"),
    "gelu of a falling value": (lambda m, x: F.gelu(1 / x), NotHomogeneous, FAST),
    "tanh of a slowly falling value": (lambda m, x: torch.tanh(x.abs() ** -0.5), NotHomogeneous, FAST),
    "clamp of a falling value": (lambda m, x: (x.abs() ** -0.5).clamp(-1, 1), NotHomogeneous, "equal degrees"),
    "dropout": (lambda m, x: F.dropout(x), NotHomogeneous, TRAINING),
    "attention with dropout": (lambda m, x: attend(m, x, dropout_p=0.5), NotHomogeneous, TRAINING),
    "layer of attention in training": (lambda m, x: m.mha.train()(x, x, x)[0], NotHomogeneous, TRAINING),
    "rounded quotient": (lambda m, x: torch.div(x, x, rounding_mode="floor"), NoRule, "does not know these arguments"),
    "attribute": (lambda m, x: x.real * 2, NoRule, "no rule for attribute 'real' at node 'getattr"),
    "function": (lambda m, x: torch.erfinv(x), NoRule, r"no rule for erfinv(?s:.*)rule\(<the function erfinv>\)"),
    "method": (lambda m, x: x.erfinv_(), NoRule, r"rule\('erfinv_'\)\n    def erfinv\(algebra, x\):"),
    "module": (lambda m, x: m.lstm(x)[0], NoRule, r"rule\(LSTM\)\n    def lstm\(algebra, module, x\):"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_degree_or_no_rule_is_refused_with_its_reason(name):
    function, error, reason = REFUSED[name]
    with pytest.raises(error, match=reason):
        degree(net_of(function), approximate=True)
    with pytest.raises((NotHomogeneous, NoRule)):
        degree(net_of(function))
    assert explain(net_of(function)).note.str.contains("✗").sum() == 1


# --- Which rule a module has ------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * self.weight)


class Renamed(nn.Linear):
    """Another class with the forward of nn.Linear."""


def parametrized(function):
    layer = sq()
    nn.utils.parametrize.register_parametrization(layer, "weight", Net(function))
    return layer


def patched():
    layer = sq()
    layer.forward = lambda x: F.linear(x, layer.weight).exp()
    return seq(layer)


def sloped():
    net = seq(sq(), nn.LeakyReLU())
    net[1].negative_slope = nn.Parameter(torch.tensor(0.1))
    return net


def hooked(register, module):
    getattr(module, register)(lambda module, *args: None)
    return module


OF_CLASS = r"that of its class does not count(?s:.*)def linear\(algebra, module, x\):"


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: seq(Renamed(4, 4, bias=False)), 2),
        (lambda: seq(Doubled(4, 4, bias=False)), 3),  # looked into
        (lambda: seq(parametrized(lambda m, w: w * w)), 3),
        (lambda: parametrized(lambda m, w: w.exp()), "exp at node .* in module 'parametrizations.weight.0'"),
        (lambda: seq(nn.utils.parametrizations.weight_norm(sq())), "WeightNorm"),  # the weight is no parameter any more
        (lambda: seq(hooked("register_forward_hook", sq())), OF_CLASS),
        (lambda: seq(hooked("register_forward_pre_hook", sq())), OF_CLASS),
        (lambda: hooked("register_forward_hook", seq(sq(), nn.ReLU())), "the module has hooks"),
        (lambda: hooked("register_forward_pre_hook", seq(sq(), nn.ReLU())), "the module has hooks"),
        (patched, "needs degree 0|no rule"),
        (sloped, "a parameter more"),
    ],
)
def test_only_rules_that_hold_are_used(make, found):
    if isinstance(found, int):
        assert degree(make()) == found
        return
    with pytest.raises((NoRule, NotHomogeneous), match=found):
        degree(make())


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


@pytest.mark.parametrize(
    "cast", [lambda mask: mask, lambda mask: mask.float(), lambda mask: (~mask[None]).to(torch.float)]
)
def test_a_boolean_factor_is_no_mask_of_zeros_and_infinities(cast):
    net = Two(lambda m, x, mask: m.f(x) * cast(mask) + m.b, f=sq(), b=par(4))
    for k_in in ([2, EVERY], [2, 0]):
        with pytest.raises(NotHomogeneous):
            degree(net, k_in)
    assert degree(net, [0, 0]) == 1
    as_mask = Two(lambda m, x, mask: m.f(x).masked_fill(~mask[None], 0) + m.f(x), f=sq())
    assert degree(as_mask, [1, EVERY]) == 2
    attended = Two(lambda m, x, mask: F.scaled_dot_product_attention(m.n(x), m.n(x), m.f(x), mask), f=sq(), n=plain())
    assert degree(attended, [1, EVERY]) == 2
