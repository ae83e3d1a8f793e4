"""Degrees of inputs and outputs, explanations, and degrees that are measured."""

import math
import warnings
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from degrees import SHAPE, TOKENS, Net, attention, build, encoder, linear, norm_without_gain, parameter
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from normgrowth.homogeneity import NotHomogeneous, degree, explain, measure_degree, one_minus_cosine


class Masked(nn.Module):
    """An optional mask, an optional switch, and a constant of the code."""

    def __init__(self):
        super().__init__()
        self.f = linear()

    def forward(self, x, mask=None, twice=False):
        h = self.f(x) * torch.tensor([1.0, 2, 3, 4])
        h = h if mask is None else h + mask
        return (self.f(h) if twice else h), mask


def test_degrees_of_inputs():
    net, x, mask = Masked(), torch.randn(3, 4), torch.randn(3, 4)
    hidden = torch.zeros(4).masked_fill(torch.arange(4) > 2, -math.inf)
    assert degree(net, x, 1) == degree(net, (x, hidden), 1) == degree(net, {"x": x, "mask": hidden}, 1) == 2
    assert degree(net, (x, None, True), 1) == 3 and degree(net, x, Fraction(1, 2)) == Fraction(3, 2)
    with pytest.raises(NotHomogeneous):
        degree(net, (x, mask), 1)
    assert degree(net, (x, mask), 1, approximate=True) == 2 and degree(net, (x, mask), 0, approximate=True) == 1
    assert measure_degree(net, {"x": x}, [1, 2], input_degree=1).residual.max() < 1e-12
    assert measure_degree(net, (x, mask), [1, 2], input_degree=1).residual.max() > 1e-2


def test_a_boolean_factor_is_a_constant_and_a_mask_is_not():
    x, mask = torch.randn(3, 4), torch.tensor([True, True, False, True])
    for cast in (lambda mask: mask, lambda mask: mask.float(), lambda mask: (~mask[None]).to(torch.float)):
        net = Net(lambda m, x, mask, cast=cast: m.f(x) * cast(mask) + m.b, f=linear(), b=parameter(4))
        with pytest.raises(NotHomogeneous):
            degree(net, (x, mask), 2)
        assert degree(net, (x, mask)) == 1
    filled = Net(lambda m, x, mask: m.f(x).masked_fill(~mask[None], 0) + m.f(x), f=linear())
    assert degree(filled, (x, mask), 1) == 2
    attended = Net(
        lambda m, x, mask: F.scaled_dot_product_attention(m.n(x), m.n(x), m.f(x), mask),
        f=linear(),
        n=norm_without_gain(),
    )
    assert degree(attended, (x, mask[None, :3].expand(3, 3)), 1) == 2


def test_zero_has_every_degree():
    def degree_of(function):
        return degree(Net(function), torch.randn(3, 4), 1)

    assert degree_of(lambda m, x: x + 0) == degree_of(lambda m, x: x.clamp(min=0) + torch.zeros_like(x)) == 1
    assert degree_of(lambda m, x: sum([x, x])) == 1
    with pytest.raises(ValueError, match="every degree"):
        degree_of(lambda m, x: 0 * x)
    for zeros in (lambda x: torch.zeros_like(x), lambda x: x * torch.zeros_like(x)):
        with pytest.raises(NotHomogeneous, match="divisor"):
            degree_of(lambda m, x, zeros=zeros: x / zeros(x))
    with pytest.raises(NotHomogeneous, match="sum"):  # that these values vanish here is chance
        degree_of(lambda m, x: torch.relu(-(x.abs() + x.abs()) / x.abs()) + x)


def test_masks_of_attention():
    x, causal = torch.randn(*TOKENS), nn.Transformer.generate_square_subsequent_mask(5)

    def masked(mask):
        attend = attention(bias=False).eval()
        return Net(lambda m, x: m.attention(x, x, x, attn_mask=m.mask)[0], {"mask": mask}, attention=attend)

    for mask in causal, causal < 0:
        assert degree(masked(mask), x, -1) == 1
        assert measure_degree(masked(mask), x, [1, 3], input_degree=-1).residual.max() < 1e-12
    large = masked(causal.clamp(min=-1e9))
    assert degree(large, x, -1) == 1  # scores of degree 0 and a mask of degree 0
    with pytest.raises(NotHomogeneous, match=r"in module 'attention': a sum needs .* it meets degree (4, 0|0, 4)"):
        degree(large, x, 1)


def test_with_an_epsilon_the_degree_is_asymptotic():
    def by_hand(m, x):
        return x / (x.var(-1, keepdim=True) + 1e-5).sqrt()

    x = torch.randn(3, 4)
    for norm in (nn.LayerNorm(4, elementwise_affine=False), Net(by_hand), Net(lambda m, x: F.normalize(x))):
        net = nn.Sequential(linear(), norm, linear(4, 2))
        with pytest.raises(NotHomogeneous, match=r"in module '1': .* equal degrees"):
            degree(net, x)
        assert degree(net, x, approximate=True, check=True) == 1 == degree(nn.LayerNorm(4), x)
    assert degree(Net(lambda m, x: F.rms_norm(x, (4,))), x) == 0, "x does not change with scale"
    with pytest.raises(NotHomogeneous, match="ε outgrows"):
        degree(nn.LayerNorm(4), x, -1, approximate=True)
    small = measure_degree(nn.LayerNorm(4), torch.randn(3, 4) * 1e-3, [1, 1e6], input_degree=1)
    assert small.euler[0] > 1.1 and small.euler[1] == pytest.approx(1, abs=1e-6)  # below √ε it is nearly linear in x


def test_explain_is_a_table_of_operations():
    table = explain(encoder(bias=False).eval(), torch.randn(*TOKENS), 1, approximate=True)
    assert list(table.columns) == ["module", "operation", "degree in", "degree out", "note"]
    row = table[table.note.str.contains("of 1, 3 the largest")].iloc[0]
    assert (row["operation"], row["degree in"], row["degree out"]) == ("add", "1, 3", 3)
    assert table[table.module == "norm2"]["degree out"].iloc[-1] == "1, 3, -3"  # and its mean, and one over its size


def test_measuring_what_has_no_degree():
    with pytest.raises(ValueError, match=r"norm 0\.0 at scale 2\.0"):
        measure_degree(linear(), torch.zeros(4), [2])
    for function in (lambda m, x: x / 0, lambda m, x: x * math.nan, lambda m, x: x.exp() * 1e308):
        with pytest.raises(ValueError, match=r"the output has norm (inf|nan) at scale 3\.0"):
            measure_degree(Net(function), torch.ones(2), [3], input_degree=1)
    net, x = build(lambda: nn.Sequential(linear(), linear(bias=True)), SHAPE)
    measured = measure_degree(net, x, [1, 1e6], input_degree=1)
    assert measured.residual[0] > 0.01 and measured.residual[1] < 1e-9  # 3 and 1 meet; far out 3 is left


@pytest.mark.parametrize(
    ("function", "euler", "true"),
    [
        (lambda m, x: x @ m.w.detach(), 1, 2),
        (lambda m, x: m.f(x) / m.f(x).detach().norm(), 2, 0),
        (lambda m, x: F.layer_norm(m.f(x), (4,), eps=0.0).float() * m.f(x).detach(), 0, 2),
    ],
)
def test_a_derivative_that_is_not_of_the_outputs_is_warned_of(function, euler, true):
    """Euler's identity is asked of autograd, which believes ``detach``; the residual is that of rounding."""
    net, (x,) = build(lambda: Net(function, w=parameter(4, 4), f=linear()), SHAPE)
    with pytest.warns(RuntimeWarning, match=f"against {true:.4g} at scale 1, .* at scale 3") as caught:
        measured = measure_degree(net, x, [1, 3], input_degree=1)
    assert measured.euler[0] == pytest.approx(euler, abs=1e-6) and measured.residual[0] < 1e-6
    assert measured.log_ratio[0] == pytest.approx(true, abs=1e-6) and caught[0].filename == __file__


@given(st.floats(1e-12, 3.1), st.floats(1e-150, 1e150), st.integers(0, 100))
def test_one_minus_cosine_does_not_cancel(angle, size, seed):
    generator = torch.Generator().manual_seed(seed)
    frame = torch.linalg.qr(torch.randn(6, 2, generator=generator, dtype=torch.float64))[0]
    a, b = frame[:, 0] * size, (frame @ torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)) / size
    assert float(one_minus_cosine(a, b)) == pytest.approx(
        2 * math.sin(angle / 2) ** 2, rel=1e-3 if angle < 1e-9 else 1e-6
    )


def test_the_exponent_of_a_smooth_sum_is_local_and_no_reason_to_warn():
    """c + c³ grows as c to the power (1 + 3c²)/(1 + c²)."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured = measure_degree(Net(lambda m, x: x + x**3), torch.ones(1), [0.5, 2.0, 8.0], input_degree=1)
    want = [(1 + 3 * c * c) / (1 + c * c) for c in (0.5, 2.0, 8.0)]
    assert measured.euler.tolist() == pytest.approx(want) and measured.residual.max() < 1e-12
    steps = [math.log((2 + 8) / (0.5 + 0.125), 4), math.log((8 + 512) / (2 + 8), 4)]
    assert measured.log_ratio.tolist()[:2] == pytest.approx(steps)


def test_the_first_of_nested_outputs_counts():
    net, x = Net(lambda m, x: {"first": [(m.f(x), x)], "second": x}, f=linear()), torch.randn(3, 4)
    assert degree(net, x, 1) == 2 and measure_degree(net, x, [1, 2], input_degree=1).euler[0] == pytest.approx(2)
