"""The parameter norm and what its growth is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from nbutils.layers import layer_of
from nbutils.layers import layers as layers_of
from nbutils.norms import shards
from nbutils.norms.attach import attach
from nbutils.norms.budget import NormBudget as NormBudget
from nbutils.norms.budget import drift_free_cap as drift_free_cap
from nbutils.norms.budget import norm_budget as norm_budget
from nbutils.norms.pieces import Pieces

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

QUANTITIES = ("norm", "step", "inner", "before", "snapshot", "snapshot_norm", "projection", "gradient")


def norm(parameters: nn.Module | Mapping[str, Tensor] | Iterable[Tensor]) -> float:
    """‖θ‖ of a model, a state dict or any tensors: squares in float64, what comes twice counted once.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> layer.weight.data = torch.tensor([[3.0, 4.0]])
    >>> norm(torch.nn.ModuleList([layer, layer]))
    5.0
    """
    from torch.nn import Module

    if isinstance(parameters, Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Mapping):
        parameters = parameters.values()
    once = {id(tensor): tensor for tensor in parameters}.values()
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in once))


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

    Between sums of squares of the parameters themselves, which come every ``check``-th measured step, ρ² follows from
    ρ'² = ρ² + ‖δ‖² + 2θ·δ. Where the sum is taken the two are compared: ``identity_error``.

    Args:
        named_parameters: a model, or what ``model.named_parameters()`` gives; one that comes twice is counted once.
            Those with ``requires_grad=False`` are left out, with a warning should they be trained later.
        frozen: count them as well.
        every: measure at steps ``every``, 2·``every``, …; the others cost nothing.
        by: from a parameter's name to its layer; ``None`` for the total alone.
        gradients: measure θ·∇L and ‖∇L‖ as well, from ``.grad`` as it is when the step begins: one more reading. Of
            a step with a closure, and under GradScaler, only ``attach`` sees the right one.
        check: take the norm from its own sum of squares at every so many measured steps; 1 is always.

    Raises:
        TypeError: no names beside the parameters.
        ValueError: nothing to track, parameters on several devices or meshes, complex ones, shards of FSDP1 or
            ZeRO-3, ``every`` or ``check`` < 1, a layer named ``total``.

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
        check: int = 32,
        frozen: bool = False,
    ) -> None:
        import torch

        if isinstance(named_parameters, torch.nn.Module):
            named_parameters = named_parameters.named_parameters()
        pairs = list(named_parameters)
        if not all(isinstance(pair, tuple) and isinstance(pair[-1], torch.Tensor) for pair in pairs):
            raise TypeError("give a model or its named_parameters(): each parameter with its name, to tell its layer")
        given = list({id(p): (name, p) for name, p in reversed(pairs)}.values())[::-1]
        shards.refuse(given)
        named = [(name, p) for name, p in given if frozen or p.requires_grad]
        self.attached: list[Any] = []  # optimizers
        self._frozen = [(name, p) for name, p in given if not frozen and not p.requires_grad]
        if complex_ones := [name for name, p in named if p.is_complex()]:
            raise ValueError(f"{complex_ones[0]} is complex: give real parameters, such as torch.view_as_real of it")
        devices = {p.device for _, p in named}
        if min(every, check) < 1 or len(devices) != 1:
            raise ValueError(
                f"give trainable parameters on one device, every ≥ 1 and check ≥ 1; got {len(named)} of them on "
                f"{sorted(map(str, devices))}, every = {every}, check = {check}"
            )
        names = [name for name, _ in named]
        layers = layers_of(names) if by is layer_of else {name: by(name) if by else "total" for name in names}
        if by and "total" in layers.values():
            raise ValueError("no layer may be named 'total': that row is the sum over all layers")
        self.layers = list(dict.fromkeys(layers.values()))  # in the order of the parameters
        self.every, self.gradients, self.check, self.steps = every, gradients, check, 0
        number = {layer: i for i, layer in enumerate(self.layers)}
        self._mesh = shards.mesh_of(p for _, p in named)
        alike: dict[tuple[torch.dtype, float], list[tuple[Tensor, int]]] = {}
        for name, p in named:
            alike.setdefault((p.dtype, shards.weight(p, self._mesh)), []).append((p, number[layers[name]]))
        self._groups = [Pieces(members, weight) for (_, weight), members in alike.items()]
        self._layer_of_piece = torch.tensor([i for g in self._groups for i in g.layers], device=devices.pop())
        self._snapshot_squared: Tensor | None = None
        self._rows: list[tuple[int, Tensor]] = []
        self._gaps: list[Tensor] = []  # relative gap between the two sides of the identity, where both were taken
        self._open = False
        self._of_gradients: dict[str, Tensor] = {}
        self._version: list[tuple[int, int]] | None = None
        self._refresh()
        self._record({"norm": self._squared})

    def attach(self, optimizer: Any) -> Callable[[], None]:
        """Measure every step that an optimizer of torch really makes from now on. Returns what ends it.

        Right for any loop: accumulation, steps that GradScaler skips, closures, and the optimizers that accelerate and
        Lightning wrap. Gradients are those that the step uses, unscaled and clipped.

        Raises:
            TypeError: an optimizer that is none of torch, such as DeepSpeed's: use ``step``.
        """
        return attach(self, optimizer)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one ``optimizer.step()``: ``before()`` and ``after()`` in one."""
        self.before()
        yield
        self.after()

    def before(self, *, scale: float = 1.0) -> None:
        """Right before the optimizer's step, with the gradients, times ``scale``, in place."""
        import warnings

        self._open = True
        if thawed := [name for name, p in self._frozen if p.requires_grad]:
            text = f"{thawed[0]} ({len(thawed)} in all) was frozen when tracking began, and is not counted: frozen=True"
            warnings.warn(text, stacklevel=3)
            self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]
        if (self.steps + 1) % self.every:
            return
        if not self._refresh() and self._due():
            self._compare()
        self._of_gradients = self._products(("projection", "gradient"), Pieces.gradient) if self.gradients else {}
        if scale != 1.0 and self.gradients:
            self._of_gradients["projection"] /= scale
            self._of_gradients["gradient"] /= scale**2

    def skip(self) -> None:
        """In place of ``after()``: the optimizer made no step."""
        self._open = False

    def after(self, *, stepped: bool = False) -> None:
        """Right after the optimizer's step. Unless it is sure to have ``stepped``, one that wrote nothing is no step.

        Raises:
            RuntimeError: no ``before()`` since the last ``after()``.
        """
        if not self._open:
            raise RuntimeError("NormTracker.after() without a before(): put both around each optimizer step")
        self._open = False
        if (self.steps + 1) % self.every:
            self.steps += 1
            self._version = None  # the copy is old, and fused optimizers do not raise versions
            return
        measured = self._products(("inner", "step", "snapshot"), Pieces.advance) | self._of_gradients
        if not stepped and self._version == self._versions() and not measured["step"].any():
            return  # accumulation, or GradScaler
        self.steps += 1
        measured["before"] = self._squared
        if self._snapshot_squared is not None:
            measured["snapshot_norm"] = self._snapshot_squared
        self._squared, self._version = self._squared + measured["step"] + 2 * measured["inner"], self._versions()
        if self._due():
            self._squared = self._compare()
        self._record(measured | {"norm": self._squared})

    def snapshot(self) -> None:
        """Keep the parameters as they are now: from here on ``cos_similarity`` is the cosine with them."""
        self._refresh()
        for group in self._groups:
            group.snapshot()
        self._snapshot_squared = self._squared

    def history(self, *, last: bool = False) -> pd.DataFrame:
        """One row for each measured step and layer, the total last; row 0 is the start. Or those of the ``last`` step.

        Columns: ``step`` (steps done), ``layer``, ``norm`` ‖θ'‖ after the step, ``step_norm`` ‖δ‖, ``inner`` θ·δ,
        ``alignment`` cos(θ, δ), ``projection`` θ·∇L and ``grad_norm`` ‖∇L‖ before the step, ``cos_similarity`` with the
        last snapshot. What was not measured is NaN; so is a cosine with a zero vector.
        """
        import pandas as pd
        import torch

        rows, layers = self._rows[-1:] if last else self._rows, self.layers
        sums = torch.stack([sums for _, sums in rows]).cpu().numpy()  # (measured steps, quantities, layers)
        if layers != ["total"]:
            sums, layers = np.concatenate([sums, sums.sum(axis=2, keepdims=True)], axis=2), [*layers, "total"]
        q = dict(zip(QUANTITIES, np.moveaxis(sums, 1, 0), strict=True))  # each (measured steps, layers)
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
        """Largest relative gap between ρ'² and ρ² + ‖δ‖² + 2θ·δ over layers (Eq. 3 of the paper).

        It is taken where ρ'² was summed, before and after every ``check``-th measured step and now; the right side runs
        along all steps since the sum before. Rounding gives up to about 1e-12, on CUDA 1e-6 for float32; more means
        that the parameters are not finite, or were written between two steps where no tensor's version shows it: by
        ``p.data``, or by a fused optimizer that is not tracked. Such a change counts as part of the next step, and only
        those before a ``check``-th step are seen here; with ``check=1`` all are.

        Raises:
            RuntimeError: nothing measured yet, or nothing summed since.
        """
        import torch

        if len(self._rows) < 2:
            raise RuntimeError("no step measured yet: there is no identity to check")
        if self._version == self._versions():  # else something else than a step has moved the parameters since
            self._compare()
        if not self._gaps:
            raise RuntimeError(
                f"no norm summed beside the identity: the parameters have moved since the last measured step, and it "
                f"is summed at one step of {self.check}, of {len(self._rows) - 1} so far; ask right after a step, or "
                "take check=1"
            )
        return float(torch.stack(self._gaps).max())

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
        import torch

        steps, sums = zip(*self._rows, strict=True)
        return {"layers": self.layers, "steps": self.steps, "at": list(steps), "sums": torch.stack(sums).cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the history of a training, once its parameters are loaded. A snapshot is not kept.

        Raises:
            ValueError: the history of other layers.
        """
        if list(state["layers"]) != self.layers:
            raise ValueError(f"the history is of layers {', '.join(state['layers'])}, not {', '.join(self.layers)}")
        sums = state["sums"].to(self._layer_of_piece.device)
        self._rows, self.steps = list(zip(map(int, state["at"]), sums, strict=True)), int(state["steps"])
        self._version = None
        self._refresh()

    def _record(self, measured: dict[str, Tensor]) -> None:
        import torch

        missing = torch.full_like(self._squared, torch.nan)
        self._rows.append((self.steps, torch.stack([measured.get(name, missing) for name in QUANTITIES])))

    def _versions(self) -> list[tuple[int, int]]:
        return [(p._version, p.data_ptr()) for group in self._groups for p in group.parameters]

    def _refresh(self) -> bool:
        """Copy the parameters and take their norm, unless their versions say that the last step's copy is still exact.

        In-place changes raise a tensor's version, so what happens between two steps is not taken for a step.
        """
        if self._version == self._versions():
            return False
        for group in self._groups:
            group.refresh()
        self._squared, self._version = self._sum_of_squares(), self._versions()
        return True

    def _due(self) -> bool:
        return len(self._rows) % self.check == 0

    def _compare(self) -> Tensor:
        """‖θ‖² by layer; its distance from what the steps add up to is kept."""
        summed = self._sum_of_squares()
        gap = (summed - self._squared).abs() / summed.clamp(min=np.finfo(np.float64).tiny)
        self._gaps.append(gap.max())
        return summed

    def _sum_of_squares(self) -> Tensor:
        """‖θ‖² by layer, from the parameters themselves."""
        return self._by_layer([group.squares() for group in self._groups])

    def _products(self, names: tuple[str, ...], of: Callable[[Pieces], list[Tensor]]) -> dict[str, Tensor]:
        """Sums of each group, by layer; the last names may have none."""
        sums = map(self._by_layer, zip(*map(of, self._groups), strict=True))
        return dict(zip(names, sums, strict=False))

    def _by_layer(self, sums: Sequence[Tensor]) -> Tensor:
        """Sums of each group's pieces to sums by layer, shape (layers,)."""
        import torch

        zero = torch.zeros(len(self.layers), dtype=torch.float64, device=self._layer_of_piece.device)
        if self._mesh is not None:
            sums = [group.weight * each for group, each in zip(self._groups, sums, strict=True)]
        return shards.summed(zero.index_add(0, self._layer_of_piece, torch.cat(list(sums))), self._mesh)
