"""What a chapter is made from: the nbutils modules it uses, theirs in turn, and the data it reads."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jupytext

from nbutils import trainings
from workflow import ROOT

# Read by every chapter's run: how text becomes code, how code is run, and with which packages.
ALWAYS = (
    "workflow/notebooks.py",
    "workflow/run_notebook.py",
    "workflow/jobs.py",
    "constraints.txt",
    "nbutils/__init__.py",
)


@cache
def of_chapter(chapter: str) -> list[str]:
    """Files, relative to the root, whose change means that the chapter must run again (besides its own text)."""
    trees = _closure(_code(chapter))
    files = {*ALWAYS, *(f"nbutils/{name}.py" for name in trees if name)}
    files |= {f"book/data/{table}.csv" for tree in trees.values() for table in _tables(tree)}
    if "figures" in trees:
        files.add("book/book.mplstyle")
    return sorted(files)


@cache
def _code(chapter: str) -> ast.Module:
    notebook = jupytext.read(ROOT / "book" / f"{chapter}.md", fmt="md:myst")
    return ast.parse("\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code"))


def _closure(tree: ast.Module) -> dict[str, ast.Module]:
    """A piece of code (under the name "") and the nbutils modules that it uses, and these in turn."""
    trees, queue = {"": tree}, list(_modules(tree))
    while queue:
        name = queue.pop()
        if name not in trees:
            trees[name] = _module(name)
            queue.extend(_used(name))
    return trees


@cache
def _module(name: str) -> ast.Module:
    return ast.parse((ROOT / "nbutils" / f"{name}.py").read_text(encoding="utf-8"))


@cache
def _used(name: str) -> tuple[str, ...]:
    return tuple(_modules(_module(name)))


@cache
def trainings_of(chapter: str) -> list[str]:
    """Names of the shared trainings that a chapter loads, from its calls ``trainings.load("pattern", …)``.

    Raises:
        ValueError: a call whose pattern is not a constant, so that nobody can tell what it needs before it runs.
    """
    names: set[str] = set()
    for node in ast.walk(_code(chapter)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "trainings.load":
            if not (node.args and isinstance(node.args[0], ast.Constant)):
                raise ValueError(f"{chapter}: `{ast.unparse(node)}`: give the trainings' name as a constant string")
            names |= set(trainings.names(node.args[0].value))
    return sorted(names)


@cache
def of_training(training: str) -> list[str]:
    """Files, relative to the root, whose change means that this shared training must run again."""
    recipe = trainings.RECIPES[training]
    module = getattr(recipe, "func", recipe).__module__.removeprefix("nbutils.")
    trees = _closure(ast.parse(f"from nbutils import {module}"))
    fixed = ("workflow/train.py", "workflow/jobs.py", "constraints.txt", "nbutils/__init__.py")
    return sorted({*fixed, *(f"nbutils/{name}.py" for name in trees if name)})


def _modules(tree: ast.AST) -> Iterator[str]:
    """Names of the nbutils modules that a piece of code imports, or reaches as attributes of the package."""
    known = {path.stem for path in (ROOT / "nbutils").glob("*.py")} - {"__init__"}
    packages = {"nbutils"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, _, rest = alias.name.partition(".")
                if first == "nbutils":
                    packages.add(alias.asname or first)
                    yield from {rest.split(".")[0]} & known
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "nbutils":
            inner = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            yield from set(inner) & known
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            yield from {node.attr} & known


def _tables(tree: ast.AST) -> Iterator[str]:
    """Names of the published tables that a piece of code reads; all of them where the name is not a constant."""
    tables = {path.stem for path in (ROOT / "book" / "data").glob("*.csv")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called == "published" and node.args:
                name = node.args[0]
                yield from {name.value} & tables if isinstance(name, ast.Constant) else tables


def baseline_of(chapter: str, profile: str) -> str:
    """The chapter's own part of the seed baselines, as text: its bands depend on nothing else there."""
    names = ("gpu", "book") if profile == "gpu" else (profile,)
    parts = {}
    for name in names:
        file = Path(ROOT / "tests" / "baselines" / f"{name}.json")
        checks = json.loads(file.read_text(encoding="utf-8"))["checks"] if file.exists() else {}
        parts[name] = {key: value for key, value in checks.items() if value["chapter"] == chapter}
    return json.dumps(parts, sort_keys=True)


def of_pages() -> list[str]:
    """Files, relative to the root, that the rendered pages are made from besides the executed notebooks."""
    book = [path for path in (ROOT / "book").glob("*.*") if path.suffix in (".md", ".bib", ".yml")]
    static = [path for path in (ROOT / "book" / "_static").rglob("*") if path.is_file()]
    code = [*(ROOT / "workflow").glob("*.py"), *(ROOT / "nbutils").glob("*.py")]
    kept = [
        *(ROOT / "tests" / "baselines" / f"{name}.json" for name in ("alarms", "bench", "mutants")),
        ROOT / "tests" / "baselines" / "verdicts.yml",
        ROOT / "_config.yml",
        ROOT / "_toc.yml",
        ROOT / "CITATION.cff",
    ]
    return sorted(str(path.relative_to(ROOT)) for path in [*book, *static, *code, *kept] if path.exists())
