"""Which GPUs a machine has, and one of them for each job: two jobs at once never share one."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL = 1.0  # seconds between two looks for a GPU that has become free


def visible() -> list[str]:
    """What CUDA calls the GPUs that this process may use: those of ``CUDA_VISIBLE_DEVICES``, or all that torch counts.

    A scheduler that gives a job some of the GPUs sets the variable, or hides the others.
    """
    listed = os.environ.get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    from nbutils import devices

    return [str(number) for number in range(devices.cuda_count())]


@contextmanager
def one_of(names: Sequence[str], folder: Path | None = None) -> Iterator[str]:
    """Make one of some GPUs the only one that this process and its children see; wait while other jobs have all.

    A GPU is held by the lock on a file of its name in ``folder``, by default the user's for temporary files, and so
    across checkouts; the lock ends with the process, even if that is killed. Where only one GPU is visible there is
    nothing to choose, and nothing is locked: of a scheduler each job may see its own as number 0.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not names:
        raise RuntimeError(
            "device 'cuda' was asked for, and this machine shows no GPU: use DEVICE=cpu, or ask the scheduler for a GPU"
        )
    if len(names) == 1:
        yield names[0]
        return
    name, lock = _lock_one(names, folder or Path(tempfile.gettempdir()))
    try:
        os.environ[VISIBLE] = name
        yield name
    finally:
        lock.release()


def _lock_one(names: Sequence[str], folder: Path) -> tuple[str, FileLock]:
    said = False
    while True:
        for name in names:
            lock = FileLock(folder / f"norm-growth-{os.getuid()}-gpu-{name}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            return name, lock
        if not said:
            print(f"all GPUs are taken ({', '.join(names)}): waiting for one", flush=True)
            said = True
        time.sleep(POLL)
