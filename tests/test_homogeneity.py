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
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nbutils.experiments import packaged
from normgrowth.homogeneity import RULES, NotHomogeneous, degree, explain, measure_degree, one_minus_cosine


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


# --- Large activations, overflow and late limits ----------------------------------------------------------------------


def llama_with_a_massive_channel():
    """One channel of the residual stream has 5·10⁴ from the first layer on, as in trained models."""
    settings = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**settings, vocab_size=40, num_key_value_heads=2)).eval()
    sizes = []
    layer = model.model.layers[0]
    hook = layer.register_forward_hook(lambda module, args, output: sizes.append(float(output[..., 3].abs().max())))
    with torch.no_grad():
        for _ in range(3):
            model(TOKENS_OF_LLAMA)
            layer.mlp.down_proj.weight[3] *= 5e4 / sizes[-1]
    hook.remove()
    assert sizes[-1] == pytest.approx(5e4, rel=1e-3)
    return model


TOKENS_OF_LLAMA = torch.arange(1, 13)[None]


def test_massive_activations_do_not_overflow_in_norms_of_float32():
    model = llama_with_a_massive_channel()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        measured = measure_degree(model, TOKENS_OF_LLAMA, [100.0, 1000.0])
    assert measured.euler.to_numpy() == pytest.approx(2, abs=0.01)
    assert degree(model, TOKENS_OF_LLAMA, approximate=True, check=True) == 2
    assert model.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_inside_the_code_stay_in_float64(dtype):
    """The derivative too: torch's casts of tangents are casts."""
    net = Net(lambda m, x: m.f(x).to(dtype).square().mean(-1, dtype=dtype).sqrt().type_as(x), f=linear())
    measured = measure_degree(net, torch.ones(3, 4), [1.0, 1e30], input_degree=1)
    assert measured.euler.to_numpy() == pytest.approx(2, abs=1e-12) and measured.residual.max() < 1e-12
    assert measured.log_ratio[0] == pytest.approx(2, abs=1e-12)


NOT_FINITE = {  # name: (function, a change of the network, the input, scale, reason)
    "overflow": (
        lambda m, x: F.normalize(m.f(x)).square(), lambda net: None, torch.ones(2, 4), 1e80,
        r"since float64 overflows there: linalg_vector_norm, where an operand has magnitude \d",
    ),
    "hidden in a norm": (
        lambda m, x: x + m.f(x) * (m.f(x).pow(2).mean() + 1e-6).rsqrt(), lambda net: None, torch.ones(2, 4), 1e80,
        "is not that of the model, since float64 overflows there: pow, where an operand",
    ),
    "parameter": (
        lambda m, x: m.f(x), lambda net: net.f.weight.data[0].fill_(math.nan), torch.ones(2, 4), 1.0,
        "norm nan at scale 1.0: parameter 'f.weight' is not finite",
    ),
    "input": (lambda m, x: m.f(x), lambda net: None, torch.full((2, 4), math.inf), 1.0, "the input.* is not finite"),
    "at scale 1 already": (
        lambda m, x: m.f(x) * (x - x).log(), lambda net: None, torch.ones(2, 4), 10.0, "at scale 10.0, as at scale 1",
    ),
    "far out only": (
        lambda m, x: m.f(x) * (2e3 - x).sqrt(), lambda net: None, torch.ones(2, 4), 1e4,
        "but not at scale 1; the first operation that gives no number is sqrt",
    ),
}  # fmt: skip


class Normed(nn.Module):
    """A normalisation of 1024 numbers, plus a constant."""

    def __init__(self, normalise, constant):
        super().__init__()
        self.p = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64).repeat(512))
        self.normalise = normalise
        self.constant = constant

    def forward(self, x):
        return self.normalise(self.p * x) + self.constant


NORMALISATIONS = {  # of 1024 numbers: name: function
    "layer": lambda p: F.layer_norm(p, [1024]),
    "group": lambda p: F.group_norm(p.reshape(1, 1024), 1),
    "batch": lambda p: F.batch_norm(p[:, None], None, None, training=True),
    "instance": lambda p: F.instance_norm(p[None, None]),
    "root mean square": lambda p: F.rms_norm(p, [1024]),
    "variance and mean": lambda p: (p - p.mean()) * (torch.var_mean(p)[0] + 1e-5).rsqrt(),
    "deviation and mean": lambda p: (p - p.mean()) / torch.std_mean(p)[0],
    "unit": lambda p: F.normalize(p, dim=0),
    "weight norm": lambda p: torch._weight_norm(p[None], torch.ones(1, 1, dtype=torch.float64)),
}


@pytest.mark.parametrize("constant", [0.0, 1.0])
@pytest.mark.parametrize("name", NORMALISATIONS)
def test_a_sum_of_many_squares_overflows_before_one_does(name, constant):
    """The sum of n squares overflows at √(max/n): below it the degree is 0, from there on the overflow is named."""
    net = Normed(NORMALISATIONS[name], constant)
    x = torch.ones(1, dtype=torch.float64)
    named = []
    for c in (1e100, 1e150, 1e152, 3e152, 1e153, 1e154, 1e155):
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                measured = measure_degree(net, x, [1e10, c])
        except ValueError as error:
            assert f"at scale {c}" in str(error) and "since float64 overflows there" in str(error)
            named.append(c)
            continue
        assert abs(measured.log_ratio[0]) < 1e-6
        # torch's derivative of a norm has 1/σ³, which is 0 from σ = 1e108 on
        assert abs(measured.euler[1]) < 1e-6 or "not that of the outputs" in str(warned[0].message)
    assert not named or min(named) >= 1e152


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_has_its_true_reason(name):
    function, change, x, c, reason = NOT_FINITE[name]
    net = Net(function, f=linear(), n=norm_without_gain())
    change(net)
    with pytest.raises(ValueError, match=reason) as error:
        measure_degree(net, x, [c], input_degree=1)
    assert "\n" not in str(error.value)


def test_a_mask_of_infinities_and_a_sigmoid_by_hand_are_no_overflow():
    """exp(−x) is ∞ far out, and the sigmoid 0."""
    net = Net(lambda m, x, mask: (m.f(x) @ x.mT + mask).softmax(-1) @ x / (1 + (-m.f(x)).exp()), f=linear())
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1) > 0, -math.inf)
    assert measure_degree(net, (torch.randn(3, 4), mask), [1e3], input_degree=1).euler[0] == pytest.approx(1)


@pytest.mark.parametrize(("size", "power"), [(1e-3, 3), (1e-20, 3), (1e-60, 3)])
def test_a_limit_that_comes_late_is_no_false_alarm(size, power):
    """x + size · x³ has degree 3, from the scale size^−½ on."""
    net = Net(lambda m, x: x + size * x**power)
    assert degree(net, torch.ones(2, 4, dtype=torch.float64), 1, approximate=True, check=True) == power


def test_a_wrong_degree_is_refused_at_all_scales(monkeypatch):
    net = nn.Sequential(linear(), linear())
    monkeypatch.setitem(RULES, "mm", lambda a, x, y: a.degree_of(y))
    for approximate in (False, True):
        with pytest.raises(NotHomogeneous, match=r"by the rules its degree is 1, but .* grows by the power 3"):
            degree(net, torch.ones(3, 4), 1, approximate=approximate, check=True)


def test_an_exact_degree_is_checked_to_rounding():
    """A number that leaves torch unseen: the output is right to a thousandth from 10 to 100."""
    unseen = Net(lambda m, x: m.f(x) * (1 + 1e-3 * x.new([1 / x.sum()])), f=linear())
    with pytest.raises(NotHomogeneous, match="grows by the power"):
        degree(unseen, torch.ones(4), 1, check=True)


def test_a_check_that_overflows_says_so():
    net = Net(lambda m, x: x**70)
    assert degree(net, torch.ones(2), 1, approximate=True, check=True) == 70  # 10⁴ overflows, 10³ does not
    net = Net(lambda m, x: F.relu(x) ** 400)
    with pytest.raises(ValueError, match=r"degree is 400, which the outputs cannot show: .* overflows") as error:
        degree(net, torch.ones(2), 1, approximate=True, check=True)
    assert not isinstance(error.value, NotHomogeneous)


def test_a_steep_softmax_is_no_reason_to_warn():
    """Scores of 10⁵ turn within 10⁻⁵ of the scale: a difference over 10⁻³ is far from the derivative."""
    net = Net(lambda m, x: (1e5 * torch.stack([x.log(), 0 * x])).softmax(0)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured = measure_degree(net, torch.ones(1), [1.0], input_degree=1)
    assert measured.euler[0] == pytest.approx(5e4)


# --- Trained models ---------------------------------------------------------------------------------------------------

TRAINED = {"minilm": 1, "mpnet": 1, "smollm2": 2}
SENTENCE = "The norm of the parameters grows during training, and its direction settles."


def trained(name):
    try:
        folder = packaged.folder(name)
    except packaged.ModelMissing as error:
        pytest.skip(str(error))
    load = AutoModelForCausalLM if name == "smollm2" else AutoModel
    ids = AutoTokenizer.from_pretrained(folder)(SENTENCE)["input_ids"]
    return load.from_pretrained(folder).eval(), {"input_ids": torch.tensor([ids])}


@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_have_the_degree_that_the_rules_say(name):
    model, inputs = trained(name)
    assert degree(model, inputs, approximate=True, check=True) == TRAINED[name]
    with warnings.catch_warnings():  # of MPNet rounding swamps the derivative, and D by differences is right
        warnings.filterwarnings("error", message="the derivative is not that of the outputs")
        warnings.filterwarnings("ignore", message="D by differences")
        measured = measure_degree(model, inputs, [1000.0])
    assert measured.euler[0] == pytest.approx(TRAINED[name], abs=0.05)
