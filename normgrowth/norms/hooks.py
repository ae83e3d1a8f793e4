"""Hooks on the optimizer that really steps, below the wrappers of accelerate and Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def innermost(optimizer: Any, otherwise: str) -> Any:
    """The optimizer of torch that accelerate and Lightning have wrapped, however often.

    Args:
        otherwise: what to do with an optimizer that is not one of torch, for the error.

    Raises:
        TypeError: there is no optimizer of torch, as DeepSpeed's are not.
    """
    wrapped = getattr(optimizer, "optimizer", None)
    is_deepspeed = type(optimizer).__module__.startswith("deepspeed")
    if isinstance(wrapped, torch.optim.Optimizer) and not is_deepspeed:
        return innermost(wrapped, otherwise)
    if is_deepspeed or not isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise TypeError(f"{name} is not an optimizer of torch, and may write parameters after its step: {otherwise}")
    return optimizer


def before_gradients_are_read(optimizer: Any, replace: Callable[[Any], None], closure_again: str) -> Any:
    """Call ``replace(optimizer)`` in every step, once its gradients are there and before other hooks read them.

    Without a closure that is at the beginning of the step. With one, as Lightning passes it, it is after the closure.

    Args:
        closure_again: the error's text where an optimizer evaluates its closure twice in a step.

    Returns:
        The handle of the hook, with ``remove()``.
    """

    def evaluated(closure: Callable[[], Any]) -> Callable[[], Any]:
        evaluations = 0

        def evaluate() -> Any:
            nonlocal evaluations
            evaluations += 1
            if evaluations > 1:
                raise ValueError(f"{type(optimizer).__name__} {closure_again}")
            loss = closure()
            replace(optimizer)
            return loss

        return evaluate

    def hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if len(args) > 1 and args[1] is not None:  # args[0] is the optimizer, args[1] the closure
            return (args[0], evaluated(args[1]), *args[2:]), kwargs
        if len(args) <= 1 and kwargs.get("closure") is not None:
            return args, kwargs | {"closure": evaluated(kwargs["closure"])}
        replace(optimizer)
        return None

    handle = optimizer.register_step_pre_hook(hook)
    # torch calls hooks in the order of this dictionary, and has no option to register one before the others
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)
    return handle
