"""A tracker on an optimizer: every step that it really makes is measured, whatever loop calls it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from nbutils.norms import NormTracker


def attach(tracker: NormTracker, optimizer: Any) -> Callable[[], None]:
    """Measure each step of an optimizer from hooks on it; see ``NormTracker.attach``. Returns what takes them off."""
    inner = _innermost(optimizer)
    theirs = {id(p) for group in inner.param_groups for p in group["params"]}
    if theirs.isdisjoint(map(id, tracker._pieces.parameters)):
        text = "the optimizer has none of the tracked parameters: give the tracker those of the model that it trains"
        warnings.warn(text, stacklevel=3)

    def before() -> None:
        scale = getattr(inner, "grad_scale", None)  # a fused optimizer takes it off itself under GradScaler
        tracker.before(scale=1.0 if scale is None else float(scale))

    def pre(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            before()
            return args, kwargs
        calls = itertools.count()

        def evaluated() -> Any:  # the gradients are there only once the closure has run
            loss = closure()
            if next(calls) == 0:
                before()
            return loss

        return args[:1], kwargs | {"closure": evaluated}

    def post(*_: object) -> None:
        # a fused optimizer under GradScaler is called, and does nothing where a gradient is infinite
        tracker.after(stepped=not getattr(inner, "found_inf", None))

    handles = [inner.register_step_pre_hook(pre), inner.register_step_post_hook(post)]

    def detach() -> None:
        for handle in handles:
            handle.remove()

    return detach


def _innermost(optimizer: Any) -> Any:
    """The optimizer of torch within what accelerate and Lightning wrap around it."""
    within = getattr(optimizer, "optimizer", None)
    of_deepspeed = type(optimizer).__module__.startswith("deepspeed")
    if isinstance(within, torch.optim.Optimizer) and not of_deepspeed:
        return _innermost(within)
    if of_deepspeed or not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is no optimizer of torch, and writes the parameters after its step: put "
            "`with tracker.step():` around the call that steps (of DeepSpeed engine.step())"
        )
    return optimizer
