"""The networks of the book."""

import pytest
import torch
from torch.func import functional_call

from nbutils.device import generator
from nbutils.homogeneity import degree
from nbutils.models import HomogeneousMLP


@pytest.mark.parametrize("k", range(1, 7))
def test_mlp_is_homogeneous_of_its_depth(k):
    net = HomogeneousMLP((5, *[7] * (k - 1), 1), generator=generator(k, "cpu"))
    x = torch.randn(11, 5, generator=generator(0, "cpu"), dtype=torch.float64)
    doubled = functional_call(net, {name: 2 * value for name, value in net.named_parameters()}, (x,))
    assert net.degree == k
    assert torch.equal(doubled, 2**k * net(x))  # powers of two scale without rounding
    assert degree(net, k_in=0) == k


def test_mlp_draws_are_its_generators():
    first, again = (HomogeneousMLP((3, 4, 1), generator=generator(9, "cpu"))(torch.ones(1, 3).double()) for _ in "ab")
    assert torch.equal(first, again)


def test_gradients_reach_every_layer_through_functional_call():
    net, x = HomogeneousMLP((3, 4, 4, 1), generator=generator(0, "cpu")), torch.ones(2, 3).double()
    state = {name: value.detach().requires_grad_() for name, value in net.named_parameters()}
    swapped = torch.autograd.grad(functional_call(net, state, (x,)).sum(), list(state.values()))
    plain = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    assert len(swapped) == 3
    for one, other in zip(swapped, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_one_width_is_no_network():
    with pytest.raises(ValueError, match="n_out"):
        HomogeneousMLP((3,))
