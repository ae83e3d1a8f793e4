"""Where checkpoints are, in folders, on the Hub and in the Hub's cache, and which step each belongs to."""

from __future__ import annotations

import fnmatch
import re
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from normgrowth.checkpoints import hub
from normgrowth.checkpoints.layouts import why_refused
from normgrowth.checkpoints.steps import StepOf, by_pattern, no_step
from normgrowth.checkpoints.weights import OTHER_FILES, PICKLES, Weights, listing, read

SUFFIXES = (".safetensors", *PICKLES, ".gguf")
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a series: on disk at ``place``, or on the Hub as the revision ``repo@name`` in ``label``."""

    step: int
    label: str
    stamp: str  # changes with the weights, and needs no reading of them: the commit, or sizes and times of the files
    place: Path | None = None

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


Entry = Checkpoint | Skip


def checkpoints(
    source: str | Path | Iterable[str | Path], match: str = "*", step: str | None = None
) -> tuple[list[Checkpoint], list[Skip]]:
    """Checkpoints of one or several sources, sorted by step, and near misses: weights without a step, for example.

    A checkpoint is a file or a folder with weights, at most two levels below its source. The step is in its name, or
    else in the nearest name above.

    Args:
        source: a folder of checkpoints, one checkpoint, a folder of the Hub's cache (``models--org--name``), or a Hub
            repository ``org/name`` (all revisions that name a step) or ``org/name@revision``.
        match: shell pattern for the names of folders or revisions, such as ``stage1-*``.
        step: regular expression whose one group is the step in such a name, for names that ``step_of`` cannot read.

    Raises:
        FileNotFoundError: a source is neither on disk nor the name of a repository.
        ConnectionError: the Hub is needed and cannot be reached.
    """
    step_of = by_pattern(step)
    entries: list[Entry] = []
    for name in map(str, [source] if isinstance(source, str | Path) else source):
        if is_on_disk(name):
            entries += _on_disk(Path(name), match, step_of)
        else:
            entries += _on_hub(name, match, step_of)
    by_key = {entry.key: entry for entry in entries if isinstance(entry, Checkpoint)}
    skips = [entry for entry in entries if isinstance(entry, Skip)]
    return sorted(by_key.values(), key=lambda checkpoint: checkpoint.step), skips


def model_folder(name: str, *, weights: bool = True) -> Path:
    """The folder of one saved model, on disk or in the Hub's cache, to which its files are downloaded.

    Args:
        name: a folder, or a Hub repository ``org/name`` or ``org/name@revision``.
        weights: whether the model's weights are needed, or its configuration and tokenizer alone.

    Raises:
        FileNotFoundError, ConnectionError: as ``find.checkpoints``.
        ValueError: the place is a folder of several models, or a file.
        ReadError: the revision has no weights that can be read.
    """
    if not is_on_disk(name):
        repo, _, revision = name.partition("@")
        return hub.snapshot(repo, revision or "main", weights)
    place = Path(name)
    models = _places_with_weights(place) if weights else []
    if models and models != [place]:
        raise ValueError(f"{name}: no model, but a folder of {len(models)}: name one, such as {models[-1]}")
    if place.is_file():
        raise ValueError(f"{name}: a file: give its folder")
    return place


def is_on_disk(name: str) -> bool:
    """Whether a source is a file or folder, and not a repository of the Hub; raises FileNotFoundError if neither."""
    if Path(name).exists():
        return True
    if _REPOSITORY.fullmatch(name):
        return False
    raise FileNotFoundError(f"{name}: no such folder, and no name of a Hub repository (org/name)")


def grouped(skips: Sequence[Skip]) -> list[str]:
    """One line for each kind of reason, in the order in which the kinds first occur.

    Two reasons are of one kind if they differ in numbers, paths and labels alone.
    """
    kinds: dict[str, list[Skip]] = {}
    for skip in skips:
        kind = re.sub(r"\S*/\S*|\d+", "#", skip.why.replace(skip.label, ""))
        kinds.setdefault(kind, []).append(skip)
    lines = []
    for first, *others in kinds.values():
        more = f" (and {len(others):,} more like it, to {others[-1].label})" if others else ""
        lines.append(f"{first}{more}")
    return lines


def _on_disk(source: Path, match: str, step_of: StepOf) -> Iterator[Entry]:
    if (source / "snapshots").is_dir():
        yield from _in_cache(source, match, step_of)
        return
    for name, place in _candidates(source, step_of):
        if not fnmatch.fnmatch(name, match):
            continue
        try:
            entry = _entry(name, place, step_of)
        except OSError as error:
            entry = Skip(str(place), f"cannot be read: {error.strerror or error}")
        if entry:
            yield entry


def _candidates(source: Path, step_of: StepOf) -> list[tuple[str, Path]]:
    """Places that may be checkpoints, each with the name that may hold its step."""
    inside = sorted(place for place in source.iterdir() if place.name[0] != ".") if source.is_dir() else []
    folders = [(place.name, place) for place in inside if place.is_dir()]
    files = [place for place in inside if not place.is_dir() and (place.suffix in SUFFIXES or place.is_symlink())]
    files_with_step = [(file.stem, file) for file in files if step_of(file.stem) is not None]
    if files_with_step or any(step_of(name) is not None for name, _ in folders):
        return folders + files_with_step
    name = _own_name(source, step_of)
    is_step_folder = step_of(name) is not None and _places_with_weights(source)  # such as step1000, with step1000/hf
    if _holds_weights(source) or is_step_folder:
        return [(name, source)]
    return folders


def _own_name(source: Path, step_of: StepOf) -> str:
    """The nearest name with a step among those of a place and of the folders above it; if none has one, its own."""
    real = source.resolve()
    names = [real.stem, real.parent.name, real.parent.parent.name]
    if real.is_dir():
        names = [real.name, real.parent.name]
    return next((name for name in names if step_of(name) is not None), names[0])


def _entry(name: str, place: Path, step_of: StepOf) -> Entry | None:
    """The checkpoint at a place, or in its one folder with weights, such as step1000/hf; or why it has no step.

    None for a place without weights, and for a folder that holds a series of its own.
    """
    places = _places_with_weights(place)
    weights_at = places[0] if len(places) == 1 else place
    step = step_of(name)
    if step is not None:
        return Checkpoint(step, str(weights_at), _stamp(weights_at), weights_at)
    is_series = weights_at != place and step_of(weights_at.name) is not None
    if len(places) != 1 or is_series:
        return None
    inside = [file.stem for file in place.iterdir()] if place.is_dir() else []
    return Skip(str(weights_at), no_step([name, *inside]))


def _places_with_weights(place: Path) -> list[Path]:
    """The place itself if it holds weights, otherwise the folders in it that do."""
    if _holds_weights(place):
        return [place]
    inside = sorted(place.iterdir()) if place.is_dir() else []
    folders = [folder for folder in inside if folder.is_dir() and not OTHER_FILES.search(folder.name)]
    return [folder for folder in folders if _holds_weights(folder)]


def _holds_weights(place: Path) -> bool:
    """Whether a file or folder holds weights, also in a layout that cannot be read: the reason is given later."""
    if not place.is_dir():
        return place.suffix in SUFFIXES
    names = listing(place)
    return any(name.endswith((*SUFFIXES, ".index.json")) for name in names) or why_refused(names) is not None


def _stamp(place: Path) -> str:
    """Names, sizes and times of the files with weights."""
    files = [place]
    if place.is_dir():
        files = [file for file in sorted(place.iterdir()) if file.suffix in SUFFIXES and file.is_file()]
    stamps = []
    for file in files:
        status = file.stat()
        stamps.append(f"{file.name}:{status.st_size}:{status.st_mtime_ns}")
    return ";".join(stamps)


def _in_cache(source: Path, match: str, step_of: StepOf) -> Iterator[Entry]:
    """Revisions of one repository in the Hub's cache."""
    snapshots = source / "snapshots"
    files = [file for file in source.glob("refs/**/*") if file.is_file()]
    commits = {str(file.relative_to(source / "refs")): file.read_text().strip() for file in files}
    present = {name: commit for name, commit in sorted(commits.items()) if (snapshots / commit).is_dir()}
    return _revisions(str(source), present, snapshots, match, step_of)


def _on_hub(name: str, match: str, step_of: StepOf) -> Iterator[Entry]:
    """Revisions of one repository of the Hub, or the one that is named after its ``@``."""
    repo, _, revision = name.partition("@")
    commits = hub.revisions(repo)
    if revision:
        commits = {revision: commits.get(revision, revision)}
    return _revisions(repo, commits, None, match, step_of)


def _revisions(
    repo: str, commits: Mapping[str, str], snapshots: Path | None, match: str, step_of: StepOf
) -> Iterator[Entry]:
    """Checkpoints of the revisions that name a step. If no revision does, the repository's own name may."""
    steps = {revision: step_of(revision) for revision in commits if fnmatch.fnmatch(revision, match)}
    if all(step is None for step in steps.values()):
        for revision in steps:
            if revision == "main" or len(commits) == 1:
                steps[revision] = step_of(Path(repo).name)
    for revision, step in steps.items():
        label = f"{repo}@{revision}"
        commit = commits[revision]
        if step is None:
            yield Skip(label, no_step([revision]))
        else:
            yield Checkpoint(step, label, commit, snapshots / commit if snapshots else None)


def opener(keep: bool) -> Callable[[Checkpoint], Weights]:
    """A function that opens checkpoints and has the last three at hand.

    Unless downloads are kept, each is deleted when its checkpoint is not in use any more.
    """

    @lru_cache(maxsize=3)
    def open_weights(checkpoint: Checkpoint) -> Weights:
        if checkpoint.place:
            return read(checkpoint.place)
        if keep:
            return read(hub.download(checkpoint.label, checkpoint.stamp))
        scratch = tempfile.TemporaryDirectory(prefix="normgrowth-", ignore_cleanup_errors=True)
        weights = read(hub.download(checkpoint.label, checkpoint.stamp, scratch.name))
        weakref.finalize(weights, scratch.cleanup)
        return weights

    return open_weights
