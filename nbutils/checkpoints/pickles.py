"""What ``torch.save`` has written: its tensors, and which of them are the model's weights."""

from __future__ import annotations

import contextlib
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbutils.checkpoints.layouts import megatron
from nbutils.checkpoints.tensors import FLOATS, ReadError, Tensor
from nbutils.names import originals_first

_WEIGHTS = (
    "current_model_state",
    "state_dict",
    "model_state_dict",
    "model",
    "module",
)  # the first is Lightning's, where
# its state_dict has averages
_TRAINING = re.compile(  # what else a trainer keeps
    r"optim|sched|scaler|rng|random|loops|callbacks|criterion|loss|metric|history|sampler|hparams|hyper_param|config"
    r"|args|frozen_param|extra_state|task_state|averaging_state|(?:^|_)(?:data|grad|amp|opt)", re.I
)  # fmt: skip
_COPY = re.compile(r"(?:^|_)(?:ema|swa|averaged?)(?:_|$)|shadow", re.I)
_ALONE = "save the weights alone: torch.save(model.state_dict(), …)"


def load(path: Path) -> Any:
    """What is in a file of ``torch.save``, through ``weights_only``: no code of the file runs.

    Raises:
        ReadError: it is damaged, or holds Python objects other than tensors and plain containers.
    """
    import torch

    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            return torch.load(str(path), mmap=True, **options)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(str(path), **options)  # torch's format before 1.6 cannot be mapped
    except Exception as error:  # torch raises many kinds for a broken file
        said = (str(error).strip().splitlines() or ["Weights only"])[0]
        held = re.search(r"(?i)unsupported (?:global:? (?:GLOBAL )?|class )([\w.]+)", str(error))
        names = [held[1]] if held else [name for name in objects(path) if not re.match(r"torch\.|collections\.", name)]
        if "DTensor" in str(error) or any("DTensor" in n or "sharded_tensor" in n for n in [*names, *objects(path)]):
            why = "holds a rank's part of sharded tensors; gather them (full_tensor()), or get_model_state_dict with "
            why += "full_state_dict=True, and save that"
        elif names:
            why = f"unsafe, refused: holds Python objects, {names[0]}, which may run code when loaded"
            why += f"{megatron([path.stem])}; {_ALONE}"
        else:
            kind = type(error).__name__ if said.startswith("Weights only") else said  # a page of advice
            why = f"damaged, or not from torch.save ({kind})"
        raise ReadError(f"{path}: {why}") from error


def objects(path: Path) -> list[str]:
    """Names of the classes and functions that a pickle asks for, without running it; none where it is no pickle."""
    found: list[str] = []
    strings: list[str] = []
    with contextlib.suppress(Exception):  # of a broken file, what came before its fault
        for code, value, _ in pickletools.genops(_head(path)):
            if code.name in ("GLOBAL", "INST"):
                found.append(str(value).replace(" ", "."))
            elif code.name == "STACK_GLOBAL":
                found.append(".".join(strings[-2:]))
            elif isinstance(value, str):
                strings.append(value)
    return found


def _head(path: Path, size: int = 1 << 26) -> bytes:
    """The pickle of a file of ``torch.save``; without the values, it is small."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            return file.read(size)
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        with archive.open(name) as inside:
            return inside.read(size)


def weights(loaded: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The state dict in what was loaded, and what beside it is left out, with the reason. Training states are not told.

    Raises:
        ReadError: several parts hold tensors, and which are the weights cannot be told.

    >>> import torch
    >>> w = {"w": torch.ones(2)}
    >>> weights({"net": w, "lr": torch.tensor(0.1), "optimizer": {"state": {0: torch.ones(2)}, "param_groups": []}})
    ({'w': tensor([1., 1.])}, {'lr': 'stored beside net'})
    >>> sorted(weights({"model": w, "ema": w})[1].items())
    [('ema', 'an average of the weights, beside model')]
    """
    import torch

    left_out: dict[str, str] = {}
    above = ""
    while isinstance(loaded, dict):
        if any(key in loaded for key in ("param_groups", "exp_avg", "momentum_buffer")):
            raise ReadError(f"holds the state of an optimizer, and no weights; {_ALONE}")
        here = {str(k): v for k, v in loaded.items() if torch.is_tensor(v)}
        held = {str(k): v for k, v in loaded.items() if str(k) not in here and any(_tensors(v))}
        if not held:
            return here, left_out
        likely = {k: v for k, v in held.items() if not _is_training(k, v) and not _COPY.search(k)}
        known = [k for k in _WEIGHTS if isinstance(likely.get(k), dict)]
        averages = {"state_dict"} if known[:1] == ["current_model_state"] else set()
        rivals = [k for k, v in likely.items() if k not in known[:1] and k not in averages and _named(v)]
        values = [k for k, v in here.items() if v.is_floating_point() and v.dim()]
        if known and not rivals and not (above and values):
            key = known[0]
        elif len(likely) == 1 and not values and isinstance(next(iter(likely.values())), dict):
            key = next(iter(likely))
        else:
            inside = f" in {above.rstrip('.')}" if above else ""
            beside = f", beside {values[0]}" if values else ""
            names = ", ".join(list(held)[:4])
            why = f"{names}{inside} {'holds' if len(held) == 1 else 'hold'} tensors{beside}, and which are the weights"
            raise ReadError(f"{why} cannot be told{megatron({*held, *above.split('.')})}; {_ALONE}")
        for other in [*here, *held]:
            if other in averages or _COPY.search(other):
                left_out[above + other] = f"an average of the weights, beside {above}{key}"
            elif other in here or (other != key and (other in likely or _named(held[other]))):
                left_out[above + other] = f"stored beside {above}{key}"
        loaded, above = held[key], f"{above}{key}."
    return {}, left_out


def _is_training(key: str, value: Any) -> bool:
    return bool(_TRAINING.search(key)) or (isinstance(value, dict) and "param_groups" in value)


def _tensors(value: Any, name: str = "", seen: set[int] | None = None) -> Iterator[str]:
    """A name for each tensor in nested containers, which may hold themselves; never an empty one."""
    import torch

    seen = set() if seen is None else seen
    if torch.is_tensor(value):
        yield name or "."
    elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
        seen.add(id(value))
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(inner, f"{name}.{key}", seen)


def _named(value: Any) -> bool:
    """Whether tensors have the names of weights."""
    return any(name.endswith(("weight", "bias")) for name in _tensors(value))


def stored(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a state dict by name, and which are tied: those that share storage.

    Raises:
        ReadError: one is not dense, or has no values.
    """
    import torch

    names = {getattr(torch, t): n for t, n in zip(("float64", "float32", "float16", "bfloat16"), FLOATS, strict=True)}
    seen: dict[object, str] = {}
    found, ties = {}, {}
    for name in sorted(state, key=originals_first):
        value = state[name].detach()
        if why := _why_unreadable(value):
            raise ReadError(f"tensor {name} {why}")
        storage = (value.data_ptr(), value.shape, value.stride())
        if value.numel() and storage in seen:
            ties[name] = f"tied to {seen[storage]}"
            continue
        seen[storage] = name
        other = "F?" if value.is_floating_point() else str(value.dtype)
        found[name] = Tensor(names.get(value.dtype, other), tuple(value.shape), _reader(value))
    return found, ties


def _why_unreadable(value: Any) -> str | None:
    import torch

    if value.is_quantized:
        return f"is {value.dtype}: a quantised model; its norm cannot be read from the file"
    if value.is_nested or value.layout != torch.strided:
        return f"is sparse or nested ({value.layout}); save it dense, with to_dense() or to_padded_tensor()"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(value).__name__}, in parts or packed; save it whole, with full_tensor() or dequantize()"
    return "has no values: it is on the device meta" if value.is_meta else None


def _reader(value: Any) -> Callable[[int, NDArray[np.float64]], None]:
    @cache
    def flat() -> Any:
        return value.reshape(-1)  # a copy for a transposed tensor: once, and only if it is read

    def read(first: int, out: NDArray[np.float64]) -> None:
        np.copyto(out, flat()[first : first + len(out)].double().numpy())

    return read
