"""Where modules of old are now: an import of one says so in a line."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

TO_NORMGROWTH = ("callbacks", "fits", "heads", "homogeneity", "layers", "norms", "saturation")
PLACES = {name: f"normgrowth.{name}" for name in TO_NORMGROWTH} | {
    "chapters": "nbutils.experiments",
    "checkpoints": "normgrowth.checkpoints (normgrowth.models for saved, normgrowth.report for page and report)",
    "together": "nbutils.ensembles",
    "trainings": "nbutils.shared_runs",
}


class Finder(MetaPathFinder):
    """Raises ImportError for a module of old. It stands last, so it is asked only for what is not there."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        package, _, module = name.partition(".")
        if package == "nbutils" and module in PLACES:
            raise ImportError(f"{name} is {PLACES[module]} now: import that")


sys.meta_path.append(Finder())
