"""Shared module of the executable book on parameter norm growth.

Submodules are imported on first use, so ``import nbutils`` stays cheap and does not import torch.

>>> import nbutils
>>> nbutils.profiles.choose("smoke", smoke=10, book=1000, gpu=100_000)
10
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"
__all__ = [
    "callbacks",
    "chapters",
    "checkpoints",
    "claims",
    "data",
    "devices",
    "figures",
    "fits",
    "heads",
    "homogeneity",
    "intervals",
    "layers",
    "models",
    "norms",
    "optimizers",
    "profiles",
    "saturation",
    "sublayers",
    "text",
    "together",
    "training",
    "trainings",
]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"nbutils.{name}")
    raise AttributeError(f"nbutils has no module {name!r}; it has {', '.join(__all__)}")
