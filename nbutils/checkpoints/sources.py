"""Where checkpoints are: folders, the Hub, and the Hub's cache; and the step in their names."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nbutils.checkpoints import hub
from nbutils.checkpoints.layouts import in_parts
from nbutils.checkpoints.steps import StepOf, by_pattern, no_step, step_of
from nbutils.checkpoints.weights import OTHER_FILES, PICKLES, Weights, listing, read

SUFFIXES = (".safetensors", *PICKLES, ".gguf")
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a series, on disk (``place``) or on the Hub (``repo`` at ``commit``)."""

    step: int
    label: str
    stamp: str  # changes when the files do, known without reading them
    place: Path | None = None
    repo: str = ""
    commit: str = ""
    resolved: str = ""  # the label of a place on disk, however its path was spelled

    @property
    def key(self) -> tuple[str, str]:
        """What a later run knows it by."""
        return self.resolved or self.label, self.stamp


class Skip(NamedTuple):
    """What was not counted, and why."""

    label: str
    why: str

    def __str__(self) -> str:
        return self.why if self.label in self.why else f"{self.label}: {self.why}"


Found = tuple[list[Checkpoint], list[Skip]]


def find(source: str | Path | Iterable[str | Path], match: str = "*", step: str | None = None) -> Found:
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
    found: dict[tuple[str, str], Checkpoint] = {}
    skipped: list[Skip] = []
    of = by_pattern(step)
    for name in map(str, [source] if isinstance(source, str | Path) else source):
        checkpoints, skips = _local(Path(name), match, of) if _is_here(name) else _hub(name, match, of)
        found |= {checkpoint.key: checkpoint for checkpoint in checkpoints}
        skipped += skips
    return sorted(found.values(), key=lambda c: c.step), skipped


def model_folder(name: str, *, weights: bool = True) -> Path:
    """The folder of one saved model: here, or in the Hub's cache, where its files come to; also without its weights.

    Raises:
        FileNotFoundError, ConnectionError: as ``find``. ReadError: the revision has no weights that can be read.
    """
    if _is_here(name):
        return Path(name)
    repo, _, revision = name.partition("@")
    with _on_the_hub(name) as asker:
        return hub.snapshot(repo, revision or "main", asker, weights)


def _is_here(name: str) -> bool:
    """Whether a place is a file or folder; what else may be one is a repository of the Hub."""
    if Path(name).exists() or _REPOSITORY.fullmatch(name):
        return Path(name).exists()
    raise FileNotFoundError(f"{name}: no such folder, and no name of a Hub repository (org/name)")


@contextlib.contextmanager
def _on_the_hub(name: str) -> Iterator[str]:
    """How refusals begin; where the folder above is here, a folder was meant, whatever the Hub says."""
    try:
        yield f"{name}: no such folder; as a repository of the Hub"
    except (FileNotFoundError, ConnectionError) as error:
        above = Path(name).parent
        if not above.is_dir():
            raise
        beside = [file.name for file in sorted(above.iterdir())]
        there = f"{', '.join(beside[:3])}{' and more' * (len(beside) > 3)}" or "nothing"
        raise FileNotFoundError(f"{name}: no such folder; in {above} is {there}") from error


def series_below(source: Path) -> list[Path]:
    """Folders in a folder that hold checkpoints: it was given in place of one of them."""
    found = []
    for below in sorted(source.iterdir()) if source.is_dir() else []:
        with contextlib.suppress(OSError):
            if below.is_dir() and below.name[0] != "." and _local(below, "*", step_of)[0]:
                found.append(below)
    return found


def grouped(skips: Sequence[Skip]) -> list[str]:
    """A line for each kind of reason, in the order of the first of each: numbers, paths and labels do not count."""
    kinds: dict[str, list[Skip]] = {}
    for skip in skips:
        kind = skip.why.replace(skip.label, "").lstrip(": ")
        kinds.setdefault(re.sub(r"\d+", "#", re.sub(r"\S*/\S*", "", kind)).strip(), []).append(skip)
    return [
        f"{k[0]} (and {len(k) - 1:,} more like it, to {k[-1].label})" if k[1:] else str(k[0]) for k in kinds.values()
    ]


def _holds_weights(place: Path) -> bool:
    """Whether there are weights, or something in their place that cannot be used for a reason."""
    if not place.is_dir():
        return place.suffix in SUFFIXES
    with contextlib.suppress(OSError):
        names = listing(place)
        return any(name.endswith((*SUFFIXES, ".index.json")) for name in names) or in_parts(names) is not None
    return False


def _local(source: Path, match: str, of: StepOf) -> Found:
    found: list[Checkpoint] = []
    skipped: list[Skip] = []
    for name, place in _options(source, of):
        if name and not fnmatch.fnmatch(name, match):
            continue
        try:
            one = _one(source, name, place, of)
        except OSError as error:
            one = Skip(str(place), f"cannot be read: {error.strerror or error}")
        if isinstance(one, Checkpoint):
            found.append(one)
        elif one:
            skipped.append(one)
    return found, skipped


def _options(source: Path, of: StepOf) -> list[tuple[str, Path]]:
    """What may be checkpoints, and the names that may have their steps."""
    real = source.resolve()
    above = (real.stem if source.is_file() else real.name, real.parent.name, real.parent.parent.name)
    own = next((name for name in above[: 3 if source.is_file() else 2] if of(name) is not None), above[0])
    if source.is_file():
        return [(own, source)]
    if (source / "snapshots").is_dir():
        return _cached(source, of)
    seen = sorted(d for d in source.iterdir() if d.name[0] != ".")
    inside = [(d.stem if d.suffix in SUFFIXES and not d.is_dir() else d.name, d) for d in seen]
    files = [(name, d) for name, d in inside if not d.is_dir() and (d.suffix in SUFFIXES or d.is_symlink())]
    steps = [(name, d) for name, d in files if of(name) is not None]
    folders = [(name, d) for name, d in inside if d.is_dir()]
    if not steps and not any(of(name) is not None for name, _ in folders):
        one = of(own) is not None and any(_holds_weights(d) for _, d in folders)  # such as step1000/hf
        return [(own, source)] if one or _holds_weights(source) else folders
    whole = [("", source)] if not steps and _holds_weights(source) else []
    return sorted(folders + steps, key=lambda option: option[1]) + whole


def _one(source: Path, name: str, place: Path, of: StepOf) -> Checkpoint | Skip | None:
    """The checkpoint at a place, or in a folder of it such as step1000/hf; or why there is none; or None."""
    if not place.exists():
        return Skip(str(place), f"a link to {place.readlink()}, which is not there")
    step, held = of(name), _held(place)
    if step is None:
        if len(held) != 1 or (held[0] != place and of(held[0].name) is not None):
            return None  # no checkpoint, or a series of its own
        files = [Path(file).stem for file in listing(place)] if place.is_dir() else []
        return Skip(str(held[0]), no_step([name, *files]))
    if len(held) > 1:
        names = " and ".join(d.name for d in held[:4])
        give = f"give those of one: {place.parent}/*/{held[0].name}"
        return Skip(str(place), f"weights in {len(held)} folders, {names}; {give}")
    place = held[0] if held else place
    label, resolved = (
        f"{root}@{name}" if place.parent.name == "snapshots" else str(root / place.relative_to(source))
        for root in (source, source.resolve())
    )
    return Checkpoint(step, label, _stamp(place), place, resolved=resolved)


def _held(place: Path) -> list[Path]:
    """The place itself if it holds weights, else its folders that do."""
    if _holds_weights(place):
        return [place]
    inside = sorted(place.iterdir()) if place.is_dir() else []
    return [d for d in inside if d.is_dir() and not OTHER_FILES.search(d.name) and _holds_weights(d)]


def _stamp(place: Path) -> str:
    files = [f for f in sorted(place.iterdir()) if f.suffix in SUFFIXES and f.is_file()] if place.is_dir() else [place]
    return ";".join(f"{f.name}:{(s := f.stat()).st_size}:{s.st_mtime_ns}" for f in files)


def _cached(source: Path, of: StepOf) -> list[tuple[str, Path]]:
    """Revisions of one repository in the Hub's cache. A repository with a step in its own name has one at ``main``."""
    refs = {str(f.relative_to(source / "refs")): f.read_text().strip() for f in source.glob("refs/**/*") if f.is_file()}
    refs |= {s.name: s.name for s in (source / "snapshots").iterdir() if s.name not in refs.values()}
    if not any(of(name) is not None for name in refs) and of(source.name) is not None and "main" in refs:
        refs = {source.name: refs["main"]}
    places = [(name, source / "snapshots" / commit) for name, commit in sorted(refs.items())]
    return [(name, place) for name, place in places if place.is_dir() and name != "main"]


def _hub(name: str, match: str, of: StepOf) -> Found:
    repo, _, only = name.partition("@")
    with _on_the_hub(name) as asker:
        commits = hub.revisions(repo, asker)
    if only:
        commits = {only: commits.get(only, only)}
    steps = {revision: of(revision) for revision in commits if fnmatch.fnmatch(revision, match)}
    if all(of(revision) is None for revision in commits):
        at = only or "main"
        steps = {at: of(repo.split("/")[1])} if at in commits and fnmatch.fnmatch(at, match) else {}
    found = [
        Checkpoint(step, f"{repo}@{r}", commits[r], repo=repo, commit=commits[r])
        for r, step in steps.items()
        if step is not None
    ]
    return found, [Skip(f"{repo}@{r}", no_step([r])) for r, step in steps.items() if step is None]


class Opener:
    """Opens checkpoints; keeps the last two, and the one that the others are compared with, until they are replaced."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.pinned: str | None = None
        self.check: hub.Check | None = None  # refuses a label by the shapes in its headers, before it is downloaded
        self.opened: dict[str, Weights] = {}

    def __call__(self, checkpoint: Checkpoint) -> Weights:
        weights = self.opened.pop(checkpoint.label, None)
        if weights is None:
            for label in [name for name in self.opened if name != self.pinned][:-1]:
                del self.opened[label]
            weights = read(checkpoint.place) if checkpoint.place else self._downloaded(checkpoint)
        self.opened[checkpoint.label] = weights  # the latest used is the last to go
        return weights

    def _downloaded(self, checkpoint: Checkpoint) -> Weights:
        """The weights of a revision; unless they are kept, their files are deleted with them."""
        with contextlib.ExitStack() as cleaning:
            scratch = None
            if not self.keep:
                made = tempfile.TemporaryDirectory(prefix="nbutils-", ignore_cleanup_errors=True)
                scratch = cleaning.enter_context(made)
            place = hub.download(checkpoint.repo, checkpoint.commit, checkpoint.label, scratch, self.check)
            weights = read(place)
            weakref.finalize(weights, cleaning.pop_all().close)
        return weights
