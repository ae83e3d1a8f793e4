"""Norm, step and alignment of a training run, measured at every step of its optimizer."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from normgrowth.layers import layer_of
from normgrowth.layers import layers as layers_of
from normgrowth.norms import shards
from normgrowth.norms.pieces import Pieces

CHECK_EVERY = 32  # steps between two checks for untracked writes to the parameters
# Sums by layer that each measured step leaves: ‖θ'‖², ‖δ‖², θ·δ, ‖θ‖², θ'·s and ‖s‖² of the snapshot s, θ·∇L, ‖∇L‖².
QUANTITIES = ("norm", "step", "inner", "before", "snapshot", "snapshot_norm", "projection", "gradient")


class NormTracker:
    """Norm, step and alignment of a training run, total and by layer, at about one reading of the parameters a step.

    For θ' = θ + δ it measures ‖θ'‖, ‖δ‖, θ·δ, cos(θ, δ), with ``gradients`` also θ·∇L and ‖∇L‖, and after
    ``snapshot()`` the cosine of θ' with that snapshot. δ is the step that the parameters really made, after rounding,
    clipping and weight decay, and not what the optimizer meant. It keeps one copy of the parameters (two with a
    snapshot). Sums are float64. On CPU so are the differences and products in them, and all is right to about 1e-12;
    on CUDA float32 is multiplied in float32, right to about 1e-7. On CUDA nothing waits for the device before
    ``history()``.

    Put it on the optimizer with ``attach``, or ``step`` around the call that steps. DTensors (FSDP2, tensor
    parallelism) are summed over their processes, all of which must then step.

    Args:
        named_parameters: a model, or what ``model.named_parameters()`` gives; one that comes twice is counted once.
            Those with ``requires_grad=False`` are left out, with a warning should they be trained later.
        frozen: count them as well.
        every: measure at steps ``every``, 2·``every``, …; the others cost nothing.
        by: from a parameter's name to its layer; ``None`` for the total alone.
        gradients: measure θ·∇L and ‖∇L‖ as well, from ``.grad`` as it is when the step begins: one more reading. Of
            a step with a closure, and under GradScaler, only ``attach`` sees the right one.

    Raises:
        TypeError: no names beside the parameters.
        ValueError: nothing to track, parameters on several devices or meshes, complex ones, shards of FSDP1 or
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
        if isinstance(named_parameters, nn.Module):
            named_parameters = named_parameters.named_parameters()
        pairs = list(named_parameters)
        if not all(isinstance(pair, tuple) and isinstance(pair[-1], Tensor) for pair in pairs):
            raise TypeError("give a model or its named_parameters(): each parameter with its name, to tell its layer")
        given = list({id(p): (name, p) for name, p in reversed(pairs)}.values())[::-1]
        shards.refuse(given)
        named = [(name, p) for name, p in given if frozen or p.requires_grad]
        self._frozen = [(name, p) for name, p in given if not frozen and not p.requires_grad]
        if complex_ones := [name for name, p in named if p.is_complex()]:
            raise ValueError(f"{complex_ones[0]} is complex: give real parameters, such as torch.view_as_real of it")
        devices = {p.device for _, p in named}
        if every < 1 or len(devices) != 1:
            raise ValueError(
                f"give trainable parameters on one device, and every ≥ 1; got {len(named)} of them on "
                f"{sorted(map(str, devices))}, every = {every}"
            )
        names = [name for name, _ in named]
        layers = layers_of(names) if by is layer_of else {name: by(name) if by else "total" for name in names}
        if by and "total" in layers.values():
            raise ValueError("no layer may be named 'total': that row is the sum over all layers")
        self._pieces = Pieces([(p, layers[name]) for name, p in named])
        self.layers = self._pieces.layers  # in the order of the parameters
        self.every, self.gradients, self.steps = every, gradients, 0
        self._open = False
        self._attached: list[Any] = []
        self._version: list[tuple[int, int]] | None = None
        self._refresh()
        unmeasured = torch.full_like(self._squared, torch.nan)
        self._snapshot_squared, self._of_gradients = unmeasured, (unmeasured, unmeasured)
        self._unseen = torch.zeros_like(self._squared[0])
        start = [self._squared, *[unmeasured] * (len(QUANTITIES) - 1)]
        self._rows: list[tuple[int, Tensor]] = [(0, torch.stack(start))]

    def attach(self, optimizer: Any) -> Callable[[], None]:
        """Measure every step that an optimizer of torch really makes from now on. Returns what ends it.

        Right for any loop: accumulation, steps that GradScaler skips, closures, and the optimizers that accelerate and
        Lightning wrap. Gradients are those that the step uses, unscaled and clipped.

        Raises:
            TypeError: an optimizer that is none of torch, such as DeepSpeed's: use ``step``.
            ValueError: the tracker is on this optimizer already.
        """
        inner = _innermost(optimizer)
        if inner in self._attached:
            raise ValueError("this tracker is on this optimizer already: call first what attach() returned")
        theirs = {id(p) for group in inner.param_groups for p in group["params"]}
        if theirs.isdisjoint(map(id, self._pieces.parameters)):
            text = "the optimizer has none of the tracked parameters: give the tracker the model that it trains"
            warnings.warn(text, stacklevel=2)

        def begin() -> None:
            scale = getattr(inner, "grad_scale", None)  # a fused optimizer takes it off itself under GradScaler
            self.before(scale=1.0 if scale is None else float(scale))

        def pre(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
            if closure is None:
                begin()
                return args, kwargs
            calls = itertools.count()

            def evaluated() -> Any:  # the gradients are there only once the closure has run
                loss = closure()
                if next(calls) == 0:
                    begin()
                return loss

            return (
                ((args[0], evaluated, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": evaluated})
            )

        def post(*_: object) -> None:
            # a fused optimizer under GradScaler is called, and does nothing where a gradient is infinite
            self.after(stepped=not getattr(inner, "found_inf", None))

        handles = [inner.register_step_pre_hook(pre), inner.register_step_post_hook(post)]
        self._attached.append(inner)

        def detach() -> None:
            self._attached.remove(inner)
            for handle in handles:
                handle.remove()

        return detach

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one ``optimizer.step()``: ``before()`` and ``after()`` in one."""
        self.before()
        yield
        self.after()

    def before(self, *, scale: float = 1.0) -> None:
        """Right before the optimizer's step, with the gradients, times ``scale``, in place."""
        self._open = True
        if thawed := [name for name, p in self._frozen if p.requires_grad]:
            text = f"{thawed[0]} ({len(thawed)} in all) was frozen when tracking began, and is not counted: frozen=True"
            warnings.warn(text, stacklevel=3)
            self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]
        if (self.steps + 1) % self.every:
            return
        if self.steps % CHECK_EVERY == 0:
            self._look()
        self._refresh()
        if self.gradients:
            projection, square = self._pieces.gradient()
            self._of_gradients = projection / scale, square / scale**2

    def after(self, *, stepped: bool | None = None) -> None:
        """Right after the optimizer's step, with whether it ``stepped``; by default, a measured
        one that wrote nothing is no step.

        Raises:
            RuntimeError: no ``before()`` since the last ``after()``.
        """
        if not self._open:
            raise RuntimeError("NormTracker.after() without a before(): put both around each optimizer step")
        self._open = False
        if stepped is False:
            return
        if (self.steps + 1) % self.every:
            self.steps += 1
            self._version = None  # the copy is old, and fused optimizers do not raise versions
            return
        inner, step, norm, beside = self._pieces.advance()
        if stepped is None and self._version == self._versions() and not step.any():
            return  # accumulation, or GradScaler
        self.steps += 1
        row = [norm, step, inner, self._squared, beside, self._snapshot_squared, *self._of_gradients]
        self._rows.append((self.steps, torch.stack(row)))
        self._squared, self._version = norm, self._versions()

    def snapshot(self) -> None:
        """Keep the parameters as they are now: from here on ``cos_similarity`` is the cosine with them."""
        self._refresh()
        self._pieces.snapshot()
        self._snapshot_squared = self._squared

    def history(self, *, last: bool = False) -> pd.DataFrame:
        """One row for each measured step and layer, the total last; row 0 is the start. Or those of the ``last`` step.

        Columns: ``step`` (steps done), ``layer``, ``norm`` ‖θ'‖ after the step, ``step_norm`` ‖δ‖, ``inner`` θ·δ,
        ``alignment`` cos(θ, δ), ``projection`` θ·∇L and ``grad_norm`` ‖∇L‖ before the step, ``cos_similarity`` with the
        last snapshot. What was not measured is NaN; so is a cosine with a zero vector.
        """
        rows = self._rows[-1:] if last else self._rows
        sums, layers = torch.stack([sums for _, sums in rows], dim=1).cpu().numpy(), self.layers
        if layers != ["total"]:
            sums, layers = np.concatenate([sums, sums.sum(axis=2, keepdims=True)], axis=2), [*layers, "total"]
        q = dict(zip(QUANTITIES, sums, strict=True))  # each (measured steps, layers)
        with np.errstate(invalid="ignore", divide="ignore"):
            columns = {
                "norm": np.sqrt(q["norm"]),
                "step_norm": np.sqrt(q["step"]),
                "inner": q["inner"],
                "alignment": q["inner"] / np.sqrt(q["before"] * q["step"]),
                "projection": q["projection"],
                "grad_norm": np.sqrt(q["gradient"]),
                "cos_similarity": q["snapshot"] / np.sqrt(q["norm"] * q["snapshot_norm"]),
            }
        steps = np.array([step for step, _ in rows], dtype=np.int64)
        index = {"step": np.repeat(steps, len(layers)), "layer": np.tile(np.array(layers, dtype=object), len(steps))}
        return pd.DataFrame(index | {name: values.ravel() for name, values in columns.items()})

    def identity_error(self) -> float:
        """Largest relative gap between ρ'² and ρ² + ‖δ‖² + 2θ·δ over steps and layers (Eq. 3 of the paper).

        Of each step by itself: what is written between two steps is read anew, and is in neither δ nor the gap.
        Each term is a sum of its own. Rounding gives up to about 1e-12, on CUDA 1e-6 for float32; more means that the
        parameters are not finite, or that something writes them between steps where no tensor's version shows it:
        ``p.data``, or a fused optimizer that is not tracked. Such a change counts as part of the next step. It is
        looked for here, and before every 32nd step.

        Raises:
            RuntimeError: nothing measured yet.
        """
        if len(self._rows) < 2:
            raise RuntimeError("no step measured yet: there is no identity to check")
        norm, step, inner, before, *_ = torch.stack([sums for _, sums in self._rows[1:]], dim=1)
        self._look()
        return float(torch.maximum(_gap(norm, before + step + 2 * inner), self._unseen))

    def _look(self) -> None:
        """Compare the parameters with what the last step left, where torch itself does not say that they have moved."""
        if self._version == self._versions():
            self._unseen = torch.maximum(self._unseen, _gap(self._pieces.squares(), self._squared))

    def latest(self) -> dict[str, float]:
        """The last measured step as numbers for a log: ``norm/total``, ``norm/block 0``, …, ``step_norm/total``, ….

        By layer the norm alone; of the total also ‖δ‖, cos(θ, δ) and what else is measured.
        """
        rows = self.history(last=True)
        by_layer = rows.set_index("layer")["norm"].astype(float)
        found = {f"norm/{layer}": value for layer, value in by_layer.items()}
        total = rows.iloc[-1].drop(["step", "layer", "norm"]).astype(float).dropna()
        return found | {f"{name}/total": value for name, value in total.items()}

    def state_dict(self) -> dict[str, Any]:
        """The history, for a checkpoint of the training; ``torch.save`` and ``weights_only`` take it."""
        steps, sums = zip(*self._rows, strict=True)
        return {"layers": self.layers, "steps": self.steps, "at": list(steps), "sums": torch.stack(sums).cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the history of a training, once its parameters are loaded. A snapshot is not kept.

        Raises:
            ValueError: the history of other layers.
        """
        if list(state["layers"]) != self.layers:
            raise ValueError(f"the history is of layers {', '.join(state['layers'])}, not {', '.join(self.layers)}")
        sums = state["sums"].to(self._squared.device)
        self._rows, self.steps = list(zip(map(int, state["at"]), sums, strict=True)), int(state["steps"])
        self._version = None
        self._refresh()

    def _versions(self) -> list[tuple[int, int]]:
        """In-place changes raise a tensor's version: what happens between two steps is not taken for a step."""
        return [(p._version, p.data_ptr()) for p in map(shards.local, self._pieces.parameters)]

    def _refresh(self) -> None:
        """Copy the parameters and take their norm, unless the last step's copy is still exact."""
        if self._version != self._versions():
            self._squared, self._version = self._pieces.refresh(), self._versions()


def _gap(found: Tensor, expected: Tensor) -> Tensor:
    """The largest relative difference."""
    return ((found - expected).abs() / found.clamp(min=np.finfo(np.float64).tiny)).max()


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
