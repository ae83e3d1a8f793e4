# mypy: ignore-errors
"""Chapters on a pretend GPU, for machines without one: tensors that hold CPU data, say ``cuda:0`` and refuse to mix.

It finds CPU and GPU tensors in one operation, ``.numpy()`` of a GPU tensor, generators of the other device, and the
lines that wait for the device. It says nothing of speed, of kernels that round or fail otherwise, of ``bf16`` (autocast
does nothing here) or of ``torch.compile``. Small tensors take ten to forty times as long as on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from nbutils import devices
from workflow import BUILD, ROOT, book

SIM, CPU = "sim", torch.device("cpu")  # the device's name in torch's core; Python sees "cuda"
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")
waited: Counter[str] = Counter()  # how often each line of ours has waited for the device
launched: Counter[str] = Counter()  # operations on the device, by name


def _on(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", SIM)


class Pretend(torch.Tensor):
    """A tensor on the device; ``elem`` has its data."""

    elem: torch.Tensor
    device, is_cuda = torch.device("cuda", 0), True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Pretend:
        self = torch.Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype,
            layout=elem.layout, device=torch.device(SIM, 0), requires_grad=elem.requires_grad,
        )  # fmt: skip
        self.elem = elem
        return self

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy
    __repr__ = lambda self, **_: f"Pretend({self.elem})"  # noqa: E731
    untyped_storage = lambda self: self.elem.untyped_storage()  # noqa: E731
    data_ptr = lambda self: self.elem.data_ptr()  # noqa: E731
    tolist = lambda self: self.cpu().tolist()  # noqa: E731

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(func, args, kwargs or {})


def operate(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operator: the device of its result, no mixing of devices, the work itself on the CPU."""
    leaves, form = tree_flatten((args, kwargs))
    there = [x for x in leaves if isinstance(x, Pretend)]
    asked = [x for x in leaves if isinstance(x, torch.device)]
    to_device = _on(asked[0]) if asked else bool(there)
    if not (there or to_device):
        return func(*args, **kwargs)
    name, first = func.overloadpacket.__name__, isinstance(next(iter(leaves), None), Pretend)
    here = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, Pretend) and x.dim()]
    if there and here and name not in ("_to_copy", "copy_") and not (name in INDEXING and first):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({func})")
    launched[name] += to_device and not func.is_view
    masked = name in INDEXING and any(x.dtype == torch.bool for x in there[1:])
    if there and (not to_device or masked or name in WAITS or (name == "copy_" and not first)):
        waited[_line()] += 1
    args, kwargs = tree_unflatten([_plain(x) for x in leaves], form)
    out = func(*args, **kwargs | ({"pin_memory": False} if kwargs.get("pin_memory") else {}))
    if not to_device:
        return out
    known = {id(x.elem): x for x in there} if func._schema.is_mutable else {}
    for tensor in known.values():
        if tensor.shape != tensor.elem.shape:  # squeeze_ and its like: the wrapper follows
            tensor.data = Pretend(tensor.elem)

    def wrap(x: Any) -> Any:
        return known[id(x)] if id(x) in known else Pretend(x) if isinstance(x, torch.Tensor) else x

    return tree_map(wrap, out)


def _plain(x: Any) -> Any:
    return x.elem if isinstance(x, Pretend) else CPU if isinstance(x, torch.device) and _on(x) else x


def _line() -> str:
    """The innermost line of the book's own code."""
    frame = sys._getframe(2)
    while frame.f_back:
        file = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        if file.startswith(("cell ", "nbutils/", "normgrowth/")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """What torch decides before it dispatches: ``to``, ``tensor(…, device=…)``, whether a generator fits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        there, grad = _on(kwargs.get("device")), False
        if name in ("to", "cuda", "cpu") and isinstance(args[0], torch.Tensor):
            return _moved(name, *args, **kwargs)
        if (generator := kwargs.get("generator")) is not None:
            on_it = any(isinstance(x, Pretend) for x in tree_leaves((args, kwargs)))
            if _on(generator.device) != (there if kwargs.get("device") else on_it):
                raise RuntimeError(f"a generator of {generator.device} for a tensor that is elsewhere, in {name}")
        if there and name in ("tensor", "as_tensor") and not isinstance(args[0], Pretend):
            del kwargs["device"]
            grad = kwargs.pop("requires_grad", grad)
            return _moved("cuda", func(*args, **kwargs)).requires_grad_(grad)
        if name == "new_tensor" and isinstance(args[0], Pretend):
            return _moved("cuda", torch.tensor(args[1], dtype=args[0].dtype))
        return func(*args, **kwargs | ({"device": torch.device(SIM, 0)} if there else {}))


def _moved(
    name: str, tensor: torch.Tensor, *words: Any, device: Any = None, dtype: Any = None, copy: bool = False, **_: Any
) -> torch.Tensor:
    for other in words:
        device = other if isinstance(other, str | torch.device) else getattr(other, "device", device)
        dtype = other if isinstance(other, torch.dtype) else getattr(other, "dtype", dtype)
    device = device if name == "to" else name
    there, dtype = isinstance(tensor, Pretend) if device is None else _on(device), dtype or tensor.dtype
    if there == isinstance(tensor, Pretend) and dtype == tensor.dtype and not copy:
        return tensor
    return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=torch.device(SIM, 0) if there else CPU)


class Generator(torch.Generator):
    """A CPU generator that says which device it was asked for."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu") -> None:
        self.device = torch.device(device)

    device = None

    def manual_seed(self, seed: int) -> Generator:  # as from CUDA, other numbers than from the CPU's
        super().manual_seed(seed + 1 if self.device.type == "cuda" else seed)
        return self


def device(stack: ExitStack) -> None:
    """Until ``stack`` is left, this process has a CUDA device. Torch does not quite forget it: use a process for it."""
    if not hasattr(torch, SIM):
        _setup_privateuseone_for_python_backend(SIM)
    get, put = torch.get_rng_state, torch.set_rng_state
    there = {"get_rng_state": lambda *_: get(), "set_rng_state": lambda state, *_: put(state)}
    there |= {"get_device_name": lambda *_: "a pretend GPU", "device_count": lambda: 1}
    patches = [(module, *each) for module in (torch.cuda, getattr(torch, SIM)) for each in there.items()]
    for place in (*patches, (torch, "Generator", Generator), (devices, "cuda_count", lambda: 1)):
        stack.enter_context(patch.object(*place, create=True))
    stack.enter_context(Operators())
    stack.enter_context(Functions())


def execute(chapter: str, profile: str, seed: int, device: str = "cuda") -> None:
    """A chapter's code cells in this process."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(book.code_cells(chapter), 1):
        exec(compile(code, f"cell {number} of {chapter}", "exec"), names)
        if "device" in names and "claims" not in names:  # the cell of parameters
            names |= {"profile": profile, "seed": seed, "device": device}


def quietly(folder: str) -> None:
    """No windows, and what chapters write goes to a folder."""
    (BUILD / folder).mkdir(parents=True, exist_ok=True)
    os.chdir(BUILD / folder)
    os.environ |= {"MPLBACKEND": "agg", "NBUTILS_BOOK": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapters", nargs="*")
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--seed", type=int, default=0)
    options, found = parser.parse_args(), list[str]()
    quietly("pretend")
    os.environ["NBUTILS_RESULTS"] = os.getcwd()
    for chapter in options.chapters or book.chapters():
        started, why = time.time(), ""
        waited.clear()
        launched.clear()
        with ExitStack() as stack:
            device(stack)
            try:
                execute(chapter, options.profile, options.seed)
            except Exception as error:
                traceback.print_exc()
                why = f"RAISED {type(error).__name__}: {error}; ".splitlines()[0]
        lines = ", ".join(f"{line} ({n})" for line, n in waited.most_common(6)) or "no line"
        found.append(f"{chapter}: {why}{launched.total():,} operations on the device, waits at {lines}")
        print(f"{found[-1]}; {time.time() - started:.0f} s", flush=True)
    return int(any("RAISED" in line for line in found))


if __name__ == "__main__":
    sys.exit(main())
