"""The degree of a network by numbers: outputs and their derivative along the ray of all parameters."""

from __future__ import annotations

import copy
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
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["arguments", "first_output", "measure_degree", "numbers", "one_minus_cosine", "plain", "scalable"]


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


def numbers(x: Tensor) -> bool:
    """Whether a tensor has values that can scale, not places or truths."""
    return x.is_floating_point() or x.is_complex()


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as a module is called with them: a single one, a tuple of them, or by name.

    Raises:
        ValueError: another object than a tensor, number or text, as a cache: it may hold tensors, and change.
    """
    args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    given = args, dict(inputs) if isinstance(inputs, Mapping) else {}
    for x in tree_leaves(given):
        if not isinstance(x, Tensor | int | float | str | None):
            raise ValueError(f"an input is a {type(x).__name__}: give tensors, whose degree can be known")
    return given


@contextmanager
def plain(module: nn.Module, experts: str) -> Iterator[nn.Module]:
    """A copy of a module, whose parameters lie in the same memory, and no fused kernels: they hide what they do.

    ``experts`` is how models of ``transformers`` are to run theirs.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
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

    def double(x: Tensor) -> Tensor:
        return x.detach().to(torch.promote_types(x.dtype, torch.float64)) if numbers(x) else x

    given = arguments(inputs), dict(module.named_parameters()), dict(module.named_buffers())
    inputs, parameters, buffers = tree_map_only(Tensor, double, given)

    def output(c: Any) -> Tensor:
        def scale(x: Tensor) -> Tensor:
            return x * c ** float(k_in) if numbers(x) and k_in else x.clone()

        args, kwargs = tree_map_only(Tensor, scale, inputs)
        scaled = {name: c * x if numbers(x) else x for name, x in parameters.items()}
        as_they_are = {name: x.clone() for name, x in buffers.items()}
        try:
            found = torch.func.functional_call(copied, scaled | as_they_are, args, kwargs)
        except IndexError as error:
            message = f"a token has no row in a table of the model; is the tokenizer its own? ({error})"
            raise ValueError(message) from error
        found = first_output(found)
        return (torch.view_as_real(found) if found.is_complex() else found).reshape(-1)

    # grouped products of experts know neither float64 nor forward derivatives
    with plain(module, experts="eager") as copied:
        yield output


def measure_degree(module: nn.Module, inputs: Any, scales: Sequence[float], *, k_in: Any = 0) -> pd.DataFrame:
    """Degree by numbers: at each scale c by Euler's identity, and from it to the next scale by the log-ratio.

    With D = d/dt f(e^t cθ) at t = 0, a derivative along all parameters and inputs, k-homogeneous f have D = k·f
    (Lemma 9). ``euler`` is the k that fits best, ⟨D, f⟩/⟨f, f⟩, and ``residual`` is ‖D − k·f‖/‖f‖, which is 0 if one k
    fits all outputs; both are NaN where f has no derivative, as √x at 0. ``log_ratio`` is
    ln(‖f(c'θ)‖/‖f(cθ)‖) / ln(c'/c) with the next scale c', NaN at the last one.

    The derivative is asked of the module's own code: where that detaches a value or leaves float64 it may be wrong,
    with a residual of 0. A ``RuntimeWarning`` names the scales at which it differs from the outputs at c·e^±0.001 by
    more than 1 %: believe ``log_ratio`` there. (A bias that opens a unit just there differs, too.) Another one says
    where torch has no derivative, as of BLOOM's GELU: D is a difference of these outputs then, right to about 1e-6.

    Args:
        module: runs in its present mode (dropout must be off), in float64, with its buffers as they are.
        inputs: a tensor, a tuple of them, or by name, as ``{"input_ids": …, "decoder_input_ids": …}`` of an
            encoder–decoder.
        scales: positive numbers c.
        k_in: inputs are multiplied by c^k_in, but for whole numbers.

    What the code reaches past the module, by a closure or a hook over another one, is not scaled.

    Raises:
        ValueError: the output is zero or not finite at some scale; a token that the model does not know.

    >>> measure_degree(nn.Linear(4, 2, bias=False), torch.ones(4), [1, 10], k_in=1)["euler"].round(6).tolist()
    [2.0, 2.0]
    """
    rows: list[tuple[float, float, float, float]] = []
    unlike: list[str] = []
    zero, step = torch.zeros((), dtype=torch.float64), 1e-3
    with scalable(module, inputs, k_in) as output:
        for c in map(float, scales):
            with torch.no_grad():
                low, high = (output(c * math.exp(t)) for t in (-step, step))
            try:
                f, along = torch.func.jvp(lambda t, c=c: output(c * t.exp()), (zero,), (torch.ones_like(zero),))[:2]
            except RuntimeError as error:  # torch's, where it has no forward derivative
                if not re.search("forward AD|functorch|forward-mode", str(error)):
                    raise
                reason = f"D by differences, since torch has no derivative here ({str(error).splitlines()[0]})"
                warnings.warn(reason, RuntimeWarning, stacklevel=2)
                with torch.no_grad():
                    f, along = output(c), (high - low) / (2 * step)
            size = f.norm()
            if not 0 < size < math.inf:
                raise ValueError(f"the output has norm {float(size)} at scale {c}: there is no degree to measure")
            k = along @ f / size**2
            seen = float(high.norm().log() - low.norm().log()) / (2 * step)
            if abs(float(k) - seen) > 0.01 * max(1, abs(seen)):  # NaN, as of √x at 0, is shown in the table
                unlike.append(f"{float(k):.4g} against {seen:.4g} at scale {c:g}")
            rows.append((c, float(k), float((along - k * f).norm() / size), float(size.log())))
    if unlike:
        why = "the derivative is not that of the outputs: euler and the local log-ratio are"
        warnings.warn(f"{why} {', '.join(unlike)}", RuntimeWarning, stacklevel=2)
    table = pd.DataFrame(rows, columns=["scale", "euler", "residual", "log_size"])
    steps = table.log_size.diff() / table.scale.map(math.log).diff()
    return table.drop(columns="log_size").assign(log_ratio=steps.shift(-1))
