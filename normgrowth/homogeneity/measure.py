"""The measured degree of a network, from its outputs and their derivative as all parameters are scaled together."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from normgrowth.homogeneity.finite import finite_output, has_masked_rows
from normgrowth.precision import float64_throughout

__all__ = [
    "arguments",
    "first_output",
    "is_real_valued",
    "measure_degree",
    "one_minus_cosine",
    "scalable",
    "selection",
    "without_fused_kernels",
]


Selection = Callable[[str], bool] | None  # which parameters are scaled, by name; None for all


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


def selection(module: nn.Module, parameters: Selection) -> Callable[[str], bool]:
    """Which parameters c multiplies, by name.

    Raises:
        ValueError: none of the module's parameters is accepted.
    """
    if parameters is None:
        return lambda name: True
    names = [name for name, _ in module.named_parameters()]
    if not any(map(parameters, names)):
        raise ValueError(f"none of the {len(names)} parameters is selected; their names are like {names[:3]}")
    return parameters


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
def scalable(
    module: nn.Module, inputs: Any, input_degree: Any, parameters: Selection = None
) -> Iterator[Callable[[Any], Tensor]]:
    """Yield the function from the scale c to the module's first output, flattened, in float64.

    Parameters are multiplied by c, or only those whose names ``parameters`` accepts, and inputs by c to the power
    ``input_degree``; indices and booleans are not. Casts to float32 in the module's own code stay in float64, too. The
    module is left unchanged. Complex outputs give two numbers for each entry.

    Raises:
        ValueError: an input is not a tensor, a number, text or None; or, when the function is called, a token is
            unknown to the model.

    >>> with scalable(nn.Linear(2, 1, bias=False), torch.ones(2), input_degree=1) as output:
    ...     round(float(output(3.0) / output(1.0)), 6)  # weights and inputs times 3
    9.0
    """

    arguments_at_1 = tree_map_only(Tensor, lambda x: x.detach().clone(), arguments(inputs))
    selected = selection(module, parameters)

    def in_double(x: Tensor) -> Tensor:
        return x.detach().to(torch.promote_types(x.dtype, torch.float64)) if is_real_valued(x) else x

    def output(c: Any) -> Tensor:
        def scale_input(x: Tensor) -> Tensor:
            return (
                in_double(x) * c ** float(input_degree) if is_real_valued(x) and input_degree else in_double(x).clone()
            )

        args, kwargs = tree_map_only(Tensor, scale_input, arguments_at_1)
        # each call makes the float64 parameters anew: kept beside the scaled ones they would double the memory
        scaled = {
            name: (c * in_double(x) if selected(name) else in_double(x)) if is_real_valued(x) else x
            for name, x in module.named_parameters()
        }
        unscaled = {name: in_double(x).clone() for name, x in module.named_buffers()}
        try:
            with float64_throughout():
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


# Of the difference (f(ce^h) − f(ce^−h)) / 2h. Its error is h²/6 of the third derivative, where a score s in a softmax
# counts with s³, and rounding of about 10⁻¹⁶/h. At 10⁻⁶ scores of 10⁴ err by less than 10⁻⁴. The smaller steps are for
# larger scores, as in deep networks whose heads turn one after the other.
STEPS = (1e-6, 1e-7, 1e-8, 1e-9, 1e-10)
NEXT = 1 + 2**-50  # a scale beside c: a derivative that changes much from one to the other is made of rounding


class _Point(NamedTuple):
    """The measurement at one scale c."""

    euler: float
    residual: float
    log_norm: float  # of the output
    no_derivative: str  # why torch has no derivative there; empty if it has
    contradiction: str  # euler against the power of growth from c·e^−10⁻⁶ to c·e^10⁻⁶; empty if they agree


def measure_degree(
    module: nn.Module, inputs: Any, scales: Sequence[float], *, input_degree: Any = 0, parameters: Selection = None
) -> pd.DataFrame:
    """Measure the degree: at every scale c by Euler's identity, and from c to the next scale by a log-ratio of norms.

    With D = d/dt f(e^t cθ) at t = 0, the derivative along all parameters and inputs, a k-homogeneous f has D = k·f
    (Lemma 9). ``euler`` is the k that fits best, ⟨D, f⟩/⟨f, f⟩, and ``residual`` is ‖D − k·f‖/‖f‖, which is 0 if one k
    fits all outputs. ``log_ratio`` is ln(‖f(c'θ)‖/‖f(cθ)‖) / ln(c'/c) with the next scale c', NaN at the last one.

    Torch takes the derivative of the module's own code. Where that code detaches a value or takes it out of float64
    (by NumPy, or in a tensor of another type), the derivative may be wrong although the residual is 0. A
    ``RuntimeWarning`` names the scales at which it differs from the outputs at c·e^±0.000001 by more than 1 %: trust
    ``log_ratio`` there. (It also differs where a bias switches a unit on at just that scale.) Another
    ``RuntimeWarning`` says where torch has no derivative, as for BLOOM's GELU, where it is not a number, as that of
    √x at 0, or where rounding swamps it, as where scores of 10¹⁶ enter a softmax: there D is a difference of two such
    outputs, accurate to about 1e-6.

    Tensors that the code reaches outside the module, by a closure or a hook on another module, are not scaled.

    Args:
        module: runs in its present mode (dropout must be off), in float64 throughout, with unscaled buffers.
        inputs: a tensor, a tuple of tensors, or tensors by name, as ``{"input_ids": …, "decoder_input_ids": …}`` for
            an encoder–decoder.
        scales: positive numbers c.
        input_degree: inputs are multiplied by c to this power, except for indices and booleans.
        parameters: as in ``degree``.

    Returns:
        A row for each scale, with columns ``scale``, ``euler``, ``residual`` and ``log_ratio``, float64.

    Raises:
        ValueError: the output is zero or not finite at some scale, a number overflows on the way to it (the message
            names the operation and its module), or a token is unknown to the model.

    >>> measure_degree(nn.Linear(4, 2, bias=False), torch.ones(4), [1, 10], input_degree=1)["euler"].round(6).tolist()
    [2.0, 2.0]
    """
    scales = [float(c) for c in scales]
    with scalable(module, inputs, input_degree, parameters) as output:
        points = [_measure(output, finite_output(module, inputs, output, c, math.exp(STEPS[0])), c) for c in scales]
    _warn(scales, points)
    log_ratios = [
        (after.log_norm - point.log_norm) / (math.log(next_scale) - math.log(c))
        for c, next_scale, point, after in zip(scales, scales[1:], points, points[1:], strict=False)
    ]
    return pd.DataFrame(
        {
            "scale": scales,
            "euler": [point.euler for point in points],
            "residual": [point.residual for point in points],
            "log_ratio": [*log_ratios, math.nan][: len(points)],
        },
        dtype=float,
    )


def _measure(output: Callable[[Any], Tensor], above: Tensor, c: float) -> _Point:
    """Measure at the scale c. ``above`` is the output at the scale c·e^STEPS[0]."""
    with torch.no_grad():
        below = output(c * math.exp(-STEPS[0]))
    if not above.any():
        raise ValueError(f"the output has norm 0.0 at scale {c}: there is no degree to measure")
    # so that squares do not overflow; a power of 2 rounds nothing
    unit = 2.0 ** math.frexp(float(above.abs().max()))[1]
    above, below = above / unit, below / unit
    difference = (above - below) / (2 * STEPS[0])
    no_derivative = ""
    agree = True
    try:
        f, derivative = _value_and_derivative(output, c, unit)
        agree = _agree(derivative, difference, f)
        if not agree:
            no_derivative = _lost(output, c, unit, f, derivative)
        if not agree and not no_derivative:
            agree = any(_agree(derivative, _difference(output, c, step, unit), f) for step in STEPS[1:])
    except RuntimeError as error:  # torch raises it where an operation has no forward derivative
        if not re.search("forward AD|functorch|forward-mode", str(error)):
            raise
        no_derivative = str(error).splitlines()[0]
        with torch.no_grad():
            f = output(c) / unit
    if no_derivative:
        derivative = _settled_difference(output, c, unit, f)
    norm = f.norm()
    k = float(derivative @ f / norm**2)
    power = float(above.norm().log() - below.norm().log()) / (2 * STEPS[0])
    contradicted = not agree and not no_derivative and abs(k - power) > 0.01 * max(1, abs(power))
    return _Point(
        euler=k,
        residual=float((derivative - k * f).norm() / norm),
        log_norm=float(norm.log()) + math.log(unit),
        no_derivative=no_derivative,
        contradiction=f"{k:.4g} against {round(power, 7) + 0.0:.4g}" if contradicted else "",
    )


def _value_and_derivative(output: Callable[[Any], Tensor], c: float, unit: float) -> tuple[Tensor, Tensor]:
    """The output at the scale c, and its derivative in the logarithm of the scale, by torch; both divided by a unit."""
    zero = torch.zeros((), dtype=torch.float64)
    f, derivative = torch.func.jvp(lambda t: output(c * t.exp()), (zero,), (torch.ones_like(zero),))[:2]
    return f / unit, derivative / unit


def _lost(output: Callable[[Any], Tensor], c: float, unit: float, f: Tensor, derivative: Tensor) -> str:
    """Why a derivative by torch that is not that of the outputs is lost, if it is by numbers; otherwise empty."""
    if derivative.isnan().any():
        return "it is not a number"
    if not _agree(derivative, _value_and_derivative(output, c * NEXT, unit)[1], f):
        return "rounding swamps it"
    if has_masked_rows(output, c):
        return "rows of attention are masked whole, and their scores are rounded away"
    return ""


def _difference(output: Callable[[Any], Tensor], c: float, step: float, unit: float) -> Tensor:
    """The derivative from the outputs at c·e^step and c·e^−step."""
    with torch.no_grad():
        return (output(c * math.exp(step)) - output(c * math.exp(-step))) / (2 * step * unit)


def _settled_difference(output: Callable[[Any], Tensor], c: float, unit: float, f: Tensor) -> Tensor:
    """The difference of the largest step that agrees with that of the next one; of the first step if no two agree."""
    differences = [_difference(output, c, STEPS[0], unit)]
    for step in STEPS[1:]:
        differences.append(_difference(output, c, step, unit))
        if _agree(differences[-2], differences[-1], f):
            return differences[-2]
    return differences[0]


def _agree(derivative: Tensor, other: Tensor, f: Tensor) -> bool:
    """Whether two derivatives agree to 1 % of the larger one of output and derivative. False for NaN."""
    return bool((derivative - other).norm() <= 0.01 * torch.maximum(f.norm(), other.norm()))


def _warn(scales: Sequence[float], points: Sequence[_Point]) -> None:
    """Warn where torch has no derivative, and where the derivative is not that of the outputs."""
    for cause in {point.no_derivative: None for point in points if point.no_derivative}:
        places = ", ".join(f"{c:g}" for c, point in zip(scales, points, strict=True) if point.no_derivative == cause)
        warnings.warn(
            f"D by differences at scale {places}, since torch has no derivative there ({cause})",
            RuntimeWarning,
            stacklevel=3,
        )
    contradictions = [
        f"{point.contradiction} at scale {c:g}" for c, point in zip(scales, points, strict=True) if point.contradiction
    ]
    if contradictions:
        warnings.warn(
            f"the derivative is not that of the outputs: euler and the local log-ratio are {', '.join(contradictions)}",
            RuntimeWarning,
            stacklevel=3,
        )
