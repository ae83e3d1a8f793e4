"""Objects of a pickle without their classes: no code runs, whatever the pickle asks for.

A pickle may name any function of any module and have it called. Here each name becomes an inert stand-in, but for plain
containers and for what torch itself calls to rebuild a tensor; and these are wrapped, so that a pickle can change
nothing in them.
"""

from __future__ import annotations

import io
import pickle
import struct
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from normgrowth.checkpoints.layouts import ReadError

_REBUILDERS = (  # of torch._utils; what else they call is torch's own, with the arguments of the pickle
    "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter",
    "_rebuild_parameter_with_state", "_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_meta_tensor_no_storage",
)  # fmt: skip


class _Sealed(type):
    """A class of which a pickle can change nothing."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{cls.__name__} is sealed")


class Inert(dict, metaclass=_Sealed):
    """An object of an unknown class. It takes whatever is done to it, and keeps its items and its state."""

    module: ClassVar[str] = ""
    dump_patches: ClassVar[bool] = False  # torch asks this of modules that are stored with their sources

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)  # it may be a key

    def __eq__(self, other: object) -> bool:
        return self is other

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "args", args)

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.update(part)
        object.__setattr__(self, "state", state)

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return self

    def append(self, value: object) -> None:
        self[len(self)] = value

    add = append

    def extend(self, values: Any) -> None:
        for value in values:
            self.append(value)


class Wrapped:
    """A function that a pickle may call and cannot change."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("sealed")


def _scalar(kind: object, data: object = b"") -> float | Inert:
    """A number of numpy: float64 and int64 are read, others are stand-ins."""
    code = getattr(kind, "args", ("",))[0]
    if isinstance(data, bytes) and len(data) == 8 and code in ("f8", "i8"):
        return float(struct.unpack("<d" if code == "f8" else "<q", data)[0])
    return Inert()


def _from_type(rebuild: Wrapped, kind: object, args: tuple, state: object) -> Any:
    """As torch._tensor._rebuild_from_type_v2, which makes tensors of subclasses; here they are plain ones."""
    if isinstance(rebuild, Wrapped):
        return rebuild(*args)
    stand_in = kind() if isinstance(kind, type) and issubclass(kind, Inert) else Inert()
    stand_in.__setstate__(state)
    return stand_in


_CONTAINERS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *factory: {},
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "tuple"): tuple,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): bytearray,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("_codecs", "encode"): lambda text, encoding="utf-8": text.encode("latin1" if encoding == "latin1" else "utf-8"),
}


class Unpickler(pickle.Unpickler):
    """Reads a pickle with stand-ins for all that is not a plain container or torch's."""

    plain: ClassVar[Mapping[tuple[str, str], Any]] = {}  # further names, with what a pickle gets for each

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("__builtin__", "builtins")
        if (module, name) in self.plain:
            return self.plain[module, name]
        if call := _CONTAINERS.get((module, name)):
            return Wrapped(call)
        if module == "torch" or module.startswith("torch."):
            of_torch = self.of_torch(module, name)
            if of_torch is not None:
                return of_torch
        return _Sealed(name, (Inert,), {"module": module})

    def of_torch(self, module: str, name: str) -> Any:
        """What a pickle gets for a name of torch, or None for a stand-in."""
        return _of_torch(module, name)


def _of_torch(module: str, name: str) -> Any:
    """What torch itself needs to rebuild tensors, or None for other names of torch."""
    import torch

    if (module, name) == ("torch.storage", "_load_from_bytes"):
        return Wrapped(_storage)
    if (module, name) == ("torch.storage", "UntypedStorage"):  # of dtypes younger than typed storages, such as float8
        return torch.serialization.StorageType("ByteStorage")
    if module == "torch._utils" and name in _REBUILDERS:
        return Wrapped(getattr(torch._utils, name))
    if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
        return Wrapped(_from_type)
    if (module, name) == ("torch", "Size"):
        return Wrapped(torch.Size)
    if (module, name) == ("torch.serialization", "_get_layout"):
        return Wrapped(torch.serialization._get_layout)
    value = getattr(torch, name, None) if module == "torch" else None
    return value if isinstance(value, torch.dtype | torch.layout | torch.memory_format | torch.qscheme) else None


_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9"  # how torch before 1.6 begins a file
_READER = types.SimpleNamespace(
    Unpickler=Unpickler, load=lambda file, **options: Unpickler(file, **options).load(), __name__="inert"
)


def load(path: Path) -> Any:
    """What ``torch.save`` has written, without code: tensors, containers, and ``Inert`` for the rest.

    Files of torch 1.6 and later are mapped.

    Raises:
        ReadError: the file is an archive that torch would read in another way.
        Exception: of many kinds, if the file is damaged.
    """
    import torch

    with path.open("rb") as file:
        begin = file.read(262)
    is_zip = begin.startswith(b"PK\x03\x04")
    if begin[257:] == b"ustar":
        raise ReadError("a tar archive: unpack it first")
    if is_zip and any(
        name.endswith("constants.pkl") for name in torch._C.PyTorchFileReader(str(path)).get_all_records()
    ):
        raise ReadError("a TorchScript archive, which holds code: save model.state_dict() of the module alone")
    if begin[:1] == b"\x80" and not is_zip and not begin.startswith(_LEGACY):
        with path.open("rb") as file:
            return Unpickler(file).load()  # of pickle.dump
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_READER, mmap=is_zip)


def _storage(data: bytes) -> Any:
    """A storage of torch inside a plain pickle, as torch.storage._load_from_bytes reads it, but without code."""
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=_READER)
