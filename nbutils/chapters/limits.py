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
NO, NEVER = np.array(False), np.array(complex(np.inf, np.inf))  # of an array with no activation on its way


@dataclass
class Leading:
    """An array whose entries behave like ``coef * c ** degree`` as c → ∞, axis 0 (if any) being a batch.

    Attributes:
        degree: −inf for what is exactly 0, or exponentially small.
        exact: the coefficient does not change with a small change of the parameters' direction, up to an exponentially
            small amount: inputs, steps, and their sums and products. A parameter's coefficient is not exact.
        tied: ``(batch,)`` or (), an activation on the way stood at a tie.
        slowest: the slowest saturating activation on the way errs like exp(−gap · c ** order): order + i·gap, since
            complex numbers are ordered by their real part and then by their imaginary part; inf + i·inf if none.
    """

    coef: Array
    degree: Array
    exact: Array
    tied: Array
    slowest: Array

    __array_ufunc__ = None  # numpy arrays leave the operators to us

    def __mul__(self, other: Any) -> Leading:
        other = _as_leading(other)
        zero = (self.degree == -np.inf) | (other.degree == -np.inf)
        degree = np.where(zero, -np.inf, self.degree + other.degree)
        exact = (self.exact & other.exact) | zero
        return Leading(np.where(zero, 0.0, self.coef * other.coef), degree, exact, *self._merged(other))

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Leading:
        other = _as_leading(other)
        pairs = (self.coef, other.coef), (self.degree, other.degree), (self.exact, other.exact)
        terms = [np.stack(np.broadcast_arrays(*pair), -1) for pair in pairs]
        return Leading(*_sum(*terms), *self._merged(other))

    __radd__ = __add__

    def __matmul__(self, other: Any) -> Leading:
        """Matrix product over the last axis of the left and the last but one of the right side."""
        right = _as_leading(other)
        product = self[..., None] * right[..., None, :, :]  # (..., rows, inner, columns)
        terms = (np.moveaxis(part, -2, -1) for part in (product.coef, product.degree, product.exact))
        return Leading(*_sum(*terms), product.tied, product.slowest)

    def __rmatmul__(self, other: Any) -> Leading:
        return _as_leading(other) @ self

    def __getitem__(self, index: Any) -> Leading:
        """Indices must keep the batch axis."""
        return Leading(self.coef[index], self.degree[index], self.exact[index], self.tied, self.slowest)

    @property
    def mT(self) -> Leading:
        coef, degree, exact = (part.swapaxes(-1, -2) for part in (self.coef, self.degree, self.exact))
        return Leading(coef, degree, exact, self.tied, self.slowest)

    def _merged(self, other: Leading) -> tuple[Array, Array]:
        """Tied if one of the two is; the slower of their slowest activations."""
        return self.tied | other.tied, np.minimum(self.slowest, other.slowest)


def leading(theta: Mapping[str, ArrayLike]) -> dict[str, Leading]:
    """Parameters c·θ̂ as leading terms of degree 1. A zero of θ̂ is a parameter that grows more slowly, not an exact 0.

    >>> w = leading({"w": [[2.0], [-2.0]]})["w"]
    >>> (np.array([[3.0, 1.0]]) @ w).coef, (np.array([[1.0, 1.0]]) @ w).coef
    (array([[4.]]), array([[0.]]))
    """
    return {name: _new(np.asarray(value, dtype=np.float64), 1.0, False) for name, value in theta.items()}


def _new(coef: Array, degree: float | Array, exact: bool | Array, tied: Array = NO, slowest: Array = NEVER) -> Leading:
    shape = np.shape(coef)
    degree, exact = np.broadcast_to(degree, shape), np.broadcast_to(exact, shape)
    return Leading(coef, np.where(exact & (coef == 0), -np.inf, degree), exact, tied, slowest)


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


def _passed(z: Leading, tie: Array, degree: Array | float, gap: Array | float) -> tuple[Array, Array]:
    """History after an activation that errs like exp(−gap · c ** degree); the batch of these arrays is on axis 0."""
    others = tuple(range(1, tie.ndim))
    here = np.empty(tie.shape, dtype=np.complex128)
    here.real, here.imag = degree, gap
    return z.tied | tie.any(others), np.minimum(z.slowest, here.min(others, initial=NEVER.item()))


def _saturating(z: Leading, smooth: Callable[[Array], Array], step: Callable[[Array], Array], gap: float) -> Leading:
    grows = z.degree > 0
    sure = grows & (z.coef != 0)
    value = np.where(grows, step(z.coef), smooth(np.where(grows, 0.0, np.where(z.degree == 0, z.coef, 0.0))))
    degree, gap_here = np.where(sure, z.degree, np.inf), np.where(sure, gap * abs(z.coef), np.inf)
    history = _passed(z, grows & (z.coef == 0), degree, gap_here)
    return _new(value, 0.0, np.where(grows, sure, z.exact), *history)


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
    saturates = grows & ~lost
    gap = np.where(saturates, best - np.where(lost, 0.0, rest), np.inf)
    history = _passed(z, grows & several, np.where(saturates, top, np.inf), gap)
    exact = np.where(grows, ~several, z.exact.all(-1, keepdims=True))
    return _new(np.where(grows, hard, soft), 0.0, exact, *history)


def _leading_relu(z: Leading) -> Leading:
    return _new(np.maximum(z.coef, 0.0), z.degree, z.exact | (z.coef < 0), z.tied, z.slowest)


def _leading_layer_norm(z: Leading) -> Leading:
    """Over the last axis, ε = 0. An input that is constant to leading order counts as a tie."""
    top = z.degree.max(-1, keepdims=True)
    at = np.where(z.degree == top, z.coef, 0.0)
    centred = at - at.mean(-1, keepdims=True)
    size = np.sqrt(np.square(centred).mean(-1, keepdims=True))
    flat = size <= ROUNDING * abs(at).max(-1, keepdims=True)
    unit = np.where(flat, 0.0, centred / np.where(flat, 1.0, size))
    exact = (z.exact | (z.degree < top)).all(-1, keepdims=True) & ~flat
    return _new(unit, 0.0, exact, *_passed(z, flat, np.inf, np.inf))


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
    slowest = np.broadcast_to(out.slowest, batch)
    return Limit(out.coef, out.degree, np.broadcast_to(out.tied, batch), slowest.real, slowest.imag)
