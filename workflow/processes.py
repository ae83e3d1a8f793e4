"""Processes of a run: how long one may take, with whom it dies, and the last line of its log, which says why."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STOPPED = "stopped: "  # begins the last line of a log that says why
KILLED = "its job was killed before its end: by hand, or for want of memory"


class TimeUp(SystemExit):
    """The time of a job was up.

    asyncio only logs other exceptions that a signal raises in one of its callbacks, and the client of a kernel takes
    ``TimeoutError`` for a message that did not come.
    """


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
    """Let the operating system kill this process once its parent is gone: a killed run leaves no writers behind.

    A notebook's kernel watches its parent by itself. Other systems than Linux have no such means.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, man 2 prctl
    if os.getppid() != parent:  # gone before
        sys.exit("the run that started this job is gone")


def last_words(log: Path) -> str:
    """Why a job stopped, from the last line of its log that says so: a library may print more as it ends."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    reasons = [line.removeprefix(STOPPED) for line in lines if line.startswith(STOPPED)]
    return reasons[-1] if reasons else KILLED
