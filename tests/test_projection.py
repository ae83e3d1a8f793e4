"""θ·∇L along a ray against reverse mode, and equilibria against closed forms."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import lambertw
from torch import nn

from nbutils.devices import generator
from nbutils.experiments import projection
from nbutils.experiments.figure1 import SUBLAYERS, figure1, released_transformer
from nbutils.experiments.projection import along_ray, by_autograd, equilibrium


def draw(name, *, seed=0, tokens=8, dtype=torch.float64, **switches):
    rng = generator(seed, "cpu")
    net = figure1(name, generator=rng, **switches)
    return net.to(dtype), torch.randn(4, tokens, 10, generator=rng, dtype=torch.float64).to(dtype), rng


class Fixed(nn.Module):
    """Logits θ · table: homogeneous of degree 1 in its one parameter, input ignored."""

    def __init__(self, table):
        super().__init__()
        self.theta = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("table", torch.tensor(table, dtype=torch.float64))

    def forward(self, x):
        return self.theta * self.table + 0 * x


def fixed(table, accuracies, scales=(0.5, 1, 2, 4), **options):
    net = Fixed(table)
    options = {"scale_inputs": False, "generator": generator(0, "cpu")} | options
    return along_ray(net, torch.zeros_like(net.table), scales, accuracies, **options)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rtol", "scale_inputs"),
    [(torch.float64, 1e-12, False), (torch.float64, 1e-12, True), (torch.float32, 1e-5, True)],
)
@pytest.mark.parametrize("name", SUBLAYERS)
def test_forward_mode_is_reverse_mode(name, dtype, rtol, released, scale_inputs):
    net, x, rng = draw(name, released=released, dtype=dtype)
    scales, accuracies = np.array([1.0, 2.0, 7.0]), np.array([0.0, 0.6, 0.8, 1.0])
    ray = along_ray(net, x, scales, accuracies, scale_inputs=scale_inputs, generator=rng)
    for j, c in enumerate(scales):
        plain = [by_autograd(net, x, c, ray.labels(i, j), scale_inputs=scale_inputs)[0] for i in range(4)]
        # relative to the samples' own size: their signs differ, and the mean may be 0
        size = np.abs(ray.right_part[j]).mean() + np.abs(ray.wrong_part[j]).mean()
        assert np.abs(ray.projection[:, j] - plain).max() <= rtol * size


def test_accuracy_is_what_was_asked_for_and_wrong_samples_are_nested():
    net, x, rng = draw("attention")
    ray = along_ray(net, x, [1.0, 3.0], [0, 0.25, 0.5, 0.9, 1], generator=rng)
    sets = []
    for i, a in enumerate([0, 0.25, 0.5, 0.9, 1]):
        for j in range(2):
            right = ray.labels(i, j) == ray.predicted[j]
            assert right.sum() == 32 - round((1 - a) * 32)
        sets.append(set(np.flatnonzero(~right)))
    assert all(later <= earlier for earlier, later in itertools.pairwise(sets)) and not sets[-1]


def test_mirror_labels_are_the_released_ones():
    net, x, rng = draw("feed-forward", released=True)
    ray = along_ray(net, x, [1.0], [0.0], mirror=True, generator=rng)
    assert (ray.labels(0, 0) == 9 - ray.predicted[0]).all()


def test_many_scales_are_those_one_by_one_and_the_module_is_left_alone():
    net, x, _ = draw("attention")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    scales = np.linspace(1, 5, 2 * projection.SCALES_PER_PASS + 1)
    ray = along_ray(net, x, scales, [0.8], generator=generator(3, "cpu"))
    np.testing.assert_allclose([ray.projection_at(c)[0, 0] for c in scales], ray.projection[0], rtol=1e-11)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.floats(0.01, 50))
def test_right_is_negative_within_its_bound(seed, classes, u):
    """−W((C − 1)/e) ≤ right ≤ 0 and wrong ≥ margin − W((C − 1)/e), for logits of degree 1."""
    table = torch.randn(20, classes, generator=generator(seed, "cpu"), dtype=torch.float64)
    ray = fixed(table.tolist(), [0.5], scales=[u])
    bound = lambertw((classes - 1) / math.e).real
    assert (ray.right_part <= 0).all() and (ray.right_part >= -bound - 1e-12).all()
    margin = u * (table.amax(-1) - table.gather(-1, torch.as_tensor(ray.wrong_labels[0])[:, None])[:, 0]).numpy()
    assert (ray.wrong_part[0] >= margin - bound - 1e-12).all()


def test_wrong_can_be_negative_smallest_example():
    """Logits (3, 2, 0), second class: negative below u = ln 2 / 3, where E_p f = 2."""
    signs = []
    root = math.log(2) / 3
    for seed in range(20):
        ray = fixed([[3.0, 2.0, 0.0]], [0.0], scales=[0.9 * root, 1.1 * root], generator=generator(seed, "cpu"))
        if ray.wrong_labels[0, 0] == 1:
            signs.append(np.sign(ray.wrong_part[:, 0]))
            assert equilibrium(ray)[0] == pytest.approx(root, rel=1e-8)
    assert signs and all((s == [-1, 1]).all() for s in signs)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.2, 3), st.integers(1, 31))
def test_equilibrium_of_two_classes_at_a_common_margin_is_the_logit(f, wrong):
    """ρ* = logit(a)/|f|: the law of right pulls, here with logits (f, 0) and 64 samples."""
    a = 1 - wrong / 64
    ray = fixed([[f, 0.0]] * 64, [a])
    assert equilibrium(ray)[0] == pytest.approx(math.log(a / (1 - a)) / f, rel=1e-7)


def test_equilibrium_is_the_lowest_loss_on_the_ray_and_strictly_grows():
    table = torch.randn(50, 6, generator=generator(1, "cpu"), dtype=torch.float64)
    accuracies = np.arange(30, 51) / 50  # one more right sample each
    ray = fixed(table.tolist(), accuracies)
    found = equilibrium(ray)
    assert (np.diff(found) > 0).all() and np.isinf(found[-1])

    def loss(u, i):
        return float(nn.functional.cross_entropy(u * table, torch.as_tensor(ray.labels(i, 0))))

    for i in (0, 10, 19):
        assert loss(found[i], i) < min(loss(0.999 * found[i], i), loss(1.001 * found[i], i))


def test_equilibrium_does_not_depend_on_the_grid():
    net, x, _ = draw("feed-forward, no biases or residual")
    net = net.body
    found = [
        equilibrium(along_ray(net, x, grid, [0.75, 0.9], generator=generator(2, "cpu")))
        for grid in ([1.0, 50.0], np.linspace(1, 50, 50), [0.1, 0.2], [40, 50])
    ]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-7)
    # a norm: multiply θ so that its norm is the one found, and θ·∇L is 0 there
    ray = along_ray(net, x, [1.0], [0.75, 0.9], generator=generator(2, "cpu"))
    for i, norm in enumerate(found[0]):
        left, right = (ray.projection_at(near * norm / ray.norm[0])[i, 0] for near in (1 - 1e-6, 1 + 1e-6))
        assert left < 0 < right


def test_equilibrium_ends():
    net, x, rng = draw("feed-forward, no biases or residual")
    net = net.body
    ray = along_ray(net, x, [1.0, 2.0], [0.0, 0.999, 1.0], generator=rng)
    low, rounded, full = equilibrium(ray)
    assert np.isinf([rounded, full]).all() and low >= 0  # 32 samples: 99.9 % has none wrong
    # below chance, 1/C, θ·∇L is positive from the start
    assert equilibrium(fixed([[1.0, 0.0, 0.0, 0.0]] * 100, [0.2]))[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accuracies": [0.5, 1.2]}, r"1\.2\]: a fraction of right samples lies in"),
        ({"accuracies": [-0.1]}, "a fraction of right samples lies in"),
        ({"accuracies": [math.nan]}, "a fraction of right samples lies in"),
        ({"table": [[1.0, 2.0, 3.0]], "mirror": True}, "3 classes: the mirror label"),
        ({"table": [[math.inf, 2.0]]}, "not finite at scales up to 4"),
    ],
)
def test_what_has_no_meaning_is_named(options, message):
    options = {"table": [[1.0, 0.0]], "accuracies": [0.5]} | options
    with pytest.raises(ValueError, match=message):
        fixed(**options)


def test_released_stacks_are_torch_s_layers():
    """Its layer norm and attention, not divided by √d; maps uniform in ±1/√n of n values that come in."""
    net = released_transformer(3, 40, generator=generator(0, "cpu"))
    attention, x = net[0], torch.randn(7, 40, generator=generator(1, "cpu"), dtype=torch.float64)
    q, k, v = (
        x @ getattr(attention, f"{n}_weight").T + getattr(attention, f"{n}_bias") for n in ("query", "key", "value")
    )
    expected = nn.functional.layer_norm(x + (q @ k.T).softmax(-1) @ v, (40,), eps=1e-5)
    torch.testing.assert_close(attention(x), expected)
    assert len(net) == 6
    for name, value in net.named_parameters():
        if ".norm." in name:
            assert (value == float("gain" in name)).all(), name
            continue
        bound = (400 if "output" in name else 40) ** -0.5
        assert value.abs().max() <= bound, name
        if value.ndim == 2:
            assert value.std() == pytest.approx(bound / 3**0.5, rel=0.05) and value.abs().max() > 0.99 * bound
            assert abs(float(value.mean())) < 0.05 * bound


def test_the_norm_on_the_ray_is_that_of_the_parameters_alone():
    """The affine layer that belongs to the loss is a buffer: it neither scales nor counts."""
    net, x, rng = draw("feed-forward")
    ray = along_ray(net, x, [1.0, 3.0], [1.0], generator=rng)
    rho = sum(float((p**2).sum()) for p in net.parameters()) ** 0.5
    assert ray.norm == pytest.approx(np.array([1.0, 3.0]) * rho, rel=1e-12)
