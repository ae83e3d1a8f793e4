"""Float64 throughout a computation, the casts inside a model included, and the memory that it needs.

RMSNorm, softmax and rotary positions of ``transformers`` compute in float32 whatever the precision of the model is. In
float32 a square overflows where a trained language model has entries of 10⁴ and its parameters are multiplied by 1000,
and a softmax ties scores that differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["choose", "float64_throughout", "free_memory"]

LOWER = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = 1 << 30  # bytes that a measurement takes beside the weights; its batches are bounded to fit


class _CastsToFloat64(TorchDispatchMode):
    """While this mode is active, a cast to a lower floating-point precision, or a new tensor of one, is float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_not_lower, (args, dict(kwargs or {})))
        outputs = func(*args, **kwargs)
        if any(isinstance(x, Tensor) and x.dtype in LOWER for x in tree_leaves((args, kwargs))):
            return outputs  # of a tensor that was given in that precision
        return tree_map_only(Tensor, _as_float64, outputs)  # of a factory without a precision


def _not_lower(argument: Any) -> Any:
    """Float64 in the place of a lower precision; any other argument as it is."""
    return torch.float64 if isinstance(argument, torch.dtype) and argument in LOWER else argument


def _as_float64(x: Tensor) -> Tensor:
    return x.double() if x.dtype in LOWER else x


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Within a ``with`` block, in this thread, a cast to a lower floating-point precision, or a new tensor, is float64.

    Parameters, buffers and inputs keep their precision: give the model in float64.

    >>> with float64_throughout():
    ...     torch.ones(2, dtype=torch.float64).float().dtype, torch.zeros(2).softmax(0, dtype=torch.float32).dtype
    (torch.float64, torch.float64)
    """
    with _CastsToFloat64():
        yield


def choose(model: nn.Module) -> tuple[torch.dtype | None, str]:
    """Float64 and no reason, or ``None``, the model's own precision, and the reason in a sentence.

    Float64 needs a second copy of the parameters, of 8 bytes each, beside the model.
    """
    device = next(model.parameters()).device
    if device.type not in ("cpu", "cuda"):
        return None, f"{device.type} has no float64"
    needed = 8 * sum(parameter.numel() for parameter in model.parameters()) + ACTIVATIONS
    free = free_memory(device)
    if needed > free:
        return None, f"float64 needs {needed / 1e9:.1f} GB beside the model, and {free / 1e9:.1f} GB are free"
    return torch.float64, ""


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can still be allocated on a CPU or a GPU, within the limit of a container."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [_of_machine(), *_of_container()]
    return min(free)


def _of_machine() -> int:
    """Bytes of memory that the operating system has available."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        sizes = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return 1024 * int(sizes["MemAvailable"].split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # macOS: what others use is not known


def _of_container() -> list[int]:
    """Bytes that the limit of a Linux container (control groups, version 2 or 1) leaves; empty without a limit.

    Files that the kernel keeps in memory count as used there, but are given up when memory is wanted.
    """
    for folder, limit_name, usage_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit_file = Path(folder, limit_name)
        if not limit_file.exists() or limit_file.read_text().strip() == "max":
            continue
        statistics = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
        cached = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
        used = int(Path(folder, usage_name).read_text()) - cached
        return [int(limit_file.read_text()) - used]
    return []
