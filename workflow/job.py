"""One job of the workflow: a chapter through papermill, the shared trainings of one family, or all pages.

``python -m workflow.job chapter t5 --profile book --seed 0 --device cpu 2>logs/t5.log``

A job dies with its run, keeps to its time, and leaves no result where it did not finish. Why it did not stands in the
failed notebook, or in the last line of the log. A result has beside it the hash of what it is made from, as that was
when the job began, or None if it was another when the job ended. ``workflow.collect`` asks whether it is today's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import traceback
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from nbutils import devices
from workflow import ROOT, TOKEN, Run, book, gpus, sources, write_atomically
from workflow.processes import STOPPED, Cancelled, TimeUp, Token, die_with, time_limit

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def chapter(name: str, run: Run, options: argparse.Namespace) -> None:
    """Execute a chapter in ``logs/``, under a name of this job's own; the whole notebook then moves to its place.

    One that failed stays in ``logs/``, under the chapter's name.

    Raises:
        PapermillExecutionError: a cell raised; it stands in the notebook in ``logs/``.
        TimeUp: time was up.
        Cancelled: the job was asked to end, or another run began.
        RuntimeError: the kernel died or did not start.
    """
    started = datetime.now(UTC)
    made_from = sources.hash_of(name)
    unfinished = run.unfinished(name).with_suffix(f".{uuid4().hex[:8]}.ipynb")
    try:
        _execute(name, run, options, unfinished)
        options.token.check()
        keep_stats(name, run.stats(name), options, started, made_from, resource.RUSAGE_CHILDREN)
        os.replace(unfinished, run.notebook(name))
    finally:
        if unfinished.exists():
            os.replace(unfinished, run.unfinished(name))


def _execute(name: str, run: Run, options: argparse.Namespace, target: Path) -> None:
    """Execute a chapter; ``target`` grows with every cell. Raises as ``chapter`` does."""
    import nbformat
    import papermill

    from workflow import notebooks

    os.environ["NBUTILS_TRAININGS"] = str(run.trainings)
    with tempfile.TemporaryDirectory() as scratch, time_limit(options.time_limit):
        source = Path(scratch) / f"{name}.ipynb"
        nbformat.write(notebooks.executable(book.source(name)), source)
        executed = papermill.execute_notebook(
            source,
            target,
            parameters={"profile": run.profile, "seed": run.seed, "device": run.device},
            kernel_name="python3",
            cwd=scratch,
            progress_bar=False,
            start_timeout=120,
            config=_kernel(scratch),
        )
    if any(output.output_type == "error" for cell in executed.cells for output in cell.get("outputs", ())):
        raise RuntimeError("a cell left the notebook before its end, by sys.exit")  # which papermill takes for success


def _kernel(folder: str) -> Any:
    """A kernel that draws for phones too. One speaks with it by sockets in ``folder``, which is this job's alone.

    Jupyter's default is five TCP ports that are free when it looks; another program may take one before the kernel
    does, and then the kernel dies. A socket's path has at most 107 bytes (man 7 unix): in a longer folder it is TCP.
    """
    from traitlets.config import Config

    socket = os.path.join(folder, "kernel")
    manager = {"transport": "ipc", "ip": socket} if len(os.fsencode(socket)) < 100 else {}
    return Config(KernelManager=manager, NotebookClient={"extra_arguments": ["--ext=workflow.phone"]})


def training(name: str, run: Run, options: argparse.Namespace) -> None:
    """Train, then move the result into place in one step."""
    import torch

    from nbutils import shared_runs

    started = datetime.now(UTC)
    made_from = sources.hash_of(name)
    torch.set_num_threads(options.threads)
    with time_limit(options.time_limit):
        trained = shared_runs.RECIPES[name](profile=run.profile, seed=run.seed, device=run.device)
        options.token.check()
        trained.save(run.trainings / name)
    keep_stats(name, run.training_stats(name), options, started, made_from, resource.RUSAGE_SELF)


def pages(name: str, run: Run, options: argparse.Namespace) -> None:
    """Render the pages of a run of all chapters, whose report is written."""
    from workflow import write
    from workflow.pages import build

    build.pages(replace(run, chapters=tuple(book.chapters())), write.load(run.reports))


def keep_stats(
    name: str, file: Path, options: argparse.Namespace, started: datetime, made_from: str, rusage: int
) -> None:
    """Write time, memory, hardware and versions of a job, and what its result is made from.

    That is None if it was edited while the job ran, even if the edit is taken back before the run ends: code that is
    imported late may have been the edited one.
    """
    was_edited = sources.hash_of(name) != made_from
    memory = resource.getrusage(rusage).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)
    stats = {
        "profile": options.profile,
        "seed": options.seed,
        "device": options.device,
        "threads": options.threads,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 2),
        "peak_mb": round(memory, 1),
        "hardware": devices.hardware(options.device),
        "versions": devices.versions(),
        "made_from": None if was_edited else made_from,
    }
    write_atomically(file, json.dumps(stats, indent=1) + "\n")
    print(f"{name}, seed {options.seed}: {stats['seconds']:.1f} s, {stats['peak_mb']:.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = {"chapter": chapter, "training": training, "pages": pages}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--time-limit", type=int, default=3600, help="seconds for one chapter or training")
    parser.add_argument("--token", default="", help="name of the run: this job ends when another begins")
    parser.add_argument("--parent", type=int, default=0, help="process of the run; this job ends with it")
    options = parser.parse_args()
    options.token = Token(TOKEN, options.token)
    if options.parent:
        die_with(options.parent)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update({name: str(options.threads) for name in THREADS})
    os.environ.update(PYTHONPATH=path, PYTHONHASHSEED="0", NBUTILS_BOOK="1", JUPYTER_PREFER_ENV_PATH="1")
    if options.device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    run = Run(options.profile, options.seed, options.device)
    run.logs.mkdir(parents=True, exist_ok=True)
    name = options.names[0]
    try:
        options.token.watch()
        needs_gpu = options.device == "cuda" and options.kind != "pages"
        with gpus.one_of(gpus.visible()) if needs_gpu else nullcontext():
            for name in options.names:
                kinds[options.kind](name, run, options)
    except (Exception, TimeUp, Cancelled) as error:
        traceback.print_exc()
        reason = " ".join(f"{name}: {type(error).__name__}: {error}".split())
        sys.exit(f"{STOPPED}{reason[:500]}")
    run.log(options.names[0]).unlink(missing_ok=True)  # what is left there is of jobs that failed


if __name__ == "__main__":
    main()
