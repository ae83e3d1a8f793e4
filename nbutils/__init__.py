"""Code that the chapters of the book on parameter norm growth share; ``normgrowth`` has the instruments for models.

Import the module that you need, as in ``from nbutils import training``; this file imports none of them.
"""

import sys
from importlib.abc import MetaPathFinder

from normgrowth import __version__ as __version__

MOVED = {  # former module of nbutils → its present name
    "callbacks": "normgrowth.callbacks",
    "chapters": "nbutils.experiments",
    "checkpoints": "normgrowth.checkpoints",
    "fits": "normgrowth.fits",
    "heads": "normgrowth.heads",
    "homogeneity": "normgrowth.homogeneity",
    "layers": "normgrowth.layers",
    "norms": "normgrowth.norms",
    "saturation": "normgrowth.saturation",
    "together": "nbutils.ensembles",
    "trainings": "nbutils.shared_runs",
}


class _MovedModules(MetaPathFinder):
    """Names the present module if a former one is imported. As the last finder, it only gets imports that fail."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        package, _, module = name.partition(".")
        if package == "nbutils" and module in MOVED:
            raise ImportError(f"{name} is {MOVED[module]} now: import that")


sys.meta_path.append(_MovedModules())
