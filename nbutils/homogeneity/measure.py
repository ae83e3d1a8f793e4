"""The degree of a network by numbers: outputs and their derivative along the ray of all parameters."""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nbutils.homogeneity.algebra import EVERY

__all__ = ["first_output", "given", "measure_degree", "one_minus_cosine", "plain", "scalable"]


def one_minus_cosine(a: Tensor, b: Tensor, dim: int = -1) -> Tensor:
    """1 − cos of the angle between a and b in float64, as ½‖â − b̂‖²: good down to 1e-32, not 1e-16.

    NaN where a or b is zero.

    >>> a, b = torch.tensor([[1.0, 0.0], [1.0, 1e-10]], dtype=torch.float64)
    >>> f"{one_minus_cosine(a, b).item():.3g}"  # ½ · 10⁻²⁰
    '5e-21'
    """
    a, b = (x.double() / x.double().abs().amax(dim, keepdim=True) for x in (a, b))  # squares do not overflow
    a, b = (x / x.norm(dim=dim, keepdim=True) for x in (a, b))
    return 0.5 * (a - b).square().sum(dim)


def first_output(out: Any) -> Any:
    """Of the outputs of a module the first one, as of attention with its weights."""
    while isinstance(out, tuple | list | Mapping):
        out = next(iter(out.values() if isinstance(out, Mapping) else out))
    return out


def given(module: nn.Module, inputs: Any, k_in: Any) -> tuple[list[str] | None, list[Any], list[Any]]:
    """Inputs, their names if they have any, and their degrees. Both may be single, a sequence, or by name.

    Raises:
        ValueError: ``k_in`` does not give each input a degree.
    """
    named = list(inputs) if isinstance(inputs, Mapping) else None
    inputs = list(inputs.values()) if named else list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    names = named or list(inspect.signature(module.forward).parameters)[: len(inputs)]
    by_name = k_in if isinstance(k_in, Mapping) else None
    degrees = [by_name.get(name) for name in names] if by_name else k_in
    degrees = list(degrees) if isinstance(degrees, Sequence) else [degrees] * len(inputs)
    if len(degrees) != len(inputs) or None in degrees:
        raise ValueError(f"k_in gives degrees {k_in}; the inputs are {names}: give one number, or one for each")
    return named, inputs, degrees


@contextmanager
def plain(module: nn.Module, experts: str) -> Iterator[nn.Module]:
    """A copy of a module, with the parameters themselves, and no fused kernels: they hide what they do.

    ``experts`` is how models of ``transformers`` are to run theirs.
    """
    memo: dict[int, Any] = {id(p): p for p in module.parameters()}
    for part in module.modules():  # what a forward pass has kept cannot be copied with its graph
        memo |= {id(x): x.detach().clone() for x in vars(part).values() if isinstance(x, Tensor) and not x.is_leaf}
    module = copy.deepcopy(module, memo)
    if getattr(getattr(module, "config", None), "_experts_implementation", None) is not None:
        module.set_experts_implementation(experts)  # type: ignore[operator]
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield module
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def scalable(module: nn.Module, inputs: Any, k_in: Any) -> Iterator[Callable[[Any], Tensor]]:
    """The first output of a module as a function of the scale c, in float64, flattened. The module stays as it is.

    >>> with scalable(nn.Linear(2, 1, bias=False), torch.ones(2), k_in=1) as output:
    ...     round(float(output(3.0) / output(1.0)), 6)  # weights and inputs times 3
    9.0
    """
    named, inputs, powers = given(module, inputs, k_in)

    def double(x: Any) -> Any:
        return x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x

    def scale(x: Any, k: Any, c: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x * c ** float(k) if x.is_floating_point() and k not in (0, EVERY) else x.clone()

    inputs = [double(x) for x in inputs]
    parameters = {name: double(x) for name, x in module.named_parameters()}
    buffers = {name: double(x) for name, x in module.named_buffers()}

    def output(c: Any) -> Tensor:
        tensors = {name: c * x for name, x in parameters.items()} | {name: x.clone() for name, x in buffers.items()}
        scaled = [scale(x, k, c) for x, k in zip(inputs, powers, strict=True)]
        args, kwargs = ((), dict(zip(named, scaled, strict=True))) if named else (tuple(scaled), {})
        try:
            found = torch.func.functional_call(copied, tensors, args, kwargs)
        except IndexError as error:
            largest = max(
                (int(x.max()) for x in inputs if isinstance(x, Tensor) and not x.is_floating_point()), default=0
            )
            message = f"an input has {largest}, which a table of the model has no row for; is the tokenizer its own?"
            raise ValueError(f"{message} ({error})") from error
        return first_output(found).reshape(-1)

    # grouped products of experts know neither float64 nor forward derivatives
    with plain(module, experts="eager") as copied:
        yield output


def measure_degree(module: nn.Module, inputs: Any, scales: Sequence[float], *, k_in: Any = 0) -> pd.DataFrame:
    """Degree by numbers: at each scale c by Euler's identity, and from it to the next scale by the log-ratio.

    With D = d/dt f(e^t cθ) at t = 0, a derivative along all parameters and inputs, k-homogeneous f have D = k·f
    (Lemma 9). ``euler`` is the k that fits best, ⟨D, f⟩/⟨f, f⟩, and ``residual`` is ‖D − k·f‖/‖f‖, which is 0 if one k
    fits all outputs; both are NaN where f has no derivative, as √x at 0.
    Where a module has no such derivative in torch, as BLOOM's GELU, D is a difference over c·e^±0.001, right to about
    1e-6, and a ``RuntimeWarning`` says so. ``log_ratio`` is ln(‖f(c'θ)‖/‖f(cθ)‖) / ln(c'/c) with the next scale c', NaN
    at the last one.

    The derivative is asked of the module's own code: where that detaches a value or leaves float64 it may be wrong,
    with a residual of 0. So the outputs at c·e^±0.001 are asked as well, and a ``RuntimeWarning`` names the scales at
    which the two differ by more than 1 %: believe ``log_ratio`` there. (A bias that opens a unit just there differs,
    too.)

    Args:
        module: runs in its present mode (dropout must be off), in float64, with its buffers as they are.
        inputs: a tensor, a tuple of them, or by name, as ``{"input_ids": …, "decoder_input_ids": …}`` of an
            encoder–decoder. Those of whole numbers are not scaled.
        scales: positive numbers c.
        k_in: inputs are multiplied by c^k_in: one number for all of them, or one for each, as a list or by name.

    Raises:
        ValueError: the output is zero or not finite at some scale; a token that the model does not know.

    >>> measure_degree(nn.Linear(4, 2, bias=False), torch.ones(4), [1, 10], k_in=1)["euler"].round(6).tolist()
    [2.0, 2.0]
    """
    rows: list[tuple[float, float, float, float]] = []
    unlike: list[str] = []
    zero, step, reason = torch.zeros((), dtype=torch.float64), 1e-3, ""
    with scalable(module, inputs, k_in) as output:
        for c in map(float, scales):
            try:
                f, along = torch.func.jvp(lambda t, c=c: output(c * t.exp()), (zero,), (torch.ones_like(zero),))[:2]
            except RuntimeError as error:  # torch's, where it has no forward derivative
                if not re.search("forward AD|functorch|forward-mode", str(error)):
                    raise
                reason = str(error).splitlines()[0]
                with torch.no_grad():
                    f, low, high = (output(c * math.exp(t)) for t in (0, -step, step))
                along = (high - low) / (2 * step)
            size = f.norm()
            if not 0 < size < math.inf:
                raise ValueError(f"the output has norm {float(size)} at scale {c}: there is no degree to measure")
            k = along @ f / size**2
            with torch.no_grad():
                near, far = (output(c * math.exp(sign * step)).norm().log() for sign in (-1, 1))
            seen = float(far - near) / (2 * step)
            if abs(float(k) - seen) > 0.01 * max(1, abs(seen)):  # NaN, as of √x at 0, is shown in the table
                unlike.append(f"{float(k):.4g} against {seen:.4g} at scale {c:g}")
            rows.append((c, float(k), float((along - k * f).norm() / size), float(size.log())))
    if reason:
        warnings.warn(f"D by differences, since torch has no derivative here ({reason})", RuntimeWarning, stacklevel=2)
    if unlike:
        why = "the derivative is not that of the outputs: euler and the local log-ratio are"
        warnings.warn(f"{why} {', '.join(unlike)}", RuntimeWarning, stacklevel=2)
    table = pd.DataFrame(rows, columns=["scale", "euler", "residual", "log_size"])
    steps = table.log_size.diff() / table.scale.map(math.log).diff()
    return table.drop(columns="log_size").assign(log_ratio=steps.shift(-1))
