"""What a chapter costs before its first experiment, against the limits of the book."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.book import command, copy
from benchmarks.timing import Row, row
from workflow import ROOT, chapters

HEAD = 3  # code cells: installation on Colab, parameters, imports


def package() -> Row:
    """A process that imports the package, less one that imports nothing."""
    times = {code: [command([sys.executable, "-c", code], ROOT).cpu for _ in range(5)] for code in ("pass", PACKAGE)}
    ours = [max(with_it - without, 1e-4) for without, with_it in zip(times["pass"], times[PACKAGE], strict=True)]
    return row("`import nbutils`, as a share of 0.1 s", ours, [0.1] * len(ours), 1)


def fixed_cost() -> Row:
    """The job of a chapter that ends after its imports: papermill, the kernel, torch, the style; CPU time of all.

    Once for each chapter, then twice more for the slowest.
    """
    with copy(ROOT) as book:
        for name in chapters():
            text = book / "book" / f"{name}.md"
            text.write_text(head(text.read_text(encoding="utf-8")), encoding="utf-8")
        once = {name: command(job(book, name), book).cpu for name in chapters()}
        slowest = max(once, key=lambda name: once[name])
        took = [once[slowest], *(command(job(book, slowest), book).cpu for _ in range(2))]
    what = f"fixed cost (job, kernel, imports) of the slowest of {len(once)} chapters, as a share of 6 s"
    return row(what, took, [6.0] * len(took), 1)


def head(text: str, cells: int = HEAD) -> str:
    """A chapter's text up to the end of its first code cells.

    >>> head("# A\\n```{code-cell} x\\n1\\n```\\nand\\n```{code-cell} x\\n2\\n```\\n", 1)
    '# A\\n```{code-cell} x\\n1\\n```\\n'
    """
    parts = text.split("```{code-cell}")
    return "```{code-cell}".join(parts[: cells + 1]).rpartition("\n```\n")[0] + "\n```\n"


def job(book: Path, chapter: str) -> list[str]:
    """The command of the workflow's job."""
    out = book / "_build" / "head"
    out.mkdir(parents=True, exist_ok=True)
    files = [str(out / name) for name in ("out.ipynb", "stats.json", "log.ipynb")]
    options = ["--profile", "smoke", "--seed", "0", "--device", "cpu", "--threads", "1"]
    return [sys.executable, "-m", "workflow.run_notebook", chapter, *options, *files]


PACKAGE = "import nbutils"
PAIRS = (package, fixed_cost)
