"""Results kept from earlier runs: does each stand as its job wrote it, and is it made from today's text?

This is the one judge of it. What is not sound goes before the workflow starts: Snakemake then makes what is not there.
So results of an older text are not counted either where it cannot start its work.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from nbutils import device
from workflow import ROOT, dependencies, run_folder

OLDER = "of an older text"


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder but its ``stats.json``, by path in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / "stats.json")
    return {str(path.relative_to(folder)): digest(path.read_bytes()) for path in files}


def sources_of_chapter(chapter: str) -> str:
    """SHA-256 of all that a chapter's numbers depend on: its text, modules, data, its trainings' modules, versions.

    Not of the workflow that runs it: Snakemake sees a change there, and what is measured over seeds outlives it.
    """
    return _of_files([f"book/{chapter}.md", *_used_by(chapter)])


def code_of_chapter(chapter: str) -> str:
    """The same without what cannot change a number: prose, captions, comments and docstrings."""
    parts = [_code(ROOT / name) if name.endswith(".py") else (ROOT / name).read_bytes() for name in _used_by(chapter)]
    return digest(b"\0".join([ast.dump(dependencies.code_of(chapter)).encode(), *parts, environment()]))


def _code(file: Path) -> bytes:
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree).encode()


def _used_by(chapter: str) -> list[str]:
    files = dependencies.of_chapter(chapter)
    return files + [file for name in dependencies.trainings_of(chapter) for file in dependencies.of_training(name)]


def sources_of_training(training: str) -> str:
    """SHA-256 of all that a shared training depends on."""
    return _of_files(dependencies.of_training(training))


def _of_files(files: Iterable[str]) -> str:
    parts = [(ROOT / name).read_bytes() for name in files]
    return digest(b"\0".join([*parts, environment()]))


@cache
def environment() -> bytes:
    """Versions of Python and of the packages that results depend on: those of another environment do not count."""
    return json.dumps(device.versions(), sort_keys=True).encode()


def fault(folder: Path, stats: Path, made_from: str, device: str) -> str:
    """Why a kept result must not count: "damaged", "of an older text" or "of another device"; "" if it is sound."""
    try:
        said = json.loads(stats.read_text(encoding="utf-8"))
        for name, expected in said["files"].items():
            if digest((folder / name).read_bytes()) != expected:
                return "damaged"
        if said["made_from"] != made_from:
            return OLDER
        return "" if said["device"] == device else "of another device"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "damaged"


def remove_unsound(
    profile: str, seeds: Iterable[int], chapters: Sequence[str], device: str
) -> Iterator[tuple[Path, str]]:
    """Remove every kept notebook and training of these chapters that is not sound. Yields each, and why.

    Raises:
        OSError: one cannot be removed.
    """
    trainings = sorted({name for chapter in chapters for name in dependencies.trainings_of(chapter)})
    texts = {chapter: sources_of_chapter(chapter) for chapter in chapters}
    recipes = {name: sources_of_training(name) for name in trainings}
    for seed in seeds:
        run = run_folder(profile, seed)
        for name in trainings:
            folder = run / "trainings" / name
            if folder.exists() and (why := fault(folder, folder / "stats.json", recipes[name], device)):
                shutil.rmtree(folder)
                yield folder, why
        for chapter in chapters:
            notebook, stats = run / f"{chapter}.ipynb", run / f"{chapter}.json"
            if (notebook.exists() or stats.exists()) and (why := fault(run, stats, texts[chapter], device)):
                notebook.unlink(missing_ok=True)
                stats.unlink(missing_ok=True)
                yield notebook, why
