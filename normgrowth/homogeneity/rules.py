"""What the operations of ATen do to degrees: the rows of Table 1, operation by operation.

A rule takes the ``Algebra`` and the arguments of the operation, and returns the degree of the result, or one for each.
Names are without the underscores around them: ``mul_`` is ``mul`` in place, and ``_softmax`` is ``softmax``. Those of
another library than ATen are ``library::operation``. Values that do not change with scale need no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from normgrowth.homogeneity.algebra import EVERY, INFINITE, ZERO, Algebra, kind, known

__all__ = ["MASK_READERS", "PLACES", "RULES"]

RULES: dict[str, Callable[..., Any]] = {}


def enter(names: str, function: Callable[..., Any]) -> None:
    RULES.update(dict.fromkeys(names.split(), function))


def first(function: Callable[[Algebra, Any], Any]) -> Callable[..., Any]:
    """A rule in which only the first operand counts."""
    return lambda a, x, *_, **__: function(a, x)


def kept(*kinds: str) -> Callable[..., Any]:
    """Positively homogeneous of degree 1 in the first operand; of what is known of it only these ``kinds`` stay."""

    def function(a: Algebra, x: Any, *_: Any, **__: Any) -> Any:
        k = a.of(x)
        return known(k, kind(k) if kind(k) in kinds else "")

    return function


def total(a: Algebra, x: Any, *_: Any, **__: Any) -> Any:
    """A sum or largest entry: of what is nowhere negative it vanishes only with all of it."""
    k = a.of(x)
    return known(k, "size" if kind(k) in ("even", "size") else "")


def view(a: Algebra, x: Any, size: Any) -> Any:
    """Also ``x.view(dtype)``, which reads the bits as other numbers, down to rounding."""
    return a.fail("reads the bits of a value", x) if isinstance(size, torch.dtype) else a.of(x)


def truth(a: Algebra, x: Any, y: Any) -> Any:
    """A comparison: the same at every scale if both sides have one degree."""
    a.same(x, y)
    return ZERO


def clamp(a: Algebra, x: Any, min: Any = None, max: Any = None) -> Any:
    """Exact if the bounds have the degree of x (0 and ∞ have, and the largest number of a type stands for ∞);
    asymptotically two finite numbers as bounds rule."""
    min, max = (None if isinstance(x, int | float) and abs(x) >= INFINITE else x for x in (min, max))
    if max is None and a.epsilon(x, min):
        return a.add(x, min)
    if all(isinstance(bound, int | float) and math.isfinite(bound) for bound in (min, max)):
        return a.bounded(x)
    return a.same(x, min, max)


def layer_norm(a: Algebra, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """The value, and what torch keeps for the gradient: the mean, and one over the deviation."""
    k = a.of(x)
    if k == EVERY or k < 0 < eps:
        a.fail("ε outgrows the value", x)
    a.add(a.size(x, 2), eps)
    return a.affine(ZERO, weight, bias), k, -k


def times(a: Algebra, x: Any, factor: Any) -> Any:
    """A term of a sum, with torch's factor on it."""
    return x if factor == 1 else a.mul(x, factor)


def product_plus(a: Algebra, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """A sum of two terms: beta bias + alpha xy."""
    return a.add(times(a, bias, beta), times(a, a.mul(a.of(x), a.of(y)), alpha))


def batch_norm(
    a: Algebra, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, _momentum: Any, _eps: float
) -> Any:
    """Running statistics are constants: an affine map, ε and all."""
    if training:
        a.fail("takes statistics of the batch; call eval()", x)
    a.constant(var)
    return a.affine(a.add(x, mean), weight, bias), ZERO, ZERO


ALL_ENTRIES = """alias lift_fresh clone contiguous detach expand lift permute reshape reshape_alias squeeze t to_copy
    transpose unsafe_view unsqueeze topk sort flip roll movedim"""
enter(ALL_ENTRIES, kept("even", "size"))
enter(
    """relu leaky_relu cumsum repeat split split_with_sizes unbind select slice as_strided diagonal index index_select
    gather tril triu min local_scalar_dense avg_pool2d adaptive_avg_pool2d max_pool2d_with_indices upsample_nearest1d
    upsample_nearest2d upsample_bilinear2d im2col view_as_real view_as_complex zero""",
    kept("size"),
)
enter("neg fft_r2c fft_c2c", kept())
enter("sum mean amax max", total)
enter("view", view)
enter("abs", lambda a, x: known(a.of(x), kind(a.of(x)) or "even"))
enter("sigmoid tanh erf", first(Algebra.bounded))
enter("softmax safe_softmax", first(lambda a, x: a.bounded(x, "even")))
enter("gelu silu mish softplus elu hardswish glu log_softmax logsumexp", first(Algebra.far_linear))
enter("exp log sin cos floor round", first(Algebra.constant))
enter("sign argmax argmin isnan", first(lambda a, x: ZERO))
enter("sqrt", first(lambda a, x: a.pow(x, 0.5)))
enter("rsqrt", first(lambda a, x: a.pow(x, -0.5)))
enter("reciprocal", first(lambda a, x: a.pow(x, -1)))
enter("square", first(lambda a, x: a.pow(x, 2)))
enter("pow", Algebra.pow)
enter("std", first(Algebra.size))
enter("var", first(lambda a, x: a.size(x, 2)))
# the norm of order 0 counts entries, and those of negative order may vanish before x does
enter("linalg_vector_norm norm", lambda a, x, ord=2, *_, **__: a.size(x) if ord > 0 else a.constant(x))
enter("add", lambda a, x, y, alpha=1: a.add(x, times(a, y, alpha)))
enter("sub", lambda a, x, y, alpha=1: a.add(a.of(x), a.of(times(a, y, alpha))))  # a size minus ε is none
enter("rsub", lambda a, x, y, alpha=1: a.add(a.of(times(a, x, alpha)), a.of(y)))
enter("mul dot", Algebra.mul)
enter("mm bmm mv vdot", lambda a, x, y: a.mul(a.of(x), a.of(y)))
enter("addmm baddbmm addmv", product_plus)
enter("convolution", lambda a, x, weight, bias, *_: a.affine(x, weight, bias))
enter("prelu_kernel", lambda a, x, weight: a.add(x, a.mul(x, weight)))  # max(0, x) + weight · min(0, x)
enter("div", Algebra.div)
enter("eq ne lt le gt ge", truth)
enter("maximum minimum", lambda a, x, y: a.same(x, y))
enter("clamp clamp_min", clamp)
enter("hardtanh", lambda a, x, min_val=-1, max_val=1: clamp(a, x, min_val, max_val))
enter("constant_pad_nd", lambda a, x, _pad, value=0: a.same(x, value))
enter("cat stack", lambda a, xs, *_, **__: a.same(*xs))
enter("where", lambda a, _condition, x, y: a.same(x, y))
enter("masked_fill", lambda a, x, _mask, value: a.same(x, value))
enter("copy fill", lambda a, x, value, *_: a.same(x, value))
enter("index_put", lambda a, x, _indices, values, *_: a.same(x, values))
enter("scatter", lambda a, x, _dim, _index, value: a.same(x, value))
enter("index_add scatter_add", lambda a, x, _dim, _index, value: a.add(x, value))
enter("native_layer_norm", lambda a, x, _shape, weight, bias, eps: layer_norm(a, x, weight, bias, eps))
enter("native_group_norm", lambda a, x, weight, bias, _n, _c, _hw, _group, eps: layer_norm(a, x, weight, bias, eps))
enter("native_batch_norm", batch_norm)
enter("weight_norm_interface", lambda a, v, g, *_: (a.of(g), a.size(v)))  # g · v/‖v‖
enter("embedding", lambda a, weight, _index, *_: a.of(weight))

PLACES = {"argmax", "argmin", "max", "max_pool2d_with_indices", "min", "sort", "topk"}  # do not change with scale
MASK_READERS = set(f"add softmax safe_softmax view slice select repeat {ALL_ENTRIES}".split())  # go on with scores
