"""Shared module of the executable book on parameter norm growth.

Submodules are imported on first use, so ``import nbutils`` stays cheap and does not import torch.

>>> import nbutils
>>> nbutils.profile.choose("smoke", smoke=10, book=1000, gpu=100_000)
10
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"
__all__ = [
    "activations",
    "algebra",
    "animation",
    "checkpoints",
    "claims",
    "comparisons",
    "corpora",
    "counting",
    "data",
    "device",
    "ensemble",
    "figures",
    "fits",
    "flows",
    "growth",
    "heads",
    "homogeneity",
    "languages",
    "limits",
    "margins",
    "models",
    "names",
    "norms",
    "one_weight",
    "optimizers",
    "pretrained",
    "profile",
    "projection",
    "rates",
    "recipes_lm",
    "recipes_t5",
    "samples",
    "saturation",
    "scale_invariant",
    "scaling",
    "sources",
    "sublayers",
    "text",
    "training",
    "trainings",
    "walks",
    "weights",
]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"nbutils.{name}")
    raise AttributeError(f"nbutils has no module {name!r}; it has {', '.join(__all__)}")
