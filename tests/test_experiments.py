"""Each public function and class of ``nbutils.experiments`` names the chapters that use it, and no others."""

import ast
from pathlib import Path

import jupytext
import pytest

from workflow import ROOT, book

PACKAGE = "nbutils.experiments"
MODULES = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "nbutils" / "experiments").glob("[!_]*.py")}
DEFINITIONS = ast.FunctionDef | ast.ClassDef
CHAPTERS = [book.source(name) for name in book.chapters()]


def nodes(tree):
    """All nodes but those of annotations: a type in a signature is no use of it."""
    yield tree
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes(child)


def imports(tree):
    """Local names of what a file imports from the package: ``module`` or ``module.name``."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}."):
            module = node.module.removeprefix(PACKAGE).removeprefix(".")
            for alias in node.names:
                names[alias.asname or alias.name] = f"{module}.{alias.name}" if module else alias.name
    return names


def references(tree, names):
    """``module.name`` of all that the code refers to, where ``names`` are its global names."""
    for node in nodes(tree):
        if isinstance(node, ast.Name) and node.id in names:
            yield names[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            yield f"{names[node.value.id]}.{node.attr}"


def local_names(tree):
    """Arguments, variables and inner functions of a definition; they hide global names."""
    for node in nodes(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, DEFINITIONS) and node is not tree:
            yield node.name


def defined_names(statement):
    if isinstance(statement, DEFINITIONS):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return [node.id for node in nodes(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return []


def dependencies():
    """From ``module.name`` of every definition of the package to the definitions that it refers to."""
    graph = {}
    for module, tree in MODULES.items():
        names = imports(tree)
        names |= {name: f"{module}.{name}" for statement in tree.body for name in defined_names(statement)}
        for statement in tree.body:
            hidden = set(local_names(statement)) if isinstance(statement, DEFINITIONS) else set()
            visible = {name: target for name, target in names.items() if name not in hidden}
            for name in defined_names(statement):
                graph[f"{module}.{name}"] = set(references(statement, visible))
    return graph


def code_of(chapter: Path):
    cells = jupytext.read(chapter).cells
    return ast.parse("\n".join(cell.source for cell in cells if cell.cell_type == "code"))


@pytest.fixture(scope="module")
def chapters():
    """From ``module.name`` to the chapters that use it, directly or through other definitions."""
    graph = dependencies()
    users = {name: set() for name in graph}
    for chapter in CHAPTERS:
        code = code_of(chapter)
        pending = list(references(code, imports(code)))
        reached = set()
        while pending:
            name = pending.pop()
            if name in graph and name not in reached:
                reached.add(name)
                pending.extend(graph[name])
        for name in reached:
            users[name].add(chapter.stem)
    return users


def sentence(users):
    """``Used in a.`` or ``Used in a, b and c.``, in the order of the chapters and as code."""
    *first, last = [f"``{name}``" for name in sorted(users, key=book.number)] or ["none"]
    return f"Used in {', '.join(first)} and {last}." if first else f"Used in {last}."


@pytest.mark.parametrize("module", sorted(MODULES))
def test_docstrings_say_which_chapters_use_them(module, chapters):
    definitions = [node for node in MODULES[module].body if isinstance(node, DEFINITIONS)]
    public = {node.name: ast.get_docstring(node) or "" for node in definitions if not node.name.startswith("_")}
    stated = {
        name: [line for line in text.splitlines() if line.startswith("Used in ")] for name, text in public.items()
    }
    assert stated == {name: [sentence(chapters[f"{module}.{name}"])] for name in public}
