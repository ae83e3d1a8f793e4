"""What is public: `__all__` of both packages and of their parts names what is there and has a page in the reference."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from inspect import isclass, isfunction, ismodule

import pytest

import nbutils
import normgrowth
from workflow import ROOT, book
from workflow.pages import api

PARTS = [
    f"{package.__name__}.{part}"
    for package in (normgrowth, nbutils)
    for part in package.__all__
    if part not in ("__version__", "experiments")  # which has no face: chapters import its modules
]
PAGES = {name for group in api.groups().values() for name in group}


@pytest.mark.parametrize("package", [normgrowth, nbutils])
def test_a_package_names_its_parts_and_each_has_its_page(package):
    for part in set(package.__all__) - {"__version__"}:
        name = f"{package.__name__}.{part}"
        assert ismodule(import_module(name))
        assert name in PAGES or any(page.startswith(f"{name}.") for page in PAGES), name
    assert package.__version__


@pytest.mark.parametrize("part", PARTS)
def test_each_public_name_is_there_and_documented(part):
    module = import_module(part)
    assert module.__doc__ and sorted(set(module.__all__)) == sorted(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if isfunction(value) or isclass(value):
            assert value.__doc__, f"{part}.{name}"
            assert value.__module__ in PAGES, f"{part}.{name} comes from {value.__module__}, which has no page"
            source = import_module(value.__module__)
            assert name in getattr(source, "__all__", [name]), f"{value.__module__} leaves {name} out of its page"


def codes():
    """The code that readers copy: of the README, of the pages, and of the chapters, by where it stands."""
    for file in (ROOT / "README.md", ROOT / "book" / "callbacks.md"):
        blocks = re.findall(r"```python\n(.*?)```", file.read_text(encoding="utf-8"), re.S)
        yield from ((f"{file.name}, example {number}", block) for number, block in enumerate(blocks, 1))
    for chapter in book.chapters():
        yield chapter, "\n".join(book.code_cells(chapter))


@pytest.mark.parametrize(("place", "code"), list(codes()), ids=lambda text: text if len(text) < 40 else "code")
def test_what_readers_copy_is_public(place, code):
    tree = ast.parse(code)
    parts = {}  # local name of a part → its full name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("normgrowth", "nbutils"):
            parts |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in PARTS:
            names = {alias.name for alias in node.names if f"{node.module}.{alias.name}" not in PAGES}
            assert names <= {*import_module(node.module).__all__}, place
    assert set(parts.values()) <= {*PARTS, "nbutils.experiments", "normgrowth.__version__"}, place
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in parts:
            part = import_module(parts[node.value.id])
            assert node.attr in part.__all__, f"{place}: {parts[node.value.id]}.{node.attr} is not public"


LIGHT = {  # statement → what it must not load
    "import normgrowth, nbutils": ("torch", "numpy", "pandas", "transformers"),
    "from normgrowth import checkpoints, fits, layers, report": ("torch", "transformers", "matplotlib"),
    "from normgrowth import *": ("transformers", "matplotlib", "lightning", "nbutils", "huggingface_hub"),
    "from nbutils import *": ("transformers", "matplotlib.pyplot", "nbutils.experiments.packaged"),
}


@pytest.mark.parametrize("statement", LIGHT)
def test_an_import_loads_what_it_needs_and_no_more(statement):
    """The parts load torch where they compute with it; none loads what only some of its functions need."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {*LIGHT[statement]} & {*done.stdout.split()}


OFFLINE = """
import importlib, pkgutil, socket
def connect(*words): raise SystemExit(f"an import connects to {words[1:]}")
socket.socket.connect = socket.socket.connect_ex = connect
import nbutils, normgrowth
for package in (nbutils, normgrowth):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
print("done")
"""


def test_no_import_uses_the_network():
    done = subprocess.run([sys.executable, "-c", OFFLINE], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("done\n"), done.stderr[-1500:]


@pytest.mark.parametrize("package", [normgrowth, nbutils])
def test_a_star_brings_all_parts(package):
    names = {}
    exec(f"from {package.__name__} import *", names)
    assert {*package.__all__} == {*names} - {"__builtins__"}
