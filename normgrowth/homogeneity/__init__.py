"""The degree of a network in its parameters, by the rules of Table 1 along a forward pass and by measurement.

A value v has degree k if v(cθ) = c^k v(θ) for all c > 0. ``degree`` and ``explain`` carry degrees along one run of a
module; ``measure_degree`` measures the degree from outputs at several scales.
"""

from normgrowth.homogeneity.algebra import Algebra, NotHomogeneous
from normgrowth.homogeneity.degrees import degree, explain
from normgrowth.homogeneity.measure import measure_degree, one_minus_cosine, scalable
from normgrowth.homogeneity.rules import RULES

__all__ = [
    "RULES",
    "Algebra",
    "NotHomogeneous",
    "degree",
    "explain",
    "measure_degree",
    "one_minus_cosine",
    "scalable",
]
