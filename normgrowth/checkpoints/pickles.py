"""Files of ``torch.save``: which of the tensors in them are the model's weights."""

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
_TRAINING = re.compile(  # keys of what a trainer stores beside the weights
    r"optim|sched|scaler|rng|random|loops|callbacks|criterion|loss|metric|history|sampler|hparams|hyper_param|config"
    r"|args|frozen_param|extra_state|task_state|averaging_state|(?:^|_)(?:data|grad|amp|opt)", re.I
)  # fmt: skip
_COPY = re.compile(r"(?:^|_)(?:ema|swa|averaged?)(?:_|$)|shadow", re.I)
_ALONE = "save the weights alone: torch.save(model.state_dict(), …)"
_CODE = "which may run code when loaded"
_DEPTH = 9  # of dictionaries in dictionaries: one may hold itself


def state_dict(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The weights in a file of ``torch.save``, and what is left out beside them and why.

    The state of an optimizer, and what else a trainer needs to go on, is not listed there.
    """
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
    reason = str(error).strip().partition(". ")[0]
    if not reason or reason.startswith("Weights only"):  # the latter begins a page of advice
        reason = type(error).__name__
    return f"refused: damaged, not from torch.save, or with Python objects, {_CODE} ({reason}); {_ALONE}"


def _weights(loaded: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The dictionary of weights, which may lie in other dictionaries, and what is left out beside it and why."""
    left_out: dict[str, str] = {}
    path = ""  # keys of the dictionaries around ``loaded``, each with a dot after it
    while isinstance(loaded, dict) and path.count(".") < _DEPTH:
        if any(key in loaded for key in ("param_groups", "exp_avg", "momentum_buffer")):
            raise ReadError(f"holds the state of an optimizer, and no weights; {_ALONE}")
        if loaded.keys() == {"layers", "steps", "at", "sums"}:  # as NormTracker.state_dict returns it
            raise ReadError("holds the history of a NormTracker (norms.pt of the callbacks), and no weights")
        tensors = {str(key): value for key, value in loaded.items() if torch.is_tensor(value)}
        others = {str(key): value for key, value in loaded.items() if str(key) not in tensors}
        containers = {key: value for key, value in others.items() if any(_tensor_names(value))}
        if not containers:
            return tensors, left_out
        copies = {key for key in [*tensors, *containers] if _COPY.search(key)}
        if "current_model_state" in containers:  # of Lightning, which then keeps averages in state_dict
            copies.add("state_dict")
        originals = {key: value for key, value in containers.items() if key not in copies}
        likely = {
            key: value for key, value in originals.items() if not _TRAINING.search(key) and "param_groups" not in value
        }
        chosen = _key_of_weights(tensors, containers, likely, path)
        for key in [*tensors, *containers]:
            if key in copies:
                left_out[path + key] = f"an average of the weights, beside {path}{chosen}"
            elif key in tensors or (key != chosen and (key in likely or _has_names_of_weights(containers[key]))):
                left_out[path + key] = f"stored beside {path}{chosen}"
        loaded = containers[chosen]
        path = f"{path}{chosen}."
    return {}, left_out


def _key_of_weights(
    tensors: Mapping[str, torch.Tensor], containers: Mapping[str, Any], likely: Mapping[str, Any], path: str
) -> str:
    """The key, among the ``likely`` ones, of the container that holds the weights.

    That is a usual name for weights, if nothing rivals it, or else the one likely dictionary.

    Raises:
        ReadError: which container holds them is unclear.
    """
    beside = [key for key, value in tensors.items() if value.is_floating_point() and value.dim()]  # values, not counts
    usual = next((key for key in _WEIGHTS if isinstance(likely.get(key), dict)), None)
    has_rivals = any(_has_names_of_weights(value) for key, value in likely.items() if key != usual)
    if usual and not has_rivals and not (path and beside):
        return usual
    only = next(iter(likely), "")
    if len(likely) == 1 and not beside and isinstance(likely[only], dict):
        return only
    names = ", ".join([*containers][:4])
    place = f" in {path.rstrip('.')}" if path else ""
    hold = "holds" if len(containers) == 1 else "hold"
    rival = f", beside {beside[0]}" if beside else ""
    tool = megatron({*containers, *path.split(".")})
    raise ReadError(f"{names}{place} {hold} tensors{rival}, and which are the weights is unclear{tool}; {_ALONE}")


def _tensor_names(value: Any, name: str = "", visited: set[int] | None = None) -> Iterator[str]:
    """A name, never empty, for each tensor in nested containers, which may hold themselves."""
    visited = set() if visited is None else visited
    if torch.is_tensor(value):
        yield name or "."
    elif isinstance(value, dict | list | tuple | set) and id(value) not in visited:
        visited.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _tensor_names(inner, f"{name}.{key}", visited)


def _has_names_of_weights(value: Any) -> bool:
    return any(name.endswith(("weight", "bias")) for name in _tensor_names(value))
