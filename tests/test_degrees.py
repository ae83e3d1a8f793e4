"""What a forward pass cannot see is not guessed: what is refused, near misses that are kept, whole models."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from degrees import Net, in_place, linear, norm_without_gain, parameter
from test_families import DECODER, FAMILIES, SENTENCES, VISION, build
from torch import nn

from normgrowth.homogeneity import RULES, NotHomogeneous, degree, explain, measure_degree, scalable


def norm_by_hand(m, x, eps=1e-6):
    """The norm of Llama and T5."""
    h = m.f(x)
    return m.e[0] * (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def normalized_weight(m, x):
    m.w.data = F.normalize(m.w.data, eps=0.0)
    return x @ m.w


def norm_of_all_parameters(m, x):
    return m.f(x) / sum((weights**2).sum() for weights in m.f.parameters()).sqrt()


def filled_buffer(m, x):
    m.buffer.copy_(m.f(x)[0])
    return m.buffer * x


def chosen_experts(m, x):
    weights = m.f(x).softmax(-1).topk(2)[0]
    return weights / weights.sum(-1, True) @ x[:2]


def masked_by_the_lowest_number(m, x):
    return (m.n(x) @ x.mT + torch.full((3, 3), LOWEST).triu(1)).softmax(-1)


class Sign(torch.autograd.Function):
    """A straight-through estimator: the forward pass counts."""

    @staticmethod
    def forward(context, x):
        return x.sign()


NOT_REGISTERED = nn.Parameter(torch.randn(4, 4))
LOWEST = torch.finfo(torch.float32).min


def net_of(function):
    """m.f adds 1 to the degree, m.n has 0, m.buffer is a buffer."""
    torch.manual_seed(1)
    parts = {"f": linear(), "g": linear(), "n": norm_without_gain(), "w": parameter(4, 4), "e": parameter(5, 4)}
    parts["mha"] = nn.MultiheadAttention(4, 2, bias=False)
    parts["weight_norm"] = nn.utils.parametrizations.weight_norm(linear())
    parts["spectral_norm"] = nn.utils.parametrizations.spectral_norm(linear())
    return Net(function, {"buffer": torch.zeros(4)}, **parts).eval()


# name: (function, degree at input_degree = 1, whether only asymptotically)
NEAR_MISSES = {
    "root of zeros": (lambda m, x: (0 * x) ** 0.5 + x, 1, False),
    "power 0 of a leading term": (lambda m, x: F.gelu(m.f(x)) ** 0, 0, True),
    "log of a softmax at degree 0": (lambda m, x: m.n(x).softmax(-1).log(), 0, False),
    "divided by a GELU at degree 0": (lambda m, x: x / F.gelu(m.n(x)), 1, False),
    "dropout of nothing": (lambda m, x: F.dropout(x, 0.0), 1, False),
    "shape and type of another": (lambda m, x: m.f(x).view_as(x).expand_as(x).reshape_as(x).to(x), 2, False),
    "attention": (lambda m, x: m.mha(x, x, x)[0], 3, True),
    "weights of attention": (lambda m, x: m.mha(x, x, x)[1], 0, True),  # each row sums to 1
    "chosen experts": (chosen_experts, 1, True),
    "in place, same degree": (in_place, 2, False),
    "product in place": (lambda m, x: m.f(x).mul_(x), 3, False),
    "one of two": (lambda m, x: torch.where(x > 0, m.f(x), x), 2, True),
    "over the square of a matrix": (lambda m, x: x / (1e-6 + (m.w @ m.w).sum()), -1, True),
    "over a spectrum": (lambda m, x: x / (1e-9 + torch.fft.rfft(m.f(x).norm(dim=-1)).abs()[1]), -1, True),
    "over 1 less a norm": (lambda m, x: x / (1 - m.f(x).norm()), -1, True),
    "linear attention that is open": (lambda m, x: x / (m.f(x).abs().relu() + 1e-6), -1, True),
    "instance norm": (lambda m, x: m.f(F.instance_norm(x[None])[0]), 1, True),
    "norm by hand": (norm_by_hand, 1, True),
    "guarded norm": (lambda m, x: m.f(x) / x.norm(dim=-1, keepdim=True).clamp(min=1e-12), 1, True),
    "a power of the size": (lambda m, x: m.f(x) * m.f(x).square().mean(-1, True) ** -0.25, 1, False),
    "lowest number as mask": (masked_by_the_lowest_number, 0, True),
    "weight norm": (lambda m, x: m.weight_norm(x), 2, False),  # g · v/‖v‖
    "spectral norm": (lambda m, x: m.spectral_norm(x), 1, False),
    "over the norm of all": (norm_of_all_parameters, 1, False),
    "from the dictionary": (lambda m, x: x @ m.state_dict()["f.weight"].T, 2, False),
    "data of a parameter": (normalized_weight, 1, False),
    "branch that scales": (lambda m, x: m.f(x) if m.f(x).sum() > 0 else -m.f(x), 2, False),
    "number of places": (lambda m, x: m.f(x) * len((x > 0).nonzero()), 2, False),
    "function of its own": (lambda m, x: Sign.apply(m.f(x)) * x, 1, False),
    "buffer that is filled": (filled_buffer, 3, False),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_have_the_degree_that_is_measured(name):
    function, expected, asymptotic = NEAR_MISSES[name]
    net, x = net_of(function), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    before = net.w.clone()
    assert degree(net, x, 1, approximate=asymptotic) == degree(net, x, 1, approximate=True) == expected
    assert torch.equal(net.w, before)
    with scalable(net, x, 1) as output, torch.no_grad():
        small, large = (float(output(c).double().norm()) for c in ((1e5, 1e6) if asymptotic else (1.0, 10.0)))
    assert math.log10(large / small) == pytest.approx(float(expected), abs=1e-3 if asymptotic else 1e-6)


def error_caught(m, x):
    try:
        return m.f(x) + x
    except ValueError:
        return x


def filled_by_numpy(m, x):
    out = torch.zeros(3)
    out.numpy()[:] = 1
    return out.sum() * x


def part_of_a_constant(m, x):
    mask = torch.ones(4, 4) - torch.eye(4)
    mask.diagonal().copy_(m.f(x)[0])
    return mask


VANISHES, IN_PLACE = "the leading term of the divisor is 0 somewhere", "in place"
# name: (function, the reason, whether asymptotically too); a reason for each way to be refused
REFUSED = {
    "bias behind a layer": (lambda m, x: m.f(x) + m.e[0], "sum needs equal degrees.* 2, 1", False),
    "threshold": (lambda m, x: (x > 1) * m.f(x), "gt: parts side by side", False),
    "running mean": (lambda m, x: F.batch_norm(x, torch.ones(4), torch.ones(4)), "sum needs equal degrees", False),
    "maximum": (lambda m, x: torch.maximum(m.f(x), m.g(m.f(x))), "equal degrees", True),
    "one of two": (lambda m, x: torch.where(x > 0, m.f(x), x), "where: parts side by side", False),
    "lowest number": (lambda m, x: m.f(x).masked_fill(x > 0, LOWEST) * 2, "before a softmax", True),
    "power of a value": (lambda m, x: 2**x, "needs degree 0", True),
    "log of sigmoid": (lambda m, x: torch.log(torch.sigmoid(m.f(x))), "exact, not asymptotic", True),
    "linear attention": (lambda m, x: x / (m.f(x).relu() + 1e-6), VANISHES, True),
    "least of a vector": (lambda m, x: 1 / (m.f(x).norm(p=-torch.inf) + 1e-4), "needs degree 0", True),
    "size above a value": (lambda m, x: x.norm().clamp(min=-m.f(x).norm()), "side by side", True),
    "GELU of a falling value": (lambda m, x: F.gelu(1 / x), "needs degree 0", True),
    "product in a row in place": (lambda m, x: m.f(x)[0].mul_(x[0]), IN_PLACE, True),
    "part of a constant": (part_of_a_constant, IN_PLACE, True),
    "parameter in place": (lambda m, x: x @ m.w.mul_(2), "changes a parameter", True),
    "number": (lambda m, x: m.f(x) * m.f(x).sum().item(), "Python reads a value", True),
    "branch far out": (lambda m, x: x if (m.f(x) + x).sum() > 0 else x * x, "equal|reads", True),
    "error that is caught": (error_caught, "equal degrees", False),
    "NumPy": (lambda m, x: torch.from_numpy(np.tanh(m.f(x).detach().numpy())), "out of torch", True),
    "by keyword": (lambda m, x: torch.tensor(data=[m.f(x).min(), x.max()]), "out of torch", True),
    "unseen": (filled_by_numpy, "no operation was seen", True),
    "not registered": (lambda m, x: x @ NOT_REGISTERED.T, "a constant has a gradient.*must be registered", True),
    "sum of whole numbers": (lambda m, x: m.f(x).sum(dtype=torch.int64), "rounds to whole numbers", True),
    "bits": (lambda m, x: m.f(x).view(torch.int32), "reads the bits", True),
    "dropout": (lambda m, x: F.dropout(x), "is random, in eval mode too", True),
    "rounded quotient": (lambda m, x: torch.div(x, m.f(x), rounding_mode="floor"), "know these arguments", True),
    "no rule": (lambda m, x: torch.erfinv(x), r"erfinv: there is no rule.*RULES\['erfinv'\]", True),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_degree_or_cannot_be_seen_is_refused_with_its_reason(name):
    function, reason, asymptotic = REFUSED[name]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with pytest.raises(NotHomogeneous, match=f"(?s)({reason}).*measure_degree"):
        degree(net_of(function), x, 1, approximate=asymptotic)
    with pytest.raises(NotHomogeneous):
        degree(net_of(function), x, 1)
    assert explain(net_of(function), x, 1).note.str.contains("✗").sum() == 1


def test_inputs_and_parameters_of_all_types():
    """Complex numbers scale; whole ones do not; an object that may hold tensors is refused."""
    z, whole = torch.randn(3, 4, dtype=torch.complex64), nn.Parameter(torch.ones(4, dtype=torch.int8), False)
    net = net_of(lambda m, x: (x @ m.w.to(x.dtype)).abs())
    assert degree(net, z, 1, check=True) == 2
    assert measure_degree(net, z, [1, 2], input_degree=1).log_ratio[0] == pytest.approx(2)
    net = net_of(lambda m, x: x @ m.w * m.whole.int())
    net.whole = whole
    assert degree(net, torch.ones(4), check=True) == 1
    with pytest.raises(ValueError, match="an input is of type object"):
        degree(net, {"x": object()}, 1)
    guarded = net_of(lambda m, x: torch.clamp(m.f(x), -torch.finfo(x.dtype).max, torch.finfo(x.dtype).max))
    assert degree(guarded, torch.ones(4), 1, approximate=True) == 2


def test_a_rule_can_be_added(monkeypatch):
    net, x = Net(lambda m, x: F.silu(x)), torch.rand(3)
    monkeypatch.delitem(RULES, "silu")
    with pytest.raises(NotHomogeneous, match="no rule"):
        degree(net, x, 1, approximate=True)
    assert degree(net, x) == 0, "what does not change with scale needs no rule"
    monkeypatch.setitem(RULES, "silu", lambda algebra, x: algebra.asymptotically_linear(x))
    assert degree(net, x, 1, approximate=True) == 1


class Recorder(nn.Module):
    """Sets an attribute, counts in a buffer and fills a cache, as models do."""

    def __init__(self):
        super().__init__()
        self.f = linear()
        self.last = None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        self.last = self.f(x)
        self.cache[:] = self.last[0].detach()
        x.mul_(2)
        return self.last.relu()


def test_the_module_and_its_inputs_are_what_they_were():
    net, x = Recorder().train(), torch.randn(3, 4)
    net.last = net.f(x)  # with its graph
    before = copy.deepcopy(net.state_dict())
    attributes = dict(vars(net))
    inputs = x.clone()
    fused = torch.backends.mha.get_fastpath_enabled()
    for function in (degree, explain, lambda *inputs: degree(*inputs, check=True)):
        assert function(net, x, 1) is not None
    with pytest.raises(NotHomogeneous):
        degree(nn.Sequential(net, linear(bias=True)), x, 1)
    measure_degree(net, x, [1, 2])
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert vars(net) == attributes and net.training and torch.equal(x, inputs)
    assert all(p.grad is None and p.requires_grad and p.dtype == torch.float32 for p in net.parameters())
    assert torch.backends.mha.get_fastpath_enabled() is fused


def norm_of(m, x, gain):
    return m.g(F.layer_norm(m.f(x), (4,), eps=0.0) * gain)


# name: (a network with a parameter e or w of zeros, its parameter)
ZEROS = {
    "gain 1 + w": (lambda m, x: norm_of(m, x, 1 + m.e[0]), "e"),
    "gain 1 + w, at a part": (lambda m, x: norm_of(m, x, (1 + m.e)[0]), "e"),
    "residual branch": (lambda m, x: x + m.f(x) @ m.w, "w"),
    "LoRA": (lambda m, x: m.f(x) + m.g(x) @ m.n(x).mT @ m.n(x) @ m.w, "w"),
    "gate": (lambda m, x: x + m.e[0, 0] * m.g(m.f(x)), "e"),
    "gate at the bias": (lambda m, x: F.linear(m.f(x), m.w, m.g.weight[0]), "w"),
    "shift and scale": (lambda m, x: (1 + (x @ m.w).chunk(2, -1)[0]) * m.n(x)[:, :2], "w"),
    "tanh of a gate": (lambda m, x: x + m.g(m.f(x)) * m.e[0], "e"),
    "an output of zeros": (lambda m, x: m.f(x) @ m.w, "w"),
    "softplus": (lambda m, x: F.softplus(x @ m.w), "w"),
    "convolution": (lambda m, x: F.conv1d(m.f(x)[None], m.w[:, :3, None], m.g.weight[0]), "w"),
    "in place": (lambda m, x: (m.f(x) @ m.w).add_(x), "w"),
}


@pytest.mark.parametrize("name", ZEROS)
def test_a_leading_term_of_zeros_is_refused_with_its_parameter(name):
    """A fresh gain of 1 + w, gate, adapter or projection of zeros: the degree is that of what is left."""
    function, parameter_name = ZEROS[name]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    net = net_of(function)
    k = degree(net, x, 1, approximate=True, check=True)
    getattr(net, parameter_name).data.zero_()
    with pytest.raises(NotHomogeneous, match=f"is 0 here, since parameter '{parameter_name}' is 0.* train it") as error:
        degree(net, x, 1, approximate=True)
    assert "\n" not in str(error.value)
    try:
        measured = measure_degree(net, x, [1e3, 1e4], input_degree=1).log_ratio[0]
    except ValueError:  # the output is 0
        return
    assert measured != pytest.approx(float(k), abs=0.01)


# A part of a leading term is 0: name: (function of a gain 1 + w whose last two channels are constants, degree)
PARTS_OF_ZEROS = {
    "all channels": (lambda m, gain, x: m.n(x) * gain, 1),
    "mixed": (lambda m, gain, x: m.g(m.n(x) * gain)[:, 3:], 2),
    "one that is": (lambda m, gain, x: (m.n(x) * gain)[:, :1], 1),
    "one that is not": (lambda m, gain, x: (m.n(x) * gain)[:, 3:], None),
    "one that is not, copied": (lambda m, gain, x: (m.n(x) * gain).relu().flip(-1)[:, :2].contiguous(), None),
    "multiplied by zeros": (lambda m, gain, x: m.n(x) * gain @ torch.diag(torch.tensor([0.0, 0, 1, 2])), None),
}


@pytest.mark.parametrize("name", PARTS_OF_ZEROS)
def test_a_part_of_a_leading_term_may_be_zero(name):
    function, expected = PARTS_OF_ZEROS[name]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    net = net_of(lambda m, x: function(m, 1 + m.e[0], x))
    net.e.data[:, 2:] = 0
    if expected is None:
        with pytest.raises(NotHomogeneous, match="the leading part of the output is 0 here"):
            degree(net, x, 1, approximate=True)
        return
    assert degree(net, x, 1, approximate=True, check=True) == expected


@pytest.mark.parametrize("function", [F.gelu, F.silu, F.softplus, F.elu, F.mish, lambda x: x * x.sigmoid()])
def test_a_limit_of_zero_is_refused(function):
    """Far out these functions are 0 or constants where no argument is positive."""
    net = net_of(lambda m, x: function(-m.f(x).abs()))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with pytest.raises(NotHomogeneous, match="is 0 here, and what is left has another degree"):
        degree(net, x, 1, approximate=True)


@pytest.mark.parametrize("approximate", [False, True])
def test_biases_of_zeros_and_terms_beside_the_leading_one_stay(approximate):
    net = nn.Sequential(linear(bias=True), nn.ReLU(), linear())
    nn.init.zeros_(net[0].bias)
    assert degree(net, torch.randn(3, 4), approximate=approximate, check=True) == 2
    beside = net_of(lambda m, x: m.f(x) + m.e[0] * m.n(x) if approximate else m.f(m.n(x)) + m.e[0] * m.n(x))
    beside.e.data.zero_()
    assert degree(beside, torch.randn(3, 4), 1, approximate=approximate, check=True) == 1 + approximate


# --- Models of transformers ---------------------------------------------------------------------------------------

EXACT_END = {  # at the ε of the first norm
    "llama": "add in module 'model.layers.0.input_layernorm'",
    "gpt2": "native_layer_norm in module 'transformer.h.0.ln_1'",
}
ENDS = {  # family: the asymptotic degree of the first output, or where it ends
    "llama": 2, "mistral": 2, "mixtral": 2, "qwen2": 2, "qwen2-moe": 2, "gpt-neo": 2, "bloom": 2, "gpt2": 2, "bert": 1,
    "t5": 2, "bart": 2, "vit": 1, "gemma2": 0, "mamba": "exp in module 'backbone.layers.0.mixer': needs degree 0",
    "gpt-oss": "lower terms decide, of which the degree is not known", "deepseek": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", ENDS)
def test_models_have_the_degree_that_is_measured_or_end_where_it_is_said(family):
    model, ids = build(FAMILIES[family][0]), torch.tensor(SENTENCES[:1])
    inputs = {"pixel_values": torch.randn(1, 3, 8, 8)} if family in VISION else {"input_ids": ids}
    inputs |= {"decoder_input_ids": ids} if family in DECODER else {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape)) if "norm" in name else None
    with pytest.raises(NotHomogeneous, match=EXACT_END.get(family, "it meets degree")):
        degree(model, inputs)
    if isinstance(ENDS[family], str):
        with pytest.raises(NotHomogeneous, match=ENDS[family]):
            degree(model, inputs, approximate=True)
        return
    k = degree(model, inputs, approximate=True)
    with warnings.catch_warnings(action="ignore"):
        measured = measure_degree(model, inputs, [1e3, 1.5e3]).log_ratio[0]
    assert k == ENDS[family] and measured == pytest.approx(k, abs=0.01)
