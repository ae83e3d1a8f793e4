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


def test_one_width_is_no_network():
    with pytest.raises(ValueError, match="n_out"):
        HomogeneousMLP((3,))


def test_functional_call_reaches_every_layer():
    net = HomogeneousMLP((3, 4, 4, 1), generator=generator(1, "cpu"))
    x = torch.randn(5, 3, generator=generator(0, "cpu"), dtype=torch.float64)
    theta = {name: value.detach() for name, value in net.named_parameters()}
    gradients = torch.func.grad(lambda at: functional_call(net, at, (x,)).sum())(theta)
    net(x).sum().backward()
    for name, value in net.named_parameters():
        assert torch.equal(gradients[name], value.grad) and value.grad.abs().max() > 0
