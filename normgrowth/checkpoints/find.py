"""Sources of checkpoints: folders, the Hub and the Hub's cache; and which step each checkpoint belongs to."""

from __future__ import annotations

import fnmatch
import re
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from normgrowth.checkpoints import hub, places
from normgrowth.checkpoints.parts import places_with_weights
from normgrowth.checkpoints.places import Checkpoint, Entry, Numbered, Skip, Unplaced
from normgrowth.checkpoints.steps import StepOf, by_pattern, no_step
from normgrowth.checkpoints.weights import Weights, read

__all__ = ["checkpoints", "grouped", "model_folder", "opener"]
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")


def checkpoints(
    source: str | Path | Iterable[str | Path], match: str = "*", step: str | None = None
) -> tuple[list[Checkpoint], list[Skip]]:
    """Checkpoints of one or several sources, sorted by step, and near misses: weights without a step, for example.

    A checkpoint is a file or a folder with weights, at most two levels below its source. The step is in its name, or
    else in the nearest name above, or else inside, where a trainer or an optimizer has counted. A checkpoint that is
    alone needs no step: it is written as 0.

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
    entries += places.placed([entry for entry in entries if isinstance(entry, Numbered)])
    by_key = {entry.key: entry for entry in entries if isinstance(entry, Checkpoint)}
    unplaced = [entry for entry in entries if isinstance(entry, Unplaced)]
    skips = [entry for entry in entries if isinstance(entry, Skip)]
    is_alone = not by_key and len(unplaced) == 1 and step is None
    if is_alone:
        only = unplaced[0].as_first()
        by_key = {only.key: only}
    else:
        skips += [entry.skip for entry in unplaced]
    # Of one step the shorter name comes first: others have a word more, as averages have.
    return sorted(by_key.values(), key=lambda checkpoint: (checkpoint.step, len(checkpoint.label))), skips


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
    models = places_with_weights(place) if weights else []
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
        return _in_cache(source, match, step_of)
    return places.entries(source, match, step_of)


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
            yield Unplaced(Skip(label, no_step([revision])), commit, snapshots / commit if snapshots else None)
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
