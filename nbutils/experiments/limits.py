"""The limit of a network under scaling, computed without scaling: arithmetic with leading terms a·c^k.

A network is written once, as a function ``(theta, x, act)`` of its parameters, its input and a set of activations. With
``SMOOTH`` it is the network, with ``STEP`` every activation is replaced by a step, and with ``LEADING`` (parameters by
``leading``) it gives the leading term at scale c → ∞, with every tie on the way reported. All in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from scipy.special import softmax as smooth_softmax

Array = NDArray[Any]
Theta = Mapping[str, Any]
Network = Callable[[Theta, Any, "Activations"], Any]

ROUNDING = 1e-12  # a sum smaller than this part of its terms is 0
NO = np.array(False)  # of an array with no activation on its way


@dataclass
class Leading:
    """An array whose entries behave like ``coef * c ** degree`` as c → ∞, axis 0 (if any) being a batch.

    Attributes:
        degree: −inf for what is exactly 0, or exponentially small.
        exact: the coefficient does not change with a small change of the parameters' direction, up to an exponentially
            small amount: inputs, steps, and their sums and products. A parameter's coefficient is not exact.
        tied: ``(batch,)`` or (), an activation on the way stood at a tie.
    """

    coef: Array
    degree: Array
    exact: Array
    tied: Array

    __array_ufunc__ = None  # numpy arrays leave the operators to us

    @property
    def undecided(self) -> Array:
        """Whether there is a tie on the way or at a sigmoid on top. Shape ``(batch,)`` for an output of that shape."""
        return self.tied | ((self.coef == 0) & (self.degree > 0))

    def __mul__(self, other: Any) -> Leading:
        other = _as_leading(other)
        degree = self.degree + other.degree
        exact = (self.exact & other.exact) | (degree == -np.inf)  # an exact 0 makes all of it one
        return Leading(self.coef * other.coef, degree, exact, self.tied | other.tied)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Leading:
        other = _as_leading(other)
        pairs = (self.coef, other.coef), (self.degree, other.degree), (self.exact, other.exact)
        coef, degree, exact = (np.stack(np.broadcast_arrays(*pair), -1) for pair in pairs)
        return Leading(coef, degree, exact, self.tied | other.tied)._sum()

    __radd__ = __add__

    def __matmul__(self, other: Any) -> Leading:
        """Matrix product over the last axis of the left and the last but one of the right side."""
        product = self[..., None] * _as_leading(other)[..., None, :, :]  # (..., rows, inner, columns)
        return product._each(lambda part: np.moveaxis(part, -2, -1))._sum()

    def __rmatmul__(self, other: Any) -> Leading:
        return _as_leading(other) @ self

    def __getitem__(self, index: Any) -> Leading:
        """Indices must keep the batch axis."""
        return self._each(lambda part: part[index])

    @property
    def mT(self) -> Leading:
        return self._each(lambda part: part.swapaxes(-1, -2))

    def _each(self, change: Callable[[Array], Array]) -> Leading:
        """The same entries in another shape."""
        return Leading(change(self.coef), change(self.degree), change(self.exact), self.tied)

    def _sum(self) -> Leading:
        """Sum over the last axis: the highest degree wins. Exact terms that cancel leave an exact 0."""
        top = self.degree.max(-1, initial=-np.inf)
        here = (self.degree == top[..., None]) & (top[..., None] > -np.inf)
        total, size = (np.where(here, part, 0.0).sum(-1) for part in (self.coef, abs(self.coef)))
        total = np.where(abs(total) <= ROUNDING * size, 0.0, total)
        return _new(total, top, (self.exact | ~here).all(-1), self.tied)


def leading(theta: Mapping[str, ArrayLike]) -> dict[str, Leading]:
    """Parameters c·θ̂ as leading terms of degree 1. A zero of θ̂ is a parameter that grows more slowly, not an exact 0.

    >>> w = leading({"w": [[2.0], [-2.0]]})["w"]
    >>> (np.array([[3.0, 1.0]]) @ w).coef, (np.array([[1.0, 1.0]]) @ w).coef
    (array([[4.]]), array([[0.]]))
    """
    return {name: _new(np.asarray(value, dtype=np.float64), 1.0, False) for name, value in theta.items()}


def _new(coef: Array, degree: float | Array, exact: bool | Array, tied: Array = NO) -> Leading:
    shape = np.shape(coef)
    degree, exact = np.broadcast_to(degree, shape), np.broadcast_to(exact, shape)
    return Leading(coef, np.where(exact & (coef == 0), -np.inf, degree), exact, tied)


def _as_leading(value: Any) -> Leading:
    """A plain array is a constant: degree 0, exact."""
    return value if isinstance(value, Leading) else _new(np.asarray(value, dtype=np.float64), 0.0, True)


def _with_ties(z: Leading, tie: Array) -> Array:
    """What an activation adds to the ties of ``z``; the batch of ``tie`` is on axis 0."""
    return z.tied | tie.any(tuple(range(1, tie.ndim)))


def _saturating(z: Leading, smooth: Callable[[Array], Array], step: Callable[[Array], Array]) -> Leading:
    grows = z.degree > 0
    value = np.where(grows, step(z.coef), smooth(np.where(z.degree == 0, z.coef, 0.0)))
    tie = grows & (z.coef == 0)
    return _new(value, 0.0, np.where(grows, ~tie, z.exact), _with_ties(z, tie))


def _leading_softmax(z: Leading) -> Leading:
    """Over the last axis. Scores of lower degree than the highest count as 0 of that degree."""
    top = z.degree.max(-1, keepdims=True, initial=-np.inf)
    grows = top > 0
    score = np.where(z.degree == top, z.coef, 0.0)
    best = score.max(-1, keepdims=True)
    winner = best - score <= ROUNDING * abs(score).max(-1, keepdims=True)
    count = winner.sum(-1, keepdims=True)
    soft = smooth_softmax(np.where(z.degree == 0, z.coef, 0.0), axis=-1)
    exact = np.where(grows, count == 1, z.exact.all(-1, keepdims=True))
    return _new(np.where(grows, winner / count, soft), 0.0, exact, _with_ties(z, grows & (count > 1)))


def _leading_relu(z: Leading) -> Leading:
    return _new(np.maximum(z.coef, 0.0), z.degree, z.exact | (z.coef < 0), z.tied)


def _leading_layer_norm(z: Leading) -> Leading:
    """Over the last axis, ε = 0. An input that is constant to leading order counts as a tie."""
    top = z.degree.max(-1, keepdims=True)
    at = np.where(z.degree == top, z.coef, 0.0)
    centred = at - at.mean(-1, keepdims=True)
    size = np.sqrt(np.square(centred).mean(-1, keepdims=True))
    flat = size <= ROUNDING * abs(at).max(-1, keepdims=True)
    unit = np.where(flat, 0.0, centred / np.where(flat, 1.0, size))
    exact = (z.exact | (z.degree < top)).all(-1, keepdims=True) & ~flat
    return _new(unit, 0.0, exact, _with_ties(z, flat))


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
    """The limit of softmax(cz) over the last axis: uniform over the largest entries."""
    winner = z == z.max(-1, keepdims=True)
    return winner / winner.sum(-1, keepdims=True)


def layer_norm(z: Array) -> Array:
    """Standardise the last axis, ε = 0, safe at any scale."""
    centred = z - z.mean(-1, keepdims=True)
    centred = centred / abs(centred).max(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True))


def _relu(z: Array) -> Array:
    return np.maximum(z, 0.0)


SMOOTH = Activations(expit, np.tanh, partial(smooth_softmax, axis=-1), _relu, layer_norm)
STEP = Activations(step, np.sign, argmax, _relu, layer_norm)
LEADING = Activations(
    partial(_saturating, smooth=expit, step=step),
    partial(_saturating, smooth=np.tanh, step=np.sign),
    _leading_softmax,
    _leading_relu,
    _leading_layer_norm,
)


def limit(network: Network, theta: Mapping[str, ArrayLike], x: ArrayLike) -> Leading:
    """The leading term of ``network(c·theta, x)`` as c → ∞, for a batch of inputs ``x``, ``(batch, …)``.

    >>> def neuron(theta, x, act):
    ...     return act.sigmoid(x @ theta["w"])[:, 0]
    >>> found = limit(neuron, {"w": [[1.0], [-1.0]]}, [[2.0, 1.0], [1.0, 1.0]])  # w·x = 1, and a tie at 0
    >>> found.coef, found.tied
    (array([1. , 0.5]), array([False, True]))
    """
    return network(leading(theta), np.asarray(x, dtype=np.float64), LEADING)
