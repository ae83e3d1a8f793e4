"""A tracker on an optimizer: every step that it really makes is measured, whatever loop calls it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbutils.norms import NormTracker


def attach(tracker: NormTracker, optimizer: Any) -> Callable[[], None]:
    """Measure each step of an optimizer from hooks on it; see ``NormTracker.attach``. Returns what takes them off."""
    inner = _innermost(optimizer)
    if inner in tracker.attached:
        raise ValueError("this tracker is on this optimizer already: call first what attach() returned")
    theirs = {id(p) for group in inner.param_groups for p in group["params"]}
    if theirs.isdisjoint(id(p) for group in tracker._groups for p in group.parameters):
        text = "the optimizer has none of the tracked parameters: give the tracker those of the model that it trains"
        warnings.warn(text, stacklevel=3)
    tracker.attached.append(inner)

    def pre(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            tracker.before(scale=_scale(inner))
            return args, kwargs
        pending = [True]

        def evaluated() -> Any:  # the gradients are there only once the closure has run
            loss = closure()
            if pending.pop() if pending else False:
                tracker.before(scale=_scale(inner))
            return loss

        return ((args[0], evaluated, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": evaluated})

    def post(*_: object) -> None:
        found_inf = getattr(inner, "found_inf", None)
        if found_inf is not None and float(found_inf):
            tracker.skip()  # a fused optimizer under GradScaler is called, and does nothing
        else:
            tracker.after(stepped=True)

    handles = [inner.register_step_pre_hook(pre), inner.register_step_post_hook(post)]

    def detach() -> None:
        tracker.attached[:] = [other for other in tracker.attached if other is not inner]
        for handle in handles:
            handle.remove()

    return detach


def _innermost(optimizer: Any) -> Any:
    """The optimizer of torch within what accelerate and Lightning wrap around it."""
    import torch

    def foreign() -> bool:
        return type(optimizer).__module__.startswith("deepspeed")

    while not foreign() and isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if foreign() or not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is no optimizer of torch, and writes the parameters after its step: put "
            "`with tracker.step():` around the call that steps (of DeepSpeed engine.step())"
        )
    return optimizer


def _scale(optimizer: Any) -> float:
    """Factor on the gradients that a fused optimizer takes off itself under GradScaler; others see none."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)
