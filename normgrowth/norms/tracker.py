"""Norm, step and alignment of a training run, measured at every step of its optimizer."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from normgrowth.layers import layer_of
from normgrowth.layers import layers as layers_of
from normgrowth.norms import shards
from normgrowth.norms.hooks import innermost
from normgrowth.norms.pieces import Pieces

CHECK_EVERY = 32  # steps between two checks for untracked writes to the parameters
# Sums by layer of a measured step: ‖θ'‖², ‖δ‖², θ·δ, ‖θ‖², θ'·s and ‖s‖² with the snapshot s, θ·∇L, ‖∇L‖².
QUANTITIES = ("norm", "step", "inner", "before", "snapshot", "snapshot_norm", "projection", "gradient")


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

    _squared: Tensor  # ‖θ‖² by layer

    def __init__(
        self,
        named_parameters: nn.Module | Iterable[tuple[str, Tensor]],
        *,
        every: int = 1,
        by: Callable[[str], str] | None = layer_of,
        gradients: bool = False,
        frozen: bool = False,
    ) -> None:
        pairs = _distinct(named_parameters)
        shards.refuse(pairs)
        tracked = [(name, parameter) for name, parameter in pairs if frozen or parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in pairs if not (frozen or parameter.requires_grad)]
        _refuse_untrackable(tracked, every)
        layers = _layers([name for name, _ in tracked], by)
        self._pieces = Pieces([(parameter, layers[name]) for name, parameter in tracked])
        self.layers = self._pieces.layers  # in the order of the parameters
        self.every = every
        self.gradients = gradients
        self.steps = 0
        self._in_step = False  # between before() and after()
        self._attached: list[Any] = []
        self._copied_versions: list[tuple[int, int]] | None = None  # of the parameters, when the copy was made
        self._refresh()
        unmeasured = torch.full_like(self._squared, torch.nan)
        self._snapshot_squared = unmeasured
        self._gradient_sums = (unmeasured, unmeasured)  # θ·∇L and ‖∇L‖²
        self._untracked = torch.zeros_like(self._squared[0])  # largest relative change by untracked writes
        start = [self._squared, *[unmeasured] * (len(QUANTITIES) - 1)]
        self._rows: list[tuple[int, Tensor]] = [(0, torch.stack(start))]

    def attach(self, optimizer: Any) -> Callable[[], None]:
        """Measure every step that an optimizer of torch really makes from now on. Returns a function that detaches.

        This is right in any loop: with accumulation, steps that GradScaler skips, closures, and the optimizers that
        accelerate and Lightning wrap. Gradients are those that the step uses, unscaled and clipped.

        Raises:
            TypeError: the optimizer is not one of torch, as DeepSpeed's are not: use ``step``.
            ValueError: the tracker is on this optimizer already.
        """
        inner = innermost(
            optimizer,
            "put `with tracker.step():` around the call that steps (of DeepSpeed engine.step())",
        )
        if inner in self._attached:
            raise ValueError("this tracker is on this optimizer already: call first what attach() returned")
        optimized = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
        if optimized.isdisjoint(map(id, self._pieces.parameters)):
            text = "the optimizer has none of the tracked parameters: give the tracker the model that it trains"
            warnings.warn(text, stacklevel=2)

        def begin() -> None:
            scale = getattr(inner, "grad_scale", None)  # under GradScaler a fused optimizer unscales by itself
            self.before(scale=1.0 if scale is None else float(scale))

        def before_step(
            _: object, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if len(args) > 1 and args[1] is not None:  # args[0] is the optimizer, args[1] the closure
                return (args[0], _then_once(args[1], begin), *args[2:]), kwargs
            if len(args) <= 1 and kwargs.get("closure") is not None:
                return args, kwargs | {"closure": _then_once(kwargs["closure"], begin)}
            begin()
            return args, kwargs

        def after_step(*_: object) -> None:
            # under GradScaler a fused optimizer is called also when a gradient is infinite, and then does nothing
            self.after(stepped=not getattr(inner, "found_inf", None))

        handles = [inner.register_step_pre_hook(before_step), inner.register_step_post_hook(after_step)]
        self._attached.append(inner)

        def detach() -> None:
            self._attached.remove(inner)
            for handle in handles:
                handle.remove()

        return detach

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context around one ``optimizer.step()``: ``before()`` and ``after()`` in one."""
        self.before()
        yield
        self.after()

    def before(self, *, scale: float = 1.0) -> None:
        """Call right before the optimizer's step, once the gradients are there; they are ``scale`` times too large."""
        self._in_step = True
        self._warn_of_thawed()
        if (self.steps + 1) % self.every:
            return
        if self.steps % CHECK_EVERY == 0:
            self._check_untracked_writes()
        self._refresh()
        if self.gradients:
            projection, square = self._pieces.gradient()
            self._gradient_sums = (projection / scale, square / scale**2)

    def after(self, *, stepped: bool | None = None) -> None:
        """Call right after the optimizer's step.

        Args:
            stepped: whether the optimizer has made a step; by default, a measured step that wrote nothing is not
                counted.

        Raises:
            RuntimeError: no ``before()`` since the last ``after()``.
        """
        if not self._in_step:
            raise RuntimeError("NormTracker.after() without a before(): put both around each optimizer step")
        self._in_step = False
        if stepped is False:
            return
        if (self.steps + 1) % self.every:
            self.steps += 1
            self._copied_versions = None  # the copy is old, and fused optimizers do not raise versions
            return
        inner, step, norm, snapshot = self._pieces.advance()
        if stepped is None and self._copied_versions == self._versions() and not step.any():
            return  # gradients were only accumulated, or GradScaler has skipped the step
        self.steps += 1
        row = [norm, step, inner, self._squared, snapshot, self._snapshot_squared, *self._gradient_sums]
        self._rows.append((self.steps, torch.stack(row)))
        self._squared = norm
        self._copied_versions = self._versions()

    def snapshot(self) -> None:
        """Keep the parameters as they are now: from the next step on, ``cos_similarity`` is the cosine with them."""
        self._refresh()
        self._pieces.snapshot()
        self._snapshot_squared = self._squared

    def history(self, *, last: bool = False) -> pd.DataFrame:
        """One row for each measured step and layer, the total last; with ``last`` only rows of the last measured step.

        Step 0 is the start. Columns: ``step`` (steps done), ``layer``, ``norm`` ‖θ'‖ after the step, ``step_norm`` ‖δ‖,
        ``inner`` θ·δ, ``alignment`` cos(θ, δ), ``projection`` θ·∇L and ``grad_norm`` ‖∇L‖ before the step,
        ``cos_similarity`` with the last snapshot. Values that were not measured, and cosines with a zero vector, are
        NaN.
        """
        rows = self._rows[-1:] if last else self._rows
        layers = self.layers
        sums = torch.stack([sums for _, sums in rows], dim=1).cpu().numpy()  # (quantities, measured steps, layers)
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
        norm, step, inner, before, *_ = torch.stack([sums for _, sums in self._rows[1:]], dim=1)
        self._check_untracked_writes()
        return float(torch.maximum(_gap(norm, before + step + 2 * inner), self._untracked))

    def _check_untracked_writes(self) -> None:
        """Compare norms with those after the last step, unless versions show that the parameters have changed since."""
        if self._copied_versions == self._versions():
            self._untracked = torch.maximum(self._untracked, _gap(self._pieces.squares(), self._squared))

    def _warn_of_thawed(self) -> None:
        """Warn once of parameters that are trained now and were frozen when tracking began."""
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            text = f"{thawed[0]} ({len(thawed)} in all) was frozen when tracking began, and is not counted: frozen=True"
            warnings.warn(text, stacklevel=4)
            self._frozen = [(name, parameter) for name, parameter in self._frozen if not parameter.requires_grad]

    def latest(self) -> dict[str, float]:
        """The last measured step as numbers for a log: ``norm/total``, ``norm/block 0``, …, ``step_norm/total``, ….

        Layers have the norm alone; the total also has ‖δ‖, cos(θ, δ) and all else that is measured.
        """
        rows = self.history(last=True)
        norms = rows.set_index("layer")["norm"].astype(float)
        total = rows.iloc[-1].drop(["step", "layer", "norm"]).astype(float).dropna()
        by_layer = {f"norm/{layer}": norm for layer, norm in norms.items()}
        of_total = {f"{quantity}/total": value for quantity, value in total.items()}
        return by_layer | of_total

    def state_dict(self) -> dict[str, Any]:
        """The history, for a checkpoint of the training; ``torch.load`` reads it with ``weights_only=True``."""
        steps, sums = zip(*self._rows, strict=True)
        return {"layers": self.layers, "steps": self.steps, "at": list(steps), "sums": torch.stack(sums).cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the history of a training, once its parameters are loaded. Snapshots are not restored.

        Raises:
            ValueError: the history has other layers.
        """
        if list(state["layers"]) != self.layers:
            raise ValueError(f"the history is of layers {', '.join(state['layers'])}, not {', '.join(self.layers)}")
        sums = state["sums"].to(self._squared.device)
        self._rows = list(zip(map(int, state["at"]), sums, strict=True))
        self.steps = int(state["steps"])
        self._copied_versions = None
        self._refresh()

    def _versions(self) -> list[tuple[int, int]]:
        """Version and address of each parameter: a write in place raises the version, a new storage has a new address.

        They tell changes between two steps from the steps themselves.
        """
        tensors = map(shards.local, self._pieces.parameters)
        return [(tensor._version, tensor.data_ptr()) for tensor in tensors]

    def _refresh(self) -> None:
        """Copy the parameters and compute their norm, unless the copy is still exact."""
        if self._copied_versions != self._versions():
            self._squared = self._pieces.refresh()
            self._copied_versions = self._versions()


def _distinct(named_parameters: nn.Module | Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
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
    layers = layers_of(names) if by is layer_of else {name: by(name) for name in names}
    if "total" in layers.values():
        raise ValueError("no layer may be named 'total': that row is the sum over all layers")
    return layers


def _then_once(closure: Callable[[], Any], begin: Callable[[], None]) -> Callable[[], Any]:
    """The closure of a step, which calls ``begin`` after its first evaluation: only then the gradients are there."""
    evaluations = itertools.count(1)

    def evaluate() -> Any:
        loss = closure()
        if next(evaluations) == 1:
            begin()
        return loss

    return evaluate


def _gap(value: Tensor, expected: Tensor) -> Tensor:
    """The largest relative difference."""
    return ((value - expected).abs() / value.clamp(min=np.finfo(np.float64).tiny)).max()
