"""Execute one chapter through papermill: the job of the workflow. A notebook that did not finish leaves no output.

``python -m workflow.run_notebook CHAPTER --profile book --seed 0 --device cpu --threads 1 OUTPUT STATS LOG``
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from workflow import ROOT, jobs, notebooks, stale


def execute(arguments: argparse.Namespace) -> None:
    """The chapter, with word of why it failed if it does."""
    with jobs.error_file(Path(arguments.log).with_suffix(".error.json"), arguments.chapter):
        execute_chapter(arguments)


def execute_chapter(arguments: argparse.Namespace) -> None:
    """Run the notebook into the log file, then move it and its statistics into place, each in one step."""
    chapter, log = arguments.chapter, Path(arguments.log)
    os.environ["NBUTILS_TRAININGS"] = str(Path(arguments.output).resolve().parent / "trainings")
    started, made_from = datetime.now(UTC), stale.sources_of_chapter(chapter)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / f"{chapter}.ipynb"
        nbformat.write(notebooks.executable(ROOT / "book" / f"{chapter}.md"), source)
        run_kernel(source, log, scratch, arguments)
    if stale.sources_of_chapter(chapter) != made_from:
        # Snakemake would take the old result for that of the new text
        raise jobs.JobError("cell ? raised: the chapter or a module of it changed while it ran: run it again")
    notebook = log.read_text(encoding="utf-8")
    stats = {
        "chapter": chapter,
        **jobs.statistics(arguments, started, resource.RUSAGE_CHILDREN),
        "made_from": made_from,
        "files": {Path(arguments.output).name: stale.digest(notebook.encode())},
    }
    jobs.put(Path(arguments.stats), json.dumps(stats, indent=1) + "\n")
    jobs.put(Path(arguments.output), notebook)
    print(f"{chapter}, seed {arguments.seed}: {stats['seconds']:.1f} s, {stats['peak_mb']:.0f} MB", flush=True)


def run_kernel(source: Path, log: Path, scratch: str, arguments: argparse.Namespace) -> None:
    """Execute ``source`` into ``log``.

    Raises:
        JobError: a cell raised, the time was up, or the kernel died or did not start.
    """
    messages, killed = log.with_suffix(".stderr"), jobs.out_of_memory_kills()
    jobs.limit_time(arguments.time_limit)
    try:
        with jobs.kernel_messages(messages):
            papermill.execute_notebook(
                source,
                log,
                parameters={"profile": arguments.profile, "seed": arguments.seed, "device": arguments.device},
                kernel_name="python3",
                cwd=scratch,
                progress_bar=False,
                start_timeout=120,
                config=transport(scratch),
            )
    except TimeoutError:
        raise jobs.JobError(f"cell ? raised TimeoutError: not finished after {arguments.time_limit} s") from None
    except PapermillExecutionError as error:
        raise jobs.JobError(f"cell {cell_of(error)} raised {error.ename}: {error.evalue}") from None
    except Exception as error:  # a kernel that died, or that did not start; no room for its output
        what = f"cell ? raised {type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            log.unlink(missing_ok=True)  # half a notebook helps nobody, and the reports need the room
        if jobs.out_of_memory_kills() > killed:
            what += " (the system killed a process for want of memory)"
        elif not isinstance(error, OSError) and (words := last_words(messages)):
            what += f" ({words})"
        raise jobs.JobError(what) from None
    finally:
        jobs.limit_time(0)


def transport(folder: str) -> Config:
    """How to speak with the kernel: by sockets in ``folder``, which is this job's alone.

    Jupyter's default is five TCP ports that are free when it looks; another program may take one before the kernel
    does, and then the kernel dies. A socket's path has at most 107 bytes (man 7 unix): in a longer folder it is TCP.
    """
    socket = os.path.join(folder, "kernel")
    ipc = os.name == "posix" and len(os.fsencode(socket)) < 100
    return Config(KernelManager={"transport": "ipc", "ip": socket} if ipc else {})


def last_words(messages: Path) -> str:
    """The last error that a dead kernel wrote, as one line: ``ModuleNotFoundError: …``; "" if it wrote none."""
    lines = messages.read_text(encoding="utf-8", errors="replace").splitlines()
    names = [
        line.strip() for line in lines if line.partition(":")[0].endswith(("Error", "Exception")) or "No module" in line
    ]
    return names[-1] if names else ""


def cell_of(error: PapermillExecutionError) -> str:
    """The failed cell by its execution count and first line of code."""
    lines = [line for line in error.source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return f"[{error.exec_count}] {lines[0].strip() if lines else ''}"


def main() -> None:
    parser = jobs.parser(__doc__)
    for name in ("chapter", "output", "stats", "log"):
        parser.add_argument(name)
    jobs.start(execute, parser.parse_args())


if __name__ == "__main__":
    main()
