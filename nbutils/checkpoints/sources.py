"""Where checkpoints are: folders, the Hub, and the Hub's cache; and the step that a name tells."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nbutils.checkpoints.foreign import why_foreign
from nbutils.checkpoints.weights import ONLY_ADAPTER, ReadError, Weights, weight_files

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_AMOUNT = r"((?:[1-9]\d{0,2}(?:[_,]\d{3})+|\d+)(?:\.\d+)?)([kKmMbB]?)"  # 1_000_000 and 1,000,000 are one number
_END = r"(?=$|[^A-Za-z0-9.]|\.(?!\d)|tokens)"
_WORDS = ("(?:global_?|train_?)?step", "ba(?:tch)?", "checkpoint|ckpt|iteration|iter|it")
_MARKERS = [re.compile(rf"(?<![A-Za-z])(?:{words})s?[-_= ]?{_AMOUNT}{_END}", re.I) for words in _WORDS]
_WHOLE = [
    re.compile(rf"{_AMOUNT}(?:[-_ ]?steps?)?", re.I),
    re.compile(r"(?:model|weights|params|state)[-_](\d+)()", re.I),
]
_EPOCH_UPDATE = re.compile(r"checkpoint_\d+_(\d+)")  # fairseq; checkpoint1 is its first epoch
Tell = Callable[[str], int | None]  # from a name to its step
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def step_of(name: str) -> int | None:
    """The training step that a name tells, or None where it tells none, or two.

    >>> [step_of(n) for n in ("step1000-tokens4B", "checkpoint-300000", "step_20k", "step-1.5M", "iter_0001000", "64")]
    [1000, 300000, 20000, 1500000, 1000, 64]
    >>> step_of("step1_000_000"), step_of("step1,000")
    (1000000, 1000)
    >>> [step_of(n) for n in ("checkpoint_1_1600", "ep0-ba100", "1000steps", "model_100", "model_7b")]
    [1600, 100, 1000, 100, None]
    """
    if of_fairseq := _EPOCH_UPDATE.fullmatch(name):
        return int(of_fairseq[1])
    for marker in _MARKERS:
        found = {_number(*match.groups()) for match in marker.finditer(name)}
        if found:
            return found.pop() if len(found) == 1 else None
    plain = next((match for whole in _WHOLE if (match := whole.fullmatch(name))), None)
    return _number(*plain.groups()) if plain else None


def _number(digits: str, unit: str) -> int | None:
    whole, _, decimals = re.sub("[_,]", "", digits).partition(".")
    value, rest = divmod(int(whole + decimals) * _UNITS[unit.lower()], 10 ** len(decimals))
    return value if rest == 0 else None


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


def by_pattern(pattern: str | None) -> Callable[[str], int | None]:
    r"""``step_of``, or what a regular expression with one group finds in a name, with its unit such as k.

    Raises:
        ValueError: no regular expression, or not one group.

    >>> by_pattern(r"phase2_(\d+k)")("phase2_30k-best")
    30000
    """
    if pattern is None:
        return step_of
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--step {pattern!r} is no regular expression: {error}") from None
    if compiled.groups != 1:
        raise ValueError(
            f"--step {pattern!r} has {compiled.groups} groups; put ( ) around the number of the step, once"
        )

    def tell(name: str) -> int | None:
        found = compiled.search(name)
        number = re.fullmatch(_AMOUNT, found[1]) if found and found[1] else None
        return _number(*number.groups()) if number else None

    return tell


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
    files = [place] if place.is_file() else [f for f in _listed(place) if f.suffix in SUFFIXES and f.is_file()]
    return ";".join(f"{f.name}:{(s := f.stat()).st_size}:{s.st_mtime_ns}" for f in files)


def series_below(source: Path) -> list[Path]:
    """Folders in a folder that hold checkpoints: it was given in place of one of them.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "mine", "step10").mkdir(parents=True)
    ...     [below.name for below in series_below(Path(folder))]
    ['mine']
    """
    below = _listed(source) if source.is_dir() else []
    return [d for d in below if d.is_dir() and not d.name.startswith(".") and _local(d, "*")[0]]


def _no_step(names: Iterable[str]) -> str:
    if any("epoch" in name.lower() for name in names):
        return "no step (epochs are not steps; rename, such as step500, or give --step)"
    return "its name tells no step, or two; --step takes a pattern that tells it"


def grouped(skips: Sequence[Skip]) -> list[str]:
    """One line for each kind of reason, with the first of its kind and how many more there are.

    >>> grouped([Skip(f"run/step{i}", f"run/step{i}: empty folder") for i in range(300)])
    ['run/step0: empty folder, and 299 more such']
    """
    kinds: dict[str, list[Skip]] = {}
    for skip in skips:
        kinds.setdefault(re.sub(r"\S*/\S*|\d+", "", skip.why.replace(skip.label, "")), []).append(skip)
    more = {kind: f", and {len(same) - 1} more such" if len(same) > 1 else "" for kind, same in kinds.items()}
    return [f"{same[0]}{more[kind]}" for kind, same in kinds.items()]


def _listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing where it may not be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _holds_weights(place: Path) -> bool:
    if place.is_file():
        return place.suffix in SUFFIXES
    with contextlib.suppress(ReadError):
        return bool(weight_files(place))
    return why_foreign(place, depth=1) is not None or any(
        f.suffix in SUFFIXES or f.name.endswith(".index.json") for f in _listed(place)
    )


def _local(source: Path, match: str, tell: Tell = step_of) -> tuple[list[Checkpoint], list[Skip]]:
    if source.is_file():
        options = [(source.stem, source)]
    elif (source / "snapshots").is_dir():
        options = _cached(source, tell)
    else:
        inside = [c for c in sorted(source.iterdir()) if c.is_dir() or c.suffix in SUFFIXES or not c.exists()]
        options = [(c.stem if c.is_file() else c.name, c) for c in inside if not c.name.startswith(".")]
        options = [o for o in options if o[1].is_dir() or tell(o[0]) is not None]
        if not any(tell(name) is not None for name, _ in options):
            options = [(source.resolve().name, source)] if _holds_weights(source) else options
        elif _holds_weights(source) and all(place.is_dir() for _, place in options):
            options.append(("", source))
    found, skipped = [], []
    for name, place in options:
        if name and not fnmatch.fnmatch(name, match):
            continue
        if not place.exists():
            if tell(name) is not None:
                skipped.append(Skip(str(place), "a symbolic link to nothing"))
            continue
        step, inside = tell(name), [] if place.is_file() else _listed(place)
        if not _holds_weights(place) and len(held := [d for d in inside if d.is_dir() and _holds_weights(d)]) == 1:
            if step is None and tell(held[0].name) is not None:
                continue  # a series of its own
            place = held[0]  # such as step1000/hf
        if step is not None:
            label, resolved = (
                f"{root}@{name}" if place.parent.name == "snapshots" else str(root / place.relative_to(source))
                for root in (source, source.resolve())
            )
            found.append(Checkpoint(step, label, _stamp(place), place, resolved=resolved))
        elif _holds_weights(place):
            files = [f.stem for f in inside if f.suffix in SUFFIXES]
            skipped.append(Skip(str(place), _no_step([name, *files])))
    return found, skipped


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
    skipped = [Skip(f"{repo}@{r}", _no_step([r])) for r, step in chosen.items() if step is None]
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
    raise ReadError(ONLY_ADAPTER if only_adapter else "no .safetensors and no .bin file in it")


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
