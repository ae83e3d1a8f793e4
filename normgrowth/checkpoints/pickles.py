"""What ``torch.save`` has written: which of its tensors are the model's weights."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from normgrowth.checkpoints.layouts import ReadError, megatron

_WEIGHTS = ("current_model_state", "state_dict", "model_state_dict", "model", "module")
_TRAINING = re.compile(  # what else a trainer keeps
    r"optim|sched|scaler|rng|random|loops|callbacks|criterion|loss|metric|history|sampler|hparams|hyper_param|config"
    r"|args|frozen_param|extra_state|task_state|averaging_state|(?:^|_)(?:data|grad|amp|opt)", re.I
)  # fmt: skip
_COPY = re.compile(r"(?:^|_)(?:ema|swa|averaged?)(?:_|$)|shadow", re.I)
_ALONE = "save the weights alone: torch.save(model.state_dict(), …)"
_CODE = "which may run code when loaded"
_DEPTH = 9  # of dictionaries in dictionaries: one may hold itself


def state_dict(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The weights in a file of ``torch.save``, and what is left out beside them and why; training states are not."""
    mapped = zipfile.is_zipfile(path)  # torch's format before 1.6 cannot be mapped
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises many kinds for a broken file
        raise ReadError(_why_refused(path, error)) from error
    return _weights(loaded)


def _why_refused(path: Path, error: Exception) -> str:
    try:
        unsafe = sorted(get_unsafe_globals_in_checkpoint(path))
    except Exception:  # damaged, of torch before 1.6, or pickled by a protocol that torch does not read
        unsafe = []
    if "DTensor" in str(error) or any("DTensor" in name or "sharded_tensor" in name for name in unsafe):
        gather = "gather them (full_tensor()), or get_model_state_dict with full_state_dict=True, and save that"
        return f"holds a rank's part of sharded tensors; {gather}"
    if unsafe:
        names = ", ".join(unsafe[:3])
        return f"unsafe, refused: holds Python objects, {names}, {_CODE}{megatron([path.stem])}; {_ALONE}"
    first = str(error).strip().partition(". ")[0]
    kind = type(error).__name__ if not first or first.startswith("Weights only") else first  # a page of advice
    return f"refused: damaged, not from torch.save, or with Python objects, {_CODE} ({kind}); {_ALONE}"


def _weights(loaded: Any) -> tuple[dict[str, Any], dict[str, str]]:
    left_out: dict[str, str] = {}
    above = ""
    while isinstance(loaded, dict) and above.count(".") < _DEPTH:
        if any(key in loaded for key in ("param_groups", "exp_avg", "momentum_buffer")):
            raise ReadError(f"holds the state of an optimizer, and no weights; {_ALONE}")
        here = {str(k): v for k, v in loaded.items() if torch.is_tensor(v)}
        held = {str(k): v for k, v in loaded.items() if str(k) not in here and any(_tensors(v))}
        if not held:
            return here, left_out
        copies = {k for k in [*here, *held] if _COPY.search(k)}
        if "current_model_state" in held:  # of Lightning, whose state_dict has averages then
            copies.add("state_dict")
        rest = {k: v for k, v in held.items() if k not in copies}
        likely = {k: v for k, v in rest.items() if not _TRAINING.search(k) and "param_groups" not in v}
        values = [k for k, v in here.items() if v.is_floating_point() and v.dim()]  # no scalars, no counts
        key = _chosen(likely, bool(values), above)
        if key is None:
            names = ", ".join([*held][:4]) + (f" in {above.rstrip('.')}" if above else "")
            hold = "holds" if len(held) == 1 else "hold"
            beside, tool = f", beside {values[0]}" if values else "", megatron({*held, *above.split(".")})
            raise ReadError(f"{names} {hold} tensors{beside}, and which are the weights is unclear{tool}; {_ALONE}")
        for other in [*here, *held]:
            if other in copies:
                left_out[above + other] = f"an average of the weights, beside {above}{key}"
            elif other in here or (other != key and (other in likely or _named(held[other]))):
                left_out[above + other] = f"stored beside {above}{key}"
        loaded, above = held[key], f"{above}{key}."
    return {}, left_out


def _chosen(likely: Mapping[str, Any], values: bool, above: str) -> str | None:
    """The key of the weights: a known one that nothing rivals, or that of the one dictionary; None if it is unclear."""
    known = next((key for key in _WEIGHTS if isinstance(likely.get(key), dict)), None)
    rivals = any(_named(value) for key, value in likely.items() if key != known)
    if known and not rivals and not (above and values):
        return known
    alone = next(iter(likely), "")
    return alone if len(likely) == 1 and not values and isinstance(likely[alone], dict) else None


def _tensors(value: Any, name: str = "", seen: set[int] | None = None) -> Iterator[str]:
    """A name for each tensor in nested containers, which may hold themselves; never an empty one."""
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
