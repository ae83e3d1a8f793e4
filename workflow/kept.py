"""What is kept of runs in ``book/``: numbers for the prose, what a GPU measured, the notebooks that Colab opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workflow import ROOT, Run, book, costs
from workflow.collect import collect
from workflow.judge import judge, to_rerun
from workflow.notebooks import NUMBERS, ON_GPU, glued, plain


def write_notebooks() -> list[Path]:
    """Write ``book/notebooks/`` from the sources, with the numbers of the last green ``book`` run; keep these.

    Returns:
        The files that changed.
    """
    import nbformat

    keep_numbers()
    keep_gpu()
    costs.keep()
    folder = ROOT / "book" / "notebooks"
    texts = {folder / f"{name}.ipynb": nbformat.writes(plain(book.source(name))) + "\n" for name in book.chapters()}
    changed = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    folder.mkdir(exist_ok=True)
    for path in changed:
        path.write_text(texts[path], encoding="utf-8")
    gone = sorted(set(folder.glob("*.ipynb")) - set(texts))
    for path in gone:
        path.unlink()
    return changed + gone


def keep_numbers() -> None:
    """Keep what the last whole ``book`` run gave the prose, if it was green, and is by today's code and claims."""
    facts = _last("book")["run"]
    run = Run("book", facts.get("seed", 0), facts.get("device", "cpu"), tuple(book.chapters()))
    if not facts["green"] or not _is_green_today(run):
        print("no whole green run of profile book: the numbers in the notebooks stay as they are")
        return
    import nbformat

    executed = {name: nbformat.read(run.notebook(name), as_version=4) for name in run.chapters}
    numbers = {
        "run": f"profile book, seed {run.seed}, on {facts['hardware']}",
        "chapters": {name: glued(notebook) for name, notebook in executed.items()},
    }
    NUMBERS.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_green_today(run: Run) -> bool:
    """Whether what a run and its reruns left is of today's code, and is as today's ``claims.yml`` expects."""
    collected = collect(run)
    doubtful = to_rerun(collected)
    reruns = [collect(other) for other in run.further(doubtful)] if doubtful else []
    return bool(judge(collected, reruns).run["green"])


def keep_gpu() -> None:
    """Keep what the last whole ``gpu`` run measured on a GPU, if it was green: values, times and hardware."""
    metrics = _last("gpu")
    facts = metrics["run"]
    if not facts["green"] or facts["device"] != "cuda":
        return
    measured = json.loads(ON_GPU.read_text(encoding="utf-8"))  # its estimates and notes are of no run
    measured |= {key: facts[key] for key in ("hardware", "device", "seed", "commit")}
    measured["torch"] = facts["versions"]["torch"]
    measured["seconds"] = {stats["chapter"]: stats["seconds"] for stats in facts["notebooks"]}
    measured["checks"] = {f"{record['claim']}: {record['check']}": record["measured"] for record in metrics["records"]}
    ON_GPU.write_text(json.dumps(measured, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _last(profile: str) -> dict[str, Any]:
    """What the last whole run of a profile left for machines; of a run that is not green where there is none."""
    metrics = Run(profile).metrics
    nothing: dict[str, Any] = {"run": {"green": False}}
    return json.loads(metrics.read_text(encoding="utf-8")) if metrics.exists() else nothing
