"""Execute one chapter through papermill: the job of the workflow. A notebook that did not finish leaves no output.

``python -m workflow.run_notebook CHAPTER --profile book --seed 0 --device cpu --threads 1 OUTPUT STATS LOG``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError

from workflow import ROOT, dependencies, jobs, notebooks


def execute(arguments: argparse.Namespace) -> None:
    """Run the notebook into the log file, then move it and its statistics into place, each in one step."""
    chapter, log = arguments.name, Path(arguments.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    error_file = log.with_suffix(".error.json")
    error_file.unlink(missing_ok=True)
    jobs.set_environment(arguments.threads)
    os.environ["NBUTILS_TRAININGS"] = str(Path(arguments.output).resolve().parent / "trainings")
    started, made_from = datetime.now(UTC), digest(chapter)
    jobs.limit_time(arguments.time_limit)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / f"{chapter}.ipynb"
        nbformat.write(notebooks.executable(ROOT / "book" / f"{chapter}.md"), source)
        try:
            with jobs.kernel_messages(log.with_suffix(".stderr")):
                papermill.execute_notebook(
                    source,
                    log,
                    parameters={"profile": arguments.profile, "seed": arguments.seed, "device": arguments.device},
                    kernel_name="python3",
                    cwd=scratch,
                    progress_bar=False,
                    start_timeout=120,
                )
        except TimeoutError:
            jobs.fail(error_file, chapter, "cell ?", f"TimeoutError: not finished after {arguments.time_limit} s")
        except PapermillExecutionError as error:
            jobs.fail(error_file, chapter, f"cell {cell_of(error)}", f"{error.ename}: {error.evalue}")
        except Exception as error:  # a kernel that died, or that did not start
            jobs.fail(error_file, chapter, "cell ?", f"{type(error).__name__}: {error}")
        jobs.limit_time(0)
    if digest(chapter) != made_from:  # Snakemake would take the old result for that of the new text
        jobs.fail(error_file, chapter, "cell ?", "the chapter or a module of it changed while it ran: run it again")
    stats = {"chapter": chapter, **jobs.statistics(arguments, started, resource.RUSAGE_CHILDREN)}
    jobs.put(Path(arguments.stats), json.dumps(stats, indent=1) + "\n")
    jobs.put(Path(arguments.output), log.read_text(encoding="utf-8"))
    print(f"{chapter}, seed {arguments.seed}: {stats['seconds']:.1f} s, {stats['peak_mb']:.0f} MB", flush=True)


def digest(chapter: str) -> str:
    """SHA-256 of the chapter's text and of all that it is made from."""
    files = (ROOT / name for name in (f"book/{chapter}.md", *dependencies.of_chapter(chapter)))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def cell_of(error: PapermillExecutionError) -> str:
    """The failed cell by its execution count and first line of code."""
    lines = [line for line in error.source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return f"[{error.exec_count}] {lines[0].strip() if lines else ''}"


def main() -> None:
    parser = jobs.parser(__doc__)
    for name in ("output", "stats", "log"):
        parser.add_argument(name)
    jobs.start(execute, parser.parse_args())


if __name__ == "__main__":
    main()
