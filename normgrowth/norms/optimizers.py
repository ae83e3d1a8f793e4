"""Calls of ``step``: when they begin, when their gradients are ready, when they end; of an optimizer and all it holds.

SAM, Lookahead, schedule-free averaging and the wrappers of accelerate and Lightning hold another optimizer, and write
parameters before and after its step. A step is the outermost call, and its gradients are those of the innermost.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Listener(Protocol):
    """What is told of every call of ``step``. Calls of one optimizer may lie in each other, as of ``super().step``."""

    def begin(self, optimizer: Any, frame: types.FrameType) -> None:
        """A call begins; it runs as long as the frame does, also where it raises and never ends."""

    def gradients_may_change(self, optimizer: Any) -> None:
        """The gradients in ``.grad`` may not be those of the step yet."""

    def gradients_ready(self, optimizer: Any) -> None:
        """The gradients of a step lie in ``.grad``."""

    def evaluated(self, optimizer: Any) -> None:
        """A closure has been evaluated: if gradients have changed, they are those of the step."""

    def end(self, optimizer: Any) -> None:
        """A call has ended, and all its writing is done."""


def family(optimizer: Any) -> list[Any]:
    """The optimizer itself, and all optimizers that it holds in its attributes, however deep.

    Raises:
        TypeError: neither is an optimizer of torch, or one of them is DeepSpeed's, which writes outside of its step.
    """
    if isinstance(optimizer, list | tuple | dict):
        raise TypeError(f"a {type(optimizer).__name__} of optimizers: attach the tracker to each of them")
    members: list[Any] = []
    pending = [optimizer]
    while pending:
        member = pending.pop()
        if all(member is not known for known in members):
            members.append(member)
            pending += filter(_is_optimizer, _contents(member))
    is_foreign = not any(isinstance(member, Optimizer) for member in members) or not hasattr(optimizer, "step")
    if is_foreign or any(type(member).__module__.startswith("deepspeed") for member in members):
        raise TypeError(
            f"{type(optimizer).__name__} is not an optimizer of torch, and may write parameters after its step: put "
            "`with tracker.step():` around the call that steps (of DeepSpeed engine.step())"
        )
    return members


def trained(optimizer: Any) -> Iterator[Tensor]:
    """The parameters in the groups of an optimizer; none without groups."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def listen(optimizer: Any, listener: Listener) -> Callable[[], None]:
    """Tell a listener of every call of an optimizer's ``step``. Returns a function that ends this.

    A ``step`` on the object begins before all that is done in a call and ends after it, whatever else has been put in
    the place of the class's method. torch's hooks are called also where somebody has kept that method, and read the
    gradients when the hooks of others have changed them.
    """
    has_hooks = "_optimizer_step_pre_hooks" in vars(optimizer) and getattr(type(optimizer).step, "hooked", False)
    if not has_hooks:
        return _replace(optimizer, listener)
    arrange, remove = _hook(optimizer, listener)
    restore = _replace(optimizer, listener, arrange)

    def end() -> None:
        restore()
        remove()

    return end


def is_running(frame: types.FrameType) -> bool:
    """Whether a call is still among those that led here."""
    current: types.FrameType | None = sys._getframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def _hook(optimizer: Any, listener: Listener) -> tuple[Callable[[], None], Callable[[], None]]:
    """By torch's hooks: the beginning before all other hooks, the gradients after those, the end after all.

    Returns two functions: one puts the hooks in this order, which cannot be done in their midst; one removes them.
    """

    def arrange() -> None:
        before.move_to_end(begun.id, last=False)
        before.move_to_end(read.id)

    def begin(*_: object) -> None:
        after.move_to_end(ended.id)
        listener.begin(optimizer, sys._getframe(1))

    def gradients(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        others, kwargs, has_closure = _with_closures(optimizer, listener, args[1:], kwargs)
        if not has_closure:
            listener.gradients_ready(optimizer)
        return (args[0], *others), kwargs

    def end(*_: object) -> None:
        arrange()
        listener.end(optimizer)

    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    begun = optimizer.register_step_pre_hook(begin)
    read = optimizer.register_step_pre_hook(gradients)
    ended = optimizer.register_step_post_hook(end)
    arrange()

    def remove() -> None:
        for handle in (begun, read, ended):
            handle.remove()

    return arrange, remove


def _replace(optimizer: Any, listener: Listener, arrange: Callable[[], None] | None = None) -> Callable[[], None]:
    """By another ``step`` on the object: wrappers seldom call the constructor of torch's class, so have no hooks.

    Where there are hooks, ``arrange`` puts them in order, and they read the gradients.
    """
    original = optimizer.step
    own_step = vars(optimizer).get("step")
    is_listening = True

    @functools.wraps(original)
    def step(owner: Any, *args: Any, **kwargs: Any) -> Any:
        if owner is not optimizer:  # a deep copy, which has taken this function along
            return type(owner).step(owner, *args, **kwargs)
        if not is_listening:  # what has wrapped this function, as schedulers do, calls it for ever
            return original(*args, **kwargs)
        if arrange:
            arrange()
        listener.begin(optimizer, sys._getframe())
        if arrange:
            listener.gradients_may_change(optimizer)
        else:
            args, kwargs, has_closure = _with_closures(optimizer, listener, args, kwargs)
            if not has_closure:
                listener.gradients_ready(optimizer)
        result = original(*args, **kwargs)
        listener.end(optimizer)
        return result

    method = types.MethodType(step, optimizer)
    optimizer.step = method

    def restore() -> None:
        nonlocal is_listening
        is_listening = False
        if vars(optimizer).get("step") is method:
            if own_step is None:
                del optimizer.step
            else:
                optimizer.step = own_step

    return restore


def _with_closures(
    optimizer: Any, listener: Listener, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Arguments of ``step`` with closures that tell a listener when they are evaluated, and whether there are any.

    A closure is a function, wherever it stands and under any name.
    """
    if not any(map(_is_closure, (*args, *kwargs.values()))):
        return args, kwargs, False
    listener.gradients_may_change(optimizer)

    def telling(argument: Any) -> Any:
        return _telling(argument, optimizer, listener) if _is_closure(argument) else argument

    return tuple(map(telling, args)), {name: telling(value) for name, value in kwargs.items()}, True


def _is_closure(argument: Any) -> bool:
    return callable(argument) and not isinstance(argument, type | nn.Module | Tensor)


def _telling(closure: Callable[[], Any], optimizer: Any, listener: Listener) -> Callable[[], Any]:
    """A closure that tells of its first evaluation, and before the second: ``backward`` may be left to ``step``."""
    evaluations = itertools.count(1)

    @functools.wraps(closure, updated=())
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        count = next(evaluations)
        if count == 1:
            listener.gradients_may_change(optimizer)
        elif count == 2:
            listener.evaluated(optimizer)
        loss = closure(*args, **kwargs)
        if count == 1:
            listener.evaluated(optimizer)
        return loss

    return evaluate


def _contents(member: Any) -> Iterator[Any]:
    """The attributes of an object, and what lies in those that are lists or dictionaries."""
    for value in list(getattr(member, "__dict__", {}).values()):
        if isinstance(value, Mapping):
            yield from list(value.values())
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _is_optimizer(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, Optimizer) or (callable(getattr(kind, "step", None)) and hasattr(value, "param_groups"))
