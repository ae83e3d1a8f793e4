"""The measured degree of a network, from its outputs and their derivative as all parameters are scaled together."""

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

__all__ = [
    "arguments",
    "first_output",
    "is_real_valued",
    "measure_degree",
    "one_minus_cosine",
    "scalable",
    "without_fused_kernels",
]


def one_minus_cosine(a: Tensor, b: Tensor, dim: int = -1) -> Tensor:
    """1 − cos of the angle between a and b, float64, as ½‖â − b̂‖²: accurate down to 1e-32, not only to 1e-16.

    Shapes are those of a and b, broadcast, without the axis ``dim``. The result is NaN where a or b is zero.

    >>> a, b = torch.tensor([[1.0, 0.0], [1.0, 1e-10]], dtype=torch.float64)
    >>> f"{one_minus_cosine(a, b).item():.3g}"  # ½ · 10⁻²⁰
    '5e-21'
    """

    def unit(x: Tensor) -> Tensor:
        bounded = x.double() / x.double().abs().amax(dim, keepdim=True)  # so that squares do not overflow
        return bounded / bounded.norm(dim=dim, keepdim=True)

    return 0.5 * (unit(a) - unit(b)).square().sum(dim)


def first_output(outputs: Any) -> Any:
    """The first tensor that a module returns: attention, for example, returns its output and its weights."""
    while isinstance(outputs, tuple | list | Mapping):
        outputs = next(iter(outputs.values() if isinstance(outputs, Mapping) else outputs))
    return outputs


def is_real_valued(x: Tensor) -> bool:
    """Whether a tensor has real or complex values, which can be scaled: not indices or booleans."""
    return x.is_floating_point() or x.is_complex()


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a module, from one input, a tuple of inputs, or inputs by name.

    Raises:
        ValueError: an input is not a tensor, a number, text or None. Tensors inside another object, such as a cache,
            have no known degree, and the pass may change them.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    elif isinstance(inputs, tuple | list):
        args = tuple(inputs)
    else:
        args = (inputs,)
    for x in tree_leaves((args, kwargs)):
        if not isinstance(x, Tensor | int | float | str | None):
            raise ValueError(f"an input is of type {type(x).__name__}: give tensors, whose degree can be known")
    return args, kwargs


@contextmanager
def without_fused_kernels(module: nn.Module, experts: str) -> Iterator[nn.Module]:
    """Yield a copy of a module that shares its parameters' memory, with fused kernels off, since they hide operations.

    ``experts`` names the implementation of mixtures of experts that models of ``transformers`` use in the copy.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    for submodule in module.modules():
        for x in vars(submodule).values():
            # Torch cannot copy a tensor together with its graph, as an earlier forward pass may have stored one.
            if isinstance(x, Tensor) and not x.is_leaf:
                memo[id(x)] = x.detach().clone()
    copied = copy.deepcopy(module, memo)
    if getattr(getattr(copied, "config", None), "_experts_implementation", None) is not None:
        copied.set_experts_implementation(experts)  # type: ignore[operator]
    fastpath_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield copied
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath_enabled)


@contextmanager
def scalable(module: nn.Module, inputs: Any, input_degree: Any) -> Iterator[Callable[[Any], Tensor]]:
    """Yield the function from the scale c to the module's first output, flattened, in float64.

    Parameters are multiplied by c and inputs by c to the power ``input_degree``; indices and booleans are not. The
    module is left unchanged. Complex outputs give two numbers for each entry.

    Raises:
        ValueError: an input is not a tensor, a number, text or None; or, when the function is called, a token is
            unknown to the model.

    >>> with scalable(nn.Linear(2, 1, bias=False), torch.ones(2), input_degree=1) as output:
    ...     round(float(output(3.0) / output(1.0)), 6)  # weights and inputs times 3
    9.0
    """

    def in_double(x: Tensor) -> Tensor:
        return x.detach().to(torch.promote_types(x.dtype, torch.float64)) if is_real_valued(x) else x

    arguments_at_1 = tree_map_only(Tensor, in_double, arguments(inputs))
    parameters = tree_map_only(Tensor, in_double, dict(module.named_parameters()))
    buffers = tree_map_only(Tensor, in_double, dict(module.named_buffers()))

    def output(c: Any) -> Tensor:
        def scale_input(x: Tensor) -> Tensor:
            return x * c ** float(input_degree) if is_real_valued(x) and input_degree else x.clone()

        args, kwargs = tree_map_only(Tensor, scale_input, arguments_at_1)
        scaled = {name: c * x if is_real_valued(x) else x for name, x in parameters.items()}
        unscaled = {name: x.clone() for name, x in buffers.items()}
        try:
            outputs = torch.func.functional_call(copied, scaled | unscaled, args, kwargs)
        except IndexError as error:
            raise ValueError(
                f"a token has no row in a table of the model: is the tokenizer that of this model? ({error})"
            ) from error
        value = first_output(outputs)
        return (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)

    # "eager", since the grouped products of experts support neither float64 nor forward derivatives.
    with without_fused_kernels(module, experts="eager") as copied:
        yield output


def measure_degree(module: nn.Module, inputs: Any, scales: Sequence[float], *, input_degree: Any = 0) -> pd.DataFrame:
    """Measure the degree: at every scale c by Euler's identity, and from c to the next scale by a log-ratio of norms.

    With D = d/dt f(e^t cθ) at t = 0, the derivative along all parameters and inputs, a k-homogeneous f has D = k·f
    (Lemma 9). ``euler`` is the k that fits best, ⟨D, f⟩/⟨f, f⟩, and ``residual`` is ‖D − k·f‖/‖f‖, which is 0 if one k
    fits all outputs. Both are NaN where f has no derivative, as √x at 0. ``log_ratio`` is
    ln(‖f(c'θ)‖/‖f(cθ)‖) / ln(c'/c) with the next scale c', NaN at the last one.

    Torch takes the derivative of the module's own code. Where that code detaches a value or leaves float64, the
    derivative may be wrong although the residual is 0. A ``RuntimeWarning`` names the scales at which it differs from
    the outputs at c·e^±0.001 by more than 1 %: trust ``log_ratio`` there. (It also differs where a bias switches a
    unit on at just that scale.) Another ``RuntimeWarning`` says where torch has no derivative, as for BLOOM's GELU:
    there D is a difference of these two outputs, accurate to about 1e-6.

    Tensors that the code reaches outside the module, by a closure or a hook on another module, are not scaled.

    Args:
        module: runs in its present mode (dropout must be off), in float64, with unscaled buffers.
        inputs: a tensor, a tuple of tensors, or tensors by name, as ``{"input_ids": …, "decoder_input_ids": …}`` for
            an encoder–decoder.
        scales: positive numbers c.
        input_degree: inputs are multiplied by c to this power, except for indices and booleans.

    Returns:
        A row for each scale, with columns ``scale``, ``euler``, ``residual`` and ``log_ratio``, float64.

    Raises:
        ValueError: the output is zero or not finite at some scale, or a token is unknown to the model.

    >>> measure_degree(nn.Linear(4, 2, bias=False), torch.ones(4), [1, 10], input_degree=1)["euler"].round(6).tolist()
    [2.0, 2.0]
    """
    rows: list[tuple[float, float, float, float]] = []
    disagreements: list[str] = []
    zero = torch.zeros((), dtype=torch.float64)
    step = 1e-3
    with scalable(module, inputs, input_degree) as output:
        for c in map(float, scales):
            with torch.no_grad():
                below = output(c * math.exp(-step))
                above = output(c * math.exp(step))

            def along_ray(t: Tensor, c: float = c) -> Tensor:
                return output(c * t.exp())

            try:
                f, derivative = torch.func.jvp(along_ray, (zero,), (torch.ones_like(zero),))[:2]
            except RuntimeError as error:  # torch raises it where an operation has no forward derivative
                if not re.search("forward AD|functorch|forward-mode", str(error)):
                    raise
                cause = str(error).splitlines()[0]
                warnings.warn(
                    f"D by differences, since torch has no derivative here ({cause})", RuntimeWarning, stacklevel=2
                )
                with torch.no_grad():
                    f = output(c)
                    derivative = (above - below) / (2 * step)
            norm = f.norm()
            if not 0 < norm < math.inf:
                raise ValueError(f"the output has norm {float(norm)} at scale {c}: there is no degree to measure")
            k = derivative @ f / norm**2
            residual = (derivative - k * f).norm() / norm
            rows.append((c, float(k), float(residual), float(norm.log())))
            local_log_ratio = float(above.norm().log() - below.norm().log()) / (2 * step)
            if abs(float(k) - local_log_ratio) > 0.01 * max(1, abs(local_log_ratio)):  # false for NaN, as of √x at 0
                disagreements.append(f"{float(k):.4g} against {local_log_ratio:.4g} at scale {c:g}")
    if disagreements:
        warnings.warn(
            f"the derivative is not that of the outputs: euler and the local log-ratio are {', '.join(disagreements)}",
            RuntimeWarning,
            stacklevel=2,
        )
    table = pd.DataFrame(rows, columns=["scale", "euler", "residual", "log_norm"])
    log_ratio = table.log_norm.diff() / table.scale.map(math.log).diff()
    return table.drop(columns="log_norm").assign(log_ratio=log_ratio.shift(-1))
