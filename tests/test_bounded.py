"""Values with a bound on one side, in rows where the bound is all that is left: the degree is right, or refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from degrees import Net

from normgrowth.homogeneity import NotHomogeneous, degree

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
X[0] = X[0].abs() + 0.1  # a row all positive
X[1] = -X[1].abs() - 0.1  # a row all negative


def above(x):
    """What grows below its bound alone."""
    return x.clamp(max=1)


def masked_copy(x):
    copied = torch.zeros_like(x)
    copied[x > 0] = above(x)[x > 0]
    return copied


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
}
# And some that are to be answered.
ANSWERED = {
    "a sigmoid": (lambda x: above(x).sigmoid(), 0),
    "a bound from above": (above, 2),
    "a bound of a positive value from below": (lambda x: x.clamp(min=-1).relu(), 2),
    "two bounds": (lambda x: x.clamp(-1, 1), 0),
    "two bounds of tensors": (lambda x: x.clamp(-torch.ones(4), torch.ones(4)), 0),
    "the smaller of a value and a constant": (lambda x: torch.minimum(x, torch.tensor(1.0)), 2),
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


@pytest.mark.parametrize("name", ANSWERED)
def test_a_bounded_value_that_grows_somewhere_is_answered(name):
    function, known = ANSWERED[name]
    net = Net(lambda m, x: function(x), w=torch.nn.Parameter(torch.ones(1, dtype=torch.float64)))
    assert degree(net, X, 2, approximate=True) == known
    assert measured(function) == pytest.approx(known, abs=0.02)
