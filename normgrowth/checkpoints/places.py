"""Checkpoints in a folder: which of its files and folders are some, and which step each belongs to."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from normgrowth.checkpoints import distributed, files, progress
from normgrowth.checkpoints.containers import AVERAGE
from normgrowth.checkpoints.files import OTHER_FILES, holds_weights, is_weights
from normgrowth.checkpoints.parts import places_with_weights
from normgrowth.checkpoints.progress import Progress
from normgrowth.checkpoints.steps import StepOf, no_step, says_step
from normgrowth.checkpoints.steps import step_of as step_in_name

_OTHER_FORMATS = (
    ".zip", ".h5", ".hdf5", ".keras", ".npz", ".msgpack", ".onnx", ".pdparams", ".nemo", ".mar", ".gz", ".pt2", ".ptl"
)  # fmt: skip
_FIRST = "no step in its name or inside: written as step 0"
_AVERAGES = "an average of the weights (EMA), by its name"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a series: on disk at ``place``, or on the Hub as the revision ``repo@name`` in ``label``."""

    step: int
    label: str
    stamp: str  # changes with the weights, and needs no reading of them: the commit, or sizes and times of the files
    place: Path | None = None
    note: str = ""  # what is to be known of the checkpoint

    @property
    def key(self) -> str:
        """Identifies the checkpoint, with these weights, in a later run."""
        return f"{self.label} {self.stamp}"


class Skip(NamedTuple):
    """A checkpoint, revision or tensor that was not counted, and why."""

    label: str
    why: str

    def __str__(self) -> str:
        return self.why if self.label in self.why else f"{self.label}: {self.why}"


class Unplaced(NamedTuple):
    """A checkpoint without a step. It counts if it is the only one."""

    skip: Skip
    stamp: str
    place: Path | None

    def as_first(self) -> Checkpoint:
        return Checkpoint(0, self.skip.label, self.stamp, self.place, f"{self.skip.label}: {_FIRST}")


class Numbered(NamedTuple):
    """A checkpoint whose name has a number and does not say of what: the series says whether it counts epochs."""

    number: int
    place: Path
    progress: Progress  # what its files record of the training
    note: str = ""


Entry = Checkpoint | Skip | Unplaced | Numbered


def entries(source: Path, match: str, step_of: StepOf) -> Iterator[Entry]:
    """The checkpoints of a folder, or the one that a place is; averages of weights give way to the weights."""
    everything = _candidates(source, match, step_of)
    candidates = [(name, place) for name, place in everything if fnmatch.fnmatch(name, match)]
    averages = {place for _, place in candidates if AVERAGE.search(place.name)}
    with_step = [place for name, place in candidates if step_of(name) is not None]
    is_empty = True
    is_series_of_averages = averages.issuperset(with_step or [place for _, place in candidates])
    for name, place in candidates:
        if not place.is_dir() and place.suffix in _OTHER_FORMATS:
            yield Skip(str(place), f"of another format ({place.suffix}): save the weights as safetensors")
            continue
        try:
            entry = _entry(name, place, step_of)
        except OSError as error:
            entry = Skip(str(place), f"cannot be read: {error.strerror or error}")
        if isinstance(entry, Checkpoint | Numbered) and place in averages:
            if is_series_of_averages:
                entry = _with_note(entry, f"{entry.place}: {_AVERAGES}")
            else:
                entry = Skip(str(entry.place), f"{_AVERAGES}, beside weights: give it alone to measure it")
        if entry:
            is_empty = False
            yield entry
    if is_empty and source.is_dir():
        others = [place for name, place in everything if not fnmatch.fnmatch(name, match)]
        if not any(not place.is_dir() or places_with_weights(place) for place in others):
            yield from _of_no_known_format(source, step_of)


def _of_no_known_format(source: Path, step_of: StepOf) -> Iterator[Skip]:
    """Files that are called checkpoints, such as those of Flax and TensorFlow, where there are no others."""
    for file in sorted(source.iterdir()):
        if file.is_file() and step_of(file.name) is not None and not is_weights(file) and not files.is_text(file):
            yield Skip(str(file), "of no format that is read here: save the weights as safetensors")


def _with_note(entry: Checkpoint | Numbered, note: str) -> Checkpoint | Numbered:
    return replace(entry, note=note) if isinstance(entry, Checkpoint) else entry._replace(note=note)


def placed(numbered: Sequence[Numbered]) -> list[Checkpoint | Unplaced]:
    """The checkpoints of a series whose names have a number alone: a step, or the epoch if all files say so.

    Of epochs the step is what the file counts. A larger count than the number, in every file, is the step as well.
    """
    with_epoch = [(entry.number, entry.progress.epoch) for entry in numbered if entry.progress.epoch is not None]
    are_epochs = bool(with_epoch) and all(abs(number - epoch) <= 1 for number, epoch in with_epoch)
    are_counted = all(entry.progress.step is not None and entry.progress.step >= entry.number for entry in numbered)
    checkpoints: list[Checkpoint | Unplaced] = []
    for entry in numbered:
        step = entry.progress.step if are_counted or are_epochs else entry.number
        if step is None:
            step = entry.progress.optimizer
        label = str(entry.place)
        stamp = _stamp(entry.place)
        if step is None:
            checkpoints.append(Unplaced(Skip(label, no_step([f"epoch{entry.number}"])), stamp, entry.place))
        else:
            checkpoints.append(Checkpoint(max(step, entry.number), label, stamp, entry.place, entry.note))
    return checkpoints


def _candidates(source: Path, match: str, step_of: StepOf) -> list[tuple[str, Path]]:
    """Places that may be checkpoints, each with the name that may hold its step.

    A link without a step, such as ``latest.pt``, is left out where its target is there under a name that matches.
    """
    inside = sorted(place for place in source.iterdir() if place.name[0] != ".") if source.is_dir() else []
    has_links = any(place.is_symlink() for place in inside)
    own = [place for place in inside if has_links and not place.is_symlink()]
    may_count = [place for place in own if place.is_dir() or is_weights(place)]
    targets = {place.resolve() for place in may_count if fnmatch.fnmatch(_name(place), match)}
    is_other_name = {place: place.is_symlink() and place.resolve() in targets for place in inside}
    inside = [place for place in inside if step_of(_stem(place)) is not None or not is_other_name[place]]
    folders = [(place.name, place) for place in inside if place.is_dir()]
    stored = [
        place
        for place in inside
        if not place.is_dir() and (is_weights(place) or place.is_symlink() or place.suffix in _OTHER_FORMATS)
    ]
    with_step = [(_stem(file), file) for file in stored if step_of(_stem(file)) is not None]
    if with_step or any(step_of(name) is not None for name, _ in folders):
        is_final_copy = {"model", "pytorch_model"}  # of a trainer, beside its checkpoints
        others = [
            (_stem(file), file)
            for file in stored
            if step_of(_stem(file)) is None
            and not _is_part(file)
            and _stem(file) not in is_final_copy
            and file.suffix not in _OTHER_FORMATS
        ]
        return folders + with_step + (others if with_step or len(others) > 1 else [])
    name = _own_name(source, step_of)
    is_step_folder = step_of(name) is not None and places_with_weights(source)  # such as step1000, with step1000/hf
    stored = [file for file in stored if file.suffix not in _OTHER_FORMATS]
    is_several = len([file for file in stored if not _is_part(file)]) > 1 and not _is_whole(source)
    if is_several and not is_step_folder:
        return folders + [(_stem(file), file) for file in stored if not _is_part(file)]
    if holds_weights(source) or is_step_folder:
        return [(name, source)]
    return folders


def _name(place: Path) -> str:
    """The name of a place inside a folder, which may hold its step and is matched."""
    return place.name if place.is_dir() else _stem(place)


def _stem(file: Path) -> str:
    """A file's name without its suffixes, as people write them: ``step-1.5M`` of ``step-1.5M.pth.tar``."""
    name = file.name
    while (suffix := Path(name).suffix) and not suffix[1:2].isdigit():
        name = name.removesuffix(suffix)
    return name


def _is_part(file: Path) -> bool:
    """Whether a file is a trainer's own, a shard, or an adapter beside weights: no checkpoint by itself."""
    return bool(OTHER_FILES.search(file.name)) or files.is_shard(file.name)


def _is_whole(source: Path) -> bool:
    """Whether a folder is one checkpoint, of one or several files, by the names of the files."""
    names = files.listing(source)
    return distributed.is_distributed(names) or files.is_one_checkpoint(names)


def _own_name(source: Path, step_of: StepOf) -> str:
    """The nearest name with a step among those of a place and of the folders above it; if none has one, its own."""
    real = source.resolve()
    names = [_stem(real), real.parent.name, real.parent.parent.name]
    if real.is_dir():
        names = [real.name, real.parent.name]
    return next((name for name in names if step_of(name) is not None), names[0])


def _entry(name: str, place: Path, step_of: StepOf) -> Entry | None:
    """The checkpoint at a place, or in its one folder with weights, such as step1000/hf; or why it has no step.

    None for a place without weights, and for a folder that holds a series of its own.
    """
    inside = places_with_weights(place)
    weights_at = inside[0] if len(inside) == 1 else place
    step = step_of(name)
    if step is not None and not (step_of is step_in_name and not says_step(name)):
        return Checkpoint(step, str(weights_at), _stamp(weights_at), weights_at)
    if step is not None:
        return Numbered(step, weights_at, _progress_inside(weights_at))
    is_series = weights_at != place and step_of(weights_at.name) is not None
    if len(inside) != 1 or is_series:
        return None
    known = _progress_inside(weights_at)
    step = known.step if known.step is not None else known.optimizer
    if step is not None:
        return Checkpoint(step, str(weights_at), _stamp(weights_at), weights_at)
    names = [file.stem for file in place.iterdir()] if place.is_dir() else []
    return Unplaced(Skip(str(weights_at), no_step([name, *names])), _stamp(weights_at), weights_at)


def _progress_inside(place: Path) -> Progress:
    """What a trainer has left of the training, beside the weights or in a file of them."""
    stored = [place]
    if place.is_dir():
        step = progress.step_beside(place)
        if step is not None:
            return Progress(step)
        stored = [file for file in sorted(place.iterdir()) if file.is_file() and is_weights(file)]
    known = Progress()
    for file in sorted(stored, key=lambda file: bool(OTHER_FILES.search(file.name))):
        is_pickle = file.name.endswith(files.PICKLES) or not file.name.endswith(files.SUFFIXES)
        if is_pickle and (file == place or not OTHER_FILES.search(file.name) or "optim" in file.name):
            from normgrowth.checkpoints import pickles

            more = pickles.progress_in(file)
            known = Progress(*(mine if mine is not None else new for mine, new in zip(known, more, strict=True)))
    return known


def _stamp(place: Path) -> str:
    """Names, sizes and times of the files with weights."""
    stored = [place]
    if place.is_dir():
        stored = sorted(file for file in place.rglob("*") if file.is_file() and _counts(file, place))
    stamps = []
    for file in stored:
        status = file.stat()
        name = file.name if file.parent == place else str(file.relative_to(place))
        stamps.append(f"{name}:{status.st_size}:{status.st_mtime_ns}")
    return ";".join(stamps)


def _counts(file: Path, place: Path) -> bool:
    """Whether a file below a place may hold weights of the checkpoint there."""
    depth = len(file.relative_to(place).parts)
    is_part = file.name == distributed.METADATA or file.name.endswith(".distcp")
    return depth <= 2 and (is_part or file.name.endswith(files.SUFFIXES))
