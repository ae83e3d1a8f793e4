"""One hash of all that a chapter or a shared training is made from: when the hash changes, the chapter runs again.

The hash leaves out prose, captions, comments and docstrings, which change no number.
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

PACKAGES = ("normgrowth", "nbutils")  # the packages whose modules chapters import
# Files that chapters read beside modules. A change of one of them makes every chapter run again.
DATA = ("book/data/*.csv", "normgrowth/*.mplstyle", "normgrowth/*.txt")


def hashes() -> dict[str, str]:
    """``hash_of`` of all chapters and shared trainings, by name."""
    codes = modules()
    return {name: hash_of(name, codes) for name in (*shared_runs.names(), *book.chapters())}


def hash_of(name: str, codes: Mapping[str, str] | None = None) -> str:
    """SHA-256 of all that the numbers of a chapter or of a shared training depend on today.

    That is the code cells, the modules of both packages that the cells and the shared trainings import, directly or
    through other modules, the files of ``DATA``, and the versions of Python and of packages. The workflow, which runs
    the chapter, is left out.

    Raises:
        ValueError: a code cell is not valid Python, or the name of a training in it is not a constant.
    """
    codes = codes or modules()
    is_training = name in shared_runs.RECIPES
    used = _closure([_module_of(name)], codes) if is_training else used_by(name, codes)
    cells = [] if is_training else _cells(name)
    data = [path.read_bytes() for pattern in DATA for path in sorted(ROOT.glob(pattern))]
    digest_of_modules = _digest(_hash(codes[module]) for module in sorted(used))
    return _digest([*data, _versions(), digest_of_modules, *map(_hash, cells)])


def modules() -> dict[str, str]:
    """The code of every module of both packages, by full name of the module."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    files = {path.relative_to(ROOT).with_suffix(""): path for path in paths}
    return {".".join(name.parts).removesuffix(".__init__"): path.read_text("utf-8") for name, path in files.items()}


def used_by(chapter: str, codes: Mapping[str, str] | None = None) -> set[str]:
    """The modules of both packages that a chapter's code and its trainings import, directly or through others."""
    direct = {*map(_module_of, trainings_of(chapter))}.union(*map(_imports, _cells(chapter)))
    return _closure(direct, codes or modules())


def _closure(names: Iterable[str], codes: Mapping[str, str]) -> set[str]:
    """The modules ``names`` and all that they import, directly or through others; only those in ``codes``."""
    reached: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop()
        if name in codes and name not in reached:
            reached.add(name)
            queue.extend(_imports(codes[name]))
    return reached


def page_sources() -> list[str]:
    """Files that the rendered pages are made from besides the executed notebooks, relative to the root."""
    code = ("workflow/**/*.py", "workflow/**/*.j2", "normgrowth/**/*.py", "nbutils/**/*.py")
    patterns = (*code, "_config.yml", "_toc.yml", "constraints.txt", "book/*.*", "book/_static/**/*", "CITATION.cff")
    files = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(ROOT)) for path in files)


def trainings_of(chapter: str) -> list[str]:
    """Names of the shared trainings that a chapter loads, from its calls ``shared_runs.load("pattern", …)``.

    Raises:
        ValueError: the pattern in a call is not a constant, so the trainings are unknown before the chapter runs.
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
    """Names of the shared trainings in groups, one for each job: starting a job takes as long as a small training.

    A job makes the trainings of one module.
    """
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
    tree = ast.parse(code)  # not the cached ``_parse``, since the tree is changed below
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return _digest([ast.dump(tree)])


@cache
def _imports(code: str) -> frozenset[str]:
    """Full names of the modules and packages that code imports, in functions too.

    Importing a module runs the packages that it lies in first, so these count as well.

    Raises:
        ValueError: the code imports a whole package.
    """
    imported = set()
    for node in ast.walk(_parse(code)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    if whole_packages := imported & set(PACKAGES):
        name = min(whole_packages)
        raise ValueError(f"`import {name}` names no module: write `from {name} import …`, so that a change is seen")
    return frozenset(name.rsplit(".", parts)[0] for name in imported for parts in range(name.count(".")))


def _digest(parts: Iterable[str | bytes]) -> str:
    return hashlib.sha256(b"\0".join(part if isinstance(part, bytes) else part.encode() for part in parts)).hexdigest()
