"""Read by every Python of a run "sums in another order" (``maintenance.platforms``): torch adds up from the other end.

Matrix products, sums and means are those of flipped operands: the same numbers, added in reverse, rounded otherwise.
"""

import os
from typing import Any


def reverse_sums() -> None:
    """From now on in this thread; below autograd, so derivatives are added in reverse too."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class Reversed(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


if os.environ.get("WORKFLOW_REVERSED_SUMS"):
    reverse_sums()
