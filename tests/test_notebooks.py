"""Every chapter: its three forms agree, its shape is the book's, and it runs in the smoke profile."""

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from types import ModuleType, SimpleNamespace

import nbformat
import pytest
import yaml

from nbutils.claims.check import records_of
from workflow import ROOT, book, kept, notebooks


def pytest_generate_tests(metafunc):
    if "chapter" in metafunc.fixturenames:
        metafunc.parametrize("chapter", book.chapters())


def code(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def committed_text(chapter):
    """The notebook of a chapter as text. The test fails with what an author is to do where there is none yet."""
    path = ROOT / "book" / "notebooks" / f"{chapter}.ipynb"
    if not path.exists():
        pytest.fail(f"there is no book/notebooks/{chapter}.ipynb: run `make notebooks` and commit it", pytrace=False)
    return path.read_text(encoding="utf-8")


def committed(chapter):
    return nbformat.reads(committed_text(chapter), as_version=4)


def test_committed_notebook_is_in_step_with_its_source(chapter):
    text = committed_text(chapter)
    assert text == nbformat.writes(notebooks.plain(book.source(chapter))) + "\n", "run `make notebooks` and commit"


def test_papermill_colab_and_the_hash_have_the_same_code(chapter):
    executable = notebooks.executable(book.source(chapter))
    assert [cell.strip() for cell in book.code_cells(chapter)] == [cell.strip() for cell in code(executable)]
    tag = f'[*pip, f"{{book}}@v{version("norm-growth")}"], stderr=subprocess.DEVNULL'
    pinned = f"{tag}) and subprocess.call({notebooks.INSTALL}"
    ours = [cell.replace(pinned, notebooks.INSTALL) for cell in code(committed(chapter)) if "keep_in_drive" not in cell]
    assert ours == code(executable)


def test_prose_is_plain_markdown(chapter):
    prose = "\n".join(cell.source for cell in committed(chapter).cells if cell.cell_type == "markdown")
    assert not re.search(r"```\{|\{[a-z:]+\}`|^:::", prose, re.M)
    numbered = ":label: eq-" in book.source(chapter).read_text(encoding="utf-8")
    assert "**Figure " in prose and "](https://arxiv.org" in prose and ("\\tag{1}" in prose) == numbered


def test_lines_of_code_fit_the_page(chapter):
    for cell in code(notebooks.executable(book.source(chapter))):
        assert max(map(len, cell.splitlines())) <= 92, cell


def test_chapter_has_the_shape_of_the_book(chapter):
    text = book.source(chapter).read_text(encoding="utf-8").partition("\n# ")[2]  # below the card
    wanted = ["Read first:", "**Intuition.**", "## Paper and here", "## Where it breaks", "## Summary", "## Exercises"]
    places = [text.find(part) for part in wanted]
    assert -1 not in places and places == sorted(places)
    names = re.findall(r"^    name: (fig-\S+)$", text, re.M)
    assert names and all(f"{{numref}}`{name}`" in text for name in names), "every figure is referred to"
    assert text.count("    alt: ") == text.count("    caption: ") == len(names)


def test_each_exercise_has_a_folded_solution_and_solutions_run(chapter):
    exercises = book.source(chapter).read_text(encoding="utf-8").partition("## Exercises")[2]
    asked = re.findall(r"^\*\*(\d+)\.\*\* ", exercises, re.M)
    answers = re.findall(r"^```\{admonition\} Solution\n:class: dropdown\n", exercises, re.M)
    assert len(asked) == len(answers) >= 1 and asked == [str(number) for number in range(1, len(asked) + 1)]
    cells = re.findall(r"^```\{code-cell\}.*?^```", exercises, re.M | re.S)
    assert all("hide-cell" in cell for cell in cells), "the code of a solution is folded, too"


def test_each_chapter_has_exercises_of_four_kinds(chapter):
    """A warm-up, a main one, two that change a cell of the chapter, and an open one, each with a solution."""
    exercises = book.source(chapter).read_text(encoding="utf-8").partition("## Exercises")[2]
    first, *each = re.split(r"^\*\*\d+\.\*\* ", exercises, flags=re.M)
    kinds = [re.match(r"\*(Warm-up|Main|Change a cell|Open)\b[^*]*\.\* ", exercise) for exercise in each]
    assert not first.strip() and all(kinds), "each begins with its kind: *Warm-up.*, *Main.*, *Change a cell.*, *Open.*"
    counts = Counter(kind[1] for kind in kinds)
    assert counts["Warm-up"] >= 1 and counts["Main"] >= 1 and counts["Change a cell"] >= 2 and counts["Open"] == 1
    assert all("```{admonition} Solution\n" in exercise for exercise in each)


def test_errata_have_one_shape():
    """What is stated, what we find, the smallest example, a charitable reading where there is one, what survives."""
    entries = re.split(r"^## ", (ROOT / "book" / "errata.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    shape = ["Stated", "We find", "Smallest example", "Charitable reading", "Survives"]
    for entry in entries:
        parts = re.findall(r"^\*\*([A-Z][a-z ]+)\.\*\*", entry, re.M)
        assert parts == [part for part in shape if part in parts], entry
        assert {*shape} - {*parts} <= {"Charitable reading"}, entry


def test_first_cell_installs_from_the_configured_repository(chapter):
    url = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]
    first = code(committed(chapter))[0]
    assert f"git+{url}" in first and "--no-deps" in first
    ast.parse(first)


@pytest.mark.parametrize(
    "rule",
    [
        test_committed_notebook_is_in_step_with_its_source,
        test_papermill_colab_and_the_hash_have_the_same_code,
        test_prose_is_plain_markdown,
        test_first_cell_installs_from_the_configured_repository,
    ],
)
def test_a_chapter_without_its_notebook_is_told_to_make_it(rule, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "_config.yml").write_text((book.ROOT / "_config.yml").read_text())
    with pytest.raises(pytest.fail.Exception, match=r"no book/notebooks/t5\.ipynb: run `make notebooks`"):
        rule("t5")


def test_runs_in_smoke_and_every_check_is_recorded(chapter, smoke):
    notebook = nbformat.read(smoke / "seed-0" / f"{chapter}.ipynb", as_version=4)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip())
    records = records_of(smoke / "seed-0" / f"{chapter}.ipynb")
    assert records and {record.chapter for record in records} == {chapter}
    assert all(record.profile == "smoke" and record.seed == 0 and record.device == "cpu" for record in records)


def test_no_stray_values_are_shown(chapter, smoke):
    """Readers need no `True`."""
    cells = nbformat.read(smoke / "seed-0" / f"{chapter}.ipynb", as_version=4).cells
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    assert not {"True", "False", "None"} & {data.get("text/plain") for data in outputs}


def test_a_notebook_for_colab_has_the_card_the_kept_numbers_and_its_version(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "NUMBERS", tmp_path / "numbers.json")
    source = book.source("random-walk")
    head = notebooks.plain(source).cells[0].source
    address = yaml.safe_load((ROOT / "_config.yml").read_text())["html"]["baseurl"]
    assert head.startswith("# 1. The random walk\n\n> **Asked.**") and f"({address}random-walk.html)" in head
    assert "green run" not in head and "Why believe it" not in head, "numbers of no run say nothing"
    kept = '{"run": "profile book, seed 0", "chapters": {"random-walk": {"walk_left": "0.1234"}}}'
    (tmp_path / "numbers.json").write_text(kept)
    node = notebooks.plain(source)
    prose = "\n".join(each.source for each in node.cells if each.cell_type == "markdown")
    assert "**Why believe it.** In one dimension" in prose and "0.1234" in prose and "`walk_t_max`" in prose
    assert "green run (profile book, seed 0)" in prose
    setup = next(each.source for each in node.cells if "setup" in each.metadata.get("tags", ()))
    assert f'f"{{book}}@v{version("norm-growth")}"' in setup
    compile(setup, "setup", "exec")


STRANGER = """
import subprocess
import sys
from pathlib import Path

asked = []

def pip(words, **options):  # as pip would do: the module's files in the stranger's folder
    asked.append(words)
    Path("nbutils/__init__.py").write_text("__version__ = '0.1.0'")
    Path("nbutils/claims.py").write_text("")
    return 0

subprocess.call = pip
import nbutils
assert nbutils.ours is False
exec(Path("setup.py").read_text())
import nbutils.claims
assert len(asked) == 1 and not hasattr(nbutils, "ours") and nbutils.__version__ == "0.1.0"
"""


def test_the_setup_cell_notices_the_nbutils_of_somebody_else(tmp_path):
    """PyPI has another package of that name, which a reader may have imported even."""
    (tmp_path / "nbutils").mkdir()
    (tmp_path / "nbutils" / "__init__.py").write_text("ours = False")
    (tmp_path / "setup.py").write_text(code(notebooks.plain(book.source("t5")))[0])
    words = [sys.executable, "-B", "-c", STRANGER]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr


def test_chapters_with_shared_trainings_offer_to_keep_them_in_drive(monkeypatch):
    """Off by default, and inert where there is no Colab; with Colab's module a session's trainings go to the mount."""
    assert not any("google.colab" in cell for cell in code(notebooks.plain(book.source("t5"))))
    setup, cell, parameters = code(notebooks.plain(book.source("small-t5")))[:3]
    assert "import sys" in setup and "profile =" in parameters and len(cell.splitlines()) <= 10
    mounted, colab = [], ModuleType("google.colab")
    colab.drive = SimpleNamespace(mount=mounted.append)
    monkeypatch.delenv("NBUTILS_RESULTS", raising=False)
    for wanted, there, stays in ((False, True, False), (True, False, False), (True, True, True)):
        with monkeypatch.context() as patched:
            patched.setattr(os, "environ", dict(os.environ))
            if there:
                patched.setitem(sys.modules, "google.colab", colab)
            exec(cell.replace("keep_in_drive = False", f"keep_in_drive = {wanted}"), {"sys": sys})
            assert bool(mounted) == stays == os.environ.get("NBUTILS_RESULTS", "").startswith("/content/drive/")


def test_to_markdown():
    text = (
        "See {eq}`eq-a`, {numref}`fig-b` and {cite:t}`raffel2020exploring`: {glue:text}`x`.\n"
        "```{math}\n:label: eq-a\na = b\n```\n"
        "```{admonition} Solution\n:class: dropdown\nTwo\nlines\n```\n[next](t5.md), [words](notation.md#words)\n"
    )
    address = yaml.safe_load((ROOT / "_config.yml").read_text())["html"]["baseurl"]
    assert notebooks.to_markdown(text, {"eq-a": "4"}, {"fig-b": "2"}, {"x": "0.5"}) == (
        "See (4), Figure 2 and [Raffel et al., 2020](https://arxiv.org/abs/1910.10683): 0.5.\n"
        "$$\na = b \\tag{4}\n$$\n> **Solution.**\n> Two\n> lines\n"
        f"[next](t5.ipynb), [words]({address}notation.html#words)\n"
    )
    with pytest.raises(ValueError, match=r"no plain form for '\{tip2\}`x`'|no plain form for"):
        notebooks.to_markdown("{unknown}`x`", {}, {}, {})
    assert notebooks.to_markdown("{glue:text}`x`", {}, {}, {}) == "`x`", "a number that no run has kept yet"


def test_a_number_of_another_chapter_is_that_of_its_run_or_the_kept_one():
    kept = notebooks.kept_numbers()["chapters"]["survives"]["sv_half"]
    text = "At {glue:text}`survives/sv_half`, {glue:text}`own`."
    assert notebooks.with_numbers_of_others(text, {"survives": {"sv_half": "7"}}) == "At 7, {glue:text}`own`."
    assert notebooks.with_numbers_of_others(text, {"your-own": {}}) == f"At {kept}, {{glue:text}}`own`."
    assert notebooks.to_markdown(text, {}, {}, {"own": "2"}) == f"At {kept}, 2."


@pytest.mark.parametrize("name", book.chapters())
def test_numbers_of_other_chapters_were_kept(name):
    kept = notebooks.kept_numbers()["chapters"]
    for chapter, number in notebooks.OF_ANOTHER.findall(book.source(name).read_text(encoding="utf-8")):
        assert number in kept[chapter], f"{name}: {chapter} keeps no {number}"


def test_readme_figure_is_that_of_the_run(smoke):
    made = (smoke / "html" / "_static" / "figures" / "fig-t5-norm.svg").read_text(encoding="utf-8")
    kept = (ROOT / "book" / "_static" / "t5-norm.svg").read_text(encoding="utf-8")
    assert kept.strip() == made.strip(), "copy the page's figure"


def test_a_green_run_on_a_gpu_is_kept_for_the_pages_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "ON_GPU", tmp_path / "gpu.json")
    before = {"estimates": {"01-one": [2.0, 1.0]}, "notes": ["of an earlier run"]}
    (tmp_path / "gpu.json").write_text(json.dumps(before))
    run = {"green": True, "device": "cpu", "hardware": "a card", "seed": 3, "commit": "abc", "versions": {"torch": "2"}}
    found = {"run": run | {"notebooks": [{"chapter": "01-one", "seconds": 4.5}]}}
    found["records"] = [{"claim": "claim", "check": "a", "measured": 0.25}]
    monkeypatch.setattr(kept, "_last", lambda profile: found if profile == "gpu" else None)
    for other in ({}, {"device": "cuda", "green": False}):
        found["run"] |= other
        kept.keep_gpu()
        assert json.loads((tmp_path / "gpu.json").read_text()) == before
    found["run"] |= {"device": "cuda", "green": True}
    kept.keep_gpu()
    now = json.loads((tmp_path / "gpu.json").read_text())
    assert now["seconds"] == {"01-one": 4.5} and now["checks"] == {"claim: a": 0.25} and now["notes"] == before["notes"]
    assert (now["hardware"], now["torch"], now["estimates"]) == ("a card", "2", before["estimates"])
