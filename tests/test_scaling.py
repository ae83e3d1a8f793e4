"""Every parameter times c within a block, and all as it was afterwards."""

import pytest
import torch
from torch import nn

from normgrowth.saturation import scaled


class Tied(nn.Module):
    """Two names for one parameter, a buffer, whole numbers, a parameter without numbers, and a submodule's own mode."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.norm = nn.BatchNorm1d(3)
        self.norm.eval()


def same_bits(a, b):
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))


def test_scaled_once_and_back_bit_for_bit():
    model = Tied()
    with torch.no_grad():  # values that neither scaling by 0.1 and 10 nor dividing brings back
        model.first.weight.copy_(torch.tensor([[1e-45, -0.0, 0.1], [1 / 3, 3e38, 7e-39], [1.1, 2.2, 3.3]]))
    before = [p.detach().clone() for p in model.parameters()]
    kept = [p.data_ptr() for p in model.parameters()]
    buffers = {name: x.clone() for name, x in model.named_buffers()}
    with scaled(model, 0.1) as inside:
        assert inside is model and model.second.weight is model.first.weight
        for parameter, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.detach(), 0.1 * old, rtol=0, atol=0)
        assert all(torch.equal(x, buffers[name]) for name, x in model.named_buffers())
    assert same_bits(model.parameters(), before)
    assert kept == [p.data_ptr() for p in model.parameters()]


def test_storage_tied_by_hand_is_scaled_once():
    model = Tied()
    model.second.weight = nn.Parameter(torch.empty(3, 3))
    model.second.weight.data = model.first.weight.data  # two parameters, one memory
    old = model.first.weight.detach().clone()
    with scaled(model, 3):
        assert torch.equal(model.second.weight, 3 * old) and torch.equal(model.first.weight, 3 * old)
    assert model.second.weight.data_ptr() == model.first.weight.data_ptr()


def test_back_after_an_exception_and_after_writing():
    model = Tied()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyError), scaled(model, 1e3):
        with torch.no_grad():
            model.first.weight.fill_(torch.nan)
        model.double()
        raise KeyError
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert same_bits(model.parameters(), before)


def test_another_precision_reaches_buffers_which_are_not_scaled():
    model = Tied()

    def kinds():
        return {x.dtype for x in [*model.parameters(), *model.buffers()] if x.is_floating_point()}

    with scaled(model, 2, dtype=torch.float64):
        assert kinds() == {torch.float64} and model.norm.num_batches_tracked.dtype == torch.int64
        model.first(torch.ones(1, 3, dtype=torch.float64))
        assert torch.equal(model.norm.running_var, torch.ones(3, dtype=torch.float64))
        assert torch.equal(model.norm.weight, 2 * torch.ones(3, dtype=torch.float64))
    assert kinds() == {torch.float32}


@pytest.mark.parametrize(
    ("value", "dtype", "c", "error", "message"),
    [
        (-3e5, torch.float16, 1, OverflowError, r"float16: its largest magnitude 3e\+05 times c = 1 .* 6.55e\+04\. "),
        (2.0, None, 1e39, OverflowError, "'weight' overflows torch.float32.*smaller c, or dtype=torch.float64"),
        (2.0, None, torch.inf, OverflowError, "times c = inf is beyond"),
        (torch.nan, None, 2, ValueError, "'weight' has values that are not finite before"),
        (-torch.inf, None, 2, ValueError, "'weight' has values that are not finite before"),
    ],
)
def test_what_cannot_be_scaled_is_named(value, dtype, c, error, message):
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, value]]))
    before = [p.detach().clone() for p in layer.parameters()]
    with pytest.raises(error, match=message), scaled(layer, c, dtype=dtype):
        raise AssertionError("never entered")
    assert same_bits(layer.parameters(), before)


def test_a_norm_that_would_take_a_large_vector_for_nothing_is_refused():
    """x/√(mean x²) of 1.5·10¹⁹ is 0 in float32, finite and wrong: no layer behind it would show that."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.RMSNorm(3)).requires_grad_(False)
    nn.init.eye_(model[0].weight)
    x = torch.tensor([[1.0, 1.0, -1.0], [1.5e8, 1.5e8, -1.5e8]])  # of which no square overflows, but their sum
    with scaled(model, 1e11, dtype=torch.float64):
        assert model(x.double()).norm() == pytest.approx(1e11 * 6**0.5)
    refused = pytest.raises(OverflowError, match=r"c = 1e\+11 1 reads .* 1.5e\+19: its square.*dtype=torch.float64")
    with refused, scaled(model, 1e11):
        assert not model(x)[1].any()
    assert not model[1]._forward_pre_hooks and model[1].weight.eq(1).all()


def test_a_quantised_model_is_refused():
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"'weight' is torch.int8"), scaled(layer, 2):
        pass
