"""Where checkpoints are: folders, the Hub, and the Hub's cache; and the step that a name tells."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nbutils.checkpoints.layouts import in_parts, other_format
from nbutils.checkpoints.steps import Tell, by_pattern, no_step, step_of
from nbutils.checkpoints.weights import ONLY_ADAPTER, OTHER_FILES, ReadError, Weights, weight_files

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


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

    @property
    def pretrained(self) -> dict[str, str]:
        """What ``from_pretrained`` of ``transformers`` takes to load it: ``AutoModel.from_pretrained(**c.pretrained)``.

        >>> Checkpoint(1000, "org/name@step1000", "", repo="org/name", commit="8f2e").pretrained
        {'pretrained_model_name_or_path': 'org/name', 'revision': '8f2e'}
        """
        where = {"pretrained_model_name_or_path": str(self.place or self.repo)}
        return where if self.place else where | {"revision": self.commit}


class Skip(NamedTuple):
    """What was not counted, and why."""

    label: str
    why: str

    def __str__(self) -> str:
        return self.why if self.label in self.why else f"{self.label}: {self.why}"


def find(
    source: str | Path | Iterable[str | Path], match: str = "*", step: str | None = None
) -> tuple[list[Checkpoint], list[Skip]]:
    """Checkpoints of one or several sources, sorted by step, and what looks like one and is none.

    Args:
        source: a folder of checkpoints, one checkpoint, a folder of the Hub's cache (``models--org--name``), or a Hub
            repository ``org/name`` (all revisions that name a step) or ``org/name@revision``.
        match: shell pattern for the names of folders or revisions, such as ``stage1-*``.
        step: regular expression whose one group is the step in such a name, where ``step_of`` does not know it.

    Raises:
        FileNotFoundError: a source that is neither there nor the name of a repository.
        ConnectionError: the Hub is needed and cannot be reached.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("step1000.safetensors", "step200.safetensors", "notes.txt"):
    ...         Path(folder, name).touch()
    ...     [checkpoint.step for checkpoint in find(folder)[0]]
    [200, 1000]
    """
    found: list[Checkpoint] = []
    skipped: list[Skip] = []
    tell = by_pattern(step)
    for one in [source] if isinstance(source, str | Path) else source:
        name = str(one)
        if Path(name).exists():
            checkpoints, skips = _local(Path(name), match, tell)
        elif re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", name):
            checkpoints, skips = _hub(name, match, tell)
        else:
            raise FileNotFoundError(f"{name}: no such folder, and no name of a Hub repository (org/name)")
        found += checkpoints
        skipped += skips
    unique = {checkpoint.key: checkpoint for checkpoint in found}
    return sorted(unique.values(), key=lambda c: c.step), skipped


def _stamp(place: Path) -> str:
    files = [place] if place.is_file() else sorted(f for f in place.iterdir() if f.suffix in SUFFIXES and f.is_file())
    return ";".join(f"{f.name}:{(s := f.stat()).st_size}:{s.st_mtime_ns}" for f in files)


def series_below(source: Path) -> list[Path]:
    """Folders in a folder that hold checkpoints: it was given in place of one of them.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "mine", "step10").mkdir(parents=True)
    ...     [below.name for below in series_below(Path(folder))]
    ['mine']
    """
    found = []
    for below in sorted(source.iterdir()) if source.is_dir() else []:
        with contextlib.suppress(OSError):
            if below.is_dir() and not below.name.startswith(".") and _local(below, "*")[0]:
                found.append(below)
    return found


def grouped(skips: Sequence[Skip]) -> list[str]:
    """A line for each kind of reason, in the order of the first of each: numbers, paths and labels make no other kind.

    >>> grouped([Skip("step1", "empty folder"), Skip("step2", "x/step2: empty folder"), Skip("last", "no step")])
    ['step1: empty folder (and 1 more like it, to step2)', 'last: no step']
    """
    kinds: dict[str, list[Skip]] = {}
    for skip in skips:
        kind = skip.why.replace(skip.label, "").lstrip(": ")
        kinds.setdefault(re.sub(r"\d+", "#", re.sub(r"\S*/\S*", "", kind)).strip(), []).append(skip)
    return [
        f"{k[0]} (and {len(k) - 1:,} more like it, to {k[-1].label})" if k[1:] else str(k[0]) for k in kinds.values()
    ]


def _holds_weights(place: Path) -> bool:
    """Or something in their place, of which reading it says why it cannot be used."""
    if place.is_file():
        return place.suffix in SUFFIXES
    with contextlib.suppress(ReadError):
        return bool(weight_files(place))
    with contextlib.suppress(OSError):
        names = [f.name for f in place.iterdir()]
        return any(n.endswith((*SUFFIXES, ".index.json")) for n in names) or bool(in_parts(names))
    return False


def _local(source: Path, match: str, tell: Tell = step_of) -> tuple[list[Checkpoint], list[Skip]]:
    found: list[Checkpoint] = []
    skipped: list[Skip] = []
    for name, place in _options(source, tell):
        if name and not fnmatch.fnmatch(name, match):
            continue
        try:
            one = _one(source, name, place, tell)
        except OSError as error:
            one = Skip(str(place), f"cannot be read: {error.strerror or error}")
        if isinstance(one, Checkpoint):
            found.append(one)
        elif one:
            skipped.append(one)
    return found, skipped


def _options(source: Path, tell: Tell = step_of) -> list[tuple[str, Path]]:
    """What may be checkpoints, and the names that may tell their steps."""
    own = source.resolve().with_suffix("") if source.is_file() else source.resolve()
    if tell(own.name) is None and tell(own.parent.name) is not None:
        own = own.parent  # such as step1000/model, or step1000/model.safetensors
    if source.is_file():
        return [(own.name, source)]
    if (source / "snapshots").is_dir():
        return _cached(source, tell)
    inside = [c for c in sorted(source.iterdir()) if c.is_dir() or c.suffix in SUFFIXES or c.is_symlink()]
    options = [(c.name if c.is_dir() or c.suffix not in SUFFIXES else c.stem, c) for c in inside if c.name[0] != "."]
    options = [o for o in options if o[1].is_dir() or tell(o[0]) is not None]
    if not any(tell(name) is not None for name, _ in options):
        one = tell(own.name) is not None and any(_holds_weights(place) for _, place in options)  # such as step1000/hf
        return [(own.name, source)] if one or _holds_weights(source) else options
    if _holds_weights(source) and all(place.is_dir() for _, place in options):
        options.append(("", source))
    return options


def _one(source: Path, name: str, place: Path, tell: Tell = step_of) -> Checkpoint | Skip | None:
    """The checkpoint at a place, or why there is none; None where nothing looks like one."""
    if not place.exists():
        return Skip(str(place), f"a link to {place.readlink()}, which is not there")
    step, inside = tell(name), [] if place.is_file() else sorted(place.iterdir())
    if not _holds_weights(place):
        held = [d for d in inside if d.is_dir() and not OTHER_FILES.search(d.name) and _holds_weights(d)]
        if step is None and any(tell(d.name) is not None for d in held):
            return None  # a series of its own
        if len(held) > 1 and step is not None:
            names = " and ".join(d.name for d in held[:4])
            return Skip(
                str(place),
                f"weights in {len(held)} folders, {names}; give those of one: {place.parent}/*/{held[0].name}",
            )
        place = held[0] if len(held) == 1 else place  # such as step1000/hf
    if step is not None:
        label, resolved = (
            f"{root}@{name}" if place.parent.name == "snapshots" else str(root / place.relative_to(source))
            for root in (source, source.resolve())
        )
        return Checkpoint(step, label, _stamp(place), place, resolved=resolved)
    files = [f.stem for f in inside if f.suffix in SUFFIXES]
    return Skip(str(place), no_step([name, *files])) if _holds_weights(place) else None


def _cached(source: Path, tell: Tell = step_of) -> list[tuple[str, Path]]:
    """Revisions of one repository in the Hub's cache. A repository whose own name tells a step has one at ``main``."""
    refs = {str(f.relative_to(source / "refs")): f.read_text().strip() for f in source.glob("refs/**/*") if f.is_file()}
    refs |= {s.name: s.name for s in (source / "snapshots").iterdir() if s.name not in refs.values()}
    if not any(tell(name) is not None for name in refs) and tell(source.name) is not None and "main" in refs:
        refs = {source.name: refs["main"]}
    places = [(name, source / "snapshots" / commit) for name, commit in sorted(refs.items())]
    return [(name, place) for name, place in places if place.is_dir() and name != "main"]


@contextlib.contextmanager
def _asking(repo: str, what: str) -> Iterator[None]:
    """Say plainly what is missing when the Hub does not answer."""
    try:
        from huggingface_hub import errors as hub
    except ImportError as error:
        raise ConnectionError(f"{repo}: reading from the Hub needs the package huggingface_hub") from error
    try:
        yield
    except hub.RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{repo}: not on the Hub, or no access to it") from error
    except ReadError:
        raise
    except Exception as error:  # each version of the client raises its own kinds
        gone = isinstance(error, hub.EntryNotFoundError | hub.RevisionNotFoundError)
        if gone and not isinstance(error, hub.LocalEntryNotFoundError):  # that one tells of a missing network
            raise ReadError(f"{repo}: {what}: not on the Hub") from error
        said = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise ConnectionError(
            f"{repo}: cannot get {what} from the Hub ({type(error).__name__}: {said}). Without a network, give a "
            "folder of checkpoints or of the Hub's cache (…/hub/models--org--name)"
        ) from error


def _hub(name: str, match: str, tell: Tell = step_of) -> tuple[list[Checkpoint], list[Skip]]:
    repo, _, only = name.partition("@")
    with _asking(f"{name}: no such folder; and as a repository", "the list of its revisions"):
        from huggingface_hub import HfApi

        refs = HfApi().list_repo_refs(repo)
    commits = {ref.name: ref.target_commit for ref in [*refs.branches, *refs.tags]}
    if only:
        commits = {only: commits.get(only, only)}
    steps = {revision: tell(revision) for revision in commits}
    if all(step is None for step in steps.values()):
        at = only or "main"
        steps = {at: tell(repo.split("/")[1])} if at in commits else {}
    chosen = {r: s for r, s in steps.items() if fnmatch.fnmatch(r, match)}
    found = [
        Checkpoint(step, f"{repo}@{r}", commits[r], repo=repo, commit=commits[r])
        for r, step in chosen.items()
        if step is not None
    ]
    skipped = [Skip(f"{repo}@{r}", no_step([r])) for r, step in chosen.items() if step is None]
    return found, skipped


def _wanted(names: Sequence[str]) -> list[str]:
    """Which files of a repository to fetch: the weights in one format, safetensors first."""
    here = [n for n in names if "/" not in n and not re.search(r"optim|scheduler|training_args|rng_state|adapter", n)]
    for single in ("model.safetensors", "pytorch_model.bin"):
        suffix = Path(single).suffix
        if single in here:
            return [single]
        if files := [n for n in here if n.endswith((suffix, f"{suffix}.index.json"))]:
            return files
    only_adapter = any(n.startswith("adapter_model.") for n in names)
    other = in_parts(names) or other_format(names) or "no .safetensors and no .bin file in it"
    raise ReadError(ONLY_ADAPTER if only_adapter else other)


class Opener:
    """Opens checkpoints; keeps the last two, and the one that the others are compared with, until they are replaced."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.pinned: str | None = None
        self.opened: dict[str, tuple[Weights, Path | None]] = {}

    def __call__(self, checkpoint: Checkpoint) -> Weights:
        if checkpoint.label in self.opened:
            self.opened[checkpoint.label] = self.opened.pop(checkpoint.label)  # the latest used is the last to go
            return self.opened[checkpoint.label][0]
        for label in [name for name in self.opened if name != self.pinned][:-1]:
            self._drop(label)
        scratch = None
        try:
            place = checkpoint.place
            if place is None:
                scratch = None if self.keep else Path(tempfile.mkdtemp(prefix="nbutils-"))
                place = self._fetch(checkpoint, scratch)
            weights = Weights(place)
        except BaseException:
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        self.opened[checkpoint.label] = (weights, scratch)
        return weights

    def _fetch(self, checkpoint: Checkpoint, scratch: Path | None) -> Path:
        with _asking(checkpoint.label, "its weights"):
            from huggingface_hub import HfApi, hf_hub_download

            try:
                names = _wanted(HfApi().list_repo_files(checkpoint.repo, revision=checkpoint.commit))
            except ReadError as error:
                raise ReadError(f"{checkpoint.label}: {error}") from error
            where = {"revision": checkpoint.commit, "local_dir": scratch}
            files = [Path(hf_hub_download(checkpoint.repo, name, **where)) for name in names]
        return files[0].parent

    def _drop(self, label: str) -> None:
        weights, scratch = self.opened.pop(label)
        weights.close()
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)

    def close(self) -> None:
        for label in list(self.opened):
            self._drop(label)
