"""Where checkpoints are: folders, the Hub, and the Hub's cache; and the step in their names."""

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
    """One checkpoint of a series: on disk at ``place``, or the revision ``repo@name`` of the Hub that is its label."""

    step: int
    label: str
    stamp: str  # changes when the weights do, known without reading them: the commit, or sizes and times of files
    place: Path | None = None

    @property
    def key(self) -> str:
        """What a later run knows it by."""
        return f"{self.label} {self.stamp}"


class Skip(NamedTuple):
    """What was not counted, and why."""

    label: str
    why: str

    def __str__(self) -> str:
        return self.why if self.label in self.why else f"{self.label}: {self.why}"


Each = Iterator[Checkpoint | Skip]


def checkpoints(
    source: str | Path | Iterable[str | Path], match: str = "*", step: str | None = None
) -> tuple[list[Checkpoint], list[Skip]]:
    """Checkpoints of one or several sources, sorted by step, and what looks like one and is none.

    A checkpoint is a file or a folder with weights, at most two levels down; its step is in the nearest name above.

    Args:
        source: a folder of checkpoints, one checkpoint, a folder of the Hub's cache (``models--org--name``), or a Hub
            repository ``org/name`` (all revisions that name a step) or ``org/name@revision``.
        match: shell pattern for the names of folders or revisions, such as ``stage1-*``.
        step: regular expression whose one group is the step in such a name, where ``step_of`` does not know it.

    Raises:
        FileNotFoundError: a source that is neither there nor the name of a repository.
        ConnectionError: the Hub is needed and cannot be reached.
    """
    each: list[Checkpoint | Skip] = []
    of = by_pattern(step)
    for name in map(str, [source] if isinstance(source, str | Path) else source):
        each += _local(Path(name), match, of) if _is_here(name) else _hub(name, match, of)
    found = {one.key: one for one in each if isinstance(one, Checkpoint)}
    return sorted(found.values(), key=lambda c: c.step), [one for one in each if isinstance(one, Skip)]


def model_folder(name: str, *, weights: bool = True) -> Path:
    """The folder of one saved model: here, or in the Hub's cache, where its files come to; also without its weights.

    Raises:
        FileNotFoundError, ConnectionError: as ``find.checkpoints``. ValueError: a folder of models, or a file.
        ReadError: the revision has no weights that can be read.
    """
    if _is_here(name):
        if weights and (held := _held(Path(name))) and held != [Path(name)]:
            raise ValueError(f"{name}: no model, but a folder of {len(held)}: name one, such as {held[-1]}")
        if Path(name).is_file():
            raise ValueError(f"{name}: a file: give its folder")
        return Path(name)
    repo, _, revision = name.partition("@")
    return hub.snapshot(repo, revision or "main", weights)


def _is_here(name: str) -> bool:
    """Whether a place is a file or folder; what else may be one is a repository of the Hub."""
    if Path(name).exists() or _REPOSITORY.fullmatch(name):
        return Path(name).exists()
    raise FileNotFoundError(f"{name}: no such folder, and no name of a Hub repository (org/name)")


def grouped(skips: Sequence[Skip]) -> list[str]:
    """A line for each kind of reason, in the order of the first of each: numbers, paths and labels do not count."""
    kinds: dict[str, list[Skip]] = {}
    for skip in skips:
        kind = re.sub(r"\S*/\S*|\d+", "#", skip.why.replace(skip.label, ""))
        kinds.setdefault(kind, []).append(skip)
    return [
        f"{k[0]} (and {len(k) - 1:,} more like it, to {k[-1].label})" if k[1:] else str(k[0]) for k in kinds.values()
    ]


def _local(source: Path, match: str, of: StepOf) -> Each:
    if (source / "snapshots").is_dir():
        yield from _cached(source, match, of)
        return
    for name, place in _options(source, of):
        try:
            if fnmatch.fnmatch(name, match):
                yield from _one(name, place, of)
        except OSError as error:
            yield Skip(str(place), f"cannot be read: {error.strerror or error}")


def _options(source: Path, of: StepOf) -> list[tuple[str, Path]]:
    """What may be checkpoints, and the names that may have their steps."""
    inside = sorted(d for d in source.iterdir() if d.name[0] != ".") if source.is_dir() else []
    folders = [(d.name, d) for d in inside if d.is_dir()]
    files = [d for d in inside if not d.is_dir() and (d.suffix in SUFFIXES or d.is_symlink())]
    steps = [(d.stem, d) for d in files if of(d.stem) is not None]
    if steps or any(of(name) is not None for name, _ in folders):
        return folders + steps
    real = source.resolve()
    above = [real.name, real.parent.name] if real.is_dir() else [real.stem, real.parent.name, real.parent.parent.name]
    own = next((name for name in above if of(name) is not None), above[0])
    one = _holds_weights(source) or (of(own) is not None and _held(source))  # the second is such as step1000/hf
    return [(own, source)] if one else folders


def _one(name: str, place: Path, of: StepOf) -> Each:
    """The checkpoint at a place, or in its one folder with weights, such as step1000/hf; or why it has no step."""
    step, held = of(name), _held(place)
    at = held[0] if len(held) == 1 else place
    if step is not None:
        yield Checkpoint(step, str(at), _stamp(at), at)
    elif len(held) == 1 and (at == place or of(at.name) is None):  # else there is none, or a series of its own
        files = [file.stem for file in place.iterdir()] if place.is_dir() else []
        yield Skip(str(at), no_step([name, *files]))


def _held(place: Path) -> list[Path]:
    """The place itself if it holds weights, else its folders that do."""
    if _holds_weights(place):
        return [place]
    inside = sorted(place.iterdir()) if place.is_dir() else []
    return [d for d in inside if d.is_dir() and not OTHER_FILES.search(d.name) and _holds_weights(d)]


def _holds_weights(place: Path) -> bool:
    """Whether there are weights, or something in their place that cannot be used for a reason."""
    if not place.is_dir():
        return place.suffix in SUFFIXES
    names = listing(place)
    return any(name.endswith((*SUFFIXES, ".index.json")) for name in names) or why_refused(names) is not None


def _stamp(place: Path) -> str:
    files = [f for f in sorted(place.iterdir()) if f.suffix in SUFFIXES and f.is_file()] if place.is_dir() else [place]
    return ";".join(f"{f.name}:{(s := f.stat()).st_size}:{s.st_mtime_ns}" for f in files)


def _cached(source: Path, match: str, of: StepOf) -> Each:
    """Revisions of one repository in the Hub's cache."""
    refs = {str(f.relative_to(source / "refs")): f.read_text().strip() for f in source.glob("refs/**/*") if f.is_file()}
    there = {name: commit for name, commit in sorted(refs.items()) if (source / "snapshots" / commit).is_dir()}
    return _revisions(str(source), there, source / "snapshots", match, of)


def _hub(name: str, match: str, of: StepOf) -> Each:
    repo, _, only = name.partition("@")
    commits = hub.revisions(repo)
    if only:
        commits = {only: commits.get(only, only)}
    return _revisions(repo, commits, None, match, of)


def _revisions(repo: str, commits: Mapping[str, str], snapshots: Path | None, match: str, of: StepOf) -> Each:
    """Of revisions and their commits those that name a step; where none does, it may be in the repository's name."""
    steps = {revision: of(revision) for revision in commits if fnmatch.fnmatch(revision, match)}
    if all(step is None for step in steps.values()):
        steps |= {at: of(Path(repo).name) for at in steps if at == "main" or len(commits) == 1}
    for revision, step in steps.items():
        label, commit = f"{repo}@{revision}", commits[revision]
        if step is None:
            yield Skip(label, no_step([revision]))
        else:
            yield Checkpoint(step, label, commit, snapshots / commit if snapshots else None)


def opener(keep: bool) -> Callable[[Checkpoint], Weights]:
    """What opens checkpoints, and has the last three at hand; downloads that are not kept are deleted after that."""

    @lru_cache(maxsize=3)
    def opened(checkpoint: Checkpoint) -> Weights:
        if checkpoint.place:
            return read(checkpoint.place)
        scratch = None if keep else tempfile.TemporaryDirectory(prefix="normgrowth-", ignore_cleanup_errors=True)
        weights = read(hub.download(checkpoint.label, checkpoint.stamp, scratch.name if scratch else None))
        if scratch:
            weakref.finalize(weights, scratch.cleanup)
        return weights

    return opened
