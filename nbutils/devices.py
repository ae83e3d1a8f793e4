"""The device, explicit random generators, and the hardware and software of the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["PACKAGES", "cuda_count", "generator", "hardware", "resolve", "versions"]

PACKAGES = (
    "numpy", "scipy", "pandas", "numba", "torch", "safetensors", "tokenizers", "transformers", "matplotlib",
    "jupyter-book", "papermill", "norm-growth",
)  # fmt: skip


def cuda_count() -> int:
    """Number of CUDA devices that torch can use; 0 without a GPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolve(device: str = "auto") -> str:
    """``cpu`` or ``cuda``; ``auto`` chooses CUDA if torch can use it, and the CPU otherwise.

    Raises:
        ValueError: the device is not one of ``auto``, ``cpu``, ``cuda``.
        RuntimeError: the device is ``cuda``, and torch finds no CUDA device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}: choose one of auto, cpu, cuda")
    if device == "cpu":
        return "cpu"
    has_cuda = cuda_count() > 0
    if device == "cuda" and not has_cuda:
        raise RuntimeError(
            "device 'cuda' was asked for and torch finds no CUDA device here: use device 'auto' or 'cpu'"
        )
    return "cuda" if has_cuda else "cpu"


def generator(seed: int, device: str = "auto") -> torch.Generator:
    """A ``torch.Generator`` on ``device`` seeded with ``seed``. The book has no global seed.

    Raises ValueError and RuntimeError as ``resolve`` does.
    """
    import torch

    return torch.Generator(device=resolve(device)).manual_seed(int(seed))


def hardware(device: str = "auto") -> str:
    """Name and number of GPUs, or name of the processor and number of cores that this process may use, as text."""
    if resolve(device) == "cuda":
        import torch

        return f"{torch.cuda.get_device_name()} ({torch.cuda.device_count()} GPU)"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()} ({cores} cores)"


def _processor() -> str:
    """Name of the processor, from the kernel on Linux, where ``platform`` knows only the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # only Linux has this file
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result may depend on, without those that are not installed."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed
