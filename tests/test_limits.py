"""Leading terms against scaling: where no tie is reported, a network far out must be at its limit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

from nbutils.experiments import limit_networks, limits
from nbutils.experiments.limits import LEADING, SMOOTH, STEP

NETWORKS = ("feedforward", "lstm", "transformer")
small = st.integers(-3, 3)


def sample(name, seed=0, count=40):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3) if name == "feedforward" else (count, 5, 3))
    return getattr(limit_networks, name), limit_networks.draw(name, rng), limit_networks.draw(name, rng), x


def scaled(theta, c):
    return {name: c * value for name, value in theta.items()}


def two_terms(theta, x, act):
    return x * theta["a"] * theta["b"] + x * theta["c"]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("drift", [0.0, 1e-9])
def test_far_out_a_network_is_at_its_limit(name, drift):
    net, theta, u, x = sample(name)
    end = limits.limit(net, theta, x)
    assert not end.undecided.any()
    far = net({name: 1e18 * (theta[name] + drift * u[name]) for name in theta}, x, SMOOTH)
    np.testing.assert_allclose(expit(far), limits.step(end.coef), atol=1e-9)
    np.testing.assert_allclose(far / 1e18**end.degree, end.coef, atol=1e-6)


@given(a=small, b=small, c=small, x=st.integers(1, 3))
def test_a_sum_keeps_its_highest_degree(a, b, c, x):
    end = limits.limit(two_terms, {"a": [a], "b": [b], "c": [c]}, [float(x)])
    assert end.degree == 2 and end.coef == a * b * x  # a zero of the direction may still grow: degree 2 stays
    assert end.undecided.item() == (a * b == 0)


@given(st.lists(small, min_size=2, max_size=6), st.lists(small, min_size=6, max_size=6))
def test_sigmoid_tanh_and_softmax_are_steps_and_argmax(w, x):
    w, x = np.array([w], dtype=float), np.array([x[: len(w)]], dtype=float)
    z = limits.leading_terms({"w": w})["w"] * x
    want = w * x
    tie = ((want == 0) & (x != 0)).any()
    for smooth, activation in ((STEP.sigmoid, LEADING.sigmoid), (STEP.tanh, LEADING.tanh)):
        out = activation(z)
        np.testing.assert_array_equal(out.coef, smooth(want))
        assert out.tied.all() == tie
    np.testing.assert_array_equal(LEADING.softmax(z).coef, STEP.softmax(want) if x.any() else STEP.softmax(0 * w))


def test_steps_that_cancel_are_an_exact_zero_and_parameters_are_not():
    w = limits.leading_terms({"w": [[1.0]]})["w"]
    up = LEADING.sigmoid(w)
    gone = up + (-1.0) * up
    assert gone.coef == 0 and gone.degree == -np.inf and gone.exact
    assert not LEADING.sigmoid(w * gone + w).tied.any()
    left = w + (-1.0) * w
    assert left.coef == 0 and left.degree == 1 and not left.exact
    assert LEADING.sigmoid(left).tied.all()


def test_layer_norm_of_a_constant_is_a_tie_and_lower_degrees_are_dropped():
    w = limits.leading_terms({"w": [[2.0, 2.0, 2.0]], "v": [[1.0, 3.0, 5.0]], "b": [[7.0, 0.0, 0.0]]})
    assert LEADING.layer_norm(w["w"]).tied.all()
    both = LEADING.layer_norm(w["v"] * w["v"] + w["b"])
    np.testing.assert_allclose(both.coef, limits.layer_norm(np.array([[1.0, 9.0, 25.0]])))
    assert both.degree.max() == 0 and not both.tied.any()


def test_step_networks_of_one_degree_are_the_limit_and_an_lstm_keeps_its_cells_tanh():
    net, theta, _, x = sample("feedforward")
    np.testing.assert_allclose(net(theta, x, STEP), limits.limit(net, theta, x).coef, rtol=1e-12)
    net, theta, _, x = sample("lstm")
    assert abs(net(theta, x, STEP) - limits.limit(net, theta, x).coef).max() > 0.1


def test_scores_that_do_not_grow_keep_their_softmax():
    """0 is exact, of degree −∞, and stays a score; one that falls with c counts as 0 beside it."""
    scores = np.array([[0.0, 1.0, -2.0]])
    constant = limits.leading_terms({"w": scores})["w"] * 0.0 + scores
    np.testing.assert_allclose(LEADING.softmax(constant).coef, SMOOTH.softmax(scores), rtol=1e-12)
    assert LEADING.softmax(constant).exact.all() and not LEADING.softmax(constant).tied.any()


def test_what_a_step_leaves_at_zero_is_an_exact_zero():
    """A weight of softmax where one score is largest, what ReLU cuts off; not what a tie or a parameter leaves."""
    weights = LEADING.softmax(limits.leading_terms({"w": [[3.0, 1.0, 2.0], [3.0, 3.0, 2.0]]})["w"])
    np.testing.assert_array_equal(weights.degree, [[0, -np.inf, -np.inf], [0, 0, 0]])
    cut = LEADING.relu(limits.leading_terms({"w": [-0.5, 0.0, 2.0]})["w"])
    np.testing.assert_array_equal(cut.degree, [-np.inf, 1, 1])


def test_layer_norm_of_inputs_is_exact_row_by_row():
    """The first row is an input, the second a parameter."""
    x = np.array([[[1.0, 3.0], [0.0, 0.0]]])
    w = limits.leading_terms({"w": [[[2.0, 5.0]]]})["w"] * np.array([[[0.0], [1.0]]])
    out = LEADING.layer_norm(w + x)
    np.testing.assert_array_equal(out.exact, [[[True, True], [False, False]]])
    np.testing.assert_array_equal(out.coef, [[[-1, 1], [-1, 1]]])


def test_a_tie_on_either_side_of_a_sum_or_product_is_kept():
    w = limits.leading_terms({"w": [[1.0]]})["w"]
    tied = LEADING.sigmoid(w + (-1.0) * w)
    for joined in (w + tied, tied + w, w * tied, tied * w):
        assert joined.tied.all()


def test_zero_times_a_parameter_is_zero_from_either_side():
    w, nothing = limits.leading_terms({"w": [[3.0]]})["w"], np.array([[0.0]])
    for product in (w * nothing, nothing * w):
        assert product.coef == 0 and product.degree == -np.inf and product.exact


def test_matrix_product_is_that_of_numpy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 2, 3)), rng.normal(size=(3, 5))
    w = limits.leading_terms({"b": b})["b"]
    np.testing.assert_allclose((a @ w).coef, a @ b)
    np.testing.assert_allclose((w.mT @ (w @ np.ones((5, 1)))).coef, b.T @ (b @ np.ones((5, 1))))
    assert ((w.mT @ w).degree == 2).all()


def test_the_lstm_is_torch_s():
    """Its four gates in torch's order: input, forget, cell, output."""
    _, theta, _, x = sample("lstm")
    theirs = torch.nn.LSTM(3, 8, batch_first=True, dtype=torch.float64)
    parts = {"weight_ih_l0": "U", "weight_hh_l0": "W", "bias_ih_l0": "b"}
    with torch.no_grad():
        theirs.bias_hh_l0.zero_()
        for name, kind in parts.items():
            stacked = np.concatenate([theta[f"{kind}{gate}"] for gate in "ifgo"])
            getattr(theirs, name).copy_(torch.from_numpy(stacked))
        last = theirs(torch.from_numpy(x))[0][:, -1].numpy()
    expected = (last @ theta["W"].T + theta["b"])[:, 0]
    np.testing.assert_allclose(limit_networks.lstm(theta, x, SMOOTH), expected, rtol=1e-10)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_what_is_constant_but_for_rounding_is_a_tie_at_every_size(size):
    """A part of 10⁻¹⁴ of the entries is rounding, of 10⁻⁹ is not."""
    for part, tie in ((1e-14, True), (1e-9, False)):
        z = limits.leading_terms({"w": size * np.array([[1.0, 1.0 + part, 1.0]])})["w"]
        assert bool(LEADING.layer_norm(z).tied.all()) is tie, part
        scores = limits.leading_terms({"w": size * np.array([[1.0, 1.0 + part, 0.5]])})["w"]
        assert bool(LEADING.softmax(scores).tied.all()) is tie, part


def test_the_transformer_is_torch_s():
    """Post-norm, one head, torch's own layer norm and softmax; scores are not divided."""
    generator = np.random.default_rng(5)
    drawn, x = limit_networks.draw("transformer", generator), generator.normal(size=(2, 5, 3))
    theta = {name: torch.from_numpy(value) for name, value in drawn.items()}

    def norm(z, number):
        return torch.nn.functional.layer_norm(z, z.shape[-1:], theta[f"gain{number}"], theta[f"shift{number}"], eps=0)

    e = torch.from_numpy(x) @ theta["E"].T
    q, k, v = (torch.nn.functional.linear(e, theta[name]) for name in "QKV")
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
    y = norm(e + torch.nn.functional.linear(heads, theta["O"]), 1)
    inner = torch.nn.functional.linear(y, theta["W1"], theta["b1"]).relu()
    z = norm(y + torch.nn.functional.linear(inner, theta["W2"], theta["b2"]), 2)
    known = torch.nn.functional.linear(z[:, 0], theta["W"], theta["b"])[:, 0]
    np.testing.assert_allclose(limit_networks.transformer(drawn, x, SMOOTH), known, rtol=1e-9)
