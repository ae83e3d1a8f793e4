"""What every job of the workflow does: die with its run, hold one GPU, keep to its time, say why it failed."""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from nbutils import device
from workflow import BUILD, ROOT

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
HOLDER = BUILD / ".holder"  # process and name of the run that took this checkout last
KILLED = "its job was killed before its end: by hand, for want of memory, or by a limit of the scheduler"
BLOCK = 4096  # bytes of an error file, one block of most file systems


class JobError(Exception):
    """Why a job failed, as one sentence for the reader of a red run."""


def die_with_run(run: str = "", interval: float = 0.3) -> None:
    """End this process and its children once its parent is gone or another run has taken the checkout.

    A killed run must not leave writers behind. On one machine the parent tells. On a cluster a job's parent is the
    scheduler's, which outlives the run; there the next run tells, by its name in the lock (see ``holder``).
    """
    parent = os.getppid()

    def watch() -> None:
        beats = 0
        while os.getppid() == parent and (beats % 10 or not run or holder() in ("", run)):
            time.sleep(interval)
            beats += 1
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def holder() -> str:
    """Name of the run that took this checkout last, from the second line of ``HOLDER``; "" where there is none."""
    try:
        return "".join(HOLDER.read_text(encoding="utf-8").splitlines()[1:2])
    except OSError:
        return ""


@contextmanager
def gpu_slot(names: Sequence[str]) -> Iterator[str]:
    """Hold one GPU for this job: the first whose lock is free, shown as the only one.

    Before anything of this process asks CUDA for its devices: afterwards it does not look at the variable again.
    """
    BUILD.mkdir(exist_ok=True)
    while True:
        for name in names:
            lock = FileLock(BUILD / f".gpu-{name}.lock")
            with suppress(Timeout):
                lock.acquire(timeout=0)
            if lock.is_locked:
                with lock:
                    os.environ["CUDA_VISIBLE_DEVICES"] = name
                    yield name
                return
        time.sleep(1)


@contextmanager
def kernel_messages(file: Path) -> Iterator[None]:
    """What the kernel and papermill write to the standard error goes to a file, to be looked up."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(file, "wb") as target:
        os.dup2(target.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def put(target: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old one or the whole new one."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def note_error(file: Path, job: str, what: str) -> None:
    """Say in a file why a job has no result. It is written over in place: a full disk has no room for more."""
    text = json.dumps({"job": job, "what": " ".join(what.split())[:500]})
    with open(file, "r+" if file.exists() else "w", encoding="utf-8") as target:
        target.write(text.ljust(BLOCK - 1) + "\n")


def errors(folder: Path) -> dict[str, str]:
    """Why the jobs of a run failed, by job, from the files in its ``logs``. One without words is of a killed job."""
    said = {}
    for file in sorted(folder.glob("*.error.json")):
        try:
            error = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            error = {"job": file.name.removesuffix(".error.json"), "what": KILLED}
        said[error["job"]] = error["what"]
    return said


@contextmanager
def error_file(file: Path, job: str) -> Iterator[None]:
    """Leave a file that says why the job failed, unless it reaches its end; a killed one has said so beforehand."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        note_error(file, job, KILLED)
        yield
    except Exception as error:
        what = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
        print(f"{job}: {' '.join(what.split())[:500]}", file=sys.stderr, flush=True)
        with suppress(OSError):  # no room or no leave to write: the line above has said it
            if file.exists():
                note_error(file, job, what)
        raise SystemExit(1) from None
    file.unlink()


def out_of_memory_kills() -> int:
    """How many processes Linux has killed for want of memory since it started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def set_environment(threads: int) -> None:
    """Threads, the checkout first on the path, a fixed hash seed and this environment's kernel, for children."""
    os.environ.update({name: str(threads) for name in THREADS})
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update(PYTHONPATH=path, PYTHONHASHSEED="0", NBUTILS_BOOK="1", JUPYTER_PREFER_ENV_PATH="1")


def limit_time(seconds: int) -> None:
    """Raise ``TimeoutError`` in this process after so many seconds; 0 takes the limit away."""
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(seconds)


def _out_of_time(signum: int, frame: object) -> None:
    raise TimeoutError


def statistics(arguments: argparse.Namespace, started: datetime, who: int, cpu_before: float = 0.0) -> dict[str, Any]:
    """Time, memory, hardware and versions of a job; ``who`` is ``resource.RUSAGE_SELF`` or ``RUSAGE_CHILDREN``.

    ``cpu_before``: CPU seconds of its process when it began. The peak of memory is that of the process so far.
    """
    usage = resource.getrusage(who)
    return {
        "profile": arguments.profile,
        "seed": arguments.seed,
        "device": arguments.device,
        "threads": arguments.threads,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime - cpu_before, 2),
        "peak_mb": round(usage.ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2), 1),
        "hardware": device.hardware(arguments.device),
        "versions": device.versions(),
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every job has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--profile", required=True)
    made.add_argument("--seed", type=int, required=True)
    made.add_argument("--device", required=True)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--time-limit", type=int, default=3600, help="seconds for one chapter or training")
    made.add_argument("--run", default="", help="name of the run that this job belongs to, as in the lock")
    made.add_argument("--gpus", default="0", help="those of this machine, by comma, as in CUDA_VISIBLE_DEVICES")
    made.add_argument("--executor", default="local", help="who starts the jobs; another than local also gives the GPU")
    return made


def start(execute: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> None:
    """Run a job that dies with its run, on one GPU of its own or on none."""
    die_with_run(arguments.run)
    set_environment(arguments.threads)
    if arguments.device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        execute(arguments)
    elif arguments.executor == "local":
        with gpu_slot(arguments.gpus.split(",")):
            execute(arguments)
    else:  # a cluster's scheduler has chosen the GPU, and the locks here know nothing of other machines
        execute(arguments)
