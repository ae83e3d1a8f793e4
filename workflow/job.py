"""One job of the workflow: a chapter through papermill, the shared trainings of one family, or all pages.

``python -m workflow.job chapter 05-t5=HASH --profile book --seed 0 --device cpu 2>logs/05-t5.log``

Each NAME=HASH is what to make and the hash of what it is made from, as the workflow saw it; where that is another when
the job begins or ends, there is no result. A job dies with its run, keeps to its time, and leaves no result where it
did not finish. Why it did not stands in the failed notebook, or in the last line of the log.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nbutils import devices
from workflow import ROOT, Run, book, sources, write_atomically

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
STOPPED = "stopped: "  # begins the last line of a log that says why


def chapter(name: str, run: Run, how: argparse.Namespace) -> None:
    """Execute a chapter in ``logs/``; the whole notebook then moves to its place in one step.

    Raises:
        PapermillExecutionError: a cell raised; it stands in the notebook in ``logs/``.
        TimeUp: time was up.
        RuntimeError: the kernel died or did not start.
    """
    import nbformat
    import papermill

    from workflow import notebooks

    started, log = datetime.now(UTC), run.logs / f"{name}.ipynb"
    os.environ["NBUTILS_TRAININGS"] = str(run.folder / "trainings")
    with tempfile.TemporaryDirectory() as scratch, time_limit(how.time_limit):
        source = Path(scratch) / f"{name}.ipynb"
        nbformat.write(notebooks.executable(book.source(name)), source)
        made = papermill.execute_notebook(
            source,
            log,
            parameters={"profile": run.profile, "seed": run.seed, "device": run.device},
            kernel_name="python3",
            cwd=scratch,
            progress_bar=False,
            start_timeout=120,
            config=_kernel(scratch),
        )
    if any(output.output_type == "error" for cell in made.cells for output in cell.get("outputs", ())):
        raise RuntimeError("a cell left the notebook before its end, by sys.exit")  # which papermill takes for success
    keep_stats(name, run.stats(name), how, started, resource.RUSAGE_CHILDREN)
    os.replace(log, run.notebook(name))


def _kernel(folder: str) -> Any:
    """A kernel that draws for phones too. One speaks with it by sockets in ``folder``, which is this job's alone.

    Jupyter's default is five TCP ports that are free when it looks; another program may take one before the kernel
    does, and then the kernel dies. A socket's path has at most 107 bytes (man 7 unix): in a longer folder it is TCP.
    """
    from traitlets.config import Config

    socket = os.path.join(folder, "kernel")
    manager = {"transport": "ipc", "ip": socket} if len(os.fsencode(socket)) < 100 else {}
    return Config(KernelManager=manager, NotebookClient={"extra_arguments": ["--ext=workflow.phone"]})


def training(name: str, run: Run, how: argparse.Namespace) -> None:
    """Train, then move the result into place in one step."""
    import torch

    from nbutils import shared_runs

    started = datetime.now(UTC)
    torch.set_num_threads(how.threads)
    with time_limit(how.time_limit):
        made = shared_runs.RECIPES[name](profile=run.profile, seed=run.seed, device=run.device)
        made.save(run.training(name))
    keep_stats(name, run.training(name) / "stats.json", how, started, resource.RUSAGE_SELF)


def pages(name: str, run: Run, how: argparse.Namespace) -> None:
    """Render the pages of a run of all chapters, whose verdicts are collected."""
    from workflow.pages import build

    build.pages(replace(run, chapters=tuple(book.chapters())))


def not_edited(name: str, how: argparse.Namespace) -> None:
    """Raise ``RuntimeError`` where what a result is made from is no longer what the workflow saw."""
    if how.kind != "pages" and sources.hash_of(name) != how.made[name]:
        raise RuntimeError("it, or a module of it, changed while the run went on: run it again")


def keep_stats(name: str, file: Path, how: argparse.Namespace, started: datetime, who: int) -> None:
    """Write time, memory, hardware and versions of a job."""
    not_edited(name, how)
    memory = resource.getrusage(who).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)
    stats = {
        "profile": how.profile,
        "seed": how.seed,
        "device": how.device,
        "threads": how.threads,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 2),
        "peak_mb": round(memory, 1),
        "hardware": devices.hardware(how.device),
        "versions": devices.versions(),
        "made_from": how.made[name],
    }
    write_atomically(file, json.dumps(stats, indent=1) + "\n")
    print(f"{name}, seed {how.seed}: {stats['seconds']:.1f} s, {stats['peak_mb']:.0f} MB", flush=True)


class TimeUp(SystemExit):
    """A job's time was up. asyncio only logs another exception that a signal raises in one of its callbacks, and the
    client of a kernel takes ``TimeoutError`` for a message that did not come."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise ``TimeUp`` in this process after so many seconds."""

    def end(signum: int, frame: object) -> None:
        raise TimeUp(f"not finished after {seconds} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def die_with(parent: int) -> None:
    """Let the kernel of the system kill this process once its parent is gone: a killed run leaves no writers behind.

    A notebook's kernel watches its parent by itself. Other systems than Linux have no such means.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, man 2 prctl
    if os.getppid() != parent:  # gone before
        sys.exit("the run that started this job is gone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    makes = {each.__name__: each for each in (chapter, training, pages)}
    parser.add_argument("kind", choices=makes)
    parser.add_argument("made", nargs="+", metavar="NAME=HASH")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--time-limit", type=int, default=3600, help="seconds for one chapter or training")
    parser.add_argument("--parent", type=int, default=0, help="process of the run; this job ends with it")
    how = parser.parse_args()
    how.made = dict(each.split("=") for each in how.made)
    if how.parent:
        die_with(how.parent)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update({name: str(how.threads) for name in THREADS})
    os.environ.update(PYTHONPATH=path, PYTHONHASHSEED="0", NBUTILS_BOOK="1", JUPYTER_PREFER_ENV_PATH="1")
    if how.device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    run = Run(how.profile, how.seed, how.device)
    run.logs.mkdir(parents=True, exist_ok=True)
    for name in how.made:
        try:
            not_edited(name, how)
            makes[how.kind](name, run, how)
        except (Exception, TimeUp) as error:
            traceback.print_exc()
            reason = " ".join(f"{name}: {type(error).__name__}: {error}".split())
            sys.exit(f"{STOPPED}{reason[:500]}")
    (run.logs / f"{next(iter(how.made))}.log").unlink(missing_ok=True)  # what is left there is of jobs that failed


if __name__ == "__main__":
    main()
