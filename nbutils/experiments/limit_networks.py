"""Networks written once, for numbers and for leading terms: a feed-forward network, an LSTM and two transformers.

Each returns the logits of a batch, ``(batch,)``; the sigmoid that would follow is left to the caller.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbutils.experiments.limits import LEADING, Activations, Array, Theta


def feedforward(theta: Theta, x: Any, act: Activations) -> Any:
    """Two hidden layers of sigmoids and a readout, all with biases; ``x`` is ``(batch, n)``.

    Used in ``settled-direction``.

    >>> from nbutils.experiments.limits import STEP
    >>> theta = draw("feedforward", np.random.default_rng(0))
    >>> ones = {name: np.ones_like(value) for name, value in theta.items()}
    >>> feedforward(ones, np.ones((1, 3)), STEP)  # eight units at 1, and the bias
    array([9.])
    """
    h = act.sigmoid(x @ theta["W1"].mT + theta["b1"])
    h = act.sigmoid(h @ theta["W2"].mT + theta["b2"])
    return (h @ theta["W3"].mT + theta["b3"])[:, 0]


def lstm(theta: Theta, x: Any, act: Activations) -> Any:
    """One LSTM layer over ``x``, ``(batch, T, n)``, and a readout of its last state.

    Used in ``settled-direction``.

    >>> from nbutils.experiments.limits import limit
    >>> generator = np.random.default_rng(0)
    >>> theta = draw("lstm", generator)
    >>> x = generator.normal(size=(2, 5, 3))
    >>> limit(lstm, theta, x).degree  # states are bounded: only the readout grows
    array([1., 1.])
    """

    def preactivation(gate: str, h: Any, x_t: Any) -> Any:
        return h @ theta[f"W{gate}"].mT + x_t @ theta[f"U{gate}"].mT + theta[f"b{gate}"]

    units = theta["Wi"].coef.shape[0] if act is LEADING else len(theta["Wi"])
    h = np.zeros((x.shape[0], units))
    cell = h
    for t in range(x.shape[1]):
        i = act.sigmoid(preactivation("i", h, x[:, t]))
        f = act.sigmoid(preactivation("f", h, x[:, t]))
        o = act.sigmoid(preactivation("o", h, x[:, t]))
        g = act.tanh(preactivation("g", h, x[:, t]))
        cell = f * cell + i * g
        h = o * act.tanh(cell)
    return (h @ theta["W"].mT + theta["b"])[:, 0]


def transformer(theta: Theta, x: Any, act: Activations) -> Any:
    """One post-norm layer (one head, biases, residuals) on ``x``, ``(batch, T, n)``, and a readout of the first token.

    Used in ``settled-direction``.

    >>> from nbutils.experiments.limits import limit
    >>> generator = np.random.default_rng(0)
    >>> theta = draw("transformer", generator)
    >>> x = generator.normal(size=(2, 5, 3))
    >>> limit(transformer, theta, x).degree  # gain and readout, after a norm of degree 0
    array([2., 2.])
    """
    z = _layer(theta, x @ theta["E"].mT, act)
    return (z[:, 0] @ theta["W"].mT + theta["b"])[:, 0]


def two_layers(theta: Theta, x: Any, act: Activations) -> Any:
    """Two layers as that of ``transformer``, one on the other, and a readout of the first token.

    Used in ``settled-direction``.

    >>> from nbutils.experiments.limits import limit
    >>> generator = np.random.default_rng(0)
    >>> theta = draw("two_layers", generator)
    >>> x = generator.normal(size=(100, 5, 3))
    >>> bool(limit(two_layers, theta, x).tied.any())  # tokens that took the same from layer 1 tie as keys in layer 2
    True
    """
    first = {name: theta[f"{name} 1"] for name in _LAYER}
    second = {name: theta[f"{name} 2"] for name in _LAYER}
    z = _layer(second, _layer(first, x @ theta["E"].mT, act), act)
    return (z[:, 0] @ theta["W"].mT + theta["b"])[:, 0]


def _layer(theta: Theta, e: Any, act: Activations) -> Any:
    """Attention of one head, then a feed-forward network, each with a residual and a norm behind: ``(batch, T, 8)``."""
    q = e @ theta["Q"].mT
    k = e @ theta["K"].mT
    v = e @ theta["V"].mT
    attention = act.softmax(q @ k.mT) @ v @ theta["O"].mT
    y = act.layer_norm(e + attention) * theta["gain1"] + theta["shift1"]
    inner = act.relu(y @ theta["W1"].mT + theta["b1"])
    z = y + inner @ theta["W2"].mT + theta["b2"]
    return act.layer_norm(z) * theta["gain2"] + theta["shift2"]


# Shapes of the parameters, for 3 inputs and 8 units a layer, in the order in which they are drawn.
_READOUT: dict[str, tuple[int, ...]] = {"W": (1, 8), "b": (1,)}
_FEEDFORWARD: dict[str, tuple[int, ...]] = {
    "W1": (8, 3),
    "b1": (8,),
    "W2": (8, 8),
    "b2": (8,),
    "W3": (1, 8),
    "b3": (1,),
}
_LSTM: dict[str, tuple[int, ...]] = {}
for _gate in ("i", "f", "o", "g"):
    _LSTM |= {f"W{_gate}": (8, 8), f"U{_gate}": (8, 3), f"b{_gate}": (8,)}
_EMBEDDING: dict[str, tuple[int, ...]] = {"E": (8, 3)}
_LAYER: dict[str, tuple[int, ...]] = {
    "Q": (8, 8),
    "K": (8, 8),
    "V": (8, 8),
    "O": (8, 8),
    "W1": (8, 8),
    "b1": (8,),
    "W2": (8, 8),
    "b2": (8,),
    "gain1": (8,),
    "shift1": (8,),
    "gain2": (8,),
    "shift2": (8,),
}
_TWO_LAYERS = {f"{name} {layer}": shape for layer in (1, 2) for name, shape in _LAYER.items()}
SHAPES = {
    "feedforward": _FEEDFORWARD,
    "lstm": _LSTM | _READOUT,
    "transformer": _EMBEDDING | _LAYER | _READOUT,
    "two_layers": _EMBEDDING | _TWO_LAYERS | _READOUT,
}


def draw(network: str, generator: np.random.Generator) -> dict[str, Array]:
    """Standard normal parameters of ``feedforward``, ``lstm``, ``transformer`` or ``two_layers``, by name.

    Used in ``settled-direction``.
    """
    return {name: generator.normal(size=shape) for name, shape in SHAPES[network].items()}
