"""Networks written once for numbers and for leading terms; each returns a logit (batch,), for a sigmoid to follow."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbutils.experiments.limits import LEADING, Activations, Array, Theta


def feedforward(theta: Theta, x: Any, act: Activations) -> Any:
    """Two hidden layers of sigmoids and a readout, all with biases; ``x`` ``(batch, n)``.

    >>> from nbutils.experiments.limits import STEP
    >>> theta = {name: np.ones_like(value) for name, value in draw("feedforward", np.random.default_rng(0)).items()}
    >>> feedforward(theta, np.ones((1, 3)), STEP)  # eight units at 1, and the bias
    array([9.])
    """
    for i in (1, 2):
        x = act.sigmoid(x @ theta[f"W{i}"].mT + theta[f"b{i}"])
    return (x @ theta["W3"].mT + theta["b3"])[:, 0]


def lstm(theta: Theta, x: Any, act: Activations) -> Any:
    """One LSTM layer over ``x`` ``(batch, T, n)`` and a readout of its last state.

    >>> from nbutils.experiments.limits import limit
    >>> generator = np.random.default_rng(0)
    >>> theta, x = draw("lstm", generator), generator.normal(size=(2, 5, 3))
    >>> limit(lstm, theta, x).degree  # states are bounded: only the readout grows
    array([1., 1.])
    """
    gates = {"i": act.sigmoid, "f": act.sigmoid, "o": act.sigmoid, "g": act.tanh}
    h = cell = np.zeros((x.shape[0], theta["Wi"].coef.shape[0] if act is LEADING else len(theta["Wi"])))
    for t in range(x.shape[1]):
        i, f, o, g = (
            squash(h @ theta[f"W{n}"].mT + x[:, t] @ theta[f"U{n}"].mT + theta[f"b{n}"]) for n, squash in gates.items()
        )
        cell = f * cell + i * g
        h = o * act.tanh(cell)
    return (h @ theta["W"].mT + theta["b"])[:, 0]


def transformer(theta: Theta, x: Any, act: Activations) -> Any:
    """One post-norm layer (one head, biases, residuals) on ``x`` ``(batch, T, n)`` and a readout of the first token.

    >>> from nbutils.experiments.limits import limit
    >>> generator = np.random.default_rng(0)
    >>> theta, x = draw("transformer", generator), generator.normal(size=(2, 5, 3))
    >>> limit(transformer, theta, x).degree  # gain and readout, after a norm of degree 0
    array([2., 2.])
    """
    e = x @ theta["E"].mT
    q, k, v = (e @ theta[name].mT for name in ("Q", "K", "V"))
    y = act.layer_norm(e + act.softmax(q @ k.mT) @ v @ theta["O"].mT) * theta["gain1"] + theta["shift1"]
    z = y + act.relu(y @ theta["W1"].mT + theta["b1"]) @ theta["W2"].mT + theta["b2"]
    z = act.layer_norm(z) * theta["gain2"] + theta["shift2"]
    return (z[:, 0] @ theta["W"].mT + theta["b"])[:, 0]


_GATE = {"W": (8, 8), "U": (8, 3), "b": (8,)}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {  # of 3 inputs and 8 units a layer; in the order of the draws
    "feedforward": {"W1": (8, 3), "b1": (8,), "W2": (8, 8), "b2": (8,), "W3": (1, 8), "b3": (1,)},
    "lstm": {f"{part}{gate}": shape for gate in "ifog" for part, shape in _GATE.items()} | {"W": (1, 8), "b": (1,)},
    "transformer": {"E": (8, 3), "Q": (8, 8), "K": (8, 8), "V": (8, 8), "O": (8, 8)}
    | {"W1": (8, 8), "b1": (8,), "W2": (8, 8), "b2": (8,)}
    | {"gain1": (8,), "shift1": (8,), "gain2": (8,), "shift2": (8,), "W": (1, 8), "b": (1,)},
}


def draw(network: str, generator: np.random.Generator) -> dict[str, Array]:
    """Normal random parameters of ``feedforward``, ``lstm`` or ``transformer``."""
    return {name: generator.normal(size=shape) for name, shape in SHAPES[network].items()}
