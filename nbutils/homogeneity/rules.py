"""What the operations of ATen do to degrees: the rows of Table 1, operation by operation.

Importing this module enters them in ``algebra.RULES``. Names are without the underscores around them: ``mul_`` is
``mul`` in place, and ``_softmax`` is ``softmax``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nbutils.homogeneity.algebra import CHOICES, EVERY, MASK_READERS, ZERO, Algebra, Degree, rule

__all__: list[str] = []  # to be found in RULES


def enter(names: str, function: Callable[..., Any]) -> None:
    rule(*names.split())(function)


def first(function: Callable[[Algebra, Any], Any]) -> Callable[..., Any]:
    """A rule in which only the first operand counts."""
    return lambda a, x, *_, **__: function(a, x)


def kept(*kinds: str) -> Callable[..., Any]:
    """Positively homogeneous of degree 1 in the first operand; of what is known of it only these ``kinds`` stay."""

    def function(a: Algebra, x: Any, *_: Any, **__: Any) -> Any:
        k = a.of(x)
        return k if k == EVERY or getattr(k, "kind", "") in kinds else Degree(k)

    return function


def total(a: Algebra, x: Any, *_: Any, **__: Any) -> Any:
    """A sum or largest entry: of what is nowhere negative it vanishes only with all of it."""
    k = a.of(x)
    return Degree(k, kind="size") if getattr(k, "kind", "") in ("even", "size") else k


def view(a: Algebra, x: Any, size: Any) -> Any:
    """Also ``x.view(dtype)``, which reads the bits as other numbers, down to rounding."""
    return a.fail("reads the bits of a value", x) if isinstance(size, torch.dtype) else a.of(x)


def absolute(a: Algebra, x: Any) -> Any:
    k = a.of(x)
    return k if k == EVERY else Degree(k, kind=getattr(k, "kind", "") or "even")


def plus(a: Algebra, x: Any, y: Any, alpha: Any = 1) -> Any:
    """x + alpha · y, or a size plus ε."""
    for size, eps in ((x, y), (y, x)):
        if alpha == 1 and (k := a.epsilon(size, eps)) is not None:
            return k
    return a.add(x, y if alpha == 1 else a.mul(y, alpha))


def reverse_subtract(a: Algebra, x: Any, y: Any, alpha: Any = 1) -> Any:
    return +a.add(a.mul(x, alpha), y)


def truth(a: Algebra, x: Any, y: Any) -> Any:
    """A comparison: the same at every scale if both sides have one degree."""
    a.add(x, y)
    return ZERO


def at_least(a: Algebra, x: Any, y: Any) -> Any:
    """The larger or smaller of two; or a size that is not below ε."""
    return a.same(x, y) if (k := a.epsilon(x, y)) is None else k


def clamp(a: Algebra, x: Any, min: Any = None, max: Any = None) -> Any:
    """Exact if the bounds have the degree of x (0 and ∞ have); asymptotically two finite numbers as bounds rule."""
    if max is None and (k := a.epsilon(x, min)) is not None:
        return k
    finite = all(isinstance(bound, int | float) and math.isfinite(bound) for bound in (min, max))
    if not (a.approximate and finite and a.of(x) > 0):
        return a.same(x, min, max)
    a.leads("asymptotic: saturates")
    return a.same(min, max)


def product(a: Algebra, x: Tensor, dim: int | None = None, keepdim: bool = False, **_: Any) -> Any:
    return a.pow(x, x.numel() if dim is None else x.shape[dim])


def norm(a: Algebra, x: Any, ord: Any = 2, *_: Any, **__: Any) -> Any:
    """Degree 1, but the norm of order 0 counts entries; those of negative order may vanish before x does."""
    return ZERO if ord == 0 else a.size(x) if ord == "fro" or ord > 0 else Degree(a.of(x))


def matrix_plus(a: Algebra, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return a.add(a.mul(bias, beta), a.mul(a.mul(x, y), alpha))


def layer_norm(a: Algebra, x: Any, _shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    return a.affine(a.normalized(x, eps), weight, bias), a.of(x), ZERO if a.of(x) == EVERY else -a.of(x)


def group_norm(a: Algebra, x: Any, weight: Any, bias: Any, _n: Any, _c: Any, _hw: Any, _group: Any, eps: float) -> Any:
    return layer_norm(a, x, (), weight, bias, eps)


def batch_norm(
    a: Algebra, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, _momentum: Any, eps: float
) -> Any:
    """With statistics of the batch it is like layer norm. Running ones are constants: an affine map, ε and all."""
    if training and mean is not None:
        return a.fail("changes its running statistics; call eval()", x)
    if training or mean is None:
        return layer_norm(a, x, (), weight, bias, eps)
    a.constant(var)
    return a.affine(a.add(x, mean), weight, bias), ZERO, ZERO


def embedding(a: Algebra, weight: Any, _index: Any, *_: Any, **__: Any) -> Any:
    return a.of(weight)


ALL_ENTRIES = """alias lift_fresh clone contiguous copy detach expand lift permute reshape reshape_alias squeeze t
    to_copy transpose unsafe_view unsqueeze topk sort flip roll conj resolve_conj movedim"""
enter(ALL_ENTRIES, kept("even", "size", "masked"))
enter(
    """relu leaky_relu positive cumsum trace repeat split split_with_sizes unsafe_split unsafe_split_with_sizes
    unsafe_chunk chunk unbind select slice as_strided narrow diagonal diag_embed diag index index_select gather take
    masked_select tril triu rot90 unfold reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d
    adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_bicubic2d im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle grid_sampler_2d kthvalue mode median
    nanmedian min view_as_real view_as_complex real imag fft_r2c fft_c2c fft_c2r zero""",
    kept("size", "masked"),
)
enter("neg", kept())
enter("sum mean nansum amax max", total)
enter("view", view)
enter("abs", absolute)
enter("sigmoid tanh erf hardsigmoid", first(Algebra.bounded))
enter("softmax safe_softmax", first(lambda a, x: a.bounded(x, "even")))
enter("gelu silu mish softplus elu celu selu hardswish glu log_softmax logsumexp", first(Algebra.far_linear))
enter("constant_pad_nd", lambda a, x, _pad, value=0: a.same(x, value))
enter("log_sigmoid_forward", first(lambda a, x: (a.far_linear(x), ZERO)))
enter("exp expm1 exp2 log log1p log2 log10 sin cos floor ceil round trunc frac", first(Algebra.constant))
enter("hardshrink softshrink fmod remainder floor_divide", lambda a, *xs: a.constant(*xs))
enter("sign sgn argmax argmin argsort isfinite isnan isinf nonzero signbit any all", first(lambda a, x: ZERO))
enter("count_nonzero logical_not logical_and logical_or logical_xor bitwise_not is_nonzero", first(lambda a, x: ZERO))
enter("local_scalar_dense", first(Algebra.of))
enter("sqrt", first(lambda a, x: a.pow(x, 0.5)))
enter("rsqrt", first(lambda a, x: a.pow(x, -0.5)))
enter("reciprocal", first(lambda a, x: a.pow(x, -1)))
enter("square", first(lambda a, x: a.pow(x, 2)))
enter("pow", Algebra.pow)
enter("std", first(Algebra.size))
enter("var", first(lambda a, x: a.size(x, 2)))
enter("var_mean", first(lambda a, x: (a.size(x, 2), a.of(x))))
enter("std_mean", first(lambda a, x: (a.size(x), a.of(x))))
enter("linalg_vector_norm norm", norm)
enter("prod", product)
enter("add", plus)
enter("sub", lambda a, x, y, alpha=1: +a.add(x, a.mul(y, alpha)))
enter("rsub", reverse_subtract)
enter("hypot dist", lambda a, x, y: a.add(x, y))
enter("lerp", lambda a, x, y, weight: a.add(x, a.mul(a.add(x, y), weight)))
enter("addcmul", lambda a, x, y, z, *, value=1: a.add(x, a.mul(a.mul(y, z), value)))
enter("addcdiv", lambda a, x, y, z, *, value=1: a.add(x, a.mul(a.div(y, z), value)))
enter("mul mm bmm mv dot vdot grouped_mm", lambda a, x, y, *_, **__: a.mul(x, y))
enter("addmm baddbmm addmv addr", matrix_plus)
enter("trilinear", lambda a, x, y, z, *_: a.mul(a.mul(x, y), z))
enter("convolution", lambda a, x, weight, bias, *_: a.affine(x, weight, bias))
enter("prelu_kernel", lambda a, x, weight: a.add(x, a.mul(x, weight)))  # max(0, x) + weight · min(0, x)
enter("div", Algebra.div)
enter("eq ne lt le gt ge equal atan2", truth)
enter("maximum fmax clamp_min", at_least)
enter("minimum fmin clamp_max", lambda a, x, y: a.same(x, y))
enter("clamp", clamp)
enter("hardtanh", lambda a, x, min_val=-1, max_val=1: clamp(a, x, min_val, max_val))
enter("threshold", lambda a, x, threshold, value: truth(a, x, threshold) + a.same(x, value))
enter("cat stack", lambda a, xs, *_, **__: a.same(*xs))
enter("where", lambda a, _condition, x, y: a.same(x, y))
enter("masked_fill masked_scatter", lambda a, x, _mask, value: a.same(x, value))
enter("copy fill", lambda a, x, value, *_: a.same(x, value))
enter("index_put index_put_impl", lambda a, x, _indices, values, *_: a.same(x, values))
enter("index_fill index_copy scatter", lambda a, x, _dim, _index, value: a.same(x, value))
enter("index_add", lambda a, x, _dim, _index, value, *, alpha=1: a.add(x, a.mul(value, alpha)))
enter("scatter_add", lambda a, x, _dim, _index, value: a.add(x, value))
enter("slice_scatter select_scatter", lambda a, x, value, *_, **__: a.same(x, value))
enter("native_layer_norm", layer_norm)
enter("native_group_norm", group_norm)
enter("native_batch_norm cudnn_batch_norm", batch_norm)
enter("weight_norm_interface", lambda a, v, g, *_: (a.of(g), a.size(v)))  # g · v/‖v‖
enter("embedding", embedding)
enter("embedding_renorm", lambda a, weight, *_: a.fail("max_norm rescales rows", weight))

PLACES = """eq ne lt le gt ge equal isfinite isnan isinf nonzero signbit any all argmax argmin argsort count_nonzero
    logical_not logical_and logical_or logical_xor is_nonzero local_scalar_dense sort topk kthvalue mode median
    nanmedian max min max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d"""
CHOICES.update(PLACES.split())
READERS = f"add softmax safe_softmax view slice select repeat {ALL_ENTRIES}"
MASK_READERS.update(READERS.split())
