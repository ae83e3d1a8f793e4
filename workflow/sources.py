"""What a chapter or a shared training is made from, as one hash: another hash, and it runs again.

The hash is of code, not of its looks: prose, captions, comments and docstrings change no number.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import groupby

from nbutils import devices, shared_runs
from workflow import ROOT, book

PACKAGES = ("normgrowth", "nbutils")  # whose modules chapters import
# What chapters read beside modules; a change of it is one for all.
DATA = ("book/data/*.csv", "normgrowth/*.mplstyle", "normgrowth/*.txt")


def hashes() -> dict[str, str]:
    """``hash_of`` each chapter and each shared training, by name."""
    codes = modules()
    return {name: hash_of(name, codes) for name in (*shared_runs.names(), *book.chapters())}


def hash_of(name: str, codes: Mapping[str, str] | None = None) -> str:
    """SHA-256 of all that the numbers of a chapter or of a shared training depend on, as it is now.

    Its code cells, the modules of both packages that these import, theirs in turn, its trainings' modules, the
    published data, and the versions of Python and packages. Not of the workflow that runs it.

    Raises:
        ValueError: a cell of a chapter is no Python, or a training's name in it is no constant.
    """
    codes = codes or modules()
    is_training = name in shared_runs.RECIPES
    used = _closure([_module_of(name)], codes) if is_training else used_by(name, codes)
    cells = [] if is_training else _cells(name)
    data = [path.read_bytes() for pattern in DATA for path in sorted(ROOT.glob(pattern))]
    digest_of_modules = _digest(_hash(codes[module]) for module in sorted(used))
    return _digest([*data, _versions(), digest_of_modules, *map(_hash, cells)])


def modules() -> dict[str, str]:
    """The code of all modules of both packages by their full names."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    files = {path.relative_to(ROOT).with_suffix(""): path for path in paths}
    return {".".join(name.parts).removesuffix(".__init__"): path.read_text("utf-8") for name, path in files.items()}


def used_by(chapter: str, codes: Mapping[str, str] | None = None) -> set[str]:
    """The modules of ours that a chapter's code imports, and its trainings', those that they use, and so on."""
    direct = {*map(_module_of, trainings_of(chapter))}.union(*map(_imports, _cells(chapter)))
    return _closure(direct, codes or modules())


def _closure(names: Iterable[str], codes: Mapping[str, str]) -> set[str]:
    """Modules of ours and what they import, in turn."""
    reached: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop()
        if name in codes and name not in reached:
            reached.add(name)
            queue.extend(_imports(codes[name]))
    return reached


def of_pages() -> list[str]:
    """Files, relative to the root, that the rendered pages are made from besides the executed notebooks."""
    code = ("workflow/**/*.py", "workflow/**/*.j2", "normgrowth/**/*.py", "nbutils/**/*.py")
    patterns = (*code, "_config.yml", "_toc.yml", "constraints.txt", "book/*.*", "book/_static/**/*", "CITATION.cff")
    files = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(ROOT)) for path in files)


def trainings_of(chapter: str) -> list[str]:
    """Names of the shared trainings that a chapter loads, from its calls ``shared_runs.load("pattern", …)``.

    Raises:
        ValueError: a call whose pattern is not a constant, so that nobody can tell what it needs before it runs.
    """
    names: set[str] = set()
    for cell in _cells(chapter):
        for node in ast.walk(_parse(cell)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "shared_runs.load":
                pattern = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
                if not isinstance(pattern, str):
                    raise ValueError(f"{chapter}: `{ast.unparse(node)}`: give the trainings' name as a constant string")
                names |= set(shared_runs.names(pattern))
    return sorted(names)


def families() -> list[list[str]]:
    """The shared trainings by the job that makes them, those of one module: to start takes as long as a small one."""
    return [list(names) for _, names in groupby(shared_runs.names(), key=_module_of)]


@cache
def _versions() -> str:
    return json.dumps(devices.versions(), sort_keys=True)


def _module_of(training: str) -> str:
    recipe = shared_runs.RECIPES[training]
    return getattr(recipe, "func", recipe).__module__


def _cells(chapter: str) -> list[str]:
    cells = book.code_cells(chapter)
    for number, cell in enumerate(cells, 1):
        try:
            _parse(cell)
        except SyntaxError as error:
            raise ValueError(f"{chapter}: code cell {number}, line {error.lineno}: {error.msg}") from None
    return cells


_parse = cache(ast.parse)


@cache
def _hash(code: str) -> str:
    """SHA-256 of code without comments and docstrings."""
    tree = ast.parse(code)  # another one: it is changed
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return _digest([ast.dump(tree)])


@cache
def _imports(code: str) -> frozenset[str]:
    """What code imports by full names, in functions too; a package runs before its parts, so it counts too."""
    named = set()
    for node in ast.walk(_parse(code)):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    if whole := named & set(PACKAGES):
        name = min(whole)
        raise ValueError(f"`import {name}` names no module: write `from {name} import …`, so that a change is seen")
    return frozenset(name.rsplit(".", up)[0] for name in named for up in range(name.count(".")))


def _digest(parts: Iterable[str | bytes]) -> str:
    return hashlib.sha256(b"\0".join(part if isinstance(part, bytes) else part.encode() for part in parts)).hexdigest()
