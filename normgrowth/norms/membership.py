"""Which parameters are tracked, and whether a model and its optimizers still have these and no others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from normgrowth.norms import optimizers

Named = list[tuple[str, Tensor]]

RENEW = "make a new tracker"
_WRAPPER = re.compile(r"(?:(?<=^)|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")


class Membership:
    """The parameters that a tracker was given, and those that a model and the attached optimizers have since.

    Args:
        named_parameters: a model, its ``named_parameters()``, or pairs of a name and a parameter. Of a model and of its
            ``named_parameters()`` later changes are seen; of other pairs, only what attached optimizers show.

    Raises:
        TypeError: the parameters have no names.
    """

    def __init__(self, named_parameters: nn.Module | Iterable[tuple[str, Tensor]]) -> None:
        self._model = _model_of(named_parameters)
        self.pairs = _distinct(named_parameters)
        self._known = {id(parameter): parameter for _, parameter in [*self.pairs, *self._named()]}  # keeps ids in use
        self._tracked: Named = []
        self._shards: set[str] = set()  # names of those that FSDP2 gathers at times
        self._watched: list[tuple[list[Any], dict[int, Tensor]]] = []  # optimizers, and what they had at first

    def track(self, tracked: Named) -> None:
        """Of all parameters, those that are tracked."""
        self._tracked = [(_WRAPPER.sub("", name), parameter) for name, parameter in tracked]
        self._shards = {name for name, parameter in self._tracked if hasattr(parameter, "placements")}

    def watch(self, family: Sequence[Any]) -> Callable[[], None]:
        """Watch the groups of optimizers from now on. Returns a function that ends this."""
        entry = (list(family), {id(parameter): parameter for parameter in _trained(family)})
        self._watched.append(entry)
        return lambda: self._watched.remove(entry)

    def names(self, parameters: Iterable[Tensor]) -> str:
        """The names of some tracked parameters, in words."""
        ids = set(map(id, parameters))
        names = [name for name, parameter in self._tracked if id(parameter) in ids]
        return _some(names) if names else ""

    def changes(self) -> Iterator[str]:
        """One line for each kind of change since tracking began."""
        named = self._named()
        gone = self._gone(named) if named else []
        if gone:
            fate = self._fate(gone[0], dict(named))
            yield f"{_some(gone)} was {fate} after tracking began, and the old values are counted: {RENEW}"
        for where, candidates in (("model", named), ("optimizer", self._later_in_groups(named))):
            added = [name for name, p in candidates if id(p) not in self._known and p.requires_grad]
            added = [name for name in added if name not in self._shards and name not in gone]
            if added:
                yield f"{_some(added)} came into the {where} after tracking began, and is not counted: {RENEW}"
        if self._model is None:
            yield from self._strangers()

    def _named(self) -> Named:
        """The model's parameters as they are now, under each of their names."""
        if self._model is None:
            return []
        named = self._model.named_parameters(remove_duplicate=False)
        return [(_WRAPPER.sub("", name), parameter) for name, parameter in named]

    def _gone(self, named: Named) -> list[str]:
        """Names of tracked parameters that the model does not have any more."""
        present = {id(parameter) for _, parameter in named}
        missing = [(name, parameter) for name, parameter in self._tracked if id(parameter) not in present]
        now = dict(named) if missing else {}
        return [name for name, parameter in missing if not _is_gathered(now.get(name), parameter)]

    def _fate(self, name: str, named: dict[str, Tensor]) -> str:
        tracked = {id(parameter): name for name, parameter in self._tracked}
        now = named.get(name)
        if id(now) in tracked:
            return f"tied to {tracked[id(now)]}"
        return "removed" if now is None else "replaced"

    def _later_in_groups(self, named: Named) -> Named:
        """Parameters that attached optimizers have got since."""
        in_model = {id(parameter) for _, parameter in named}  # told of already
        later = []
        for family, first in self._watched:
            for parameter in _trained(family):
                if id(parameter) not in first and id(parameter) not in in_model:
                    later.append((f"a parameter of shape {tuple(parameter.shape)}", parameter))
        return later

    def _strangers(self) -> Iterator[str]:
        """Without a model: optimizers that train others, and not all that is tracked, may train another model."""
        trained = {id(p): p for family, _ in self._watched for p in _trained(family)}
        others = [p for key, p in trained.items() if key not in self._known]
        idle = [name for name, p in self._tracked if id(p) not in trained and p.requires_grad]
        if others and idle and len(idle) < len(self._tracked):
            yield (
                f"{_some(idle)} is in none of the attached optimizers, which train {len(others)} parameters that are "
                "not tracked: if they were replaced, make a new tracker"
            )


def plain_names(names: Iterable[str]) -> list[str]:
    """Names without the prefixes that torch.compile, DistributedDataParallel and activation checkpointing add.

    >>> plain_names(["module._orig_mod.h.0.w", "module._orig_mod.wte._checkpoint_wrapped_module.w"])
    ['h.0.w', 'wte.w']
    """
    plain = [_WRAPPER.sub("", name) for name in names]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain


def _model_of(named_parameters: Any) -> nn.Module | None:
    """The model itself, or the one whose ``named_parameters()`` has not begun yet."""
    if isinstance(named_parameters, nn.Module):
        return named_parameters
    frame = getattr(named_parameters, "gi_frame", None)  # of a generator: the method's own variables
    model = frame.f_locals.get("self") if frame else None
    return model if isinstance(model, nn.Module) else None


def _distinct(named_parameters: nn.Module | Iterable[tuple[str, Tensor]]) -> Named:
    """Names and parameters, each parameter once, under its first name."""
    if isinstance(named_parameters, nn.Module):
        named_parameters = named_parameters.named_parameters()
    pairs: dict[int, tuple[str, Tensor]] = {}
    for pair in named_parameters:
        if not (isinstance(pair, tuple) and isinstance(pair[-1], Tensor)):
            raise TypeError("give a model or its named_parameters(): each parameter with its name, to tell its layer")
        name, parameter = pair
        pairs.setdefault(id(parameter), (name, parameter))
    return list(pairs.values())


def _trained(family: Iterable[Any]) -> Iterator[Tensor]:
    for member in family:
        yield from optimizers.trained(member)


def _is_gathered(now: Tensor | None, tracked: Tensor) -> bool:
    """Whether FSDP2 shows the whole parameter at present, in place of its shard."""
    return now is not None and hasattr(tracked, "placements") and now.shape == tracked.shape


def _some(names: Sequence[str]) -> str:
    return f"{names[0]} ({len(names)} in all)" if len(names) > 1 else names[0]
