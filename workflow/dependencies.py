"""What a chapter is made from: the nbutils modules it uses, theirs in turn, and the data it reads."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from nbutils import trainings
from workflow import ROOT

# Read by every run: how text becomes code, how code is run, and with which packages. Snakemake looks after these.
HOW_IT_IS_RUN = (
    "workflow/notebooks.py",
    "workflow/run_notebook.py",
    "workflow/train.py",
    "workflow/jobs.py",
    "constraints.txt",
    "nbutils/__init__.py",
)


class Uses(NamedTuple):
    """What a piece of code names itself."""

    modules: frozenset[str]  # of nbutils, by their full names
    tables: frozenset[str]  # published ones


@cache
def of_chapter(chapter: str) -> list[str]:
    """Files, relative to the root, whose change means that the chapter must run again (besides its own text)."""
    direct = _uses(code_of(chapter))
    modules = _closure(direct.modules)
    tables = direct.tables.union(*(_of_module(name).tables for name in modules))
    files = {
        *map(file_of, modules),
        *(f"book/data/{table}.csv" for table in tables),
    }
    if "nbutils.figures" in modules:
        files.add("book/book.mplstyle")
    return sorted(files)


@cache
def code_of(chapter: str) -> ast.Module:
    """All code cells as one module; from the notebook, which every run brings in step with the text: 40 times as fast.

    Raises:
        ValueError: a cell is no Python.
    """
    notebook = json.loads((ROOT / "book" / "notebooks" / f"{chapter}.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        try:
            ast.parse(cell)
        except SyntaxError as error:
            raise ValueError(f"{chapter}: code cell {number}, line {error.lineno}: {error.msg}") from None
    return ast.parse("\n".join(cells))


@cache
def known_modules() -> dict[str, str]:
    """All modules of nbutils by their full names, and the file of each, relative to the root."""
    found = {}
    for path in sorted((ROOT / "nbutils").rglob("*.py")):
        file = path.relative_to(ROOT)
        parts = file.with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = str(file)
    return found


def file_of(module: str) -> str:
    """The file of a module, relative to the root."""
    return known_modules()[module]


def _closure(direct: Iterable[str]) -> set[str]:
    """Modules of nbutils, those that they use, and these in turn."""
    found: set[str] = set()
    queue = list(direct)
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue.extend(_of_module(name).modules)
    return found


@cache
def _of_module(name: str) -> Uses:
    return _uses(ast.parse((ROOT / file_of(name)).read_text(encoding="utf-8")))


@cache
def trainings_of(chapter: str) -> list[str]:
    """Names of the shared trainings that a chapter loads, from its calls ``trainings.load("pattern", …)``.

    Raises:
        ValueError: a call whose pattern is not a constant, so that nobody can tell what it needs before it runs.
    """
    names: set[str] = set()
    for node in ast.walk(code_of(chapter)):
        called = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "load"
        if called and ast.unparse(node.func) == "trainings.load":
            if not (node.args and isinstance(node.args[0], ast.Constant)):
                raise ValueError(f"{chapter}: `{ast.unparse(node)}`: give the trainings' name as a constant string")
            names |= set(trainings.names(node.args[0].value))
    return sorted(names)


@cache
def of_training(training: str) -> list[str]:
    """Files, relative to the root, whose change means that this shared training must run again."""
    recipe = trainings.RECIPES[training]
    return sorted(map(file_of, _closure([getattr(recipe, "func", recipe).__module__])))


def _uses(tree: ast.AST) -> Uses:
    """Modules of nbutils that a piece of code imports, or reaches as attributes of a package; tables that it reads.

    An import of a module runs the packages it stands in, so these count too; the bare top package imports nothing.
    Where the name of a table is not a constant, it may be any.
    """
    tables = {path.stem for path in (ROOT / "book" / "data").glob("*.csv")}
    called: dict[str, str] = {"nbutils": "nbutils"}  # what a name in the code stands for
    reached, read = set(), set()
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "nbutils":
                    reached.add(alias.name)
                    called[alias.asname or "nbutils"] = alias.name if alias.asname else "nbutils"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "nbutils":
            for alias in node.names:
                reached.add(f"{node.module}.{alias.name}")
                called[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "attr", getattr(node.func, "id", None))
            if function == "published" and node.args:
                name = node.args[0]
                read |= {name.value} if isinstance(name, ast.Constant) else tables
    for node in nodes:
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in called:
                reached.add(f"{called[first]}.{rest}")
    modules = {module for name in reached for module in _run_by(name)}
    return Uses(frozenset(modules), frozenset(read & tables))


def _run_by(name: str) -> set[str]:
    """The modules that run before ``nbutils.a.b.c`` can be had: a, a.b and a.b.c, as far as these are modules."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(2, len(parts) + 1)} & set(known_modules())


def of_pages() -> list[str]:
    """Files, relative to the root, that the rendered pages are made from besides the executed notebooks."""
    book = [path for path in (ROOT / "book").glob("*.*") if path.suffix in (".md", ".bib", ".yml")]
    static = [path for path in (ROOT / "book" / "_static").rglob("*") if path.is_file()]
    code = [*(ROOT / "workflow").glob("*.py"), *(ROOT / "nbutils").rglob("*.py")]
    kept = [
        *(
            ROOT / "tests" / "baselines" / f"{name}.json"
            for name in ("alarms-smoke", "alarms-book", "platforms-smoke", "bench", "mutants")
        ),
        ROOT / "tests" / "baselines" / "verdicts.yml",
        ROOT / "_config.yml",
        ROOT / "_toc.yml",
        ROOT / "CITATION.cff",
    ]
    return sorted(str(path.relative_to(ROOT)) for path in [*book, *static, *code, *kept] if path.exists())
