"""The null model of a training: the same loop, with noise of its own size in place of every gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normgrowth.norms import shards
from normgrowth.norms.hooks import before_gradients_are_read, innermost

BLOCK = 1 << 24  # elements converted to float64 at a time
ROUNDING_ERROR = 0.02  # relative error of a norm beyond which a dtype has lost values to underflow or overflow
LARGE = 1e30  # a norm beyond which noise, or its factor ‖g‖/‖noise‖, may overflow float32


class NoiseGradients:
    """Put noise of each gradient's own size in its place, at every step of an optimizer: nothing can be learned.

    Rates, decay, momentum, clipping and the optimizer's own normalisation stay as they are, so the norm grows as it
    does for this optimizer without a signal. Each gradient, as unscaled and clipped for the step, is replaced in place
    by independent normal noise with its norm ‖g‖ (sums in float64; rounding to the gradient's dtype remains); one that
    shares memory, with another gradient or among its own elements, gets memory of its own. A gradient that is 0 stays
    0, and one that is None stays None. The loss and its gradients are computed as ever, at the parameters that the
    noise has reached, and only their sizes are used.

    It works in any order with ``NormTracker.attach``, which then sees the noise, and with the wrappers of accelerate
    and Lightning. The draws depend on ``seed``, the step, and the parameter's place in the optimizer alone: processes
    that hold copies of a parameter draw alike. DTensors (FSDP2, tensor parallelism) are normed over their processes.
    A copy of the optimizer (``copy.deepcopy``, pickle) has no noise, since torch copies no hooks: attach it anew.

    Args:
        optimizer: of torch, or a wrapper of accelerate or Lightning around one.
        seed: of the noise. It is mixed with step and place, so it may be that of the weights.
        steps: steps that the optimizer has made with noise already, of a training that is resumed.

    Raises:
        TypeError: the optimizer is not one of torch.
        ValueError: on attaching, if noise is on this optimizer already, or parameters are shards of FSDP1 or ZeRO-3. At
            a step, if a gradient is not finite, sparse or complex, if its norm leaves float64 or its noise leaves the
            gradient's dtype (no parameter has changed then), if there is none at the first step, or if a closure
            is evaluated twice, as LBFGS does.

    >>> theta = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> sgd = torch.optim.SGD([theta], lr=1.0)
    >>> with NoiseGradients(sgd, seed=1):
    ...     theta.grad = torch.tensor([0.0, -8.0])
    ...     sgd.step()
    >>> round(float(theta.grad.norm()), 5), bool(theta.grad[0] == 0)
    (8.0, False)
    """

    def __init__(self, optimizer: Any, *, seed: int = 0, steps: int = 0) -> None:
        inner = innermost(optimizer, "replace the gradients yourself, before the call that steps")
        if getattr(inner, "_noise_gradients", None):
            raise ValueError(f"noise is on this {type(inner).__name__} already: call its remove() first")
        for number, parameter in _parameters(inner):
            _refuse_shards(number, parameter)
        self.seed = seed
        self.steps = steps
        self._optimizer = inner
        again = "evaluates its closure twice in a step, as LBFGS does: noise has no loss to search along"
        self._handle = before_gradients_are_read(inner, self._replace, again)
        inner._noise_gradients = self

    def remove(self) -> None:
        """Leave the gradients alone from now on."""
        self._handle.remove()
        self._optimizer._noise_gradients = None

    def __enter__(self) -> NoiseGradients:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def state_dict(self) -> dict[str, int]:
        """Seed and steps: all that a training needs to go on with the same noise."""
        return {"seed": self.seed, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on with the noise of ``state_dict``."""
        self.seed = int(state["seed"])
        self.steps = int(state["steps"])

    @torch.no_grad()
    def _replace(self, optimizer: Any) -> None:
        """Replace all gradients of one step."""
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer under GradScaler, which will not step
        if found_inf is not None and bool(found_inf):
            return
        with_gradient = [(number, p) for number, p in _parameters(optimizer) if p.grad is not None and p.numel()]
        if not with_gradient and self.steps == 0:
            raise ValueError(
                f"no parameter of {type(optimizer).__name__} has a gradient in .grad when it steps, so no noise can "
                "take its place: it may step within backward, or keep gradients elsewhere"
            )
        for number, parameter in with_gradient:
            _refuse_gradient(number, parameter)
        _separate([parameter for _, parameter in with_gradient])
        norms = [_norm(_gradient(parameter), parameter) for _, parameter in with_gradient]
        _refuse_not_finite(with_gradient, norms)
        for (number, parameter), norm in zip(with_gradient, norms, strict=True):
            gradient = _gradient(parameter)
            noise = self._noise(number, parameter, gradient)
            is_large = bool(norm > LARGE)
            if is_large:
                noise = noise.double()
            gradient.copy_(noise.mul_(norm / _norm(noise, parameter)))
            if is_large or gradient.dtype == torch.float16:
                _refuse_rounding(number, parameter, _norm(gradient, parameter), norm)
        self.steps += 1

    def _noise(self, number: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Standard normal noise of this process's shard, float32 or, for a gradient of float64, float64."""
        place = [self.seed, self.steps, number, *_shard_coordinates(parameter)]
        # of these 64 bits the generator on the CPU takes 32: another step has the same noise once in 4 billion
        mixed = np.random.SeedSequence(place).generate_state(1, np.uint64)[0]
        generator = torch.Generator(gradient.device).manual_seed(int(mixed))
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        return torch.randn(gradient.shape, generator=generator, dtype=dtype, device=gradient.device)


def _parameters(optimizer: Any) -> Iterator[tuple[int, Tensor]]:
    """All parameters of an optimizer with their numbers, through all groups."""
    return enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])


def _gradient(parameter: Tensor) -> Tensor:
    """The gradient of this process's shard of a parameter; writing to it changes ``parameter.grad``."""
    parameter.grad = shards.sharded_like(parameter.grad, parameter)
    return shards.local(parameter.grad)


def _separate(parameters: list[Tensor]) -> None:
    """Copy each gradient that overlaps an earlier one, or itself as expanded tensors do: writing would meet both."""
    memories: list[tuple[int, int, Tensor]] = []  # first byte, end, and the parameter of its gradient
    for parameter in parameters:
        gradient = _gradient(parameter)
        if parameter.grad is not None and not torch.ops.aten.is_non_overlapping_and_dense(gradient):
            parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
            continue
        start = gradient.data_ptr()
        memories.append((start, start + gradient.nbytes, parameter))
    taken = 0
    for start, end, parameter in sorted(memories, key=lambda memory: memory[:2]):
        if start < taken and parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
        taken = max(taken, end)


def _norm(values: Tensor, parameter: Tensor) -> Tensor:
    """‖·‖ of a tensor in float64, over all processes that hold shards of ``parameter``; one element."""
    blocks = values.reshape(-1).split(BLOCK)
    square = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) ** 2 for block in blocks]).sum()
    mesh = shards.mesh_of([parameter])
    return shards.summed(square * shards.weight(parameter, mesh), mesh).sqrt()


def _shard_coordinates(parameter: Any) -> list[int]:
    """Where this process's shard lies on its mesh, the same for copies of a shard; nothing for a plain tensor."""
    placements = getattr(parameter, "placements", ())
    if not placements:
        return []
    coordinates = parameter.device_mesh.get_coordinate()
    return [coordinates[i] for i, placement in enumerate(placements) if placement.is_shard()]


def _named(number: int, parameter: Tensor) -> str:
    return f"parameter {number} of the optimizer, of shape {tuple(parameter.shape)},"


def _refuse_shards(number: int, parameter: Any) -> None:
    """Raise ValueError for shards that look like whole parameters."""
    is_fsdp1 = getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False)
    is_zero_3 = hasattr(parameter, "ds_id") and not parameter.numel()
    if is_fsdp1 or is_zero_3:
        kind = "FSDP1" if is_fsdp1 else "DeepSpeed ZeRO-3"
        raise ValueError(f"{_named(number, parameter)} is a shard of {kind}: use FSDP2 (fully_shard)")


def _refuse_gradient(number: int, parameter: Tensor) -> None:
    """Raise ValueError for gradients that noise cannot replace."""
    gradient: Any = parameter.grad
    if gradient.layout != torch.strided:
        raise ValueError(f"{_named(number, parameter)} has a sparse gradient: make it dense (sparse=False)")
    if gradient.is_complex():
        raise ValueError(f"{_named(number, parameter)} is complex: train torch.view_as_real of it")


def _refuse_not_finite(with_gradient: list[tuple[int, Tensor]], norms: list[Tensor]) -> None:
    """Raise ValueError for a gradient whose norm is not finite: what noise of its size would be has no answer."""
    for (number, parameter), norm in zip(with_gradient, norms, strict=True):
        if bool(norm.isfinite()):
            continue
        if _is_finite(parameter):
            raise ValueError(
                f"the gradient of {_named(number, parameter)} is finite, but the sum of its squares overflows float64: "
                "the loss diverges here, or needs a smaller scale"
            )
        raise ValueError(
            f"the gradient of {_named(number, parameter)} is not finite, so there is no noise of its size: "
            "the loss diverges here, or a GradScaler is missing"
        )


def _is_finite(parameter: Tensor) -> bool:
    """Whether all values of a gradient are finite, over all processes that hold shards of it."""
    not_finite = (~_gradient(parameter).isfinite()).sum()
    return not bool(shards.summed(not_finite, shards.mesh_of([parameter])))


def _refuse_rounding(number: int, parameter: Tensor, rounded: Tensor, norm: Tensor) -> None:
    """Raise ValueError if the dtype of a gradient cannot hold noise of this norm."""
    if bool((rounded - norm).abs() <= ROUNDING_ERROR * norm):
        return
    dtype = _gradient(parameter).dtype
    advice = "the loss diverges here, or needs a smaller scale"
    if dtype == torch.float16:
        advice = "train in bfloat16, or in float32 with autocast"
    raise ValueError(
        f"noise of norm {float(norm):.3g} in place of gradient {number} leaves the range of "
        f"{str(dtype).removeprefix('torch.')} (its norm there is {float(rounded):.3g}): {advice}"
    )
