"""Code that the chapters of the book on parameter norm growth share; ``normgrowth`` has the instruments for models.

Import the module that you need, as in ``from nbutils import training``; this file imports none of them.
"""

from normgrowth import __version__

__all__ = [
    "__version__", "claims", "data", "devices", "ensembles", "experiments", "figures", "intervals", "models",
    "notebook", "optimizers", "profiles", "shared_runs", "sublayers", "text", "training",
]  # fmt: skip
