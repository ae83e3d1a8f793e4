"""Real text without a network: the sources of the running Python's standard library, and sentences from them."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import sysconfig
import tokenize
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

DEV = 0.1  # share of the dev split
# Not text of the library: tests and their data, tables, generated files, and what belongs to this machine.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "__pycache__"}
_LEFT_OUT |= {"lib-dynload", "site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"}


class Corpus(NamedTuple):
    """Normalised documents, split into train and dev. ``source`` says where they come from, with its version."""

    source: str
    train: tuple[str, ...]
    dev: tuple[str, ...]


def normalise(text: str) -> str:
    """NFC, newline ends, no blanks at line ends, at most one empty line in a row, one newline at the end. Idempotent.

    >>> normalise("a  \\r\\n\\n\\n\\nb")
    'a\\n\\nb\\n'
    """
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[^\S\n]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).strip("\n")
    return f"{text}\n" if text else ""


def corpus(size: int) -> Corpus:
    """At most ``size`` bytes of the library's sources; about a tenth is the dev split, made of whole files.

    Files come in a fixed mixed order (by the hash of their path), so that a larger ``size`` only appends, and a file
    never changes its split.

    Raises:
        FileNotFoundError: this Python comes without its sources.
        ValueError: a size that leaves no dev split.

    >>> small, large = (corpus(size).train for size in (400_000, 600_000))
    >>> small[:-1] == large[: len(small) - 1]  # only its last document may be cut
    True
    """
    parts: tuple[list[str], list[str]] = ([], [])
    sizes = [0, 0]
    for document in _cut(_files(), size):
        part = int(sizes[1] < DEV * sum(sizes))  # 1 (dev) whenever dev has less than its share so far
        parts[part].append(document)
        sizes[part] += len(document.encode())
    if not parts[1]:
        raise ValueError(f"{size} bytes are at most one document and leave no dev split: ask for more")
    return Corpus(f"Python {platform.python_version()} standard library", tuple(parts[0]), tuple(parts[1]))


def sentences(count: int) -> list[str]:
    """``count`` English sentences found in the library's docstrings.

    A docstring's first paragraph is cut at full stops. A sentence has 6 to 40 words of letters and plain punctuation; a
    file gives at most five, and none comes twice.

    Raises:
        FileNotFoundError: as ``corpus``. ValueError: too few sentences.

    >>> found = sentences(20)
    >>> len(set(found)), all(6 <= len(sentence.split()) <= 40 for sentence in found)
    (20, True)
    """
    found: list[str] = []
    for text in _files():
        firsts = (" ".join(doc.split("\n\n")[0].split()) for doc in _docstrings(text))
        inside = (part for first in firsts for part in re.split(r"(?<=\.)\s+(?=[A-Z])", first) if _is_sentence(part))
        new = [part for part in dict.fromkeys(inside) if part not in found]
        found += new[: min(5, count - len(found))]
        if len(found) == count:
            return found
    raise ValueError(f"the library gives only {len(found)} sentences; {count} were asked for")


def _folder() -> Path:
    """The running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _files() -> Iterator[str]:
    """Normalised sources, in the order of the hash of their paths: mixed, and the same on every machine."""
    root, paths = _folder(), []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT and not name.startswith("config-")]
        paths += [Path(folder, name) for name in files if name.endswith(".py") and name not in _LEFT_OUT]
    # _sysconfigdata differs from machine to machine.
    names = {path.relative_to(root).as_posix(): path for path in paths if not path.name.startswith("_sysconfigdata")}
    if not names:
        raise FileNotFoundError(f"no Python sources in {root}: use a Python that has its library as .py files")
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


def _cut(documents: Iterable[str], size: int) -> Iterator[str]:
    """Documents up to ``size`` bytes; the last one ends at a line end below it."""
    for document in documents:
        data = document.encode()
        part = data if len(data) <= size else data[: data.rfind(b"\n", 0, size) + 1]
        if part:
            yield part.decode()
        if part != data:
            return
        size -= len(data)
