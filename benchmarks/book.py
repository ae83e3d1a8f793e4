"""The book's own run against Jupyter Book executing the same notebooks; a run with nothing changed; one chapter edited.

Wall time of whole runs, in a copy of the checkout with its own ``_build``: both sides cold, profile ``smoke``, both
render the same pages with the same settings. Jupyter Book executes one notebook after another, with as many threads as
torch takes by itself, and each chapter trains what it loads on the spot. On a machine that does other work these
numbers say little, so each row has the load, and the CPU time of both sides.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import yaml
from workflow.jobs import THREADS

from benchmarks.timing import Row, load, row
from workflow import ROOT, render
from workflow.notebooks import executable
from workflow.report import records_of

SOME = ("04-t5", "07-homogeneity", "10-projection", "13-saturation")  # one of each part; 03 loads shared trainings
PARAMETERS = 'profile = "smoke"\nseed = 0\ndevice = "cpu"'


class Took(NamedTuple):
    """Wall and CPU time of a command and of all that it started, s."""

    wall: float
    cpu: float

    def __add__(self, other: Took) -> Took:
        return Took(self.wall + other.wall, self.cpu + other.cpu)


def rows(names: Sequence[str] = SOME, *, turns: int = 2, root: Path = ROOT) -> list[Row]:
    """The rows of the table; over all chapters, rendered by the workflow itself, where none is named."""
    every = sorted(path.stem for path in (root / "book").glob("[0-9][0-9]-*.md"))
    whole, names = not names, sorted(names) or every
    with two_cores(), copy(root) as book:
        ours, plain = zip(*(cold(book, names) for _ in range(turns)), strict=True)
        of = "all chapters" if whole else f"{len(names)} of {len(every)} chapters"
        what = f"{of}, smoke, cold, two cores, pages rendered, against Jupyter Book executing them one after another"
        made = [row(what, [side.wall for side in ours], [side.wall for side in plain], 1.25)]
        made[0] |= {"ours_cpu_s": sum(side.cpu for side in ours), "plain_cpu_s": sum(side.cpu for side in plain)}
        if whole:
            workflow(book, "--html")  # what it still has to do is render
            nothing = [workflow(book, "--html").wall for _ in range(3)]
            mine = [sum(side.wall for side in ours) / turns] * len(nothing)
            made.append(row("whole book, nothing changed, against its own cold run", nothing, mine, 50))
        made.append(edited(book, names, [] if whole else names))
    return [each | {"clock": "wall"} for each in made]


@contextmanager
def two_cores() -> Iterator[None]:
    """Hold this process and what it starts on two cores, where the system can."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(mine)[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


@contextmanager
def copy(root: Path) -> Iterator[Path]:
    """The files of a checkout, without its builds and environments, in a temporary folder."""
    kept = shutil.ignore_patterns("_build", ".git", ".venv*", ".snakemake", ".hypothesis", "__pycache__", ".*_cache")
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(root, Path(folder) / "book", ignore=kept, symlinks=True))


def command(words: Sequence[str], root: Path) -> Took:
    """Run a command in a checkout and time it.

    Raises:
        RuntimeError: it failed; with its last lines.
    """
    environment = {key: value for key, value in os.environ.items() if key not in (*THREADS, "NBUTILS_TRAININGS")}
    environment |= {"PYTHONPATH": str(root), "PYTHONHASHSEED": "0", "NBUTILS_BOOK": "1", "CUDA_VISIBLE_DEVICES": ""}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(words, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout[-3000:]}")
    return Took(wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def workflow(book: Path, *words: str) -> Took:
    return command([sys.executable, "-m", "workflow", "run", "--profile", "smoke", "--jobs", "2", *words], book)


def cold(book: Path, names: Sequence[str]) -> tuple[Took, Took]:
    """Ours and Jupyter Book's own way, from nothing; the checks of both must come out alike."""
    shutil.rmtree(book / "_build", ignore_errors=True)
    shutil.rmtree(book / ".snakemake", ignore_errors=True)
    ours = workflow(book, *names) + rendered(book, names)
    plain = executed_by_jupyter_book(book, names)
    for name in names:
        mine, theirs = (
            outcome(run(book) / f"{name}.ipynb"),
            outcome(pages(book) / f"_build/jupyter_execute/{name}.ipynb"),
        )
        assert mine == theirs and mine, f"{name}: the checks of the two sides differ: {mine} and {theirs}"
    return ours, plain


def run(book: Path) -> Path:
    return book / "_build" / "smoke" / "seed-0"


def pages(book: Path) -> Path:
    return book / "_build" / "pages"


def outcome(notebook: Path) -> list[tuple[str, str, bool | None]]:
    """Which checks an executed notebook made, and how each came out."""
    return [(record.claim, record.check, record.holds) for record in records_of(notebook)]


def rendered(book: Path, names: Sequence[str]) -> Took:
    """Jupyter Book renders notebooks that are executed already."""
    return jupyter_book(book, {name: nbformat.read(run(book) / f"{name}.ipynb", as_version=4) for name in names}, "off")


def executed_by_jupyter_book(book: Path, names: Sequence[str]) -> Took:
    """Jupyter Book executes and renders."""
    notebooks = {name: executable(book / "book" / f"{name}.md") for name in names}
    for notebook in notebooks.values():
        next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])).source = PARAMETERS
    return jupyter_book(book, notebooks, "force")


def jupyter_book(book: Path, notebooks: dict[str, nbformat.NotebookNode], execute: str) -> Took:
    """Time of ``jupyter-book build`` over these notebooks alone, with the book's settings."""
    source = book / "_build" / "source"
    for old in (source, pages(book)):
        shutil.rmtree(old, ignore_errors=True)
    source.mkdir(parents=True)
    for name, notebook in notebooks.items():
        nbformat.write(notebook, source / f"{name}.ipynb")
    shutil.copy(book / "book" / "references.bib", source)
    shutil.copytree(book / "book" / "_static", source / "_static")
    settings = yaml.safe_load((book / "_config.yml").read_text(encoding="utf-8"))
    settings["execute"] |= {"execute_notebooks": execute, "timeout": -1}
    (source / "_config.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    first, *others = notebooks
    toc: dict[str, Any] = {"format": "jb-book", "root": first}
    if others:
        toc["chapters"] = [{"file": name} for name in others]
    (source / "_toc.yml").write_text(yaml.safe_dump(toc), encoding="utf-8")
    return command([*render.jupyter_book(source, pages(book)), "--all"], book)


def edited(book: Path, names: Sequence[str], only: Sequence[str]) -> Row:
    """A remark at the end of a chapter: the whole command against the time of that chapter and 15 s."""
    text = book / "book" / f"{names[0]}.md"
    text.write_text(text.read_text(encoding="utf-8") + "\nOne more remark.\n", encoding="utf-8")
    took = workflow(book, *(only or ["--html"]))
    stats = yaml.safe_load((run(book) / f"{names[0]}.json").read_text(encoding="utf-8"))
    pages_too = "" if only else ", pages rendered"
    what = f"one chapter edited ({names[0]}){pages_too}, against that chapter's time + 15 s"
    return row(what, [took.wall], [stats["seconds"] + 15], 1) | {"ours_cpu_s": took.cpu, "load": load()}
