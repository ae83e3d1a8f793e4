"""Which GPUs a machine has, and one of them for each job: two jobs at once never share one."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

VISIBLE = "CUDA_VISIBLE_DEVICES"
FOLDER = Path("/dev")
POLL = 1.0  # seconds between two looks for a GPU that has become free


def visible(folder: Path = FOLDER) -> list[str]:
    """What CUDA calls the GPUs that this process may use: those of ``CUDA_VISIBLE_DEVICES``, or all of the machine.

    These are counted by NVIDIA's device files, ``nvidia0`` and on, and where there are none by torch. A scheduler that
    gives a job some of the GPUs sets the variable.
    """
    listed = os.environ.get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    files = [match[1] for file in folder.glob("nvidia*") if (match := re.fullmatch(r"nvidia(\d+)", file.name))]
    if files:
        return sorted(files, key=int)
    from nbutils import devices

    return [str(number) for number in range(devices.cuda_count())]


@contextmanager
def one_of(names: Sequence[str], folder: Path | None = None) -> Iterator[str]:
    """Make one of some GPUs the only one that this process and its children see; wait while other jobs have all.

    A GPU is held by the lock on a file of its name in ``folder``, by default the machine's for temporary files, and so
    across checkouts; the lock ends with the process, even if that is killed. Where only one GPU is visible, whoever
    made it visible keeps others off.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not names:
        raise RuntimeError(
            "device 'cuda' was asked for, and this machine shows no GPU: use DEVICE=cpu, or ask the scheduler for a GPU"
        )
    if len(names) == 1:
        os.environ[VISIBLE] = names[0]
        yield names[0]
        return
    name, lock = _lock_one(names, folder or Path(tempfile.gettempdir()))
    try:
        os.environ[VISIBLE] = name
        yield name
    finally:
        lock.release()


def _lock_one(names: Sequence[str], folder: Path) -> tuple[str, FileLock]:
    while True:
        for name in names:
            lock = FileLock(folder / f"norm-growth-{os.getuid()}-gpu-{name}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            return name, lock
        time.sleep(POLL)
