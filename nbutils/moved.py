"""Where modules of old are now: an import of one says so in a line."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

PLACES = {
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

SPLIT = {"checkpoints": " (its saved is normgrowth.models, its page and report are in normgrowth.report)"}


class Finder(MetaPathFinder):
    """Raises ImportError for a module of old. It stands last, so it is asked only for what is not there."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        package, _, module = name.partition(".")
        if package == "nbutils" and module in PLACES:
            raise ImportError(f"{name} is {PLACES[module]} now: import that{SPLIT.get(module, '')}")


sys.meta_path.append(Finder())
