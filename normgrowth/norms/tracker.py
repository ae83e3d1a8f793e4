"""Norm, step and alignment of a training run, measured at every step of its optimizer."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from normgrowth.layers import layer_of
from normgrowth.layers import layers as layers_of
from normgrowth.norms import optimizers, shards
from normgrowth.norms.membership import Membership, plain_names
from normgrowth.norms.pieces import Member, Pieces

CHECK_EVERY = 32  # steps between two comparisons of all parameters with their copies
SAME = 1e-4  # relative difference of norms up to which a history ends at the parameters that were loaded
# Sums by layer of a measured step: ‖θ'‖², ‖δ‖², θ·δ, ‖θ‖², θ'·s and ‖s‖² with the snapshot s, θ·∇L, ‖∇L‖².
QUANTITIES = ("norm", "step", "inner", "before", "snapshot", "snapshot_norm", "projection", "gradient")


NORM, STEP, INNER, BEFORE, SNAPSHOT, SNAPSHOT_NORM, PROJECTION, GRADIENT = range(len(QUANTITIES))


@dataclass
class _Call:
    """A call of an optimizer's ``step`` that has begun; ``frame`` is None for ``before``."""

    owner: Any
    frame: types.FrameType | None
    entries: int = 1  # with those of ``super().step`` in it


@dataclass
class _Part:
    """The tracked parameters that an optimizer and all that it holds train."""

    key: tuple[int, ...]  # ids of all their parameters
    ids: frozenset[int]
    members: list[list[Member]]
    pieces: Sequence[int]


@dataclass
class _Round:
    """A step of training: one step of each optimizer that the tracker is attached to."""

    is_measured: bool
    is_counted: bool = False
    ids: set[int] = field(default_factory=set)  # parameters, and optimizers, that have had their step


class NormTracker:
    """Norm, step and alignment of a training run, total and by layer, for about one reading of the parameters a step.

    For a step θ' = θ + δ the tracker measures ‖θ'‖, ‖δ‖, θ·δ and cos(θ, δ), with ``gradients`` also θ·∇L and ‖∇L‖, and
    after ``snapshot()`` the cosine of θ' with that snapshot. δ is the step that the parameters really made, after
    rounding, clipping and weight decay, and not the step that the optimizer meant to make. The tracker keeps one copy
    of the parameters (two with a snapshot). Sums are float64. On CPU the differences and products in them are float64
    too, and results are right to about 1e-12; on CUDA float32 is multiplied in float32, right to about 1e-7. On CUDA
    nothing waits for the device before ``history()``.

    ``attach`` the tracker to the optimizer, or put ``step`` around the call that steps. DTensors (FSDP2, tensor
    parallelism) are summed over their processes, all of which must then step.

    Args:
        named_parameters: a model, or its ``named_parameters()``; a parameter that comes twice is counted once.
            Parameters with ``requires_grad=False`` are left out, with a warning if they are trained later.
        frozen: count parameters with ``requires_grad=False`` as well.
        every: measure at steps ``every``, 2·``every``, …; the other steps cost nothing.
        by: function from a parameter's name to its layer; ``None`` for the total alone.
        gradients: measure θ·∇L and ‖∇L‖ as well, from ``.grad`` at the beginning of the step: one more reading. For
            steps with a closure, and under GradScaler, these are right only with ``attach``.

    Raises:
        TypeError: the parameters have no names.
        ValueError: nothing to track, parameters on several devices or meshes, complex parameters, shards of FSDP1 or
            ZeRO-3, ``every`` < 1, a layer named ``total``.

    >>> import torch
    >>> theta = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> tracker, sgd = NormTracker([("theta", theta)], by=None), torch.optim.SGD([theta], lr=1.0)
    >>> detach = tracker.attach(sgd)
    >>> theta.grad = torch.tensor([0.0, -8.0])
    >>> sgd.step()
    >>> tracker.history()[["step", "layer", "step_norm", "inner", "alignment"]].round(2).values.tolist()
    [[0, 'total', nan, nan, nan], [1, 'total', 8.0, 32.0, 0.8]]
    """

    def __init__(
        self,
        named_parameters: nn.Module | Iterable[tuple[str, Tensor]],
        *,
        every: int = 1,
        by: Callable[[str], str] | None = layer_of,
        gradients: bool = False,
        frozen: bool = False,
    ) -> None:
        self._membership = Membership(named_parameters)
        pairs = self._membership.pairs
        shards.refuse(pairs)
        tracked = [(name, parameter) for name, parameter in pairs if frozen or parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in pairs if not (frozen or parameter.requires_grad)]
        _refuse_untrackable(tracked, every)
        self._membership.track(tracked)
        layers = _layers([name for name, _ in tracked], by)
        self._pieces = Pieces([(parameter, layers[name]) for name, parameter in tracked])
        self.layers = self._pieces.layers  # in the order of the parameters
        self.every = every
        self.gradients = gradients
        self.steps = 0
        self._families: dict[int, list[Any]] = {}  # by the id of an optimizer: itself, and all that it holds
        self._attached: list[Any] = []
        self._given: set[int] = set()  # ids of the optimizers that ``attach`` was given
        self._parts: dict[int, _Part] = {}  # by the id of an optimizer
        self._calls: list[_Call] = []  # that have begun and not ended, the outermost first
        self._has_stepped: bool | None = None  # of the outermost call; None where only its writes can tell
        self._round: _Round | None = None
        self._copies_are_old = False  # after steps that are not measured
        self._writes_are_hidden = False  # torch has not shown all writes so far
        unknown = torch.full_like(self._pieces.squares, torch.nan)
        self._moved = torch.zeros_like(
            unknown
        )  # largest relative move² of each piece outside of steps, since a reading
        self._told = torch.zeros_like(unknown)  # the same for moves that the last reading told of
        self._unread = torch.zeros_like(unknown)  # 1 for pieces that moved without a gradient in .grad, since a reading
        self._hidden_gap = torch.zeros_like(unknown[0])  # largest relative change of ρ² by writes that torch hides
        self._sums = torch.stack([self._pieces.squares, *[unknown] * (len(QUANTITIES) - 1)])
        self._rows: list[tuple[int, Tensor]] = [(0, self._pieces.by_layer(self._sums))]

    def attach(self, optimizer: Any) -> Callable[[], None]:
        """Measure every step that an optimizer really makes from now on. Returns a function that detaches.

        Give the optimizer whose ``step`` the loop calls. A step begins before this call does anything and ends when all
        is written, whatever the optimizer wraps: SAM in both forms, Lookahead, schedule-free averaging, what
        accelerate and Lightning wrap. Gradients are those that the innermost optimizer uses, unscaled and clipped, or
        those of a closure's first evaluation; they are NaN, with a warning, for parameters that move without ``.grad``.
        Accumulated batches and steps that GradScaler skips are no steps.

        Attach the tracker to each of several optimizers of one model, also to those that step within backward. A step
        of the tracker is then one step of each: it ends before an optimizer, or one with the same parameters, steps
        again.

        Raises:
            TypeError: the optimizer is not one of torch, as DeepSpeed's are not: use ``step``.
            ValueError: the tracker is on this optimizer, or on one that it holds, already.
        """
        family = optimizers.family(optimizer)
        if any(member is known for member in family for known in self._attached):
            raise ValueError("this tracker is on this optimizer already: call first what attach() returned")
        trained = [parameter for member in family for parameter in optimizers.trained(member)]
        if {id(parameter) for parameter in trained}.isdisjoint(map(id, self._pieces.parameters)):
            text = "the optimizer has none of the tracked parameters: give the tracker the model that it trains"
            warnings.warn(text, stacklevel=2)
        forget = self._membership.watch(family)
        ends = [optimizers.listen(member, self) for member in family]
        self._attached += family
        self._given.add(id(optimizer))
        for member in family:
            self._families[id(member)] = optimizers.family(member)

        def detach() -> None:
            self._attached = [known for known in self._attached if all(known is not member for member in family)]
            self._given.discard(id(optimizer))
            forget()
            for end in ends:
                end()

        return detach

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context around one ``optimizer.step()``, or around all that writes in a step of training."""
        self.before()
        try:
            yield
        except BaseException:
            self._calls.clear()
            raise
        self.after()

    def before(self, *, scale: float = 1.0) -> None:
        """Call right before the optimizer's step, once the gradients are there; they are ``scale`` times too large."""
        self._calls.clear()
        self._calls.append(_Call(self, None))
        self._open(self)
        self._read_gradients(self, scale)

    def after(self, *, stepped: bool | None = None) -> None:
        """Call right after the optimizer's step.

        Args:
            stepped: whether the optimizer has made a step; by default, a measured step that wrote nothing is not
                counted.

        Raises:
            RuntimeError: no ``before()`` since the last ``after()``.
        """
        if not self._calls or self._calls[0].owner is not self:
            raise RuntimeError("NormTracker.after() without a before(): put both around each optimizer step")
        self._calls.clear()
        self._close(self, stepped)

    def begin(self, optimizer: Any, frame: types.FrameType) -> None:
        """Told by ``optimizers.listen``: a call of ``step`` begins."""
        while self._calls and (running := self._calls[-1].frame) and not optimizers.is_running(running):
            self._calls.pop()  # it has raised
        for call in self._calls:
            if call.owner is optimizer:
                call.entries += 1
                return
        self._calls.append(_Call(optimizer, frame))
        if len(self._calls) == 1:
            self._open(optimizer)

    def gradients_ready(self, optimizer: Any) -> None:
        """Told by ``optimizers.listen``: the gradients of a step lie in ``.grad``."""
        if self._calls and self._calls[0].owner is optimizer and len(self._families[id(optimizer)]) > 1:
            self._gradient_stamps = self._stamps()  # read where an optimizer within it begins, or at the end
            return
        scale = getattr(optimizer, "grad_scale", None)  # under GradScaler a fused optimizer unscales by itself
        self._read_gradients(optimizer, 1.0 if scale is None else float(scale))

    def end(self, optimizer: Any) -> None:
        """Told by ``optimizers.listen``: a call of ``step`` has ended."""
        positions = [i for i, call in enumerate(self._calls) if call.owner is optimizer]
        if not positions:  # begun before the tracker was attached
            return
        call = self._calls[positions[0]]
        call.entries -= 1
        if call.entries:
            return
        del self._calls[positions[0] :]
        if len(self._families[id(optimizer)]) == 1:
            # under GradScaler a fused optimizer is called also when a gradient is infinite, and then does nothing
            self._has_stepped = bool(self._has_stepped) or not getattr(optimizer, "found_inf", None)
        if not self._calls:
            self._close(optimizer, self._has_stepped)

    def _open(self, owner: Any) -> None:
        """Begin the outermost call: in the present round, or in a new one."""
        self._has_stepped = None
        self._warn_of_thawed()
        part = self._part(owner)
        ids = {id(owner), *part.ids}
        if self._round is None or not self._round.ids.isdisjoint(ids) or self._has_moved(part):
            self._begin_round()
        self._gradient_sums = torch.full_like(self._sums[:2], torch.nan)
        self._gradient_depth = dict.fromkeys(part.pieces, 0)
        self._gradient_stamps: list[tuple[int, int] | None] | None = None
        self._without_gradient: list[Member] = []

    def _has_moved(self, part: _Part) -> bool:
        """Whether parameters have been written since the round began that have had no step in it."""
        return not self._copies_are_old and bool(self._pieces.rewritten(part.pieces))

    def _begin_round(self) -> None:
        """Copy what has moved since the last step, so that the copies are θ, and begin sums over a step."""
        is_measured = (self.steps + 1) % self.every == 0
        self._round = _Round(is_measured)
        if self._pieces.follow():
            self._follow()
        if not self._copies_are_old:
            self._copy_moved()
        elif is_measured:
            self._pieces.refresh()
            self._copies_are_old = False
        if is_measured:
            start = torch.zeros_like(self._sums)
            start[BEFORE] = self._pieces.squares
            if not self.gradients:
                start[PROJECTION:] = torch.nan
            self._sums = start

    def _close(self, owner: Any, stepped: bool | None) -> None:
        """End the outermost call: measure what it wrote, and add it to the round."""
        part = self._part(owner)
        if stepped is False or self._round is None:
            return
        if not part.ids:
            stepped = None
        was_written = stepped or bool(self._pieces.rewritten(part.pieces))
        if stepped is None and owner is not self and not was_written and not self._sample_is_unlike():
            return  # a wrapper has only counted a batch, or the optimizer is that of another model
        if self._round.is_measured:
            sums = self._measured(part)
            row = self._pieces.by_layer(sums)
            if stepped is None and not was_written and not row[STEP].any():
                return  # gradients were only accumulated, or GradScaler has skipped the step
            self._sums = sums
            self._count(owner, part)
            self._rows.append((self.steps, row))
        else:
            self._count(owner, part)
            self._copies_are_old = True  # and fused optimizers do not raise versions

    def _count(self, owner: Any, part: _Part) -> None:
        """Count the first call of a round as a step; a later one replaces the row of the first."""
        if self._round is None:
            return
        self._round.ids |= {id(owner), *part.ids}
        if not self._round.is_counted:
            self._round.is_counted = True
            self.steps += 1
        elif self._round.is_measured:
            self._rows.pop()

    def _measured(self, part: _Part) -> Tensor:
        """The sums of the round with a call that has just ended, ``(quantities, pieces)``."""
        sums = self._sums.clone()
        index = self._pieces.index(part.pieces)
        if self.gradients:
            self._read_late(part)
            unread = torch.zeros_like(sums[0])
            for member in self._without_gradient:
                unread[member.piece] = torch.maximum(unread[member.piece], self._pieces.moved(member).double())
            gradients = torch.where(unread > 0, torch.nan, self._gradient_sums)
            sums[PROJECTION:, index] += gradients[:, index]
            self._unread = torch.maximum(self._unread, unread)
        inner, step, *_ = self._pieces.advance(part.pieces)
        sums[STEP, index] += step
        sums[INNER, index] += inner
        sums[NORM] = self._pieces.squares
        sums[SNAPSHOT] = self._pieces.beside
        sums[SNAPSHOT_NORM] = self._pieces.snapshot_squares
        return sums

    def _read_gradients(self, owner: Any, scale: float) -> None:
        """Read the gradients of what an optimizer trains, unless those of a call within it have been read."""
        if not (self.gradients and self._calls and self._round and self._round.is_measured):
            return
        depth = next(i for i, call in enumerate(self._calls, start=1) if call.owner is owner)
        outer = self._part(self._calls[0].owner)
        pieces = set(self._part(owner).pieces)
        members = [m for m in outer.members if m[0].piece in pieces and self._gradient_depth[m[0].piece] < depth]
        if members:
            self._take_gradients(members, scale, depth)

    def _take_gradients(self, members: list[list[Member]], scale: float, depth: int) -> None:
        present = [group[0].piece for group in members]
        projection, square = self._pieces.gradient(members)
        index = self._pieces.index(present)
        self._gradient_sums[0, index] = projection / scale
        self._gradient_sums[1, index] = square / scale**2
        self._gradient_depth |= dict.fromkeys(present, depth)
        kept = [member for member in self._without_gradient if member.piece not in set(present)]
        empty = [member for group in members for member in group if member.parameter.grad is None]
        self._without_gradient = kept + empty

    def _read_late(self, part: _Part) -> None:
        """Read what no call within a wrapper's has read, if the gradients are still those of its beginning."""
        members = [group for group in part.members if not self._gradient_depth[group[0].piece]]
        if members and self._gradient_stamps is not None and self._gradient_stamps == self._stamps(part):
            self._take_gradients(members, 1.0, depth=1)

    def _stamps(self, part: _Part | None = None) -> list[tuple[int, int] | None]:
        part = part or self._part(self._calls[0].owner)
        return [_stamp(member.parameter) for group in part.members for member in group]

    def _part(self, owner: Any) -> _Part:
        """What an optimizer trains, of which the groups may change; all parameters for ``step`` of the tracker.

        Also all parameters where an attached optimizer has none of them in its groups: it may step on copies of them.
        """
        family = [] if owner is self else self._families[id(owner)]
        key = tuple(id(parameter) for member in family for parameter in optimizers.trained(member))
        known = self._parts.get(id(owner))
        if known is None or known.key != key:
            tracked = frozenset(map(id, self._pieces.parameters))
            ids = tracked if owner is self else tracked.intersection(key)
            steps_on_copies = not ids and id(owner) in self._given
            members = self._pieces.members(tracked if steps_on_copies else ids)
            known = _Part(key, ids, members, [group[0].piece for group in members])
            self._parts[id(owner)] = known
        return known

    def _copy_moved(self) -> None:
        """Copy what has been written since the last step, and keep how far it moved, for a warning."""
        self._refresh(self._pieces.rewritten())
        before = self._pieces.squares.clone()
        if self._refresh(self._hidden_writes()):
            self._keep_gap(self._pieces.squares, before)
        self._told.zero_()

    def _refresh(self, pieces: Sequence[int]) -> bool:
        """Copy some pieces; moves that a reading has told of already are not told again."""
        if pieces:
            index = self._pieces.index(pieces)
            move = self._pieces.refresh(pieces)
            is_new = (move - self._told[index]).abs() > 1e-3 * move
            self._moved[index] = torch.maximum(self._moved[index], torch.where(is_new, move, 0.0))
        return bool(pieces)

    def _hidden_writes(self) -> Sequence[int]:
        """Pieces that have been written to though torch does not show it, found at some steps only.

        Looking costs a reading: at the first three steps, every 32nd, and every one once such a write was found; on a
        CPU also where a sample shows one. Other devices are not waited for: there, all pieces are copied again.
        """
        is_due = self._writes_are_hidden or self.steps < 3 or self.steps % CHECK_EVERY == 0
        if self._pieces.device.type != "cpu":
            return self._pieces.all if is_due else []
        hidden = self._pieces.unlike() if is_due or self._sample_is_unlike() else []
        self._writes_are_hidden |= bool(hidden)
        return hidden

    def _sample_is_unlike(self) -> bool:
        is_known = not self._copies_are_old and self._pieces.device.type == "cpu"
        return is_known and self._pieces.sample_is_unlike(self.steps)

    def _keep_gap(self, squares: Tensor, before: Tensor) -> None:
        """Keep the relative change of a layer's ρ² by writes that torch hides, where it is the largest so far."""
        layers = [self.layers.index(layer) for layer in self._pieces.layer_of]
        by_layer = torch.zeros(2, len(self.layers), dtype=torch.float64, device=squares.device)
        by_layer.index_add_(1, torch.tensor(layers, device=squares.device), torch.stack([squares, before]))
        self._hidden_gap = torch.maximum(self._hidden_gap, _gap(*by_layer))

    def _follow(self) -> None:
        """Move the tracker's own sums to the parameters' device."""
        device = self._pieces.device
        self._sums, self._unread = self._sums.to(device), self._unread.to(device)
        self._moved, self._told = self._moved.to(device), self._told.to(device)
        self._hidden_gap = self._hidden_gap.to(device)

    def snapshot(self) -> None:
        """Keep the parameters as they are now: from the next step on, ``cos_similarity`` is the cosine with them."""
        if self._copies_are_old:
            self._pieces.refresh()
            self._copies_are_old = False
        else:
            self._copy_moved()
        self._pieces.snapshot()

    def history(self, *, last: bool = False) -> pd.DataFrame:
        """One row for each measured step and layer, the total last; with ``last`` only rows of the last measured step.

        Step 0 is the start. Columns: ``step`` (steps done), ``layer``, ``norm`` ‖θ'‖ after the step, ``step_norm`` ‖δ‖,
        ``inner`` θ·δ, ``alignment`` cos(θ, δ), ``projection`` θ·∇L and ``grad_norm`` ‖∇L‖ before the step,
        ``cos_similarity`` with the last snapshot. Values that were not measured, and cosines with a zero vector, are
        NaN.
        """
        self._warn_of_changes()
        return self._table(self._rows[-1:] if last else self._rows)

    def _table(self, rows: Sequence[tuple[int, Tensor]]) -> pd.DataFrame:
        layers = self.layers
        sums = _stack([sums for _, sums in rows]).cpu().numpy()  # (quantities, measured steps, layers)
        if layers != ["total"]:
            layers = [*layers, "total"]
            sums = np.concatenate([sums, sums.sum(axis=2, keepdims=True)], axis=2)
        quantity = dict(zip(QUANTITIES, sums, strict=True))
        with np.errstate(invalid="ignore", divide="ignore"):
            columns = {
                "norm": np.sqrt(quantity["norm"]),
                "step_norm": np.sqrt(quantity["step"]),
                "inner": quantity["inner"],
                "alignment": quantity["inner"] / np.sqrt(quantity["before"] * quantity["step"]),
                "projection": quantity["projection"],
                "grad_norm": np.sqrt(quantity["gradient"]),
                "cos_similarity": quantity["snapshot"] / np.sqrt(quantity["norm"] * quantity["snapshot_norm"]),
            }
        steps = np.array([step for step, _ in rows], dtype=np.int64)
        index = {"step": np.repeat(steps, len(layers)), "layer": np.tile(np.array(layers, dtype=object), len(steps))}
        return pd.DataFrame(index | {name: values.ravel() for name, values in columns.items()})

    def identity_error(self) -> float:
        """Largest relative gap between ρ'² and ρ² + ‖δ‖² + 2θ·δ over steps and layers (Eq. 3 of the paper).

        Every term is a sum of its own. Rounding gives up to about 1e-12, on CUDA 1e-6 for float32. A larger gap means
        that the parameters are not finite, or that there are untracked writes: changes between two steps that no
        tensor's version shows, by ``p.data`` or by a fused optimizer that is not tracked. They count as part of the
        next step, and are checked for here and before every 32nd step. Changes between two steps that versions do show
        are part of neither δ nor the gap.

        Raises:
            RuntimeError: no step has been measured yet.
        """
        if len(self._rows) < 2:
            raise RuntimeError("no step measured yet: there is no identity to check")
        norm, step, inner, before, *_ = _stack([sums for _, sums in self._rows[1:]])
        self._warn_of_changes()
        return max(float(_gap(norm, before + step + 2 * inner)), float(self._hidden_gap))

    def _warn_of_thawed(self) -> None:
        """Warn once of parameters that are trained now and were frozen when tracking began."""
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            text = f"{thawed[0]} ({len(thawed)} in all) was frozen when tracking began, and is not counted: frozen=True"
            warnings.warn(text, stacklevel=4)
            self._frozen = [(name, parameter) for name, parameter in self._frozen if not parameter.requires_grad]

    def latest(self) -> dict[str, float]:
        """The last measured step as numbers for a log: ``norm/total``, ``norm/block 0``, …, ``step_norm/total``, ….

        Layers have the norm, and with ``gradients`` ‖∇L‖ as ``grad_norm/block 0``; the total also has ‖δ‖, cos(θ, δ)
        and all else that is measured. Warns as ``history`` does.
        """
        self._warn_of_changes()
        rows = self._table(self._rows[-1:]).set_index("layer").astype(float)
        by_layer = {f"norm/{layer}": norm for layer, norm in rows["norm"].items()}
        total = rows.iloc[-1].drop(["step", "norm"]).dropna()
        of_total = {f"{quantity}/total": value for quantity, value in total.items()}
        of_gradients = {f"grad_norm/{layer}": norm for layer, norm in rows["grad_norm"].dropna().items()}
        return by_layer | of_total | of_gradients

    def state_dict(self) -> dict[str, Any]:
        """The history, for a checkpoint of the training; ``torch.load`` reads it with ``weights_only=True``."""
        steps, sums = zip(*self._rows, strict=True)
        return {"layers": self.layers, "steps": self.steps, "at": list(steps), "sums": torch.stack(sums).cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the history of a training, once its parameters are loaded. Snapshots are not restored.

        Raises:
            ValueError: the history has other layers.
        """
        layers = list(state["layers"])
        if sorted(layers) != sorted(self.layers):
            raise ValueError(f"the history is of layers {', '.join(layers)}, not {', '.join(self.layers)}")
        order = [layers.index(layer) for layer in self.layers]
        sums = state["sums"].to(self._pieces.device)[..., order]
        self._rows = list(zip(map(int, state["at"]), sums, strict=True))
        self.steps = int(state["steps"])
        self._round = None
        self._pieces.refresh()
        self._copies_are_old = False
        self._moved.zero_()
        last, row = self._rows[-1]
        squares = self._pieces.by_layer(self._pieces.squares[None])[0]
        if last == self.steps and float(_gap(squares.sqrt(), row[NORM].sqrt())) > SAME:
            ended, present = (float(total.sum().sqrt()) for total in (row[NORM], squares))
            text = f"the history ends at ‖θ‖ = {ended:.6g} and the parameters have {present:.6g}: it is of another run"
            warnings.warn(f"{text}, or they are not loaded yet", stacklevel=2)

    def _warn_of_changes(self) -> None:
        """Warn of what has been written outside of steps since the last reading, and of other parameters."""
        if not (self._copies_are_old or self._calls):
            self._keep_moves()
        for text in [*self._moves(), *self._unread_gradients(), *self._resized(), *self._membership.changes()]:
            warnings.warn(text, stacklevel=3)

    def _keep_moves(self) -> None:
        """Compare all parameters with those after the last step."""
        rewritten = set(self._pieces.rewritten())
        before, squares = self._pieces.squares, self._pieces.squares.clone()
        for piece in self._pieces.unlike():
            distance, square = self._pieces.distance(piece)
            if abs(distance - float(self._told[piece])) > 1e-3 * distance:
                self._moved[piece] = max(float(self._moved[piece]), distance)
            self._told[piece] = distance
            if piece not in rewritten:
                squares[piece] = square
        self._keep_gap(squares, before)

    def _moves(self) -> Iterator[str]:
        layers = self._layers_where(self._moved > 0)
        self._moved.zero_()
        if layers:
            yield (
                f"{layers} moved outside of the steps that are recorded: this is in no δ. Attach the tracker to each "
                "optimizer whose step() the loop calls, or put `with tracker.step():` around all that writes"
            )

    def _unread_gradients(self) -> Iterator[str]:
        layers = self._layers_where(self._unread > 0)
        self._unread.zero_()
        if layers:
            yield (
                f"{layers} moved without gradients in .grad when the step began, so θ·∇L and ‖∇L‖ are not known: attach "
                "the tracker to the optimizer that reads them, before they are freed"
            )

    def _resized(self) -> Iterator[str]:
        names = self._membership.names(self._pieces.resized)
        self._pieces.resized.clear()
        if names:
            yield f"{names} has another size than before: norms count its new elements, and its snapshot is gone"

    def _layers_where(self, pieces: Tensor) -> str:
        """The layers of some pieces, in words."""
        there = [layer for layer, is_in in zip(self._pieces.layer_of, pieces.tolist(), strict=True) if is_in]
        return ", ".join(dict.fromkeys("the parameters" if layer == "total" else layer for layer in there))


def _refuse_untrackable(tracked: Sequence[tuple[str, Tensor]], every: int) -> None:
    """Raise ValueError for complex parameters, no parameters, several devices, or ``every`` below 1."""
    for name, parameter in tracked:
        if parameter.is_complex():
            raise ValueError(f"{name} is complex: give real parameters, such as torch.view_as_real of it")
    devices = {parameter.device for _, parameter in tracked}
    if every < 1 or len(devices) != 1:
        raise ValueError(
            f"give trainable parameters on one device, and every ≥ 1; got {len(tracked)} of them on "
            f"{sorted(map(str, devices))}, every = {every}"
        )


def _layers(names: Sequence[str], by: Callable[[str], str] | None) -> dict[str, str]:
    """The layer of each parameter; ``total`` for all without ``by``."""
    if by is None:
        return dict.fromkeys(names, "total")
    plain = plain_names(names)
    of_plain = layers_of(plain) if by is layer_of else {name: by(name) for name in plain}
    layers = {name: of_plain[without] for name, without in zip(names, plain, strict=True)}
    if "total" in layers.values():
        raise ValueError("no layer may be named 'total': that row is the sum over all layers")
    return layers


def _stack(rows: Sequence[Tensor]) -> Tensor:
    """Rows of a history, ``(quantities, rows, layers)``; those before the parameters were moved lie on a CPU."""
    device = rows[-1].device
    return torch.stack([row.to(device) for row in rows], dim=1)


def _gap(value: Tensor, expected: Tensor) -> Tensor:
    """The largest relative difference."""
    return ((value - expected).abs() / value.clamp(min=np.finfo(np.float64).tiny)).max()


def _stamp(parameter: Tensor) -> tuple[int, int] | None:
    """Which gradient a parameter has: a write in place raises the version."""
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)
