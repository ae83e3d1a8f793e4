"""Every parameter times c within a block, and all as it was afterwards."""

import pytest
import torch
from torch import nn

from nbutils import saturation
from nbutils.saturation import scaling


class Tied(nn.Module):
    """Two names for one parameter, a buffer, and a submodule that has its own mode."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
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
    with scaling.scaled(model, 0.1) as inside:
        assert inside is model and model.second.weight is model.first.weight
        for parameter, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.detach(), 0.1 * old, rtol=0, atol=0)
        for name, x in model.named_buffers():
            assert torch.equal(x, buffers[name])
    assert same_bits(model.parameters(), before)
    assert kept == [p.data_ptr() for p in model.parameters()]


def test_storage_tied_by_hand_is_scaled_once():
    model = Tied()
    model.second.weight = nn.Parameter(torch.empty(3, 3))
    model.second.weight.data = model.first.weight.data  # two parameters, one memory
    old = model.first.weight.detach().clone()
    with scaling.scaled(model, 3):
        assert torch.equal(model.second.weight, 3 * old) and torch.equal(model.first.weight, 3 * old)
    assert model.second.weight.data_ptr() == model.first.weight.data_ptr()


def test_back_after_an_exception_and_after_writing():
    model = Tied()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyError), scaling.scaled(model, 1e3):
        with torch.no_grad():
            model.first.weight.fill_(torch.nan)
        model.double()
        raise KeyError
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert same_bits(model.parameters(), before)


def test_nested_scales_multiply():
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    with scaling.scaled(layer, 4), scaling.scaled(layer, 0.5):
        assert torch.equal(layer.weight, 2 * before)
    assert torch.equal(layer.weight, before)


def test_dtype_reaches_buffers_and_comes_back():
    model = Tied()
    with scaling.scaled(model, 2, dtype=torch.float64):
        assert {x.dtype for x in [*model.parameters(), *model.buffers()] if x.is_floating_point()} == {torch.float64}
        model.first(torch.ones(1, 3, dtype=torch.float64))
    assert {x.dtype for x in [*model.parameters(), *model.buffers()] if x.is_floating_point()} == {torch.float32}


def test_buffers_are_not_scaled_in_another_dtype_either():
    model = Tied()
    with scaling.scaled(model, 2, dtype=torch.float64):
        assert torch.equal(model.norm.running_var, torch.ones(3, dtype=torch.float64))
        assert torch.equal(model.norm.weight, 2 * torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("dtype", "c", "error", "said"),
    [
        (
            torch.float16,
            1e6,
            OverflowError,
            r"'bias' overflows torch.float16: its largest magnitude 2 times c = 1e\+06",
        ),
        (torch.float32, 1e39, OverflowError, "torch.float32.*dtype=torch.float64"),
        (torch.float32, torch.inf, ValueError, "finite; got inf"),
        (torch.float32, torch.nan, ValueError, "finite; got nan"),
    ],
)
def test_overflow_is_named(dtype, c, error, said):
    layer = nn.Linear(2, 2).to(dtype)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(2.0)
    with pytest.raises(error, match=said), scaling.scaled(layer, c):
        raise AssertionError("never entered")
    assert (layer.bias == 2).all() and (layer.weight == 0).all()


def test_bad_parameters_are_named():
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.bias[1] = torch.nan
    with pytest.raises(ValueError, match="'bias' has values that are not finite before"), scaling.scaled(layer, 2):
        pass
    layer.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"'weight' is torch.int8"), scaling.scaled(layer, 2):
        pass


def test_saturation_has_it_too():
    assert saturation.scaled is scaling.scaled and saturation.mode is scaling.mode
