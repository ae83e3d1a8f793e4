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

from torch import Tensor
from torch.optim import Optimizer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Listener(Protocol):
    """What is told of every call of ``step``. Calls of one optimizer may lie in each other, as of ``super().step``."""

    def begin(self, optimizer: Any, frame: types.FrameType) -> None:
        """A call begins; it runs as long as the frame does, also where it raises and never ends."""

    def gradients_ready(self, optimizer: Any) -> None:
        """Gradients lie in ``.grad``: before a step without a closure, after the first evaluation of a closure."""

    def end(self, optimizer: Any) -> None:
        """A call has ended, and all its writing is done."""


def family(optimizer: Any) -> list[Any]:
    """The optimizer itself, and all optimizers that it holds in its attributes, however deep.

    Raises:
        TypeError: neither is an optimizer of torch, or one of them is DeepSpeed's, which writes outside of its step.
    """
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
    """Tell a listener of every call of an optimizer's ``step``. Returns a function that ends this."""
    has_hooks = "_optimizer_step_pre_hooks" in vars(optimizer) and getattr(type(optimizer).step, "hooked", False)
    return _hook(optimizer, listener) if has_hooks else _replace(optimizer, listener)


def is_running(frame: types.FrameType) -> bool:
    """Whether a call is still among those that led here."""
    current: types.FrameType | None = sys._getframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def _hook(optimizer: Any, listener: Listener) -> Callable[[], None]:
    """By torch's hooks: the beginning before all other hooks, the gradients after those, the end after all."""

    def begin(*_: object) -> None:
        after.move_to_end(ended.id)
        listener.begin(optimizer, sys._getframe(1))

    def gradients(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        ready = functools.partial(listener.gradients_ready, optimizer)
        others, kwargs = _evaluated(args[1:], kwargs, ready)
        return (args[0], *others), kwargs

    def end(*_: object) -> None:
        before.move_to_end(begun.id, last=False)
        before.move_to_end(read.id)
        listener.end(optimizer)

    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    begun = optimizer.register_step_pre_hook(begin)
    before.move_to_end(begun.id, last=False)
    read = optimizer.register_step_pre_hook(gradients)
    ended = optimizer.register_step_post_hook(end)

    def remove() -> None:
        for handle in (begun, read, ended):
            handle.remove()

    return remove


def _replace(optimizer: Any, listener: Listener) -> Callable[[], None]:
    """By another ``step`` on the object: wrappers seldom call the constructor of torch's class, so have no hooks."""
    original = optimizer.step
    own_step = vars(optimizer).get("step")
    is_listening = True

    @functools.wraps(original)
    def step(_: object, *args: Any, **kwargs: Any) -> Any:
        if not is_listening:  # what has wrapped this function, as schedulers do, calls it for ever
            return original(*args, **kwargs)
        listener.begin(optimizer, sys._getframe())
        args, kwargs = _evaluated(args, kwargs, functools.partial(listener.gradients_ready, optimizer))
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


def _evaluated(args: tuple[Any, ...], kwargs: dict[str, Any], ready: Callable[[], None]) -> Arguments:
    """Arguments of ``step`` that call ``ready`` after the closure's first evaluation; without a closure, at once."""
    if args and callable(args[0]):
        return (_then_once(args[0], ready), *args[1:]), kwargs
    if kwargs.get("closure") is not None:
        return args, kwargs | {"closure": _then_once(kwargs["closure"], ready)}
    ready()
    return args, kwargs


def _then_once(closure: Callable[[], Any], ready: Callable[[], None]) -> Callable[[], Any]:
    evaluations = itertools.count(1)

    @functools.wraps(closure, updated=())
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        if next(evaluations) == 1:
            ready()
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
