"""Which tensors in nested containers, as trainers save them, are the model's weights, and what stands beside them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from normgrowth.checkpoints import conventions
from normgrowth.checkpoints.comparisons import in_one_memory
from normgrowth.checkpoints.layouts import ReadError, megatron
from normgrowth.checkpoints.optimizers import Trained, trained
from normgrowth.checkpoints.tensors import FLOATS, Shape, Tensor, of_torch
from normgrowth.checkpoints.unpickler import Inert

_WEIGHTS = ("current_model_state", "state_dict", "model_state_dict", "model", "module")
_TRAINING = re.compile(  # keys of what a trainer stores beside the weights
    r"optim|sched|scaler|rng|random|loops|callbacks|criterion|loss|metric|history|sampler|hparams|hyper_param|config"
    r"|args|frozen_param|extra_state|task_state|averaging_state|dataloader|train_state|(?:^|_)(?:data|grad|amp|opt)",
    re.I,
)
AVERAGE = re.compile(
    r"(?i:(?:^|[^a-z])(?:ema|swa|avg|averaged?|polyak)(?:[^a-z]|$|_?model)|shadow)|(?<=[a-z])(?:EMA|Ema|SWA)(?![a-z])"
)
_BEST = re.compile(r"(?:^|_)best(?:_|$)", re.I)  # a copy of earlier weights
ALONE = "save the weights alone: torch.save(model.state_dict(), …)"
_DEPTH = 9  # of dictionaries in dictionaries: one may hold itself


class Chosen(NamedTuple):
    """The dictionary of weights, which of them a pickled module calls buffers, and what is left out beside it."""

    tensors: dict[str, Any]
    buffers: set[str]
    left_out: dict[str, str]
    notes: list[str]


@dataclass
class Contents:
    """The tensors in one file, those that the file itself calls buffers, and what optimizers in it train."""

    tensors: dict[str, Tensor]
    buffers: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    trained: Trained = field(default_factory=Trained)
    notes: list[str] = field(default_factory=list)


def is_tensor(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def weights(tree: Any) -> Chosen:
    """The dictionary of weights, which may lie in other dictionaries, and what is left out beside it and why.

    The state of an optimizer, and what else a trainer needs to go on, is not listed there.

    Raises:
        ReadError: there are no weights, only parts of them, or it is unclear which they are.
    """
    left_out: dict[str, str] = {}
    notes: list[str] = []
    path = ""  # keys of the dictionaries around ``tree``, each with a dot after it
    if isinstance(tree, list | tuple):
        has_dictionaries = any(isinstance(value, dict) for value in tree)
        tree = dict(enumerate(tree)) if has_dictionaries else {"the list": tree}
    elif is_tensor(tree):
        raise ReadError(f"holds one tensor without a name, which may be anything; {ALONE}")
    while isinstance(tree, dict) and path.count(".") < _DEPTH:
        if _is_module(tree):
            return _of_module(tree, left_out, notes)
        _refuse_foreign(tree)
        if any(key in tree for key in ("param_groups", "exp_avg", "momentum_buffer")):
            raise ReadError(f"holds the state of an optimizer, and no weights; {ALONE}")
        tensors = {str(key): value for key, value in tree.items() if is_tensor(value)}
        others = {str(key): value for key, value in tree.items() if str(key) not in tensors}
        containers = {key: value for key, value in others.items() if any(_tensor_names(value))}
        if not containers:
            return Chosen(tensors, set(), left_out, notes)
        copies = {key for key in [*tensors, *containers] if AVERAGE.search(key)}
        best = {key for key in containers if _BEST.search(key)} if len(containers) > 1 else set()
        if "current_model_state" in containers:  # of Lightning, which then keeps averages in state_dict
            copies.add("state_dict")
        originals = {key: value for key, value in containers.items() if key not in copies | best}
        likely = {key: value for key, value in originals.items() if not _is_of_training(key, value)}
        if not likely and any(name.endswith(("weight", "bias")) for name in tensors):
            return Chosen(tensors, set(), left_out, notes)  # a state dict with what a trainer stores in it
        if not likely:
            likely = {key: value for key, value in containers.items() if key in copies and _has_names_of_weights(value)}
            notes += [f"{path}{key}: an average of the weights (EMA), by its name" for key in likely]
            copies -= likely.keys()
        are_together = not path and _are_all_trained(likely, tree)
        if are_together:
            chosen = ", ".join(likely)
            _refuse_loose({key: value for key, value in tensors.items() if key not in copies}, chosen)
        else:
            chosen = _key_of_weights(tensors, containers, likely, path)
        for key in [*tensors, *containers]:
            if key in copies:
                left_out[path + key] = f"an average of the weights, beside {path}{chosen}"
            elif key in best:
                left_out[path + key] = f"a copy of earlier weights, beside {path}{chosen}"
            elif are_together and key in likely:
                continue
            elif key in tensors or (key != chosen and (key in likely or _has_names_of_weights(containers[key]))):
                left_out[path + key] = f"stored beside {path}{chosen}"
        if are_together:
            notes.append(f"{chosen}: trained by one optimizer, and counted together")
            parts = {f"{key}.{name}": value for key, part in likely.items() for name, value in part.items()}
            return Chosen(parts, set(), left_out, notes)
        tree = containers[chosen]
        path = f"{path}{chosen}."
    return Chosen({}, set(), left_out, notes)


def _are_all_trained(dictionaries: Mapping[str, Any], tree: Mapping[str, Any]) -> bool:
    """Whether the one optimizer in a file trains the tensors of several dictionaries, and no others."""
    if len(dictionaries) < 2 or not all(isinstance(value, dict) for value in dictionaries.values()):
        return False
    tensors = {f"{key}.{name}": value for key, part in dictionaries.items() for name, value in part.items()}
    evidence = trained(tree)
    if not evidence.is_ordered or not evidence.shapes or not all(map(is_tensor, tensors.values())):
        return False
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    known = Counter(evidence.shapes)
    return known == Counter(shapes) or (len(shapes) > known.total() and known == Counter(_parameters(tensors)))


def _parameters(tensors: Mapping[str, Any]) -> list[Shape]:
    """Shapes of the tensors of torch that may be parameters: no buffers by convention, and tied ones once."""
    floating = {
        name: of_torch(tensor)
        for name, tensor in tensors.items()
        if str(tensor.dtype).removeprefix("torch.") in FLOATS
        and str(tensor.layout) == "torch.strided"
        and not tensor.is_meta
    }
    buffers = conventions.reasons(floating, conventions.by_name(tensors.keys()))
    rest = {name: tensor for name, tensor in floating.items() if name not in buffers}
    aliases = in_one_memory(rest)
    return [tensor.shape for name, tensor in rest.items() if name not in aliases]


def _refuse_loose(tensors: Mapping[str, Any], chosen: str) -> None:
    """Raise ReadError for floating tensors, but for single numbers, beside dictionaries that are counted together."""
    loose = [key for key, value in tensors.items() if _is_floating(value) and tuple(value.shape)]
    if loose:
        raise ReadError(
            f"{loose[0]} lies beside {chosen}, which one optimizer trains: whether it is a weight is unclear; {ALONE}"
        )


def _is_of_training(key: str, value: Any) -> bool:
    """Whether a container is what a trainer needs to go on: by its key, as an optimizer's, or with counts alone."""
    return bool(_TRAINING.search(key)) or "param_groups" in value or not any(_shapes(value))


def _shapes(value: Any, depth: int = _DEPTH) -> Iterator[tuple[int, ...]]:
    """Shapes of the tensors in nested containers, but for single numbers."""
    if is_tensor(value):
        if len(value.shape):
            yield tuple(value.shape)
    elif isinstance(value, dict | list | tuple | set) and depth:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _shapes(inner, depth - 1)


def has_matrix(value: Any, visited: set[int] | None = None) -> bool:
    """Whether nested containers, which may hold themselves, have a floating tensor of two dimensions or more."""
    visited = set() if visited is None else visited
    if is_tensor(value):
        return len(value.shape) > 1 and _is_floating(value)
    if not isinstance(value, dict | list | tuple | set) or id(value) in visited:
        return False
    visited.add(id(value))
    return any(has_matrix(inner, visited) for inner in (value.values() if isinstance(value, dict) else value))


def _is_module(value: Any) -> TypeGuard[Inert]:
    """Whether an object is a module of torch that was pickled whole: it says itself what its parameters are."""
    return isinstance(value, Inert) and isinstance(value.get("_parameters"), dict) and "_modules" in value


def _of_module(module: Inert, left_out: dict[str, str], notes: list[str]) -> Chosen:
    tensors: dict[str, Any] = {}
    buffers: set[str] = set()
    pending: list[tuple[str, Any]] = [("", module)]
    visited: set[int] = set()
    while pending:
        prefix, part = pending.pop()
        if not _is_module(part) or id(part) in visited:
            continue
        visited.add(id(part))
        pending += [(f"{prefix}{name}.", inner) for name, inner in part["_modules"].items()]
        own = {prefix + str(name): value for name, value in part["_parameters"].items() if is_tensor(value)}
        stored = part.get("_buffers") or {}
        beside = {prefix + str(name): value for name, value in stored.items() if is_tensor(value)}
        tensors |= own | beside
        buffers |= set(beside)
    return Chosen(tensors, buffers, left_out, notes)


def _refuse_foreign(tree: Mapping[Any, Any]) -> None:
    """Raise ReadError for tensors of a class that is not torch's own: those of a rank, or packed."""
    for key, value in tree.items():
        if isinstance(value, Inert) and type(value).__name__.endswith("Tensor"):
            name = type(value).__name__
            if "DTensor" in name or "Sharded" in name:
                raise ReadError(
                    "holds a rank's part of sharded tensors; gather them (full_tensor()), or get_model_state_dict with "
                    "full_state_dict=True, and save that"
                )
            raise ReadError(f"tensor {key} is a {name}, packed or quantised; save it whole, with dequantize()")


def _key_of_weights(
    tensors: Mapping[str, Any], containers: Mapping[str, Any], likely: Mapping[str, Any], path: str
) -> str:
    """The key, among the ``likely`` ones, of the container that holds the weights.

    That is a usual name for weights, if nothing rivals it, or else the one likely dictionary.

    Raises:
        ReadError: which container holds them is unclear.
    """
    beside = [key for key, value in tensors.items() if _is_floating(value) and tuple(value.shape)]  # values, not counts
    usual = next((key for key in _WEIGHTS if isinstance(likely.get(key), dict)), None)
    has_rivals = any(_has_names_of_weights(value) for key, value in likely.items() if key != usual)
    if usual and not has_rivals and not (path and beside):
        return usual
    only = next(iter(likely), "")
    if len(likely) == 1 and not beside and isinstance(likely[only], dict):
        return only
    if packed := next((key for key, value in likely.items() if _has_packed(value)), None):
        raise ReadError(
            f"{packed} holds matrices of integers: a quantised model; its norm cannot be read from the file"
        )
    if not likely and not beside:
        raise ReadError(f"{', '.join([*containers][:4])}: what a trainer needs to go on, and no weights; {ALONE}")
    names = ", ".join([*containers][:4])
    place = f" in {path.rstrip('.')}" if path else ""
    hold = "holds" if len(containers) == 1 else "hold"
    rival = f", beside {beside[0]}" if beside else ""
    tool = megatron({*containers, *path.split(".")})
    raise ReadError(f"{names}{place} {hold} tensors{rival}, and which are the weights is unclear{tool}; {ALONE}")


def _has_packed(value: Any) -> bool:
    """Whether a dictionary of tensors has a matrix of 8 bits, as quantised layers have."""
    tensors = [inner for inner in value.values() if is_tensor(inner)] if isinstance(value, dict) else []
    return any(len(tensor.shape) > 1 and str(tensor.dtype).endswith("int8") for tensor in tensors)


def _is_floating(tensor: Any) -> bool:
    return "float" in str(tensor.dtype)


def _tensor_names(value: Any, name: str = "", visited: set[int] | None = None) -> Iterator[str]:
    """A name, never empty, for each tensor in nested containers, which may hold themselves."""
    visited = set() if visited is None else visited
    if is_tensor(value):
        yield name or "."
    elif isinstance(value, dict | list | tuple | set) and id(value) not in visited:
        visited.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _tensor_names(inner, f"{name}.{key}", visited)


def _has_names_of_weights(value: Any) -> bool:
    return any(name.endswith(("weight", "bias")) for name in _tensor_names(value))
