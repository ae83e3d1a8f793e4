"""The weights of one checkpoint, read from its files without building a model. Stored code never runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normgrowth.checkpoints import conventions, copies, files, layouts, mapped, optimizers, parts, quantised
from normgrowth.checkpoints.comparisons import in_one_memory
from normgrowth.checkpoints.containers import Contents
from normgrowth.checkpoints.files import MERGE
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.optimizers import Trained
from normgrowth.checkpoints.parts import Part
from normgrowth.checkpoints.tensors import FLOATS, Shape, Tensor
from normgrowth.layers import layer_of

_WRAPPER = re.compile(
    r"^(?:module\.)+|(?:(?<=^)|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_ADAPTER = re.compile(  # of PEFT
    r"(?:^|\.)(?:base_layer|modules_to_save|lora_\w+|ia3_l|vera_\w+|hada_\w+|lokr_\w+|b?oft_[Rs]|ranknum|trainable_tokens_"
    r"\w+)(?:\.|$)"
)
_AVERAGE = re.compile(r"^(?:module\.|model\.)*(?:ema|ema_model|model_ema|averaged_model|swa_model)\.(?:module\.)*")
_EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state() of a module gives
_TIED = ("embeddings", "head")  # layers whose tensors may be tied to each other
ADAPTER_ALONE = "an adapter alone: its own norm, without the model that it belongs to"


@dataclass
class Weights:
    """Parameters of one checkpoint, by name without wrappers' prefixes, and stored tensors left out, with reasons."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    doubtful: dict[str, Tensor] = field(default_factory=dict)  # left out by a convention, which a class may overrule
    trained: Trained = field(default_factory=Trained)
    notes: list[str] = field(default_factory=list)
    place: Path = Path()

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tensor.shape for name, tensor in self.parameters.items()}

    @property
    def is_adapter(self) -> bool:
        return ADAPTER_ALONE in self.notes

    @property
    def folder(self) -> Path:
        """Where a configuration may lie."""
        return self.place if self.place.is_dir() else self.place.parent


def read(place: Path) -> Weights:
    """The weights of a checkpoint, which is one file or a folder with one or several files.

    Raises:
        ReadError: no weights are there, or not all of them; they cannot be read; or they are quantised, or parts.
    """
    weights = Weights(place=place)
    path = place  # the file that an error names
    try:
        found = parts.parts(place)
        weights.left_out |= found.left_out
        contents = {}
        for part in found.parts:
            path = part.path
            contents[path] = _contents(part)
            _add(weights, part, contents[path])
        path = place
        _judge_indices(weights, found.parts)
        _judge(weights, contents, found.is_adapter)
    except ReadError as error:
        raise ReadError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise ReadError(f"{error.filename or path}: {error.strerror or error}") from error
    return weights


def _contents(part: Part) -> Contents:
    """The tensors in a file or in a folder of parts, whatever wrote it: the first bytes say what it is."""
    if part.path.is_dir():
        from normgrowth.checkpoints import distributed

        return distributed.read(part.path)
    with part.path.open("rb") as file:
        begin = file.read(16)
    if begin.startswith(b"version "):
        raise ReadError("a Git LFS pointer, not the weights (git lfs pull fetches them)")
    if begin.startswith(b"GGUF") or part.path.suffix == ".gguf":
        from normgrowth.checkpoints import gguf_files

        return gguf_files.read(part.path)
    if part.path.suffix == ".safetensors" or files.is_safetensors(begin):
        return Contents(mapped.tensors(part.path))
    from normgrowth.checkpoints import pickles

    return pickles.read(part.path)


def _add(weights: Weights, part: Part, contents: Contents) -> None:
    """Add the tensors of a file to ``weights``, each once, but for those that the file itself calls buffers."""
    weights.left_out |= {part.prefix + name: why for name, why in contents.left_out.items()}
    weights.notes += [note for note in contents.notes if note not in weights.notes]
    if contents.trained:
        weights.trained = contents.trained
    for stored, tensor in contents.tensors.items():
        name = part.prefix + _without_wrappers(stored)
        if name in weights.parameters or name in weights.left_out:
            raise ReadError(f"tensor {name} is there twice")
        if stored in contents.buffers or stored in contents.trained.buffers:
            weights.left_out[name] = "buffer"
        else:
            weights.parameters[name] = tensor


def _judge_indices(weights: Weights, all_parts: Sequence[Part]) -> None:
    """Note the embeddings and output layers of an index that no file has: converters drop those that are tied.

    Raises:
        ReadError: another tensor of an index is in no file, or a dropped one is not tied to any that is stored.
    """
    stored = [name for name, tensor in weights.parameters.items() if len(tensor.shape) > 1]
    has_table = any(layer_of(name) in _TIED for name in stored)
    all_indexed = [(part, name) for part in all_parts for name in part.indexed]
    for part, indexed in all_indexed:
        name = part.prefix + _without_wrappers(indexed)
        is_there = name in weights.parameters or not {name, part.prefix + indexed}.isdisjoint(weights.left_out)
        if is_there or name.endswith(_EXTRA_STATE):
            continue
        if layer_of(name) not in _TIED or not has_table:
            raise ReadError(f"{part.path.name}: the index says that {indexed} is in it, and it is not")
        weights.left_out[name] = "in the index and in no file, as tied weights are"


def _without_wrappers(name: str) -> str:
    """A name without the prefixes that wrappers of modules add, in whatever order."""
    while (shorter := _WRAPPER.sub("", name)) != name:
        name = shorter
    return name


def _judge(weights: Weights, contents: Mapping[Path, Contents], is_adapter: bool) -> None:
    """Keep the parameters alone, and say of every other tensor why it is none.

    Raises:
        ReadError: what is stored is not the parameters of a model, or not as numbers.
    """
    stored = weights.parameters
    if why := layouts.why_part(weights.shapes):
        raise ReadError(why)
    _judge_second_models(weights, [name for name in contents])
    _judge_adapter(weights, is_adapter)
    all_names = set(stored) | set(weights.left_out)
    named = conventions.by_name(all_names)
    integers = {}
    for name, tensor in list(stored.items()):
        if name.endswith(_EXTRA_STATE):
            weights.left_out[name] = "extra state of a module"
            del stored[name]
            continue
        if tensor.dtype in FLOATS:
            continue
        if tensor.dtype.startswith(("int", "uint", "bool")):
            integers[name] = stored.pop(name)
            is_count = name.endswith("n_averaged")
            why = "counts averages: the weights beside it are averages (AveragedModel)" if is_count else None
            weights.left_out[name] = why or "not floating point"
        elif name in named:
            weights.left_out[name] = named[name]
            del stored[name]
        else:
            known = ", ".join(f"torch.{dtype}" for dtype in FLOATS)
            raise ReadError(f"tensor {name} has dtype torch.{tensor.dtype}; known are {known}")
    quantised.refuse(integers, stored, lambda name: _is_buffer_of_class(weights, name))
    for name, why in conventions.reasons(stored, named).items():
        weights.left_out[name] = why
        weights.doubtful[name] = stored.pop(name)
    _leave_out_averages(weights)
    _leave_out_ties(weights)
    _leave_out_followers(weights)
    if not weights.parameters:
        raise ReadError("holds no parameters")


def _is_buffer_of_class(weights: Weights, name: str) -> bool:
    """Whether the class in the configuration, if it is known, calls a tensor a buffer."""
    if not (weights.folder / "config.json").is_file():
        return False
    from normgrowth.checkpoints import classes

    kind = classes.of_folder(weights.folder, weights.parameters.keys())
    return kind is not None and name in kind.buffers


def _judge_second_models(weights: Weights, paths: list[Path]) -> None:
    """Leave out a second model that has the names and shapes of the first; say of another one that it counts."""
    prefixes = {f"{path.name.partition('.')[0]}.": path.name for path in paths[1:]}
    shapes = weights.shapes
    for prefix, file in prefixes.items():
        second = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
        first = {name: shape for name, shape in shapes.items() if not name.startswith(tuple(prefixes))}
        if second and second == first:
            weights.left_out[file] = "a second model with the names and shapes of the first, such as an average"
            for name in second:
                del weights.parameters[prefix + name]
        elif second:
            weights.notes.append(f"{file}: a second model, counted with the first")


def _judge_adapter(weights: Weights, is_adapter: bool) -> None:
    """Note that the tensors are those of an adapter alone; raise ReadError for one that lies in its model, unmerged."""
    of_adapter = [name for name in weights.parameters if _ADAPTER.search(name)]
    if is_adapter or (of_adapter and len(of_adapter) == len(weights.parameters)):
        weights.notes.append(ADAPTER_ALONE)
        of_adapter = [name for name in of_adapter if "base_layer" in name]
    if of_adapter:
        raise ReadError(f"{of_adapter[0]} belongs to an adapter that is not merged: {MERGE}")


def _leave_out_averages(weights: Weights) -> None:
    """Leave out averages of weights: tensors with the names and shapes of others, after a prefix such as ``ema.``.

    Raises:
        ReadError: a name has such a prefix, but the weights that it would be an average of are not there.
    """
    shapes = weights.shapes
    # Some trainers write the names of averages without dots.
    averages = {name: _AVERAGE.sub("", name).replace(".", "") for name in shapes if _AVERAGE.match(name)}
    if not averages:
        return
    originals = {name: shape for name, shape in shapes.items() if name not in averages}
    wanted = [(name_without_dots, shapes[name]) for name, name_without_dots in averages.items() if shapes[name]]
    has_originals = any(rest.issuperset(wanted) for rest in _rests_by_prefix(originals).values())
    covers_half = 2 * len(wanted) >= len(originals)
    if wanted and not (has_originals and covers_half):
        first = next(iter(averages))
        raise ReadError(f"{first} may be an average of weights or a weight: save model.state_dict() alone")
    for name in averages:
        del weights.parameters[name]
        weights.left_out[name] = "an average of the weights"


def _leave_out_followers(weights: Weights) -> None:
    """Leave out modules that follow others, and note those that may."""
    followers, notes = copies.following(weights.parameters, weights.trained)
    for name, why in followers.items():
        weights.left_out[name] = why
        weights.doubtful[name] = weights.parameters.pop(name)
    weights.notes += notes


def _leave_out_ties(weights: Weights) -> None:
    """Leave out tensors whose values are those of another one that may count, in the same memory.

    No tensor is tied to one that the optimizer does not train, such as a flat buffer of which the parameters are parts.
    """
    shapes = weights.shapes
    untrained = optimizers.untrained(shapes, weights.trained) if weights.trained else set()
    sizes = {math.prod(shape) for name, shape in shapes.items() if name not in untrained}
    may_count = {
        name: tensor for name, tensor in weights.parameters.items() if name not in untrained or tensor.size in sizes
    }
    for alias, original in in_one_memory(may_count).items():
        weights.left_out[alias] = f"tied to {original}"
        del weights.parameters[alias]


def _rests_by_prefix(shapes: Mapping[str, Shape]) -> dict[str, set[tuple[str, Shape]]]:
    """For each prefix of the names: the rest of each name, without dots, and the shape of its tensor."""
    rests: dict[str, set[tuple[str, Shape]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        for i in range(len(parts)):
            prefix = ".".join(parts[:i])
            rests.setdefault(prefix, set()).add(("".join(parts[i:]), shape))
    return rests
