"""Parameters that are spread over processes: the part that lies here, and sums over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor that this process holds; another tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def of_same_shards(grad: Any, parameter: Any) -> Tensor:
    """A gradient cut as its parameter is; under tensor parallelism some come as sums that are still to be taken."""
    cut = getattr(parameter, "placements", None)
    return grad if cut is None or grad.placements == cut else grad.redistribute(parameter.device_mesh, cut)


def refuse(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for parameters that are shards without saying so: FSDP1 and ZeRO-3."""
    for name, parameter in named:
        if "_flat_param" in name or "_fsdp_wrapped_module" in name:
            raise ValueError(
                f"{name} is of FSDP1, whose parameters are shards: use FSDP2 (fully_shard), which is tracked"
            )
        if hasattr(parameter, "ds_id") and not parameter.numel():
            raise ValueError(f"{name} is a shard of DeepSpeed ZeRO-3: track under ZeRO-1 or 2, or FSDP2 (fully_shard)")


def mesh_of(parameters: Iterable[Tensor]) -> Any | None:
    """The mesh of processes that all DTensors share, or None if there are none.

    Raises:
        ValueError: several meshes, as of experts beside dense layers.
    """
    meshes = {p.device_mesh for p in parameters if hasattr(p, "device_mesh")}
    if len(meshes) > 1:
        raise ValueError(f"parameters on {len(meshes)} device meshes: make one tracker for the parameters of each")
    return meshes.pop() if meshes else None


def weight(parameter: Tensor, mesh: Any | None) -> float:
    """1 over the number of processes of the mesh that hold the same values: so that a sum over all counts them once."""
    if mesh is None:
        return 1.0
    placements = getattr(parameter, "placements", None) or [None] * mesh.ndim  # a plain tensor is everywhere the same
    whole = [i for i, placement in enumerate(placements) if placement is None or not placement.is_shard()]
    return 1 / math.prod(map(mesh.size, whole))


def summed(sums: Tensor, mesh: Any | None) -> Tensor:
    """The sum over all processes of a mesh."""
    if mesh is not None:
        for dimension in range(mesh.ndim):
            dist.all_reduce(sums, group=mesh.get_group(dimension))
    return sums
