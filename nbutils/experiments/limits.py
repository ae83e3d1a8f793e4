"""The limit of a network under scaling, computed without scaling: arithmetic with leading terms a·c^k.

A network is written once, as a function ``(theta, x, act)`` of its parameters, its input and a set of activations. With
``SMOOTH`` it is the network itself. With ``STEP`` every activation is replaced by its limit. With ``LEADING``, and
parameters from ``leading_terms``, it returns the leading term at scale c → ∞ and reports whether an activation was at a
tie. All numbers are float64.
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

ROUNDING = 1e-12  # a sum below this fraction of its terms counts as 0
UNTIED = np.array(False)  # for arrays that no activation has produced


@dataclass
class LeadingTerms:
    """An array whose entries behave like ``coef * c ** degree`` as c → ∞; axis 0, if there is one, is the batch.

    Used in ``settled-direction``.

    Attributes:
        coef: the coefficients, float64.
        degree: the degrees, in the same shape; −inf for entries that are 0 or exponentially small.
        exact: in the same shape, whether a small change of the parameters' direction changes the coefficient by an
            exponentially small amount at most. Inputs and steps are exact, as are their sums and products. Parameters
            are not.
        tied: ``(batch,)`` or (), whether an activation that led here was at a tie.
    """

    coef: Array
    degree: Array
    exact: Array
    tied: Array

    __array_ufunc__ = None  # numpy arrays leave the operators to us

    @property
    def undecided(self) -> Array:
        """Whether an activation was at a tie, or a sigmoid of this output would be: ``(batch,)`` for such an output."""
        return self.tied | ((self.coef == 0) & (self.degree > 0))

    def __mul__(self, other: Any) -> LeadingTerms:
        other = _as_leading(other)
        degree = self.degree + other.degree
        exact = (self.exact & other.exact) | (degree == -np.inf)  # a product with an exact 0 is an exact 0
        return LeadingTerms(self.coef * other.coef, degree, exact, self.tied | other.tied)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> LeadingTerms:
        other = _as_leading(other)
        coef = np.stack(np.broadcast_arrays(self.coef, other.coef), -1)
        degree = np.stack(np.broadcast_arrays(self.degree, other.degree), -1)
        exact = np.stack(np.broadcast_arrays(self.exact, other.exact), -1)
        return LeadingTerms(coef, degree, exact, self.tied | other.tied)._sum()

    __radd__ = __add__

    def __matmul__(self, other: Any) -> LeadingTerms:
        """Matrix product: over the last axis of the left side and the second to last of the right side."""
        products = self[..., None] * _as_leading(other)[..., None, :, :]  # (..., rows, inner, columns)
        return products._rearranged(lambda array: np.moveaxis(array, -2, -1))._sum()

    def __rmatmul__(self, other: Any) -> LeadingTerms:
        return _as_leading(other) @ self

    def __getitem__(self, index: Any) -> LeadingTerms:
        """Indices must keep the batch axis."""
        return self._rearranged(lambda array: array[index])

    @property
    def mT(self) -> LeadingTerms:
        return self._rearranged(lambda array: array.swapaxes(-1, -2))

    def _rearranged(self, rearrange: Callable[[Array], Array]) -> LeadingTerms:
        """The same entries in another shape or order."""
        return LeadingTerms(rearrange(self.coef), rearrange(self.degree), rearrange(self.exact), self.tied)

    def _sum(self) -> LeadingTerms:
        """Sum over the last axis: the highest degree wins. Exact terms that cancel leave an exact 0."""
        degree = self.degree.max(-1, initial=-np.inf)
        counts = (self.degree == degree[..., None]) & (degree[..., None] > -np.inf)
        total = np.where(counts, self.coef, 0.0).sum(-1)
        size = np.where(counts, abs(self.coef), 0.0).sum(-1)
        total = np.where(abs(total) <= ROUNDING * size, 0.0, total)
        exact = (self.exact | ~counts).all(-1)
        return _terms(total, degree, exact, self.tied)


def leading_terms(theta: Mapping[str, ArrayLike]) -> dict[str, LeadingTerms]:
    """Parameters c·θ̂ as leading terms of degree 1. A zero of θ̂ is a parameter that grows more slowly, not an exact 0.

    Used in ``settled-direction``.

    >>> w = leading_terms({"w": [[2.0], [-2.0]]})["w"]
    >>> (np.array([[3.0, 1.0]]) @ w).coef, (np.array([[1.0, 1.0]]) @ w).coef
    (array([[4.]]), array([[0.]]))
    """
    return {name: _terms(np.asarray(value, dtype=np.float64), 1.0, False) for name, value in theta.items()}


def _terms(coef: Array, degree: float | Array, exact: bool | Array, tied: Array = UNTIED) -> LeadingTerms:
    """Leading terms of these coefficients; degree and exactness are broadcast, and an exact 0 gets degree −∞."""
    degree = np.broadcast_to(degree, np.shape(coef))
    exact = np.broadcast_to(exact, np.shape(coef))
    return LeadingTerms(coef, np.where(exact & (coef == 0), -np.inf, degree), exact, tied)


def _as_leading(value: Any) -> LeadingTerms:
    """A plain array is a constant: degree 0, exact."""
    if isinstance(value, LeadingTerms):
        return value
    return _terms(np.asarray(value, dtype=np.float64), 0.0, True)


def _with_ties(z: LeadingTerms, tie: Array) -> Array:
    """Ties that led to ``z``, and those of an activation of ``z``, ``tie``, whose axis 0 is the batch."""
    return z.tied | tie.any(tuple(range(1, tie.ndim)))


def _saturating(z: LeadingTerms, smooth: Callable[[Array], Array], step: Callable[[Array], Array]) -> LeadingTerms:
    """A sigmoid or tanh: its limit where ``z`` grows, itself where ``z`` stays, its value at 0 where ``z`` vanishes."""
    grows = z.degree > 0
    limit_of_z = np.where(z.degree == 0, z.coef, 0.0)
    value = np.where(grows, step(z.coef), smooth(limit_of_z))
    tie = grows & (z.coef == 0)
    exact = np.where(grows, ~tie, z.exact)
    return _terms(value, 0.0, exact, _with_ties(z, tie))


def _leading_softmax(z: LeadingTerms) -> LeadingTerms:
    """Over the last axis. Scores of lower degree than the highest count as 0 of that degree."""
    highest = z.degree.max(-1, keepdims=True, initial=-np.inf)
    grows = highest > 0
    score = np.where(z.degree == highest, z.coef, 0.0)
    distance = score.max(-1, keepdims=True) - score
    is_maximum = distance <= ROUNDING * abs(score).max(-1, keepdims=True)
    maxima = is_maximum.sum(-1, keepdims=True)
    bounded = smooth_softmax(np.where(z.degree == 0, z.coef, 0.0), axis=-1)
    weights = np.where(grows, is_maximum / maxima, bounded)
    exact = np.where(grows, maxima == 1, z.exact.all(-1, keepdims=True))
    return _terms(weights, 0.0, exact, _with_ties(z, grows & (maxima > 1)))


def _leading_relu(z: LeadingTerms) -> LeadingTerms:
    return _terms(np.maximum(z.coef, 0.0), z.degree, z.exact | (z.coef < 0), z.tied)


def _leading_layer_norm(z: LeadingTerms) -> LeadingTerms:
    """Over the last axis, ε = 0. An input that is constant to leading order counts as a tie."""
    highest = z.degree.max(-1, keepdims=True)
    coef = np.where(z.degree == highest, z.coef, 0.0)
    centred = coef - coef.mean(-1, keepdims=True)
    size = np.sqrt(np.square(centred).mean(-1, keepdims=True))
    constant = size <= ROUNDING * abs(coef).max(-1, keepdims=True)
    unit = np.where(constant, 0.0, centred / np.where(constant, 1.0, size))
    exact = (z.exact | (z.degree < highest)).all(-1, keepdims=True) & ~constant
    return _terms(unit, 0.0, exact, _with_ties(z, constant))


# ---- the three sets of activations ----


class Activations(NamedTuple):
    """The functions that a network takes for its activations.

    Used in ``settled-direction``.
    """

    sigmoid: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    softmax: Callable[[Any], Any]
    relu: Callable[[Any], Any]
    layer_norm: Callable[[Any], Any]


def step(z: Array) -> Array:
    """The limit of σ(cz) as c → ∞: 0, ½ or 1.

    Used in ``settled-direction``.

    >>> step(np.array([-3.0, 0.0, 0.1]))
    array([0. , 0.5, 1. ])
    """
    return np.heaviside(z, 0.5)


def argmax(z: Array) -> Array:
    """The limit of softmax(cz) over the last axis as c → ∞: uniform over the largest entries.

    Used in ``settled-direction``.
    """
    is_maximum = z == z.max(-1, keepdims=True)
    return is_maximum / is_maximum.sum(-1, keepdims=True)


def layer_norm(z: Array) -> Array:
    """Standardise the last axis, with ε = 0, without overflow at any scale.

    Used in ``settled-direction``.
    """
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


def limit(network: Network, theta: Mapping[str, ArrayLike], x: ArrayLike) -> LeadingTerms:
    """The leading term of ``network(c·theta, x)`` as c → ∞, for a batch of inputs ``x``, ``(batch, …)``.

    Used in ``settled-direction``.

    >>> def neuron(theta, x, act):
    ...     return act.sigmoid(x @ theta["w"])[:, 0]
    >>> output = limit(neuron, {"w": [[1.0], [-1.0]]}, [[2.0, 1.0], [1.0, 1.0]])  # w·x = 1, and a tie at 0
    >>> output.coef, output.tied
    (array([1. , 0.5]), array([False, True]))
    """
    return network(leading_terms(theta), np.asarray(x, dtype=np.float64), LEADING)
