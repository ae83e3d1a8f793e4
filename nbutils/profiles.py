"""Sizes of an experiment by profile: ``smoke`` (seconds), ``book`` (the rendered book), ``gpu`` (larger)."""

import os
from typing import TypeVar

__all__ = ["PROFILES", "choose", "resolve"]

T = TypeVar("T")

PROFILES = ("smoke", "book", "gpu")


def resolve(profile: str = "auto") -> str:
    """Name of the profile to run; ``auto`` is ``gpu`` with CUDA, ``smoke`` on Binder, and ``book`` otherwise.

    Raises:
        ValueError: the profile is not one of ``auto``, ``smoke``, ``book``, ``gpu``.

    >>> resolve("smoke")
    'smoke'
    """
    if profile in PROFILES:
        return profile
    if profile != "auto":
        raise ValueError(f"unknown profile {profile!r}: choose one of auto, {', '.join(PROFILES)}")
    from nbutils import devices

    if devices.cuda_count():
        return "gpu"
    if "BINDER_LAUNCH_HOST" in os.environ:  # set by BinderHub; mybinder.org has about 2 GB and one core
        return "smoke"
    return "book"


def choose(profile: str, *, smoke: T, book: T, gpu: T) -> T:
    """The value for the profile; a notebook shows all three values.

    >>> choose("book", smoke=100, book=10_000, gpu=1_000_000)
    10000
    """
    return {"smoke": smoke, "book": book, "gpu": gpu}[resolve(profile)]
