"""Files of weights: which they are, by their names and first bytes, and which of a folder's hold the checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
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
WHOLE = ("model.safetensors", "pytorch_model.bin")
ADAPTER = re.compile(r"adapter|lora", re.I)
SECOND = re.compile(r"(?:model|pytorch_model)_\d+\.(?:safetensors|bin)")  # accelerate's, of several models
MODULES = ("modules.json", "model_index.json")  # of sentence-transformers and diffusers
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9"  # how torch before 1.6 begins a file


def listing(place: Path) -> list[str]:
    """Names in a folder, sorted; those of folders end with a ``/``."""
    return sorted(f"{inside.name}/" if inside.is_dir() else inside.name for inside in place.iterdir())


def is_weights(file: Path) -> bool:
    """Whether a file holds tensors, by its name or by its first bytes: people write suffixes in many ways."""
    if file.name.endswith(SUFFIXES):
        return True
    if not file.is_file():  # a pipe, for example, would be waited for
        return False
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


def is_text(file: Path) -> bool:
    """Whether a file begins with text."""
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


def is_shard(name: str) -> bool:
    """Whether a file is one of several, by its name."""
    return bool(re.search(r"-\d+-of-\d+\.", name))


def is_one_checkpoint(names: Collection[str]) -> bool:
    """Whether files with these names are one checkpoint: whole, with an index, an adapter, or another library's."""
    has_index = any(name.endswith(".index.json") for name in names)
    is_declared = not {*WHOLE, *MODULES, "config.json", "adapter_config.json"}.isdisjoint(names)
    return has_index or is_declared or layouts.why_refused(names) is not None


def weight_files(names: Collection[str], odd: Collection[str] = ()) -> list[str]:
    """The names of the weights among those in a folder or repository, or that of their index.

    safetensors come before pickles, and one file with all weights before shards; an average gives way to the weights.

    Args:
        odd: those that hold weights under suffixes of their own.

    Raises:
        ReadError: no weights are there, several files without an index, or another library's layout.
    """
    whole = [name for name in WHOLE if name in names]
    has_index = any(f"{name}.index.json" in names for name in WHOLE)
    why = layouts.why_refused(names)
    if why and not whole and not has_index:
        raise ReadError(why)
    if distributed.is_distributed(names) and not whole and not has_index:
        raise ReadError("PyTorch's distributed checkpoint: give its folder, on disk")
    usable = sorted(name for name in names if "/" not in name and not OTHER_FILES.search(name))
    candidates = [name for name in usable if not ADAPTER.search(name)]
    for suffix in (".safetensors", *PICKLES, ".gguf"):
        of_suffix = [name for name in candidates if name.endswith(suffix)]
        index = [name for name in candidates if name.endswith(f"{suffix}.index.json")]
        if chosen := [name for name in whole if name in of_suffix] or index[:1] or _only(of_suffix):
            return chosen
    if chosen := _only([name for name in candidates if name in odd]):
        return chosen
    adapters = [name for name in usable if ADAPTER.search(name) and name.endswith(SUFFIXES)]
    preferred = [name for name in adapters if name.startswith(("adapter_model.", "adapters."))] or _only(adapters)
    if preferred:
        return sorted(preferred, key=lambda name: not name.endswith(".safetensors"))[:1]
    raise ReadError(f"no .safetensors, {', '.join(PICKLES[:3])} or {PICKLES[3]} file in it")


def _only(names: list[str]) -> list[str]:
    """The one file of weights among several of one suffix, if there is any; raises ReadError if it is unclear which."""
    originals = [name for name in names if not SECOND.fullmatch(name)] or names
    originals = [name for name in originals if not AVERAGE.search(name)] or originals
    if len(originals) > 1 or any(map(is_shard, originals)):
        raise ReadError(f"{len(originals)} weight files and no index: {', '.join(originals[:3])}")
    return originals


def shards_of(index: Path) -> dict[str, list[str]]:
    """The shards in an index, each with its tensors; raises ReadError unless all are files of its folder."""
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        shards: dict[str, list[str]] = {}
        for name, shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            shards.setdefault(shard, []).append(name)
        if shards and all(shard == Path(shard).name for shard in shards):
            return dict(sorted(shards.items()))
    raise ReadError(f"{index.name} is corrupt: its weight_map does not name files of the same folder")
