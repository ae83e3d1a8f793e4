"""Norm, step and alignment of a training run, measured at every step of its optimizer."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normgrowth.layers import layer_of
from normgrowth.layers import layers as layers_of
from normgrowth.norms import optimizers, shards
from normgrowth.norms.gradients import StepGradients
from normgrowth.norms.membership import Membership, plain_names
from normgrowth.norms.moves import Moves, relative_gap
from normgrowth.norms.parts import Part, Parts
from normgrowth.norms.pieces import Pieces

CHECK_FIRST = 3  # steps before which all parameters are compared with their copies …
CHECK_EVERY = 32  # … and then at every such step
IDLE = 256  # steps that write nothing at the beginning, before that is told: more than the batches that make a step
SAME = 1e-4  # relative difference of norms up to which a history ends at the parameters that were loaded
RECORDING = torch.inference_mode(False)  # tensors that are kept have to be written later, also outside of that mode
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
class _Round:
    """A step of training: one step of each optimizer that the tracker is attached to."""

    is_measured: bool
    is_counted: bool = False
    ids: set[int] = field(default_factory=set)  # parameters, and optimizers, that have had their step
    last: int = 0  # the id of the optimizer that stepped last


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
        named_parameters: a model, or its ``named_parameters()``; a parameter that comes twice is counted once. The
            prefixes of torch.compile, DistributedDataParallel and activation checkpointing are no part of its name.
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
        _warn_of_shared_memory(tracked)
        self._membership.track(tracked)
        layers = _layers([name for name, _ in tracked], by)
        self._pieces = Pieces([(parameter, layers[name]) for name, parameter in tracked])
        self.layers = self._pieces.layers  # in the order of the parameters
        self.every = every
        self.gradients = gradients
        self.steps = 0
        self._parts = Parts(self._pieces)
        self._moves = Moves(self._pieces)
        self._calls: list[_Call] = []  # that have begun and not ended, the outermost first
        self._idle = 0  # contexts of ``step`` that have ended, while none has written a tracked parameter
        self._has_stepped: bool | None = None  # the outermost call; None where only its writes can tell
        self._round: _Round | None = None
        self._order: list[int] = []  # ids of optimizers, as they step one after another in a round
        self._written_before: list[int] = []  # pieces of other parameters, written since their copy, as a call began
        self._gradients: StepGradients | None = None  # of the outermost call, if it is measured
        unknown = torch.full_like(self._pieces.squares, torch.nan)
        self._unread = torch.zeros_like(unknown)  # 1 for pieces that moved without .grad, since the last reading
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
        remove = self._parts.add(optimizer, family)
        trained = [parameter for member in family for parameter in optimizers.trained(member)]
        is_foreign = {id(parameter) for parameter in trained}.isdisjoint(map(id, self._pieces.parameters))
        if is_foreign and _memories(trained).isdisjoint(_memories(self._pieces.parameters)):
            text = "the optimizer has none of the tracked parameters: give the tracker the model that it trains"
            warnings.warn(text, stacklevel=2)
        forget = self._membership.watch(family)
        ends = [optimizers.listen(member, self) for member in family]

        def detach() -> None:
            remove()
            forget()
            if id(optimizer) in self._order:
                self._order.remove(id(optimizer))
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

    @RECORDING
    def before(self, *, scale: float = 1.0) -> None:
        """Call right before the optimizer's step, once the gradients are there; they are ``scale`` times too large."""
        self._calls.clear()
        self._calls.append(_Call(self, None))
        self._open(self)
        if self._gradients:
            self._gradients.read(self._parts.whole.pieces, 1, scale)

    @RECORDING
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

    @RECORDING
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

    def gradients_may_change(self, optimizer: Any) -> None:
        """Told by ``optimizers.listen``: the gradients in ``.grad`` may not be those of the step yet."""
        if self._gradients and self._calls:
            self._gradients.postpone()

    def evaluated(self, optimizer: Any) -> None:
        """Told by ``optimizers.listen``: a closure has been evaluated."""
        if self._gradients and self._gradients.have_changed():
            self.gradients_ready(optimizer)

    @RECORDING
    def gradients_ready(self, optimizer: Any) -> None:
        """Told by ``optimizers.listen``: the gradients of a step lie in ``.grad``."""
        depth = next((i for i, call in enumerate(self._calls, start=1) if call.owner is optimizer), 0)
        if self._gradients and depth == 1 and self._parts.holds_others(optimizer):
            self._gradients.postpone()
        elif self._gradients and depth:
            scale = getattr(optimizer, "grad_scale", None)  # under GradScaler a fused optimizer unscales by itself
            pieces = self._parts.of(optimizer).pieces
            self._gradients.read(pieces, depth, 1.0 if scale is None else float(scale))

    @RECORDING
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
        if not self._parts.holds_others(optimizer):
            # under GradScaler a fused optimizer is called also when a gradient is infinite, and then does nothing
            self._has_stepped = bool(self._has_stepped) or not getattr(optimizer, "found_inf", None)
        if not self._calls:
            self._close(optimizer, self._has_stepped)

    def _open(self, owner: Any) -> None:
        """Begin the outermost call: in the present round, or in a new one."""
        self._has_stepped = None
        part = self._separated(self._part(owner), owner)
        ids = {id(owner), *part.ids}
        is_done = self._round is None or not self._round.ids.isdisjoint(ids) or self._comes_earlier(owner)
        if is_done or self._has_moved(part):
            self._begin_round()
        self._written_before = self._pieces.rewritten(part.others) if part.others else []
        is_read = self.gradients and self._round is not None and self._round.is_measured
        self._gradients = StepGradients(self._pieces, part.members) if is_read else None

    def _separated(self, part: Part, owner: Any) -> Part:
        """The part of an optimizer, with no piece in it that has parameters of others.

        What is written to those between the steps of two optimizers would be in the measured step of this one.
        """
        while part.is_mixed:
            orphans = {id(member.parameter) for group in part.members for member in group} - part.ids
            self._separate(part.ids if self._pieces.are_mixed(part.ids) else orphans)
            part = self._part(owner)
        return part

    def _separate(self, ids: Collection[int]) -> None:
        """Split pieces between parameters with these ids and others; what was measured stays with the first."""
        parents = self._pieces.separate(ids)
        self._sums = torch.cat([self._sums, torch.zeros_like(self._sums[:, parents])], dim=1)
        self._unread = torch.cat([self._unread, self._unread[parents]])
        self._moves.split(parents)
        self._parts.renew()

    def _comes_earlier(self, owner: Any) -> bool:
        """Whether an optimizer steps before the last one of the present round, as a rule, and so begins another."""
        last = self._round.last if self._round else 0
        if last not in self._order or id(owner) not in self._order:
            return False
        return self._order.index(id(owner)) < self._order.index(last)

    def _has_moved(self, part: Part) -> bool:
        """Whether parameters have been written since the round began that have had no step in it."""
        return not self._moves.copies_are_old and bool(self._pieces.rewritten(part.pieces))

    def _begin_round(self) -> None:
        """Copy what has moved since the last step, so that the copies are θ, and begin sums over a step."""
        self._warn_of_thawed()
        is_measured = (self.steps + 1) % self.every == 0
        self._round = _Round(is_measured)
        if self._pieces.follow():
            self._moves.follow()
            self._sums, self._unread = self._sums.to(self._pieces.device), self._unread.to(self._pieces.device)
        if is_measured or not self._moves.copies_are_old:
            is_due = self.steps < CHECK_FIRST or self.steps % CHECK_EVERY == 0
            self._moves.copy(self.steps, thoroughly=is_due)
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
        if stepped is None and owner is not self and not was_written and not self._moves.sample_is_unlike(self.steps):
            return  # a wrapper has only counted a batch, or the optimizer is that of another model
        if self._round.is_measured:
            sums = self._measured(part)
            row = self._pieces.by_layer(sums)
            if stepped is None and not was_written and not row[STEP].any():
                self._idle += owner is self
                return  # gradients were only accumulated, or GradScaler has skipped the step
            self._sums = sums
            self._count(owner, part)
            self._rows.append((self.steps, row))
        else:
            self._count(owner, part)
            self._moves.copies_are_old = True  # and fused optimizers do not raise versions

    def _count(self, owner: Any, part: Part) -> None:
        """Count the first call of a round as a step; a later one replaces the row of the first."""
        if self._round is None:
            return
        self._round.ids |= {id(owner), *part.ids}
        if id(owner) not in self._order:
            position = self._order.index(self._round.last) + 1 if self._round.last in self._order else len(self._order)
            self._order.insert(position, id(owner))
        self._round.last = id(owner)
        if not self._round.is_counted:
            self._round.is_counted = True
            self.steps += 1
        elif self._round.is_measured:
            self._rows.pop()

    def _measured(self, part: Part) -> Tensor:
        """The sums of the round with a call that has just ended, ``(quantities, pieces)``."""
        sums = self._sums.clone()
        gradients = self._read_gradients(self._gradients) if self._gradients else None
        pieces = self._written(part)
        index = self._pieces.index(pieces)
        inner, step, *_ = self._pieces.advance(pieces)
        sums[STEP, index] += step
        sums[INNER, index] += inner
        if gradients is not None:
            if part.orphans:
                index = self._pieces.index(part.orphans)
                gradients[:, index] = torch.where(sums[STEP, index] == 0, 0.0, gradients[:, index])
            index = self._pieces.index(part.pieces)
            sums[PROJECTION:, index] += gradients[:, index]
        sums[NORM] = self._pieces.squares
        sums[SNAPSHOT] = self._pieces.beside
        sums[SNAPSHOT_NORM] = self._pieces.snapshot_squares
        return sums

    def _read_gradients(self, reader: StepGradients) -> Tensor:
        """θ·∇L and ‖∇L‖² by piece, before the copies become θ + δ."""
        gradients, unread = reader.end()
        self._unread = torch.maximum(self._unread, unread)
        return gradients

    def _written(self, part: Part) -> list[int]:
        """The pieces of a part, and those of other parameters that have been written in the call."""
        beyond = self._pieces.rewritten(part.others) if part.others else []
        return sorted({*part.pieces, *beyond}.difference(set(self._written_before).difference(part.pieces)))

    def _part(self, owner: Any) -> Part:
        return self._parts.whole if owner is self else self._parts.of(owner)

    @RECORDING
    def snapshot(self) -> None:
        """Keep the parameters as they are now: from the next step on, ``cos_similarity`` is the cosine with them."""
        self._moves.copy(self.steps)
        self._pieces.snapshot()

    def history(self, *, last: bool = False) -> pd.DataFrame:
        """One row for each measured step and layer, the total last; with ``last`` only rows of the last measured step.

        Step 0 is the start. Columns: ``step`` (steps done), ``layer``, ``norm`` ‖θ'‖ after the step, ``step_norm`` ‖δ‖,
        ``inner`` θ·δ, ``alignment`` cos(θ, δ), ``projection`` θ·∇L and ``grad_norm`` ‖∇L‖ before the step,
        ``cos_similarity`` with the last snapshot. Values that were not measured, and cosines with a zero vector, are
        NaN.

        Warns of parameters that have moved where no step was recorded since the last reading, that have moved without
        a gradient in ``.grad``, or that have been resized, replaced, tied or added since tracking began.
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
        that the parameters are not finite, or that there are hidden writes: changes between two steps that no tensor's
        version shows, by ``p.data`` or by a fused optimizer that is not tracked. They are searched for here, before the
        first steps, every 32nd and, on a CPU, in a sample before each; where one slips through it is part of the next
        δ. Changes between two steps that versions do show are part of neither δ nor the gap.

        Raises:
            RuntimeError: no step has been measured yet.
        """
        if len(self._rows) < 2:
            raise RuntimeError("no step measured yet: there is no identity to check")
        norm, step, inner, before, *_ = _stack([sums for _, sums in self._rows[1:]])
        self._warn_of_changes()
        return max(float(relative_gap(norm, before + step + 2 * inner)), float(self._moves.gap))

    def _warn_of_thawed(self) -> None:
        """Warn once of parameters that are trained now and were frozen when tracking began."""
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            text = f"{thawed[0]} ({len(thawed)} in all) was frozen when tracking began, and is not counted: frozen=True"
            warnings.warn(text, stacklevel=5)
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

        Layers go by their names, in any order. Warns where the history ends at another norm than the parameters have.

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
        self._moves.forget()
        last, row = self._rows[-1]
        squares = self._pieces.by_layer(self._pieces.squares[None])[0]
        if last == self.steps and float(relative_gap(squares.sqrt(), row[NORM].sqrt())) > SAME:
            ended, present = (float(total.sum().sqrt()) for total in (row[NORM], squares))
            text = f"the history ends at ‖θ‖ = {ended:.6g} and the parameters have {present:.6g}: it is of another run"
            warnings.warn(f"{text}, or they are not loaded yet", stacklevel=2)

    def _warn_of_changes(self) -> None:
        """Warn of what has been written outside of steps since the last reading, and of other parameters."""
        if not self._calls:
            self._moves.compare()
        for text in [*self._warnings(), *self._membership.changes()]:
            warnings.warn(text, stacklevel=3)

    def _warnings(self) -> Iterator[str]:
        moved = self._moves.layers()
        if moved:
            yield (
                f"{moved} moved outside of the steps that are recorded: this is in no δ. Attach the tracker to each "
                "optimizer whose step() the loop calls, or put `with tracker.step():` around all that writes"
            )
        unread = self._pieces.layers_where(self._unread > 0)
        self._unread.zero_()
        if unread:
            yield (
                f"{unread} moved without gradients in .grad when the step began, so θ·∇L and ‖∇L‖ are unknown: attach "
                "the tracker to the optimizer that reads them, before they are freed"
            )
        if self._idle >= IDLE and not self.steps:
            yield (
                f"{IDLE} steps or more have ended and no tracked parameter has been written: a loop that makes new "
                "tensors in place of these has to copy them into the model, with load_state_dict()"
            )
        resized = self._membership.names(self._pieces.resized)
        self._pieces.resized.clear()
        if resized:
            yield f"{resized} has another size than before: norms count its new elements, and its snapshot is gone"


def _refuse_untrackable(tracked: Sequence[tuple[str, Tensor]], every: int) -> None:
    """Raise ValueError for complex or empty parameters, none at all, several devices, or ``every`` below 1."""
    for name, parameter in tracked:
        if is_lazy(parameter) or parameter.is_meta:
            raise ValueError(
                f"{name} has no values yet: make the tracker after the model's first forward, or its loading"
            )
        if parameter.is_complex():
            raise ValueError(f"{name} is complex: give real parameters, such as torch.view_as_real of it")
    devices = {parameter.device for _, parameter in tracked}
    if every < 1 or len(devices) != 1:
        raise ValueError(
            f"give trainable parameters on one device, and every ≥ 1; got {len(tracked)} of them on "
            f"{sorted(map(str, devices))}, every = {every}"
        )


def _memories(parameters: Iterable[Tensor]) -> set[int]:
    """The memory of parameters: that of a flat buffer is also that of the parameters which are views of it."""
    return {shards.local(parameter).untyped_storage().data_ptr() for parameter in parameters}


def _warn_of_shared_memory(tracked: Sequence[tuple[str, Tensor]]) -> None:
    """Warn of weights that are tied by their memory and not as one parameter, such as by ``a.data = b.data``."""
    first: dict[tuple[Any, ...], str] = {}
    for name, parameter in tracked:
        tensor = shards.local(parameter)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        other = first.setdefault(key, name)
        if other != name and tensor.numel():
            text = f"{name} shares its memory with {other}, and counts twice: let both be one parameter"
            warnings.warn(text, stacklevel=3)


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
