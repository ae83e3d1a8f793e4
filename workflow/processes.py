"""Processes of a run: how long one may take, what ends it, and the last line of its log, which says why."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STOPPED = "stopped: "  # begins the last line of a log that says why
KILLED = "its job was killed before its end: by hand, or for want of memory"
CANCELLED = "it was cancelled, by hand or by what scheduled it"
SUPERSEDED = "another run of this checkout has begun since, or its _build was removed"
POLL = 10.0  # seconds between two looks for another run
LOOKS = 3  # a file system that several machines share may fail to show a file once


class TimeUp(SystemExit):
    """The time of a job was up.

    asyncio only logs other exceptions that a signal raises in one of its callbacks, and the client of a kernel takes
    ``TimeoutError`` for a message that did not come.
    """


class Cancelled(SystemExit):
    """A job was asked to end. Why it is no ``Exception``: see ``TimeUp``."""


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


class Token:
    """What says which run of a checkout is the last that began: a file that holds the name of this run.

    Jobs on other machines outlive a run that is killed. What they finish counts; as soon as another run begins, which
    makes the same results, they end. So no two write to one place, and none for ever.
    """

    def __init__(self, file: Path, name: str) -> None:
        self.file = file
        self.name = name

    def is_valid(self) -> bool:
        """Whether no other run has begun; a job without a name of a run belongs to none."""
        if not self.name:
            return True
        for _ in range(LOOKS):
            try:
                return self.file.read_text(encoding="utf-8") == self.name
            except OSError:
                time.sleep(1)
        return False

    def check(self) -> None:
        """Raise ``Cancelled`` if another run has begun."""
        if not self.is_valid():
            raise Cancelled(SUPERSEDED)

    def watch(self) -> None:
        """From now on raise ``Cancelled`` in this process when it is asked to end (SIGTERM), or another run begins."""

        def end(signum: int, frame: object) -> None:
            raise Cancelled(CANCELLED if self.is_valid() else SUPERSEDED)

        def look() -> None:
            wait = threading.Event()
            while self.is_valid():
                wait.wait(POLL)
            os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(signal.SIGTERM, end)
        threading.Thread(target=look, daemon=True).start()


def last_words(log: Path) -> str:
    """Why a job stopped, from the last line of its log that says so: a library may print more as it ends."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    reasons = [line.removeprefix(STOPPED) for line in lines if line.startswith(STOPPED)]
    return reasons[-1] if reasons else KILLED
