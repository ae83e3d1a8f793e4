"""Where a bound, a limit or a lower term is all that is left of a value: its degree is right, or refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from degrees import Net

from normgrowth.homogeneity import NotHomogeneous, degree

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
X[0] = X[0].abs() + 0.1  # a row all positive
X[1] = -X[1].abs() - 0.1  # a row all negative
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
STEPS = torch.arange(4, dtype=torch.float64)


def above(x):
    """What grows below its bound alone."""
    return x.clamp(max=1)


def masked_copy(x):
    copied = torch.zeros_like(x)
    copied[x > 0] = above(x)[x > 0]
    return copied


def around_one(x):
    """A value of degree 2 in all entries, with differences of degree 0."""
    return x.sum() + STEPS


def beside_ones(x):
    return torch.cat([x, torch.ones_like(x)])


def low_queries(x):
    """Queries of ones, for which scores of a lower degree decide: keys of x, whose values are 0."""
    keys = beside_ones(x)
    return (keys @ keys.mT).softmax(-1) @ torch.cat([torch.zeros_like(x), x])


def second_expert(x):
    weights = x.softmax(-1).topk(2)[0]
    return (weights / weights.sum(-1, keepdim=True))[:, 1:] * x


def attention_to_a_sink(x):
    scores = torch.cat([-(x @ x.mT).abs(), torch.zeros(3, 1, dtype=x.dtype)], -1)
    return scores.softmax(-1)[:, :3] @ x


def moved_in_place(x):
    rows = torch.stack([x, above(x)])
    rows[0] = rows[1]
    return rows.relu()


# x has degree 2. The value in words: a function that once had a wrong degree.
FUNCTIONS = {
    "hardtanh with one infinite side": lambda x: F.hardtanh(x.abs(), -math.inf, 1.0),
    "hardtanh below": lambda x: F.hardtanh(-x.abs(), -1.0, math.inf),
    "division by a bounded norm": lambda x: x / above(x).norm(dim=-1, keepdim=True),
    "division by a bounded sum": lambda x: x / above(x).abs().sum(-1, keepdim=True),
    "division by a bounded maximum": lambda x: x / above(x).abs().amax(-1, keepdim=True),
    "a negative power": lambda x: x * above(x).norm(dim=-1, keepdim=True) ** -1,
    "a reciprocal": lambda x: x * above(x).norm(dim=-1, keepdim=True).reciprocal(),
    "gelu above a bound": lambda x: F.gelu(x.clamp(min=-1))[1],
    "softplus above a bound": lambda x: F.softplus(x.clamp(min=-1))[1],
    "silu above a bound": lambda x: (-F.silu(x.clamp(min=-1))).relu(),
    "logsumexp of bounded ones": lambda x: above(x).logsumexp(-1)[0],
    "log softmax of bounded ones": lambda x: above(x).log_softmax(-1)[x > 0],
    "a gate of bounded ones": lambda x: F.glu(above(x))[0],
    "elu of a negative row": lambda x: F.elu(x)[1],
    "a copy under a mask": masked_copy,
    "scattered": lambda x: torch.zeros_like(x).scatter(-1, above(x).topk(2)[1], above(x).topk(2)[0])[:1],
    "interpolated": lambda x: F.interpolate(above(x)[None], 8)[0].relu(),
    "a Fourier transform": lambda x: torch.fft.rfft(above(x))[0].abs(),
    "rows moved in place": moved_in_place,
    "tanh of a negative degree": lambda x: (above(x).relu() / x.norm()).tanh(),
    "one finite bound among infinite ones": lambda x: x.abs().clamp(max=torch.tensor([math.inf, 1.0, 1.0, 1.0])),
    # a softmax is 1 at its largest score
    "attention to a bounded value": lambda x: (x.abs().sum() * torch.eye(3).double()).softmax(-1)[:1] @ above(x),
    "attention to the first, causal": lambda x: F.scaled_dot_product_attention(x, x, above(x), is_causal=True)[:1],
    "attention to a sink": attention_to_a_sink,
    "the second of two experts": second_expert,
    "smaller weights of a softmax": lambda x: x.softmax(-1).sort(-1)[0][:, :3],
    "what the largest weight leaves": lambda x: 1 - x.softmax(-1).amax(-1),
    "a value less its largest entry": lambda x: (x * x.softmax(-1)).sum(-1) - x.amax(-1),
    "a largest score by a bias": lambda x: (x[:1] + 100 * (STEPS == 0)).softmax(-1)[:, 1:].sum() * x,
    "bounded scores": lambda x: above(x)[0].softmax(-1),
    "scores of which lower terms decide": low_queries,
    # leading terms that cancel, or that a larger constant hides
    "a sum less its leading term": lambda x: (x + 1) - x,
    "a product less its leading term": lambda x: (x + 1) @ WEIGHT - x @ WEIGHT,
    "a square less its leading term": lambda x: (x + 1) * (x + 1) - x * x,
    "products in two orders": lambda x: ((x + 1) @ WEIGHT) @ WEIGHT - x @ (WEIGHT @ WEIGHT),
    "rows less each other": lambda x: (x + 1)[0] - (x + 2)[0],
    "less the mean": lambda x: around_one(x) - around_one(x).mean(),
    "the deviation of differences": lambda x: around_one(x).std(),
    "their variance": lambda x: around_one(x).var(),
    "over what is left of a sum": lambda x: x / ((x + 1) - x).norm(),
    "an open gate less 1": lambda x: x * (1 - x.abs().tanh()),
    "gelu less relu": lambda x: F.gelu(x) - F.relu(x),
    "logsumexp less the largest": lambda x: x.logsumexp(-1) - x.amax(-1),
    "relu by a bias": lambda x: (x[1] + 100).relu(),
    "gelu by a bias": lambda x: F.gelu(x[1] + 100),
    "a bias that falls": lambda x: (100 - x.abs()).relu() * x + x,
    # parts side by side
    "ones beside a value": lambda x: beside_ones(x)[3:],
    "ones within a value": lambda x: x.masked_fill(x > 0, 1.0)[0],
    "a row that falls by a division, in a norm": lambda x: F.layer_norm(
        torch.stack([x[0] ** 2, x[1]]) / (x**2).norm(), (4,)
    )[1],
    "sigmoids of two degrees": lambda x: (1 - torch.cat([x[0] ** 2, x[0]]).sigmoid())[4:] * x[0],
    "equal scores with lower terms": lambda x: (x[0].square().sum() + x[0]).softmax(-1).sort(-1)[0][:3] * x[0, :3],
    "a row that falls, in a norm": lambda x: F.layer_norm(torch.cat([x, 1 / x]), (4,))[3:] * x,
}
# And some that are to be answered.
ANSWERED = {
    "a sigmoid": (lambda x: above(x).sigmoid(), 0),
    "a bound from above": (above, 2),
    "a bound of a positive value from below": (lambda x: x.clamp(min=-1).relu(), 2),
    "two bounds": (lambda x: x.clamp(-1, 1), 0),
    "two bounds of tensors": (lambda x: x.clamp(-torch.ones(4), torch.ones(4)), 0),
    "the smaller of a value and a constant": (lambda x: torch.minimum(x, torch.tensor(1.0)), 2),
    "a value beyond its bound": (lambda x: above(x.abs()), 0),
    "the exponential of a value beyond its bound": (lambda x: x * above(x.abs()).exp(), 2),
    "attention to values that grow": (lambda x: F.scaled_dot_product_attention(x, x, above(x)), 2),
    "a layer that adds nothing": (lambda x: x + F.gelu(-x.abs()) @ WEIGHT, 2),
    "a norm of rows of two degrees": (lambda x: F.layer_norm(beside_ones(x) * STEPS, (4,))[3:] * x, 2),
    "features of two degrees": (lambda x: torch.cat([x, torch.ones_like(x)], 1).sum(-1), 2),
    "a sum in place": (lambda x: torch.ones_like(x).add_(x), 2),
    "a mask of a number": (lambda x: x * x.abs().masked_fill(STEPS > 0, -1e4).softmax(-1), 2),
}


def measured(function):
    """The degree between two large scales, or None where the output is 0 or not finite there."""
    sizes = [float(function(X * (scale * 1e4) ** 2).norm()) for scale in (1, 2)]
    return math.log2(sizes[1] / sizes[0]) if sizes[0] and math.isfinite(sizes[1]) else None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_of_which_its_bound_is_left_has_the_measured_degree_or_none(name):
    function = FUNCTIONS[name]
    net = Net(lambda m, x: function(x) + 0 * m.w.sum(), w=torch.nn.Parameter(torch.ones(1, dtype=torch.float64)))
    try:
        claimed = degree(net, X, 2, approximate=True)
    except NotHomogeneous:
        return
    assert measured(function) == pytest.approx(float(claimed), abs=0.02)


@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_a_batch_norm_without_gain_shifts_a_value_of_which_nothing_is_left(mean):
    """Of relu(−|x|) its running mean is left, a constant, and the layer after it has degree 1 and not 2."""
    layers = [torch.nn.Linear(4, 4, bias=False), torch.nn.ReLU(), torch.nn.BatchNorm1d(4, affine=False)]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(4, 2, bias=False)).double().eval()
    net[0].weight.data = -WEIGHT.abs()
    net[2].running_mean.fill_(mean)
    with pytest.raises(NotHomogeneous, match="is 0 here"):
        degree(net, X.abs(), approximate=True)
    net[0].weight.data = WEIGHT
    assert degree(net, X, approximate=True, check=True) == 2


@pytest.mark.parametrize("name", ANSWERED)
def test_a_bounded_value_that_grows_somewhere_is_answered(name):
    function, known = ANSWERED[name]
    net = Net(lambda m, x: function(x), w=torch.nn.Parameter(torch.ones(1, dtype=torch.float64)))
    assert degree(net, X, 2, approximate=True) == known
    assert measured(function) == pytest.approx(known, abs=0.02)
