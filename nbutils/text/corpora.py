"""Real text, with and without a network: Python's standard library, WikiText-2, PTB and Brown."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import platform
import re
import sysconfig
import tokenize
import unicodedata
import urllib.request
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

# Hub repository, arguments of load_dataset, and the column of text. PTB's repository holds a script, which `datasets`
# no longer runs; the hub's own conversion of it lies in a branch.
HUB: dict[str, tuple[str, dict[str, str], str]] = {
    "wikitext-2": ("Salesforce/wikitext", {"name": "wikitext-2-raw-v1"}, "text"),
    "ptb": ("ptb-text-only/ptb_text_only", {"revision": "refs/convert/parquet"}, "sentence"),
}
NAMES = ("stdlib", "docstrings", *HUB, "brown")
# Not text of the library: tests and their data, tables, generated files, and what belongs to this machine.
_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "encodings",
    "pydoc_data",
    "__pycache__",
    "lib-dynload",
}
_LEFT_OUT |= {"site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"}


class CorpusMissing(RuntimeError):
    """A corpus cannot be had here; the message says what is missing and what to do. Nothing is taken in its place."""


@dataclass(frozen=True)
class Corpus:
    """Normalised documents, split into train and dev. ``source`` says where they come from, with its version."""

    name: str
    source: str
    train: tuple[str, ...]
    dev: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all documents and of the split; two corpora with the same digest are the same text."""
        found = hashlib.sha256()
        for split in (self.train, self.dev):
            found.update(f"split {len(split)}\n".encode())
            for document in split:
                data = document.encode()
                found.update(f"{len(data)}\n".encode() + data)
        return found.hexdigest()

    def report(self, **tokens: Tensor) -> dict[str, str | int]:
        """What a chapter prints: name, source, bytes of each split, content hash, and the length of each given tensor.

        >>> list(Corpus("x", "by hand", ("abc\\n",), ()).report().values())[:-1]
        ['x', 'by hand', 4, 0]
        """
        sizes = {
            f"{split} bytes": sum(len(text.encode()) for text in getattr(self, split)) for split in ("train", "dev")
        }
        counts = {f"{split} tokens": ids.numel() for split, ids in tokens.items()}
        return {"corpus": self.name, "source": self.source, **sizes, **counts, "content": self.digest[:12]}


class Sentences(NamedTuple):
    """Sentences, and a line that says where they come from."""

    source: str
    items: list[str]


def normalise(text: str) -> str:
    """NFC, newline ends, no blanks at line ends, at most one empty line in a row, one newline at the end. Idempotent.

    >>> normalise("a  \\r\\n\\n\\n\\nb")
    'a\\n\\nb\\n'
    """
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[^\S\n]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).strip("\n")
    return f"{text}\n" if text else ""


def corpus(name: str, size: int = 2_000_000, dev: float = 0.1) -> Corpus:
    """A corpus of at most ``size`` bytes; about the share ``dev`` of it is the dev split, made of whole documents.

    ``stdlib``: the sources of the running Python's standard library. ``docstrings``: their docstrings alone, mostly
    English (1.6 MB). Files come in a fixed mixed order (by the hash of their path), so that a larger ``size`` only
    appends, and a file never changes its split. ``wikitext-2`` and ``ptb`` come from the hub with their own train and
    validation splits, ``brown`` from NLTK.

    Raises:
        CorpusMissing: the corpus cannot be had here (no sources, no network, or a package is missing).
        ValueError: unknown name, a size or share that makes no sense.

    >>> small, large = (corpus("stdlib", size).train for size in (400_000, 600_000))
    >>> small[:-1] == large[: len(small) - 1]  # only its last document may be cut
    True
    """
    if name not in NAMES:
        raise ValueError(f"unknown corpus {name!r}: choose one of {', '.join(NAMES)}")
    if size < 1 or not 0 < dev < 1:
        raise ValueError(f"size must be positive and dev between 0 and 1; got {size} and {dev}")
    if name in HUB:
        train, held = _hub(name)
        source = ", ".join([HUB[name][0], *HUB[name][1].values()])
        return Corpus(name, source, _cut(train, round(size * (1 - dev))), _cut(held, round(size * dev)))
    if name == "brown":
        documents, source = _brown_files(), "Brown corpus (NLTK)"
    else:
        documents, source = _stdlib_files(), f"Python {platform.python_version()} standard library"
        if name == "docstrings":
            documents, source = (
                (normalise("\n\n".join(_docstrings(text))) for text in documents),
                f"docstrings of the {source}",
            )
    parts: tuple[list[str], list[str]] = ([], [])
    sizes = [0, 0]
    for document in _cut(documents, size):
        part = int(sizes[1] < dev * sum(sizes))  # 1 (dev) whenever dev has less than its share so far
        parts[part].append(document)
        sizes[part] += len(document.encode())
    if not parts[1]:
        raise ValueError(f"{size} bytes of {name} are one document and leave no dev split: ask for more")
    return Corpus(name, source, tuple(parts[0]), tuple(parts[1]))


def available(name: str) -> bool:
    """Whether ``corpus(name)`` can be had: here, or from a host that answers within seconds. Downloads no text.

    >>> available("stdlib")
    True
    """
    if name in HUB:
        return _importable("datasets") and (_in_cache(name) or _hub_answers(HUB[name][0]))
    if name == "brown":
        return _importable("nltk") and (_brown_root() is not None or _brown_index_answers())
    if name not in NAMES:
        raise ValueError(f"unknown corpus {name!r}: choose one of {', '.join(NAMES)}")
    try:
        return next(_stdlib_files(), None) is not None
    except CorpusMissing:
        return False


def sentences(name: str, count: int) -> Sentences:
    """``count`` sentences: the first ones of ``brown``, or of ``stdlib``: English sentences found in docstrings.

    A docstring's first paragraph is cut at full stops. A sentence has 6 to 40 words of letters and plain punctuation; a
    file gives at most five, and none comes twice.

    Raises:
        CorpusMissing: as ``corpus``. ValueError: another name, or too few sentences.

    >>> found = sentences("stdlib", 20).items
    >>> len(set(found)), all(6 <= len(sentence.split()) <= 40 for sentence in found)
    (20, True)
    """
    found: list[str] = []
    if name == "brown":
        source = "Brown corpus (NLTK)"
        lines = (line for document in _brown_files() for line in document.splitlines())
        for line in lines:
            if len(found) == count:
                break
            found.append(line)
    elif name == "stdlib":
        source = f"English sentences from docstrings of the Python {platform.python_version()} standard library"
        for text in _stdlib_files():
            firsts = (" ".join(doc.split("\n\n")[0].split()) for doc in _docstrings(text))
            inside = (
                part for first in firsts for part in re.split(r"(?<=\.)\s+(?=[A-Z])", first) if _is_sentence(part)
            )
            new = [part for part in dict.fromkeys(inside) if part not in found]
            found += new[: min(5, count - len(found))]
            if len(found) == count:
                break
    else:
        raise ValueError(f"no sentences from {name!r}: choose brown or stdlib")
    if len(found) < count:
        raise ValueError(f"{name} gives only {len(found)} sentences; {count} were asked for")
    return Sentences(source, found)


# Where the text lies.


def _stdlib_folder() -> Path:
    """The running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _stdlib_files() -> Iterator[str]:
    """Normalised sources, in the order of the hash of their paths: mixed, and the same on every machine."""
    root, paths = _stdlib_folder(), []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT and not name.startswith("config-")]
        paths += [Path(folder, name) for name in files if name.endswith(".py") and name not in _LEFT_OUT]
    # _sysconfigdata differs from machine to machine.
    names = {path.relative_to(root).as_posix(): path for path in paths if not path.name.startswith("_sysconfigdata")}
    if not names:
        raise CorpusMissing(f"no Python sources in {root}: use a Python that ships its standard library as .py files")
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        with tokenize.open(names[name]) as lines:
            if text := normalise(lines.read()):
                yield text


def _docstrings(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old escapes in the sources
        nodes = ast.walk(ast.parse(source))
    return [found for node in nodes if isinstance(node, kinds) and (found := ast.get_docstring(node))]


def _is_sentence(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Z][a-z]*( [A-Za-z][a-z'-]*,?){5,39}\.", text))


def _cut(documents: Iterable[str], size: int) -> tuple[str, ...]:
    """Documents up to ``size`` bytes; the last one ends at a line end below it."""
    found = []
    for document in documents:
        data = document.encode()
        if len(data) > size:
            data = data[: data.rfind(b"\n", 0, size) + 1]
        if data:
            found.append(data.decode())
        size -= len(data)
        if len(data) < len(document.encode()):
            break
    return tuple(found)


def _missing(name: str, why: object, todo: str) -> CorpusMissing:
    return CorpusMissing(f"the corpus {name!r} cannot be had here: {why}. {todo}, or use the corpus 'stdlib'")


def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _hub(name: str) -> tuple[list[str], list[str]]:
    """Documents of a hub corpus: WikiText's articles; PTB's sentences as one document each split."""
    repository, options, column = HUB[name]
    if not _importable("datasets"):
        raise _missing(name, "the package `datasets` is not installed", "Install it (pip install datasets)")
    if not available(name):  # asked first: `datasets` alone tries for half a minute
        raise _missing(name, f"huggingface.co does not answer for {repository}", "Connect to the hub once")
    import datasets

    try:
        splits = [
            datasets.load_dataset(repository, split=split, **options)[column] for split in ("train", "validation")
        ]
    except Exception as error:  # whatever the hub's client raises, the reader needs the same sentence
        raise _missing(name, f"{repository}: {error}", "Connect to the hub once") from error
    texts = [normalise("\n".join(row.rstrip("\n") for row in rows)) for rows in splits]
    train, dev = ([part for part in re.split(r"^(?= = [^=].* =$)", text, flags=re.M) if part.strip()] for text in texts)
    return train, dev


def _in_cache(name: str) -> bool:
    from datasets import config

    folder, kind = HUB[name][0].replace("/", "___").lower(), HUB[name][1].get("name", "default")
    folders = Path(config.HF_DATASETS_CACHE).glob("*/*/")
    return any(path.parent.name.lower() == folder and path.name.startswith(kind) for path in folders)


def _hub_answers(repository: str) -> bool:
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(repository, timeout=5)
    except Exception:  # no network, no such repository, or offline by choice: not available
        return False
    return True


def _brown_root() -> object | None:
    import nltk

    for place in ("corpora/brown", "corpora/brown.zip/brown/"):
        try:
            return nltk.data.find(place)
        except LookupError:
            continue
    return None


def _brown_index_answers() -> bool:
    from nltk.downloader import Downloader

    try:
        with urllib.request.urlopen(urllib.request.Request(Downloader().url, method="HEAD"), timeout=5):
            return True
    except OSError:
        return False


def _brown_files() -> Iterator[str]:
    """Brown's files in order; a sentence is a line, its tokens apart by a blank."""
    if not _importable("nltk"):
        raise _missing("brown", "the package `nltk` is not installed", "Install it (pip install nltk)")
    import nltk

    root = _brown_root()
    if root is None and _brown_index_answers():
        nltk.download("brown", quiet=True)
        root = _brown_root()
    if root is None:
        todo = "Run python -m nltk.downloader brown where there is a network"
        raise _missing("brown", "NLTK finds no corpora/brown and its host does not answer", todo)
    reader = nltk.corpus.reader.TaggedCorpusReader(root, r"c[a-z]\d\d", encoding="ascii")
    return (normalise("\n".join(" ".join(words) for words in reader.sents(file))) for file in sorted(reader.fileids()))
