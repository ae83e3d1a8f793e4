"""What the chapters of the executable book on parameter norm growth share; instruments for models are ``normgrowth``.

Import the part that you need, ``from nbutils import training``: this face loads nothing more.
"""

import sys
from importlib.abc import MetaPathFinder

from normgrowth import __version__ as __version__

MOVED = {  # where modules of old are now
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


class _Moved(MetaPathFinder):
    """Says where a module of old is now. It stands last, so it is asked only for what is not there."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        package, _, module = name.partition(".")
        if package == "nbutils" and module in MOVED:
            raise ImportError(f"{name} is {MOVED[module]} now: import that")


sys.meta_path.append(_Moved())
