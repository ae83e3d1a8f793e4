"""The parts of a checkpoint: its files, those of second models and modules, and what lies beside them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from normgrowth.checkpoints import distributed, files, layouts
from normgrowth.checkpoints.containers import AVERAGE
from normgrowth.checkpoints.layouts import ReadError


@dataclass
class Part:
    """A file, or a folder of parts, with tensors of a checkpoint; ``prefix`` is that of a second model's names."""

    path: Path
    prefix: str = ""
    indexed: Sequence[str] = ()  # tensors that an index says are in it


@dataclass
class Parts:
    """All parts of a checkpoint; what lies beside them and is not counted; and whether it is an adapter alone."""

    parts: list[Part]
    left_out: dict[str, str] = field(default_factory=dict)
    is_adapter: bool = False


def places_with_weights(place: Path) -> list[Path]:
    """The place itself if it holds weights, otherwise the folders in it that do."""
    if files.holds_weights(place):
        return [place]
    return [place / name for name in _modules(place)] if place.is_dir() else []


def _modules(place: Path) -> Iterator[str]:
    """The folders in a folder that hold weights, but for those of optimizers."""
    for name in files.listing(place):
        if name.endswith("/") and not files.OTHER_FILES.search(name) and files.holds_weights(place / name):
            yield name.rstrip("/")


def parts(place: Path) -> Parts:
    """The files of a checkpoint, which is one file or a folder.

    Raises:
        ReadError: no weights are there, or not all of them, or it is unclear which they are.
    """
    if not place.is_dir():
        if why := layouts.why_refused([place.name]) or layouts.why_shard(place.name):
            raise ReadError(why)
        has_config = (place.parent / "adapter_config.json").is_file() and place.name.startswith("adapter_model")
        return Parts([Part(place)], is_adapter=has_config or bool(files.ADAPTER.search(place.name)))
    names = files.listing(place)
    modules = list(_modules(place))
    declared = _declared(place, names)
    if not files.holds_weights(place) and modules:
        return _in_folders(place, modules, declared)
    top = _at_top(place, names)
    for name in modules:
        if name in declared:
            top.parts += [Part(part.path, f"{name}.") for part in parts(place / name).parts]
        else:
            kind = "an average of the weights" if AVERAGE.search(name) else "holds weights too"
            top.left_out[f"{name}/"] = f"{kind}, not counted"
    return top


def _at_top(place: Path, names: list[str]) -> Parts:
    """The files at the top of a folder."""
    has_whole = not set(files.WHOLE).isdisjoint(names)
    if distributed.is_distributed(names) and not has_whole:
        return Parts([Part(place)])
    candidates = [
        name for name in names if name.endswith("/") or files.is_weights(place / name) or name.endswith(".json")
    ]
    pickles = [name for name in candidates if name.endswith(files.PICKLES)]
    if len(pickles) > 1:  # trainers keep counters and the like in files of one suffix with the weights
        others = [name for name in candidates if name not in pickles or not _is_of_training(place / name)]
        has_weights = any(name in others for name in pickles)
        if has_weights and not layouts.why_refused(names):  # a layout is told by all its files
            candidates = others
    chosen = files.weight_files(candidates, odd=[name for name in candidates if not name.endswith((".json", "/"))])
    left_out = {}
    indexed: dict[str, list[str]] = {}
    if chosen[0].endswith(".index.json"):
        index = chosen[0]
        indexed = files.shards_of(place / index)
        chosen = list(indexed)
        missing = [shard for shard in chosen if not (place / shard).is_file()]
        if missing:
            count = f"{len(missing)} of {len(chosen)} missing"
            raise ReadError(f"{index} names {missing[0]}, which is not there ({count})")
    found = Parts([Part(place / name, "", indexed.get(name, ())) for name in chosen])
    found.is_adapter = bool(files.ADAPTER.search(chosen[0]))
    beside = [name for name in candidates if name not in chosen and not name.endswith(("/", ".json"))]
    for name in beside:
        if files.SECOND.fullmatch(name):
            found.parts.append(Part(place / name, f"{name.partition('.')[0]}."))
        elif not files.OTHER_FILES.search(name):
            what = "an adapter" if files.ADAPTER.search(name) else "weights too"
            left_out[name] = f"{what}, beside {chosen[0]}: not counted"
    found.left_out = left_out
    return found


def _is_of_training(file: Path) -> bool:
    """Whether a file of weights by its suffix holds text, or objects without any matrix of floating numbers."""
    if files.is_text(file):
        return True
    if files.OTHER_FILES.search(file.name):
        return False  # by its name: not a candidate, and maybe large
    from normgrowth.checkpoints import pickles

    return not pickles.may_hold_weights(file)


def _is_all_of_training(folder: Path) -> bool:
    """Whether no file of a folder has a matrix, as those of ranks with a trainer's counts have none."""
    names = files.listing(folder)
    stored = [folder / name for name in names if not name.endswith("/") and files.is_weights(folder / name)]
    is_pickled = bool(stored) and all(file.name.endswith(files.PICKLES) for file in stored)
    return is_pickled and not distributed.is_distributed(names) and all(map(_is_of_training, stored))


def _in_folders(place: Path, modules: list[str], declared: Collection[str]) -> Parts:
    """The one folder with weights, or all modules that the checkpoint declares."""
    averages = [name for name in modules if AVERAGE.search(name)]
    originals = [name for name in modules if name not in averages] or averages
    left_out = {f"{name}/": "an average of the weights, not counted" for name in modules if name not in originals}
    if len(originals) > 1 and not declared:
        originals = [name for name in originals if not _is_all_of_training(place / name)] or originals
    chosen = [name for name in originals if name in declared] or originals
    if len(chosen) > 1 and not declared:
        raise ReadError(f"{len(chosen)} folders with weights, {', '.join(chosen[:3])}: give one of them")
    found = Parts([], left_out)
    for name in chosen:
        prefix = f"{name}." if len(chosen) > 1 else ""
        inner = parts(place / name)
        found.parts += [Part(part.path, prefix + part.prefix) for part in inner.parts]
        found.is_adapter |= inner.is_adapter
    left_out |= {f"{name}/": "holds weights too, not counted" for name in originals if name not in chosen}
    return found


def _declared(place: Path, names: Collection[str]) -> set[str]:
    """Folders of the modules that a checkpoint of sentence-transformers or diffusers names."""
    declared: set[str] = set()
    for file in files.MODULES:
        if file in names:
            with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
                content = json.loads((place / file).read_text(encoding="utf-8"))
                paths = [entry["path"] for entry in content] if isinstance(content, list) else list(content)
                declared |= {str(path) for path in paths}
    return declared
