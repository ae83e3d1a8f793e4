"""Which files belong to a checkpoint: its weights, in one or several files, and what lies beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from normgrowth.checkpoints import distributed, layouts
from normgrowth.checkpoints.containers import AVERAGE
from normgrowth.checkpoints.layouts import ReadError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pth.tar", ".pt.tar", ".ckpt.tar", ".pkl")
SUFFIXES = (".safetensors", *PICKLES, ".gguf")
MERGE = "merge it into its model first (merge_and_unload)"
OTHER_FILES = re.compile(
    r"^(?!model_(?:and_)?optim)(?:.*)(?:optim|scheduler|training_args|rng_state|random_states|scaler|custom_checkpoint"
    r"|dataloader)|^norms\.pt$",
    re.I,
)
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_ADAPTER = re.compile(r"adapter|lora", re.I)
_SECOND = re.compile(r"(?:model|pytorch_model)_\d+\.(?:safetensors|bin)")  # accelerate's, of several models
_MODULES = ("modules.json", "model_index.json")  # of sentence-transformers and diffusers
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9"  # how torch before 1.6 begins a file


@dataclass
class Part:
    """A file, or a folder of parts, with tensors of a checkpoint; ``prefix`` is that of a second model's names."""

    path: Path
    prefix: str = ""


@dataclass
class Parts:
    """All parts of a checkpoint; what lies beside them and is not counted; and whether it is an adapter alone."""

    parts: list[Part]
    left_out: dict[str, str] = field(default_factory=dict)
    is_adapter: bool = False
    notes: list[str] = field(default_factory=list)


def listing(place: Path) -> list[str]:
    """Names in a folder, sorted; those of folders end with a ``/``."""
    return sorted(f"{inside.name}/" if inside.is_dir() else inside.name for inside in place.iterdir())


def is_weights(file: Path) -> bool:
    """Whether a file holds tensors, by its name or by its first bytes: people write suffixes in many ways."""
    if file.name.endswith(SUFFIXES):
        return True
    if file.name.startswith(".") or file.suffix in (".json", ".txt", ".md", ".py", ".csv", ".log", ".npz", ".zip"):
        return False
    try:
        with file.open("rb") as opened:
            begin = opened.read(128)
    except OSError:
        return False
    is_torch = begin.startswith(_LEGACY) or (begin.startswith(b"PK\x03\x04") and b"/data.pkl" in begin)
    return is_torch or begin.startswith(b"GGUF") or is_safetensors(begin)


def is_safetensors(begin: bytes) -> bool:
    """Whether the first bytes of a file are a length and the JSON of a header."""
    return len(begin) > 8 and begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") < 1 << 30


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            begin = opened.read(64)
            return begin.isascii() and b"\0" not in begin and len(begin) > 0
    except OSError:
        return False


def holds_weights(place: Path) -> bool:
    """Whether a file or folder holds weights, also in a layout that cannot be read: the reason is given later."""
    if not place.is_dir():
        return is_weights(place)
    names = listing(place)
    if distributed.is_distributed(names) or layouts.why_refused(names):
        return True
    files = [name for name in names if not name.endswith("/") and not OTHER_FILES.search(name)]
    return any(name.endswith(".index.json") or is_weights(place / name) for name in files)


def places_with_weights(place: Path) -> list[Path]:
    """The place itself if it holds weights, otherwise the folders in it that do."""
    if holds_weights(place):
        return [place]
    return [place / name for name in _modules(place)] if place.is_dir() else []


def _modules(place: Path) -> Iterator[str]:
    """The folders in a folder that hold weights, but for those of optimizers."""
    for name in listing(place):
        if name.endswith("/") and not OTHER_FILES.search(name) and holds_weights(place / name):
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
        return Parts([Part(place)], is_adapter=has_config or bool(_ADAPTER.search(place.name)))
    names = listing(place)
    modules = list(_modules(place))
    declared = _declared(place, names)
    if not holds_weights(place) and modules:
        return _in_folders(place, modules, declared)
    top = _at_top(place, names)
    for name in modules:
        if name in declared:
            top.parts += [Part(part.path, f"{name}.") for part in parts(place / name).parts]
        else:
            kind = "an average of the weights" if AVERAGE.search(name) else "holds weights too"
            top.left_out[f"{name}/"] = f"{kind}, not counted"
    return top


def is_shard(name: str) -> bool:
    """Whether a file is one of several, by its name."""
    return bool(re.search(r"-\d+-of-\d+\.", name))


def is_one_checkpoint(names: Collection[str]) -> bool:
    """Whether files with these names are one checkpoint: whole, with an index, an adapter, or another library's."""
    has_index = any(name.endswith(".index.json") for name in names)
    is_declared = not {*_WHOLE, *_MODULES, "config.json", "adapter_config.json"}.isdisjoint(names)
    return has_index or is_declared or layouts.why_refused(names) is not None


def _at_top(place: Path, names: list[str]) -> Parts:
    """The files at the top of a folder."""
    has_whole = not set(_WHOLE).isdisjoint(names)
    if distributed.is_distributed(names) and not has_whole:
        return Parts([Part(place)])
    candidates = [name for name in names if name.endswith("/") or is_weights(place / name) or name.endswith(".json")]
    pickles = [name for name in candidates if name.endswith(PICKLES)]
    if len(pickles) > 1:  # SpeechBrain keeps its counters in files of one suffix with the weights
        candidates = [name for name in candidates if name not in pickles or not _is_text(place / name)]
    chosen = weight_files(candidates)
    left_out = {}
    if chosen[0].endswith(".index.json"):
        index = chosen[0]
        chosen = shards_of(place / index)
        missing = [shard for shard in chosen if not (place / shard).is_file()]
        if missing:
            count = f"{len(missing)} of {len(chosen)} missing"
            raise ReadError(f"{index} names {missing[0]}, which is not there ({count})")
    found = Parts([Part(place / name) for name in chosen], is_adapter=bool(_ADAPTER.search(chosen[0])))
    beside = [name for name in candidates if name not in chosen and not name.endswith(("/", ".json"))]
    for name in beside:
        if _SECOND.fullmatch(name):
            found.parts.append(Part(place / name, f"{name.partition('.')[0]}."))
        elif not OTHER_FILES.search(name):
            what = "an adapter" if _ADAPTER.search(name) else "weights too"
            left_out[name] = f"{what}, beside {chosen[0]}: not counted"
    found.left_out = left_out
    return found


def _in_folders(place: Path, modules: list[str], declared: Collection[str]) -> Parts:
    """The one folder with weights, or all modules that the checkpoint declares."""
    averages = [name for name in modules if AVERAGE.search(name)]
    originals = [name for name in modules if name not in averages] or averages
    left_out = {f"{name}/": "an average of the weights, not counted" for name in modules if name not in originals}
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
    for file in _MODULES:
        if file in names:
            with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
                content = json.loads((place / file).read_text(encoding="utf-8"))
                paths = [entry["path"] for entry in content] if isinstance(content, list) else list(content)
                declared |= {str(path) for path in paths}
    return declared


def weight_files(names: Collection[str]) -> list[str]:
    """The names of the weights among those in a folder, or that of their index.

    safetensors come before pickles, and one file with all weights before shards.

    Raises:
        ReadError: no weights are there, several files without an index, or another library's layout.
    """
    whole = set(_WHOLE) & set(names)
    indices = {f"{name}.index.json" for name in _WHOLE} & set(names)
    why = layouts.why_refused(names)
    if why and not whole and not indices:
        raise ReadError(why)
    usable = [name for name in names if "/" not in name and not OTHER_FILES.search(name)]
    candidates = sorted(name for name in usable if not _ADAPTER.search(name))
    for kind in ((".safetensors",), *((suffix,) for suffix in PICKLES), ("",)):
        files = [name for name in candidates if name.endswith(kind) and not name.endswith(".json")]
        files = files if kind != ("",) else [name for name in files if _is_odd(name)]
        index = [name for name in candidates if kind != ("",) and name.endswith(f"{kind[0]}.index.json")]
        if single := whole & set(files):
            return list(single)
        if index:
            return index[:1]
        files = [name for name in files if not _SECOND.fullmatch(name)] or files
        averages = [name for name in files if AVERAGE.search(name)]
        files = [name for name in files if name not in averages] or files
        if len(files) > 1 or any(map(is_shard, files)):
            raise ReadError(f"{len(files)} weight files and no index: {', '.join(files[:3])}")
        if files:
            return files
    adapters = sorted(name for name in usable if _ADAPTER.search(name) and name.endswith(SUFFIXES))
    if len(adapters) == 1 or {"adapter_model.safetensors", "adapter_model.bin"} & set(adapters):
        return [next((name for name in adapters if name.startswith("adapter_model.")), adapters[0])]
    raise ReadError(f"no .safetensors, {', '.join(PICKLES[:3])} or {PICKLES[3]} file in it")


def _is_odd(name: str) -> bool:
    """Whether a name has no suffix that is known not to be one of weights."""
    return not name.endswith((".json", ".txt", ".md", ".py", ".model", ".csv", ".log", "README.md"))


def shards_of(index: Path) -> list[str]:
    """Names of the shards in an index; raises ReadError unless all are files of its folder."""
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if shards and all(shard == Path(shard).name for shard in shards):
            return shards
    raise ReadError(f"{index.name} is corrupt: its weight_map does not name files of the same folder")
