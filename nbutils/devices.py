"""Choice of the device, explicit random generators, and what the machine is."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "numpy", "scipy", "pandas", "numba", "torch", "safetensors", "tokenizers", "transformers", "matplotlib",
    "jupyter-book", "papermill", "norm-growth",
)  # fmt: skip


def cuda_count() -> int:
    """Number of CUDA devices that torch can use; 0 without a GPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolve(device: str = "auto") -> str:
    """``cpu`` or ``cuda``; ``auto`` takes CUDA where it is there and never fails for want of it.

    Raises:
        ValueError: the device is not one of ``auto``, ``cpu``, ``cuda``.
        RuntimeError: ``cuda`` was asked for and there is none.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}: choose one of auto, cpu, cuda")
    found = cuda_count() if device != "cpu" else 0
    if device == "cuda" and not found:
        raise RuntimeError(
            "device 'cuda' was asked for and torch finds no CUDA device here: use device 'auto' or 'cpu'"
        )
    return "cuda" if found else "cpu"


def generator(seed: int, device: str = "auto") -> torch.Generator:
    """A ``torch.Generator`` on ``device`` seeded with ``seed``. The book has no global seed."""
    import torch

    return torch.Generator(device=resolve(device)).manual_seed(int(seed))


def hardware(device: str = "auto") -> str:
    """One line that names the processor or GPU and the number of cores in use."""
    if resolve(device) == "cuda":
        import torch

        return f"{torch.cuda.get_device_name()} ({torch.cuda.device_count()} GPU)"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()} ({cores} cores)"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a result may depend on; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
