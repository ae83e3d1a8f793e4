"""Sizes of an experiment by profile: ``smoke`` (seconds), ``book`` (the rendered book), ``gpu`` (larger)."""

import os
from typing import TypeVar

T = TypeVar("T")

PROFILES = ("smoke", "book", "gpu")


def resolve(profile: str = "auto") -> str:
    """Name of the profile to run; ``auto`` is ``gpu`` where CUDA is there, ``smoke`` on Binder, else ``book``.

    Raises:
        ValueError: the profile is not one of ``auto``, ``smoke``, ``book``, ``gpu``.

    >>> resolve("smoke")
    'smoke'
    """
    if profile in PROFILES:
        return profile
    if profile == "auto":
        from nbutils import devices

        binder = "BINDER_LAUNCH_HOST" in os.environ  # BinderHub sets it; mybinder.org gives 2 GB and one core or so
        return "gpu" if devices.cuda_count() else "smoke" if binder else "book"
    raise ValueError(f"unknown profile {profile!r}: choose one of auto, {', '.join(PROFILES)}")


def choose(profile: str, *, smoke: T, book: T, gpu: T) -> T:
    """The value of the running profile. All three stand in the notebook, where a reader sees them.

    >>> choose("book", smoke=100, book=10_000, gpu=1_000_000)
    10000
    """
    return {"smoke": smoke, "book": book, "gpu": gpu}[resolve(profile)]
