"""Chapters on a pretend GPU, for machines without one: tensors that hold CPU data, say ``cuda:0`` and refuse to mix.

It finds CPU and GPU tensors in one operation, ``.numpy()`` of a GPU tensor, generators on the wrong device, and the
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from nbutils import devices
from workflow import BUILD, ROOT, book

CUDA, CPU, SIM = torch.device("cuda", 0), torch.device("cpu"), "sim"  # what Python sees, and what torch's core does
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "is_nonzero")
waited: Counter[str] = Counter()  # how often each line of ours has waited for the device
launched: Counter[str] = Counter()  # operations on the device, by name


def _on(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", SIM)


class Pretend(torch.Tensor):
    """A tensor on the device; ``elem`` has its data."""

    elem: torch.Tensor
    device, is_cuda = CUDA, True  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Pretend:
        self = torch.Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype,
            layout=elem.layout, device=torch.device(SIM, 0), requires_grad=elem.requires_grad,
        )  # fmt: skip
        self.elem = elem
        return self

    def __repr__(self, **_: Any) -> str:
        return f"Pretend({self.elem})"

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    numpy = __array__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(func, args, kwargs or {})


def operate(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operator: the device of its result, no mixing of devices, the work itself on the CPU."""
    name, tensors = func.overloadpacket.__name__, [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there, here = [x for x in tensors if isinstance(x, Pretend)], [x for x in tensors if not isinstance(x, Pretend)]
    to_device = _on(kwargs["device"]) if kwargs.get("device") is not None else bool(there)
    if there:
        _refuse_mixing(func, name, args, here)
    if to_device and not func.is_view:
        launched[name] += 1
    if there and (name in WAITS or (name == "_to_copy" and not to_device) or (name == "copy_" and not isinstance(args[0], Pretend))):
        waited[_line()] += 1
    if to_device and kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": CPU}
    kwargs = {key: False if key == "pin_memory" else value for key, value in kwargs.items()}
    plain = tree_map(lambda x: x.elem if isinstance(x, Pretend) else x, (args, kwargs))
    out = func(*plain[0], **plain[1])
    if name == "_local_scalar_dense":
        return out
    known = {id(x.elem): x for x in there} if func._schema.is_mutable else {}
    if any(x.shape != x.elem.shape for x in known.values()):
        raise NotImplementedError(f"{func} changes a shape in place, which the pretend device does not follow")

    def wrap(x: Any) -> Any:
        plain = not isinstance(x, torch.Tensor) or isinstance(x, Pretend) or not to_device
        return x if plain else known[id(x)] if id(x) in known else Pretend(x)

    return tree_map(wrap, out)


def _refuse_mixing(func: Any, name: str, args: Any, here: list[Any]) -> None:
    indexing = name in INDEXING and isinstance(args[0], Pretend)
    if name not in ("_to_copy", "copy_") and not indexing and any(x.dim() for x in here):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({func})")


def _line() -> str:
    """The innermost line of the book's own code."""
    frame = sys._getframe(2)
    while frame.f_back:
        file = frame.f_code.co_filename
        if file.startswith("cell ") or (file.startswith(str(ROOT / "nbutils"))):
            return f"{file.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """What torch decides before any dispatch: ``to``, ``cuda``, ``tensor(…, device=…)``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in ("to", "cuda", "cpu") and args and isinstance(args[0], torch.Tensor):
            return _moved(name, args, kwargs)
        if (generator := kwargs.get("generator")) is not None:
            drawn = kwargs["device"] if kwargs.get("device") is not None else _place((args, kwargs))
            if _on(generator.device) != _on(drawn):
                raise RuntimeError(f"Expected a '{drawn}' device type for generator but found '{generator.device}'")
        if _on(kwargs.get("device")):
            kwargs["device"] = torch.device(SIM, 0)
            if name in ("tensor", "as_tensor"):
                del kwargs["device"]
                grad = kwargs.pop("requires_grad", False)
                made = func(*args, **kwargs)
                return made if isinstance(made, Pretend) else _moved("cuda", [made], {}).requires_grad_(grad)
        if name == "new_tensor" and isinstance(args[0], Pretend) and not kwargs:
            return _moved("cuda", [torch.tensor(args[1], dtype=args[0].dtype)], {})
        if name in ("data_ptr", "untyped_storage") and isinstance(args[0], Pretend):
            return getattr(args[0].elem, name)()
        if name == "numpy" and isinstance(args[0], Pretend):
            return args[0].__array__()
        return func(*args, **kwargs)


def _place(values: Any) -> str:
    return "cuda" if any(isinstance(x, Pretend) for x in tree_leaves(values)) else "cpu"


def _moved(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor, device, dtype = args[0], kwargs.get("device"), kwargs.get("dtype")
    for other in args[1:]:
        if isinstance(other, torch.Tensor):
            device, dtype = other.device, other.dtype
        elif isinstance(other, torch.dtype):
            dtype = other
        elif isinstance(other, str | torch.device):
            device = other
    device = {"cuda": CUDA, "cpu": CPU}.get(name, device)
    to_device, dtype = isinstance(tensor, Pretend) if device is None else _on(device), dtype or tensor.dtype
    if to_device == isinstance(tensor, Pretend) and dtype == tensor.dtype and not kwargs.get("copy"):
        return tensor
    place = torch.device(SIM, 0) if to_device else CPU
    return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=place)


class Generator(torch.Generator):
    """A CPU generator that says which device it was asked for."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made._asked = torch.device(device)
        return made

    def __init__(self, device: Any = "cpu") -> None: ...

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._asked


def device(stack: ExitStack) -> None:
    """Until ``stack`` is left, this process has a CUDA device."""
    if not hasattr(torch, SIM):
        _setup_privateuseone_for_python_backend(SIM)
    get, put = torch.get_rng_state, torch.set_rng_state
    states = {"get_rng_state": lambda *_: get(), "set_rng_state": lambda state, *_: put(state)}
    there = {**states, "get_device_name": lambda *_: "a pretend GPU", "device_count": lambda: 1}
    for module in (torch.cuda, torch.sim):  # type: ignore[attr-defined]
        for what, value in there.items():
            stack.enter_context(patch.object(module, what, value, create=True))
    stack.enter_context(patch.object(torch, "Generator", Generator))
    stack.enter_context(patch.object(devices, "cuda_count", lambda: 1))
    stack.enter_context(Dispatch())
    stack.enter_context(Functions())


def run_chapter(chapter: str, profile: str, seed: int) -> None:
    """Execute a chapter's code cells in this process, as its notebook does, in an empty folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(book.code_cells(chapter), 1):
        exec(compile(code, f"cell {number} of {chapter}", "exec"), names)
        if "device" in names and "claims" not in names:
            names |= {"profile": profile, "seed": seed, "device": "cuda"}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m maintenance pretend", description=__doc__)
    parser.add_argument("chapters", nargs="*")
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    (BUILD / "pretend").mkdir(parents=True, exist_ok=True)
    os.chdir(BUILD / "pretend")
    os.environ |= {"NBUTILS_RESULTS": os.getcwd(), "MPLBACKEND": "agg", "NBUTILS_BOOK": "1"}
    failed = 0
    for chapter in options.chapters or book.chapters():
        started = time.time()
        waited.clear(), launched.clear()
        with ExitStack() as stack:
            device(stack)
            try:
                run_chapter(chapter, options.profile, options.seed)
                said = "ran"
            except Exception as error:
                traceback.print_exc()
                failed, said = failed + 1, f"RAISED {type(error).__name__}: {error}".splitlines()[0]
        total = sum(launched.values())
        print(f"{chapter}: {said}, {time.time() - started:.0f} s, {total:,} operations on the device; waits at "
              f"{', '.join(f'{line} ({n})' for line, n in waited.most_common(6)) or 'no line'}", flush=True)
    return int(failed > 0)
