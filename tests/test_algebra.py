"""What is not known is not guessed: what the algebra of degrees refuses, and what it must not overlook."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from degrees import Net, Two, linear, par, plain, seq, sq
from torch import nn

from nbutils.homogeneity import degree, explain, measure_degree
from nbutils.homogeneity.algebra import EVERY, RULES, NoRule, NotHomogeneous, rule

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


@pytest.mark.parametrize("order", [lambda h, k: h.norm(p=k), lambda h, k: torch.linalg.vector_norm(h, ord=k)])
def test_a_norm_of_an_order_that_is_computed_is_refused(order):
    with pytest.raises(NotHomogeneous, match="the order of the norm is not a number"):
        degree(Net(lambda m, x: order(m.f(x), m.f(x).sum()), f=sq()), approximate=True)


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
    scalar = nn.Parameter(torch.tensor(3.0), requires_grad=False)
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


def test_attention_weights_have_degree_0_far_out():
    """A row of weights sums to 1; the output has that of values and two projections."""
    attention = nn.MultiheadAttention(4, 2, bias=False)
    for part, k in ((1, 0), (0, 3)):
        assert degree(Net(lambda m, x, part=part: m.a(x, x, x)[part], a=attention), 1, approximate=True) == k


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


# --- Edges ------------------------------------------------------------------------------------------------------------

KEPT = {  # name: (function, degree at k_in = 1, whether asymptotic); m.n has degree 0, m.f adds 1
    "root of zeros": (lambda m, x: (0 * x) ** 0.5 + x, 1, False),
    "sum of zeros": (lambda m, x: (0 * x + 0 * x) + x, 1, False),
    "third root": (lambda m, x: x.abs() ** (1 / 3), Fraction(1, 3), False),
    "a very small power": (lambda m, x: x.abs() ** 1e-6, Fraction(1, 10**6), False),
    "power 0 of a leading term": (lambda m, x: F.gelu(m.f(x)) ** 0, 0, True),
    "log of a softmax at degree 0": (lambda m, x: m.n(x).softmax(-1).log(), 0, True),
    "divided by a gelu at degree 0": (lambda m, x: x / F.gelu(m.n(x)), 1, True),
    "log of a clamp at degree 0": (lambda m, x: (m.n(x).clamp(-1, 1) + 2).log(), 0, True),
    "dropout of nothing": (lambda m, x: F.dropout(x, 0.0), 1, False),
    "dropout outside of training": (lambda m, x: F.dropout(x, training=False), 1, False),
    "float": (lambda m, x: x.to(torch.float64), 1, False),
    "type": (lambda m, x: x.type(torch.float64), 1, False),
    "whole numbers at degree 0": (lambda m, x: m.n(x).to(torch.int32).float() * x, 1, False),
    "attention without dropout": (
        lambda m, x: F.scaled_dot_product_attention(m.n(x), m.n(x), m.f(x), None, 0.0), 2, False
    ),
    "subscripts without a result": (lambda m, x: torch.einsum(x.mT @ x, [0, 1], m.f.weight, [1, 2]), 3, False),
    "subscripts of a diagonal": (lambda m, x: torch.einsum(x, [0, 1], m.f.weight, [1, 1], [0]), 2, False),
    "largest of all": (lambda m, x: m.f(x).max(), 2, False),
    "largest of each": (lambda m, x: m.f(x).max(0)[0], 2, False),
    "place of the largest": (lambda m, x: m.f(x).min(dim=0)[1], 0, False),
    "places by name": (lambda m, x: m.f(x).sort(-1).indices, 0, False),
    "values by name": (lambda m, x: m.f(x).sort(-1).values, 2, False),
    "median of all": (lambda m, x: m.f(x).median(), 2, False),
    "median of each": (lambda m, x: m.f(x).median(-1)[1], 0, False),
    "largest of two": (lambda m, x: torch.max(m.f(x), x @ m.f.weight), 2, False),
    "pooled": (lambda m, x: m.pool(m.f(x))[0], 2, False),
    "places of the pooled": (lambda m, x: m.pool(m.f(x))[1], 0, False),
    "number of axes": (lambda m, x: F.gelu(m.f(x)) / F.gelu(m.f(x)).ndim, 2, True),
}  # fmt: skip
NOT_KEPT = {  # name: (function, what is said)
    "power 0 of zeros": (lambda m, x: (0 * x) ** 0, "0 or infinity to the power 0"),
    "power −1 of zeros": (lambda m, x: (0 * x) ** -1, "0 or infinity to the power -1"),
    "gelu of a falling value": (lambda m, x: F.gelu(1 / x), "needs degree 0"),
    "gelu of a slowly falling value": (lambda m, x: F.gelu(x.abs() ** -0.5), "needs degree 0"),
    "tanh of a slowly falling value": (lambda m, x: torch.tanh(x.abs() ** -0.5), "needs degree 0"),
    "clamp of a slowly falling value": (lambda m, x: (x.abs() ** -0.5).clamp(-1, 1), "equal degrees"),
    "clamp of a falling value": (lambda m, x: (1 / x).clamp(-1, 1), "equal degrees"),
    "whole numbers": (lambda m, x: x.to(torch.int32), "needs degree 0"),
    "type of whole numbers": (lambda m, x: x.type(torch.int32), "needs degree 0"),
    "dropout": (lambda m, x: F.dropout(x), "dropout in training mode"),
    "attention with dropout": (
        lambda m, x: F.scaled_dot_product_attention(m.n(x), m.n(x), x, None, 0.5), "dropout in training mode"
    ),
    "largest of two": (lambda m, x: torch.max(m.f(x), x), "equal degrees"),
    "comparison": (lambda m, x: (m.f(x) > x) * x, "equal degrees"),
}  # fmt: skip


def edges(function):
    return Net(function, f=sq(), n=plain(), pool=nn.MaxPool1d(2, return_indices=True))


@pytest.mark.parametrize("name", KEPT)
def test_what_is_near_a_refusal_has_its_degree(name):
    function, k, asymptotic = KEPT[name]
    assert degree(edges(function), 1, approximate=asymptotic) == k
    assert degree(edges(function), 1, approximate=True) == k


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_is_near_a_degree_is_refused(name):
    function, said = NOT_KEPT[name]
    for approximate in (False, True) if name != "comparison" else (False,):
        with pytest.raises(NotHomogeneous, match=said):
            degree(edges(function), 1, approximate=approximate)


@pytest.mark.parametrize("name", ["real", "values", "indices"])
def test_an_attribute_that_is_not_known_is_named(name):
    with pytest.raises(NoRule, match=f"no rule for attribute '{name}' at node 'getattr"):
        degree(Net(lambda m, x: getattr(x, name) * 2))


def test_dropout_of_attention_counts_in_training_alone():
    attention = nn.MultiheadAttention(4, 2, bias=False, dropout=0.5)
    net = Net(lambda m, x: m.a(x, x, x)[0], a=attention)
    assert degree(net.eval(), 1, approximate=True) == 3
    with pytest.raises(NotHomogeneous, match="dropout"):
        degree(net.train(), 1, approximate=True)


def test_attention_weights_that_are_not_asked_for_have_every_degree():
    attention = nn.MultiheadAttention(4, 2, bias=False)
    for need, k in ((True, 0), (False, None)):
        net = Net(lambda m, x, need=need: m.a(x, x, x, need_weights=need)[1], a=attention)
        if k is None:
            with pytest.raises(ValueError, match="every degree"):
                degree(net, 1, approximate=True)
        else:
            assert degree(net, 1, approximate=True) == k


def test_batch_norm_of_running_statistics_and_in_training():
    """In training it is normalised by the batch; afterwards it is affine in what it is given."""
    layer = nn.BatchNorm1d(4, eps=0.0, affine=False)
    assert degree(seq(sq(), layer).train(), 1) == 0 and degree(seq(sq(), layer).eval(), 1) == 2
    assert degree(seq(sq(), nn.BatchNorm1d(4, eps=0.0, affine=False, track_running_stats=False)).eval(), 1) == 0


@pytest.mark.parametrize(
    ("make", "signature", "class_has_a_rule"),
    [
        (lambda: Net(lambda m, x: torch.erfinv(x)), "def erfinv(algebra, x):", False),
        (lambda: Net(lambda m, x: x.erfinv_()), "def erfinv(algebra, x):", False),
        (lambda: Net(lambda m, x: m.f(x)[0], f=nn.LSTM(4, 4)), "def lstm(algebra, module, x):", False),
        (hooked, "def linear(algebra, module, x):", True),
    ],
)
def test_how_to_add_a_rule_is_shown_as_it_is_written(make, signature, class_has_a_rule):
    with pytest.raises(NoRule) as caught:
        degree(make())
    said = str(caught.value)
    assert signature in said and ("that of its class does not count" in said) == class_has_a_rule


def rectified(m, x):
    h = m.f(x)
    F.relu(h, inplace=True)
    return h


def rectified_far_out(m, x):
    h = F.gelu(m.f(x))
    F.relu(h, inplace=True)
    return h + 1


@pytest.mark.parametrize(
    ("function", "asymptotic"),
    [(rectified, False), (rectified_far_out, True), (lambda m, x: F.silu(m.f(x), inplace=True), True),
     (lambda m, x: F.silu(m.f(x), True), True), (lambda m, x: m.f(x).relu_().abs_().mul_(2), False)],
)  # fmt: skip
def test_what_keeps_the_degree_may_be_written_in_place(function, asymptotic):
    """Also where the value is read later on; what saturates or leads alone may be written where nobody else reads."""
    net, x = Net(function, f=sq()), torch.randn(3, 4)
    assert degree(net, approximate=asymptotic) == degree(net, approximate=True) == 2
    with torch.no_grad():
        assert float((net(1e3 * x).norm() / net(1e2 * x).norm()).log10()) == pytest.approx(1, abs=0.2)
