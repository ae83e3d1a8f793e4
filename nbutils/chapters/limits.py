"""The limit of a network under scaling, computed without scaling: arithmetic with leading terms a·c^k.

A network is written once, as a function ``(theta, x, act)`` of its parameters, its input and a set of activations. With
``SMOOTH`` it is the network, with ``STEP`` every activation is replaced by a step, and with ``LEADING`` (parameters by
``leading``) it gives the leading term at scale c → ∞, with every tie on the way reported. All in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from scipy.special import softmax as smooth_softmax

Array = NDArray[Any]
Theta = Mapping[str, Any]
Network = Callable[[Theta, Any, "Activations"], Any]

ROUNDING = 1e-12  # a sum smaller than this part of its terms is 0


@dataclass
class Leading:
    """An array whose entries behave like ``coef * c ** degree`` as c → ∞, axis 0 (if any) being a batch.

    Attributes:
        degree: −inf for what is exactly 0, or exponentially small.
        exact: the coefficient does not change with a small change of the parameters' direction, up to an exponentially
            small amount: inputs, steps, and their sums and products. A parameter's coefficient is not exact.
        tied: ``(batch,)`` or (), an activation on the way stood at a tie.
        order, gap: the slowest saturating activation on the way errs like exp(−gap · c ** order); inf if none.
    """

    coef: Array
    degree: Array
    exact: Array
    tied: Array
    order: Array
    gap: Array

    __array_ufunc__ = None  # numpy arrays leave the operators to us

    def __mul__(self, other: Any) -> Leading:
        other = _as_leading(other)
        zero = (self.degree == -np.inf) | (other.degree == -np.inf)
        degree = np.where(zero, -np.inf, self.degree + other.degree)
        exact = (self.exact & other.exact) | zero
        return Leading(np.where(zero, 0.0, self.coef * other.coef), degree, exact, *_merge(self, other))

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Leading:
        other = _as_leading(other)
        terms = [np.stack(np.broadcast_arrays(*pair), -1) for pair in zip(self._term(), other._term(), strict=True)]
        return Leading(*_sum(*terms), *_merge(self, other))

    __radd__ = __add__

    def __matmul__(self, other: Any) -> Leading:
        """Matrix product over the last axis of the left and the last but one of the right side."""
        left, right = self, _as_leading(other)
        wide = [Leading(*(part[..., None] for part in left._term()), *left._history())]
        wide += [Leading(*(part[..., None, :, :] for part in right._term()), *right._history())]
        product = wide[0] * wide[1]  # (..., rows, inner, columns)
        return Leading(*_sum(*(np.moveaxis(part, -2, -1) for part in product._term())), *product._history())

    def __rmatmul__(self, other: Any) -> Leading:
        return _as_leading(other) @ self

    def __getitem__(self, index: Any) -> Leading:
        """Indices must keep the batch axis."""
        return Leading(*(part[index] for part in self._term()), *self._history())

    @property
    def mT(self) -> Leading:
        return Leading(*(part.swapaxes(-1, -2) for part in self._term()), *self._history())

    def _term(self) -> tuple[Array, Array, Array]:
        return self.coef, self.degree, self.exact

    def _history(self) -> tuple[Array, Array, Array]:
        return self.tied, self.order, self.gap


def leading(theta: Mapping[str, ArrayLike]) -> dict[str, Leading]:
    """Parameters c·θ̂ as leading terms of degree 1. A zero of θ̂ is a parameter that grows more slowly, not an exact 0.

    >>> w = leading({"w": [[2.0], [-2.0]]})["w"]
    >>> (np.array([[3.0, 1.0]]) @ w).coef, (np.array([[1.0, 1.0]]) @ w).coef
    (array([[4.]]), array([[0.]]))
    """
    return {name: _new(np.asarray(value, dtype=np.float64), 1.0, False) for name, value in theta.items()}


def _new(coef: Array, degree: float | Array, exact: bool | Array, history: tuple[Array, ...] = ()) -> Leading:
    shape = np.shape(coef)
    degree, exact = np.broadcast_to(degree, shape), np.broadcast_to(exact, shape)
    degree = np.where(exact & (coef == 0), -np.inf, degree)
    return Leading(coef, degree, exact, *(history or (np.array(False), np.array(np.inf), np.array(np.inf))))


def _as_leading(value: Any) -> Leading:
    """A plain array is a constant: degree 0, exact."""
    return value if isinstance(value, Leading) else _new(np.asarray(value, dtype=np.float64), 0.0, True)


def _sum(coef: Array, degree: Array, exact: Array) -> tuple[Array, Array, Array]:
    """Sum over the last axis: the highest degree wins. Exact terms that cancel leave an exact 0."""
    top = degree.max(-1, initial=-np.inf)
    here = (degree == top[..., None]) & (top[..., None] > -np.inf)
    total, size = (np.where(here, part, 0.0).sum(-1) for part in (coef, abs(coef)))
    total = np.where(abs(total) <= ROUNDING * size, 0.0, total)
    fixed = (exact | ~here).all(-1)
    return total, np.where((total == 0) & fixed, -np.inf, top), fixed


def _merge(*values: Leading) -> tuple[Array, Array, Array]:
    """History of several operands: tied if one is; the slowest activation is that of the lowest order, then gap."""
    tied, order, gap = values[0]._history()
    for value in values[1:]:
        tied = tied | value.tied
        order, gap = _slowest((order, gap), (value.order, value.gap))
    return tied, order, gap


def _slowest(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    first = (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] <= b[1]))
    return np.where(first, a[0], b[0]), np.where(first, a[1], b[1])


def _site(z: Leading, tie: Array, degree: Array, gap: Array, saturates: Array) -> tuple[Array, Array, Array]:
    """History after an activation; the last four arrays have the batch on axis 0 and are reduced over the rest."""
    others = tuple(range(1, np.ndim(tie)))
    tied = z.tied | tie.any(others)
    degree, gap = np.where(saturates, degree, np.inf), np.where(saturates, gap, np.inf)
    order = degree.min(others, initial=np.inf)
    low = degree == order.reshape(order.shape + (1,) * len(others))
    gap = np.where(low, gap, np.inf).min(others, initial=np.inf)
    return (tied, *_slowest((z.order, z.gap), (order, gap)))


def _saturating(z: Leading, smooth: Callable[[Array], Array], step: Callable[[Array], Array], gap: float) -> Leading:
    grows = z.degree > 0
    sure = grows & (z.coef != 0)
    value = np.where(grows, step(z.coef), smooth(np.where(grows, 0.0, np.where(z.degree == 0, z.coef, 0.0))))
    history = _site(z, grows & (z.coef == 0), z.degree, gap * abs(z.coef), sure)
    return _new(value, 0.0, np.where(grows, sure, z.exact), history)


def _leading_softmax(z: Leading) -> Leading:
    """Over the last axis. Scores of lower degree than the highest count as 0 of that degree."""
    top = z.degree.max(-1, keepdims=True, initial=-np.inf)
    grows = top > 0
    score = np.where(z.degree == top, z.coef, 0.0)
    best = score.max(-1, keepdims=True)
    winner = best - score <= ROUNDING * abs(score).max(-1, keepdims=True)
    hard = winner / winner.sum(-1, keepdims=True)
    rest = np.where(winner, -np.inf, score).max(-1, keepdims=True)
    lost = np.isneginf(rest)  # every key ties: no gap
    several = winner.sum(-1, keepdims=True) > 1
    soft = smooth_softmax(np.where(z.degree == 0, z.coef, 0.0), axis=-1)
    gap = np.where(lost, np.inf, best - np.where(lost, 0.0, rest))
    history = _site(z, grows & several, top, gap, grows & ~lost)
    exact = np.where(grows, ~several, z.exact.all(-1, keepdims=True))
    return _new(np.where(grows, hard, soft), 0.0, np.broadcast_to(exact, z.coef.shape), history)


def _leading_relu(z: Leading) -> Leading:
    off = z.coef < 0
    return Leading(*_new(np.maximum(z.coef, 0.0), z.degree, z.exact | off)._term(), *z._history())


def _leading_layer_norm(z: Leading) -> Leading:
    """Over the last axis, ε = 0. An input that is constant to leading order counts as a tie."""
    top = z.degree.max(-1, keepdims=True)
    at = np.where(z.degree == top, z.coef, 0.0)
    centred = at - at.mean(-1, keepdims=True)
    size = np.sqrt(np.square(centred).mean(-1, keepdims=True))
    flat = size <= ROUNDING * abs(at).max(-1, keepdims=True)
    unit = np.where(flat, 0.0, centred / np.where(flat, 1.0, size))
    none = np.zeros_like(flat)
    history = _site(z, flat, none + 0.0, none + 0.0, none)
    exact = (z.exact | (z.degree < top)).all(-1, keepdims=True) & ~flat
    return _new(unit, 0.0, np.broadcast_to(exact, z.coef.shape), history)


# ---- the three sets of activations ----


class Activations(NamedTuple):
    """What stands for each activation of a network."""

    sigmoid: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    softmax: Callable[[Any], Any]
    relu: Callable[[Any], Any]
    layer_norm: Callable[[Any], Any]


def step(z: Array) -> Array:
    """The limit of σ(cz): 0, ½ or 1.

    >>> step(np.array([-3.0, 0.0, 0.1]))
    array([0. , 0.5, 1. ])
    """
    return np.heaviside(z, 0.5)


def argmax(z: Array) -> Array:
    """The limit of softmax(cz) over the last axis: uniform over the largest entries.

    >>> argmax(np.array([1.0, 3.0, 3.0]))
    array([0. , 0.5, 0.5])
    """
    winner = z == z.max(-1, keepdims=True)
    return winner / winner.sum(-1, keepdims=True)


def layer_norm(z: Array) -> Array:
    """Standardise the last axis, ε = 0, safe at any scale.

    >>> layer_norm(np.array([1e300, 3e300]))
    array([-1., 1.])
    """
    centred = z - z.mean(-1, keepdims=True)
    centred = centred / abs(centred).max(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True))


def _relu(z: Array) -> Array:
    return np.maximum(z, 0.0)


SMOOTH = Activations(expit, np.tanh, lambda z: smooth_softmax(z, axis=-1), _relu, layer_norm)
STEP = Activations(step, np.sign, argmax, _relu, layer_norm)
LEADING = Activations(
    lambda z: _saturating(z, expit, step, 1.0),
    lambda z: _saturating(z, np.tanh, np.sign, 2.0),
    _leading_softmax,
    _leading_relu,
    _leading_layer_norm,
)


class Limit(NamedTuple):
    """What a network tends to under scaling, arrays ``(batch, …)``."""

    coef: Array  # of the output's leading term, coef · c ** degree
    degree: Array
    tied: Array  # (batch,): a tie on the way, so the limit may depend on the path
    order: Array  # (batch,): errors on the way are exp(−gap · c ** order) at slowest
    gap: Array

    @property
    def undecided(self) -> Array:
        """Whether there is a tie on the way or at a sigmoid on top. Shape ``(batch,)`` for an output of that shape."""
        return self.tied | ((self.coef == 0) & (self.degree > 0))


def limit(network: Network, theta: Mapping[str, ArrayLike], x: ArrayLike) -> Limit:
    """The leading term of ``network(c·theta, x)`` as c → ∞, for a batch of inputs ``x``, ``(batch, …)``.

    >>> def neuron(theta, x, act):
    ...     return act.sigmoid(x @ theta["w"])[:, 0]
    >>> found = limit(neuron, {"w": [[1.0], [-1.0]]}, [[2.0, 1.0], [1.0, 1.0]])  # w·x = 1, and a tie at 0
    >>> found.coef, found.tied
    (array([1. , 0.5]), array([False, True]))
    """
    out = network(leading(theta), np.asarray(x, dtype=np.float64), LEADING)
    batch = (len(out.coef),)
    return Limit(out.coef, out.degree, *(np.broadcast_to(part, batch) for part in out._history()))


def scaled(theta: Mapping[str, ArrayLike], c: float) -> dict[str, Array]:
    """Every parameter times ``c``.

    >>> scaled({"w": [1.0, -2.0]}, 10)
    {'w': array([ 10., -20.])}
    """
    return {name: c * np.asarray(value, dtype=np.float64) for name, value in theta.items()}


def along(theta: Mapping[str, ArrayLike], drift: Mapping[str, ArrayLike], size: float) -> dict[str, Array]:
    """The direction θ + size · drift: one that converges to θ as ``size`` falls to 0.

    >>> along({"w": [1.0, 0.0]}, {"w": [0.0, 2.0]}, 0.1)
    {'w': array([1. , 0.2])}
    """
    return {name: np.asarray(value) + size * np.asarray(drift[name]) for name, value in theta.items()}
