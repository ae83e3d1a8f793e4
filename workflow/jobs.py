"""What every job of the workflow does: die with its parent, hold one GPU, keep to its time, write in one step."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from nbutils import device
from workflow import BUILD, ROOT

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def die_with_parent(interval: float = 0.3) -> None:
    """End this process and its children once its parent is gone: a killed run must not leave writers behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def gpu_slot(count: int):
    """Hold one GPU for this job: the first whose lock is free, shown to the kernel as its only one."""
    BUILD.mkdir(exist_ok=True)
    while True:
        for index in range(count):
            with open(BUILD / f".gpu-{index}.lock", "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
                os.environ["CUDA_VISIBLE_DEVICES"] = str(index)
                yield index
                return
        time.sleep(1)


@contextmanager
def kernel_messages(file: Path):
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
    part.write_text(text, encoding="utf-8")
    os.replace(part, target)


def fail(error_file: Path, job: str, where: str, error: str) -> None:
    """Leave a file that says what failed and where, and end this process."""
    error = " ".join(error.split())[:500]
    put(error_file, json.dumps({"job": job, "where": where, "error": error}) + "\n")
    print(f"{job}, {where}: {error}", file=sys.stderr)
    raise SystemExit(1)


def set_environment(threads: int) -> None:
    """Threads, the checkout first on the path, and a fixed hash seed, for this process' children."""
    os.environ.update({name: str(threads) for name in THREADS})
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update(PYTHONPATH=path, PYTHONHASHSEED="0", NBUTILS_BOOK="1")


def limit_time(seconds: int) -> None:
    """Raise ``TimeoutError`` in this process after so many seconds; 0 takes the limit away."""
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(seconds)


def _out_of_time(signum: int, frame: object) -> None:
    raise TimeoutError


def statistics(arguments: argparse.Namespace, started: datetime, who: int) -> dict[str, Any]:
    """Time, memory, hardware and versions of a job; ``who`` is ``resource.RUSAGE_SELF`` or ``RUSAGE_CHILDREN``."""
    usage = resource.getrusage(who)
    return {
        "profile": arguments.profile,
        "seed": arguments.seed,
        "device": arguments.device,
        "threads": arguments.threads,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mb": round(usage.ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2), 1),
        "hardware": device.hardware(arguments.device),
        "versions": device.versions(),
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that every job has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("name")
    made.add_argument("--profile", required=True)
    made.add_argument("--seed", type=int, required=True)
    made.add_argument("--device", required=True)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--time-limit", type=int, default=3600, help="seconds for the whole job")
    return made


def start(execute: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> None:
    """Run a job that dies with its parent, on one GPU of its own or on none."""
    die_with_parent()
    if arguments.device == "cuda":
        with gpu_slot(max(1, device.cuda_count())):
            execute(arguments)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        execute(arguments)
