# mypy: ignore-errors
"""Chapters on a pretend GPU, for machines without one: tensors that hold CPU data, say ``cuda:0`` and refuse to mix.

A run on the pretend GPU shows where CPU and GPU tensors meet in one operation, where ``.numpy()`` is called on a GPU
tensor, where a generator is on the other device, and which lines wait for the device. It does not show speed, kernels
that round or fail otherwise, ``bf16`` (autocast does nothing here) or ``torch.compile``. Operations on small tensors
take ten to forty times as long as on the CPU.
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

BACKEND = "sim"  # the device's name in torch's core, which reserves "cuda"; Python code reads "cuda"
CPU = torch.device("cpu")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
# Operators whose result, or its shape, depends on values: on a GPU, Python waits for those.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")

waits: Counter[str] = Counter()  # waits for the device by line of the book's own code
launches: Counter[str] = Counter()  # operations on the device by name


class Pretend(torch.Tensor):
    """A tensor on the pretend device; its data are in the CPU tensor ``elem``."""

    elem: torch.Tensor
    device = torch.device("cuda", 0)
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Pretend:
        self = torch.Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype,
            layout=elem.layout, device=torch.device(BACKEND, 0), requires_grad=elem.requires_grad,
        )  # fmt: skip
        self.elem = elem
        return self

    def __repr__(self, **_: Any) -> str:
        return f"Pretend({self.elem})"

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    numpy = __array__

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operator(func, args, kwargs or {})


def is_pretend_device(device: Any) -> bool:
    """Whether a device, or the name of a device, is the pretend one."""
    return device is not None and torch.device(device).type in ("cuda", BACKEND)


def run_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU data of its operands, and put the result on the device on which CUDA would put it.

    Raises:
        RuntimeError: operands are on different devices.
    """
    leaves, structure = tree_flatten((args, kwargs))
    pretend_operands = [x for x in leaves if isinstance(x, Pretend)]
    requested_devices = [x for x in leaves if isinstance(x, torch.device)]
    to_device = is_pretend_device(requested_devices[0]) if requested_devices else bool(pretend_operands)
    if not (pretend_operands or to_device):
        return func(*args, **kwargs)

    name = func.overloadpacket.__name__
    first_is_pretend = isinstance(next(iter(leaves), None), Pretend)
    # CUDA accepts CPU tensors that are single numbers, and CPU indices of a CUDA tensor
    cpu_operands = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, Pretend) and x.dim()]
    may_mix = name in ("_to_copy", "copy_") or (name in INDEXING and first_is_pretend)
    if pretend_operands and cpu_operands and not may_mix:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({func})")

    if to_device and not func.is_view:
        launches[name] += 1
    has_boolean_index = name in INDEXING and any(x.dtype == torch.bool for x in pretend_operands[1:])
    to_cpu = not to_device or (name == "copy_" and not first_is_pretend)
    if pretend_operands and (to_cpu or has_boolean_index or name in WAITING):
        waits[_innermost_line()] += 1

    args, kwargs = tree_unflatten([_cpu_data(x) for x in leaves], structure)
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    result = func(*args, **kwargs)
    if not to_device:
        return result
    # an operation in place returns its operand, whose wrapper must stay the same object
    wrappers = {id(x.elem): x for x in pretend_operands} if func._schema.is_mutable else {}
    for wrapper in wrappers.values():
        if wrapper.shape != wrapper.elem.shape:  # after ``squeeze_``, for example
            wrapper.data = Pretend(wrapper.elem)

    def wrapped(x: Any) -> Any:
        if id(x) in wrappers:
            return wrappers[id(x)]
        return Pretend(x) if isinstance(x, torch.Tensor) else x

    return tree_map(wrapped, result)


def _cpu_data(x: Any) -> Any:
    """The CPU data of a pretend tensor, the CPU for the pretend device, and anything else as it is."""
    if isinstance(x, Pretend):
        return x.elem
    return CPU if isinstance(x, torch.device) and is_pretend_device(x) else x


def _innermost_line() -> str:
    """The innermost line of the book's own code that led to the operator, as ``file:number``."""
    frame = sys._getframe(2)
    while frame.f_back:
        file = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        if file.startswith(("cell ", "nbutils/", "normgrowth/")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class PretendOperators(TorchDispatchMode):
    """Operators without a pretend operand, which may still create a tensor on the pretend device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operator(func, args, kwargs or {})


class PretendFunctions(TorchFunctionMode):
    """What torch decides before it dispatches: ``to``, ``tensor(…, device=…)``, whether a generator fits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        if name in ("to", "cuda", "cpu") and isinstance(args[0], torch.Tensor):
            return _moved(name, *args, **kwargs)
        to_device = is_pretend_device(kwargs.get("device"))
        if (generator := kwargs.get("generator")) is not None:
            has_pretend_operand = any(isinstance(x, Pretend) for x in tree_leaves((args, kwargs)))
            needs_device = to_device if kwargs.get("device") else has_pretend_operand
            if is_pretend_device(generator.device) != needs_device:
                raise RuntimeError(f"a generator of {generator.device} for a tensor on the other device, in {name}")
        if to_device and name in ("tensor", "as_tensor") and not isinstance(args[0], Pretend):
            del kwargs["device"]
            requires_grad = kwargs.pop("requires_grad", False)
            return _moved("cuda", func(*args, **kwargs)).requires_grad_(requires_grad)
        if name == "new_tensor" and isinstance(args[0], Pretend):
            return _moved("cuda", torch.tensor(args[1], dtype=args[0].dtype))
        if to_device:
            kwargs["device"] = torch.device(BACKEND, 0)
        return func(*args, **kwargs)


def _moved(
    name: str, tensor: torch.Tensor, *targets: Any, device: Any = None, dtype: Any = None, copy: bool = False, **_: Any
) -> torch.Tensor:
    """``tensor.to(*targets)``, ``.cuda()`` or ``.cpu()``, by ``name``; a target is a device, a type or a tensor."""
    for target in targets:
        device = target if isinstance(target, str | torch.device) else getattr(target, "device", device)
        dtype = target if isinstance(target, torch.dtype) else getattr(target, "dtype", dtype)
    if name != "to":
        device = name
    is_on_device = isinstance(tensor, Pretend)
    to_device = is_on_device if device is None else is_pretend_device(device)
    dtype = dtype or tensor.dtype
    if to_device == is_on_device and dtype == tensor.dtype and not copy:
        return tensor
    return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=torch.device(BACKEND, 0) if to_device else CPU)


class Generator(torch.Generator):
    """A CPU generator that says it is on the device that was requested."""

    device = None

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu") -> None:
        self.device = torch.device(device)

    def manual_seed(self, seed: int) -> Generator:
        """Set the seed; another one on the pretend device, since CUDA draws other numbers than the CPU."""
        super().manual_seed(seed + 1 if self.device.type == "cuda" else seed)
        return self


def install_device(stack: ExitStack) -> None:
    """Give this process a CUDA device until ``stack`` is left.

    Torch keeps traces of the device afterwards, so a test should use a process of its own.
    """
    if not hasattr(torch, BACKEND):
        _setup_privateuseone_for_python_backend(BACKEND)
    get_state = torch.get_rng_state
    set_state = torch.set_rng_state
    functions = {
        "get_rng_state": lambda *_: get_state(),
        "set_rng_state": lambda state, *_: set_state(state),
        "get_device_name": lambda *_: "a pretend GPU",
        "device_count": lambda: 1,
    }
    for module in (torch.cuda, getattr(torch, BACKEND)):
        for name, function in functions.items():
            stack.enter_context(patch.object(module, name, function, create=True))
    stack.enter_context(patch.object(torch, "Generator", Generator))
    stack.enter_context(patch.object(devices, "cuda_count", lambda: 1))
    stack.enter_context(PretendOperators())
    stack.enter_context(PretendFunctions())


def execute(chapter: str, profile: str, seed: int, device: str = "cuda") -> None:
    """Execute a chapter's code cells in this process."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(book.code_cells(chapter), 1):
        exec(compile(code, f"cell {number} of {chapter}", "exec"), namespace)
        if "device" in namespace and "claims" not in namespace:  # after the cell of parameters
            namespace |= {"profile": profile, "seed": seed, "device": device}


def prepare_process(folder: str) -> None:
    """Open no windows, and let chapters write into a folder of ``_build``."""
    (BUILD / folder).mkdir(parents=True, exist_ok=True)
    os.chdir(BUILD / folder)
    os.environ |= {"MPLBACKEND": "agg", "NBUTILS_BOOK": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapters", nargs="*")
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prepare_process("pretend")
    os.environ["NBUTILS_RESULTS"] = os.getcwd()
    any_raised = False
    for chapter in options.chapters or book.chapters():
        start = time.time()
        error_text = ""
        waits.clear()
        launches.clear()
        with ExitStack() as stack:
            install_device(stack)
            try:
                execute(chapter, options.profile, options.seed)
            except Exception as error:
                traceback.print_exc()
                error_text = f"RAISED {type(error).__name__}: {error}; ".splitlines()[0]
                any_raised = True
        lines = ", ".join(f"{line} ({count})" for line, count in waits.most_common(6)) or "no line"
        seconds = time.time() - start
        print(
            f"{chapter}: {error_text}{launches.total():,} operations on the device, waits at {lines}; {seconds:.0f} s",
            flush=True,
        )
    return int(any_raised)


if __name__ == "__main__":
    sys.exit(main())
