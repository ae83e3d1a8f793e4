"""Instruments for the parameter norm of your own models: norms, growth, degree, saturation, attention heads.

Import the part that you need, ``from normgrowth import norms``: this face loads nothing.
"""

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "callbacks",
    "checkpoints",
    "fits",
    "heads",
    "homogeneity",
    "layers",
    "models",
    "norms",
    "precision",
    "report",
    "saturation",
    "sentences",
]
