"""The parameter norm, and what its growth is made of."""

from normgrowth.norms.budget import NormBudget, drift_free_cap, norm_budget
from normgrowth.norms.noise import NoiseGradients
from normgrowth.norms.total import norm
from normgrowth.norms.tracker import NormTracker

__all__ = ["NoiseGradients", "NormBudget", "NormTracker", "drift_free_cap", "norm", "norm_budget"]
