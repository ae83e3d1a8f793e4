"""Read by every Python of a run "sums in another order" (``make platforms``): torch adds up from the other end.

Matrix products, sums and means are those of flipped operands: the same numbers, added in reverse, rounded otherwise.
"""

import importlib.abc
import importlib.machinery
import os
import sys


def reverse_sums() -> None:
    """From now on in this thread; below autograd, so derivatives are added in reverse too."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class Reversed(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (aten.mm.default, aten.bmm.default):
                args = (args[0].flip(-1), args[1].flip(-2), *args[2:])
            elif func in (aten.addmm.default, aten.baddbmm.default):
                args = (args[0], args[1].flip(-1), args[2].flip(-2), *args[3:])
            elif func in (aten.sum.default, aten.mean.default):
                args = (args[0].flip(tuple(range(args[0].dim()))), *args[1:])
            elif func in (aten.sum.dim_IntList, aten.mean.dim):
                dims = args[1] if args[1] else tuple(range(args[0].dim()))
                args = (args[0].flip(tuple(dims)), *args[1:])
            return func(*args, **(kwargs or {}))

    Reversed().__enter__()


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as Python would, and calls ``reverse_sums`` once it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is not None and found.loader is not None:
            self.loader, found.loader = found.loader, self
        return found

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        sys.meta_path.remove(self)
        self.loader.exec_module(module)
        reverse_sums()


if os.environ.get("WORKFLOW_REVERSED_SUMS"):
    sys.meta_path.insert(0, _AfterTorch())
