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


def test_dropout_is_off_in_a_mode_unless_asked_for_and_its_seed_is_zero():
    layer, ones = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)), torch.ones(4, 2)
    layer[1].eval()
    with scaling.mode(layer):
        assert not layer.training and not layer[0].training and not torch.is_grad_enabled()
    drawn = []
    for options in ({}, {"seed": 0}, {"seed": 1}):
        state = torch.get_rng_state()
        with scaling.mode(layer, dropout=True, **options):
            assert layer.training and layer[1].training and not torch.is_grad_enabled()
            drawn.append(layer[0](ones))
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.is_grad_enabled() and layer.training and layer[0].training and not layer[1].training
    with pytest.raises(KeyError), scaling.mode(layer):
        raise KeyError
    assert layer.training and not layer[1].training


def test_parameters_without_numbers_and_whole_numbers_in_buffers_are_left():
    model = Tied()
    model.empty = nn.Parameter(torch.zeros(0, 3))
    with scaling.scaled(model, 2, dtype=torch.float64):
        assert model.norm.num_batches_tracked.dtype == torch.int64 and model.empty.shape == (0, 3)
    with scaling.scaled(model, 0.0), torch.no_grad():
        assert all((p == 0).all() for p in model.parameters())
    assert (model.norm.weight == 1).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_enough(bad):
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight[1, 2] = bad
    with pytest.raises(ValueError, match="'weight' has values that are not finite before"), scaling.scaled(layer, 2):
        pass


def test_an_overflow_tells_the_largest_magnitude_and_the_largest_number():
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[-3e5, 1.0], [2.0, 7.0]]))
    said = r"'weight' overflows torch.float16: its largest magnitude 3e\+05 times c = 1 is beyond 6.55e\+04"
    with pytest.raises(OverflowError, match=said), scaling.scaled(layer, 1, dtype=torch.float16):
        pass
    assert layer.weight.dtype == torch.float32
