"""Parameters that are spread over processes: the shard of this process, and sums over all processes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor that this process holds; a plain tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def sharded_like(gradient: Any, parameter: Any) -> Tensor:
    """A gradient with the same shards as its parameter.

    Under tensor parallelism some gradients are partial sums, which this completes.
    """
    placements = getattr(parameter, "placements", None)
    if placements is None or gradient.placements == placements:
        return gradient
    return gradient.redistribute(parameter.device_mesh, placements)


def refuse(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for shards that look like whole parameters: those of FSDP1 and ZeRO-3."""
    for name, parameter in named:
        if "_flat_param" in name or "_fsdp_wrapped_module" in name:
            raise ValueError(
                f"{name} is of FSDP1, whose parameters are shards: use FSDP2 (fully_shard), which is tracked"
            )
        if hasattr(parameter, "ds_id") and not parameter.numel():
            raise ValueError(f"{name} is a shard of DeepSpeed ZeRO-3: track under ZeRO-1 or 2, or FSDP2 (fully_shard)")


def mesh_of(parameters: Iterable[Tensor]) -> Any | None:
    """The mesh of processes that all DTensors share, or None without DTensors.

    Raises:
        ValueError: several meshes, as a model with experts beside dense layers may have.
    """
    meshes = {p.device_mesh for p in parameters if hasattr(p, "device_mesh")}
    if len(meshes) > 1:
        raise ValueError(f"parameters on {len(meshes)} device meshes: make one tracker for the parameters of each")
    return meshes.pop() if meshes else None


def weight(parameter: Tensor, mesh: Any | None) -> float:
    """1 over the number of processes that hold the same values, so that a sum over all processes counts them once."""
    if mesh is None:
        return 1.0
    placements = getattr(parameter, "placements", None)
    if not placements:  # a plain tensor is the same in every process
        replicated = list(range(mesh.ndim))
    else:
        replicated = [dimension for dimension, placement in enumerate(placements) if not placement.is_shard()]
    return 1 / math.prod(map(mesh.size, replicated))


def summed(sums: Tensor, mesh: Any | None) -> Tensor:
    """The sum over all processes of a mesh, in place."""
    if mesh is not None:
        for dimension in range(mesh.ndim):
            dist.all_reduce(sums, group=mesh.get_group(dimension))
    return sums
