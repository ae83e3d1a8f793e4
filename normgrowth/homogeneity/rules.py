"""What the operations of ATen do to degrees: the rows of Table 1, operation by operation.

A rule takes the ``Algebra``, here ``a``, and the arguments of the operation, and returns the degree of the result, or a
tuple of degrees if there are several results. Operations are named without the underscores around them: ``mul_`` is
``mul`` in place, and ``_softmax`` is ``softmax``. Operations of other libraries than ATen are ``library::operation``.
An operation on values that do not change with scale needs no rule. Where the result has no degree, the rule raises
``NotHomogeneous`` by ``a.fail``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from normgrowth.homogeneity.algebra import EVERY, INFINITE, ZERO, Algebra

__all__ = ["ACCEPT_MASKED_SCORES", "RETURN_INDICES", "RULES"]

RULES: dict[str, Callable[..., Any]] = {}


def register(names: str, rule: Callable[..., Any]) -> None:
    """Make a function the rule of all operations in ``names``, which spaces separate."""
    for name in names.split():
        RULES[name] = rule


def unary(function: Callable[[Algebra, Any], Any]) -> Callable[..., Any]:
    """A rule in which only the first operand counts."""
    return lambda a, x, *_, **__: function(a, x)


def degree_one(a: Algebra, x: Any, *_: Any, **__: Any) -> Any:
    """Positively homogeneous of degree 1 in the first operand."""
    return a.degree_of(x)


def view(a: Algebra, x: Any, size: Any) -> Any:
    """A view of another shape. ``x.view(dtype)`` has this name too and is refused: it reads bits as other numbers."""
    if isinstance(size, torch.dtype):
        return a.fail("reads the bits of a value", x)
    return a.degree_of(x)


def comparison(a: Algebra, x: Any, y: Any) -> Any:
    """A comparison has the same result at every scale if both sides have equal degrees."""
    a.equal_degrees(x, y)
    return ZERO


def finite_bound(bound: Any) -> Any:
    """A bound of ``clamp``; None if it is infinite. The largest number of a type stands for ∞."""
    return None if isinstance(bound, int | float) and abs(bound) >= INFINITE else bound


def clamp(a: Algebra, x: Any, min: Any = None, max: Any = None) -> Any:
    """``clamp`` keeps the degree of x if the bounds have the same one; 0 and ∞ have every degree.

    Between two finite bounds the degree is 0 asymptotically, since the values then lie on the bounds, and so it is
    with one bound if all values lie beyond it. Otherwise see ``Algebra.bounded``.
    """
    lower = finite_bound(min)
    upper = finite_bound(max)
    bounds = [bound for bound in (lower, upper) if bound is not None]
    if bounds and all(_is_finite_constant(a, bound) for bound in bounds) and _lies_on_bounds(a, x, lower, upper):
        return a.saturating(x)
    return a.bounded(x, lower, upper)


def _lies_on_bounds(a: Algebra, x: Any, lower: Any, upper: Any) -> bool:
    """Whether far out all values are on a bound: the leading part is on the side of it, where there is only one."""
    if lower is not None and upper is not None:
        return True
    leading = a.leading_part(x)
    is_beyond = leading > 0 if lower is None else leading < 0
    return a.approximate and a.degree_of(x) > 0 and bool(is_beyond.all())


def _is_finite_constant(a: Algebra, bound: Any) -> bool:
    return bound is not None and a.is_constant(bound) and bool((torch.as_tensor(bound).abs() < INFINITE).all())


def hardtanh(a: Algebra, x: Any, min_val: Any = -1, max_val: Any = 1) -> Any:
    """``clamp`` by two numbers; if just one of them is finite it is refused, unless it is 0: write ``clamp``."""
    bounds = finite_bound(min_val), finite_bound(max_val)
    if all(_is_finite_constant(a, bound) for bound in bounds):
        return clamp(a, x, *bounds)
    return a.equal_degrees(x, *bounds)


def larger_or_smaller(a: Algebra, x: Any, y: Any) -> Any:
    """``maximum`` and ``minimum``, of which a constant is a bound."""
    return a.bounded(y, x) if a.is_constant(x) else a.bounded(x, y)


def layer_norm(a: Algebra, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Degrees of three results: the normalised value and, kept for the gradient, the mean and 1/standard deviation."""
    k = a.degree_of(x)
    if k == EVERY or k < 0 < eps:
        a.fail("ε outgrows the value", x)
    a.add(a.pow(x, 2), eps)
    return a.affine(ZERO, weight, bias), k, -k


def with_factor(a: Algebra, x: Any, factor: Any) -> Any:
    """A term of a sum times its factor, such as ``alpha`` in ``torch.add``; a factor of 1 leaves the term as it is."""
    return x if factor == 1 else a.mul(x, factor)


def add_product(a: Algebra, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """A sum of two terms: beta · bias + alpha · xy."""
    product = a.mul(a.degree_of(x), a.degree_of(y))
    return a.add(with_factor(a, bias, beta), with_factor(a, product, alpha))


def batch_norm(
    a: Algebra, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, _momentum: Any, eps: float
) -> Any:
    """Degrees of three results; running statistics are constants, so the first is an affine map of x, ε included.

    Where it takes statistics of x in eval mode too, as an instance norm does, it is a layer norm over other axes.
    """
    if training and a.training:
        a.fail("takes statistics of the batch; call eval()", x)
    if training:
        return layer_norm(a, x, weight, bias, eps)
    a.arbitrary(var)
    return a.affine(a.add(x, mean), weight, bias), ZERO, ZERO


# --- Table 1, operation by operation ----------------------------------------------------------------------------------

REARRANGEMENTS = """alias lift_fresh clone contiguous detach expand lift permute reshape reshape_alias squeeze t to_copy
    transpose unsafe_view unsqueeze topk sort flip roll movedim"""
register(REARRANGEMENTS, degree_one)
register(
    """abs relu leaky_relu neg sum mean amax amin max min cumsum std repeat split split_with_sizes unbind select slice
    as_strided diagonal index index_select gather tril triu local_scalar_dense zero avg_pool2d avg_pool3d
    adaptive_avg_pool2d max_pool2d_with_indices upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d im2col col2im view_as_real
    view_as_complex conj conj_physical resolve_conj fft_r2c fft_c2c fft_c2r""",
    degree_one,
)
register("view", view)
register("sigmoid tanh erf hardsigmoid softmax safe_softmax", unary(Algebra.saturating))
register("gelu silu mish softplus elu hardswish glu log_softmax logsumexp", unary(Algebra.asymptotically_linear))
register(
    "grid_sampler_2d",  # linear in x; of the grid its nearest neighbours are no continuous function
    lambda a, x, grid, mode, *_: a.mul(a.degree_of(x), a.arbitrary(grid) if mode == 1 else a.continuous(grid)),
)
register("exp sin cos", unary(Algebra.continuous))
register("log floor round", unary(Algebra.arbitrary))
register("sign argmax argmin isnan", unary(lambda a, x: ZERO))
register("sqrt", unary(lambda a, x: a.pow(x, 0.5)))
register("rsqrt", unary(lambda a, x: a.pow(x, -0.5)))
register("reciprocal", unary(lambda a, x: a.pow(x, -1)))
register("square", unary(lambda a, x: a.pow(x, 2)))
register("pow", Algebra.pow)
register("var", unary(lambda a, x: a.pow(x, 2)))
# of order 0 it counts entries, and at a negative order a single 0 makes the norm 0
register("linalg_vector_norm norm", lambda a, x, ord=2, *_, **__: a.degree_of(x) if ord > 0 else a.arbitrary(x))
register("add", lambda a, x, y, alpha=1: a.add(x, with_factor(a, y, alpha)))
# ``add`` gets degrees, not x and y: −3.4e38 is a mask only where it is added
register("sub", lambda a, x, y, alpha=1: a.add(a.degree_of(x), a.degree_of(with_factor(a, y, alpha))))
register("rsub", lambda a, x, y, alpha=1: a.add(a.degree_of(with_factor(a, x, alpha)), a.degree_of(y)))
register("mul dot", Algebra.mul)
register("mm bmm mv vdot", lambda a, x, y: a.mul(a.degree_of(x), a.degree_of(y)))
register("addmm baddbmm addmv", add_product)
register("convolution", lambda a, x, weight, bias, *_: a.affine(x, weight, bias))
register("prelu_kernel", lambda a, x, weight: a.add(x, a.mul(x, weight)))  # max(0, x) + weight · min(0, x)
register("div", Algebra.div)
register("eq ne lt le gt ge", comparison)
register("maximum minimum", larger_or_smaller)
register("clamp clamp_min", clamp)
register("clamp_max", lambda a, x, max: clamp(a, x, None, max))
register("hardtanh", hardtanh)
register("constant_pad_nd", lambda a, x, _pad, value=0: a.side_by_side(x, value))
register("cat stack", lambda a, tensors, *_, **__: a.side_by_side(*tensors))
register("where", lambda a, _condition, x, y: a.side_by_side(x, y))
register("masked_fill", lambda a, x, _mask, value: a.side_by_side(x, value))
register("copy fill", lambda a, x, value, *_: a.equal_degrees(x, value))
register("index_put", lambda a, x, _indices, values, *_: a.side_by_side(x, values))
register("scatter", lambda a, x, _dim, _index, value: a.side_by_side(x, value))
register("index_add scatter_add", lambda a, x, _dim, _index, value: a.add(x, value))
register("native_layer_norm", lambda a, x, _shape, weight, bias, eps: layer_norm(a, x, weight, bias, eps))
register("native_group_norm", lambda a, x, weight, bias, _n, _c, _hw, _group, eps: layer_norm(a, x, weight, bias, eps))
register("native_batch_norm", batch_norm)
register("weight_norm_interface", lambda a, v, g, *_: (a.degree_of(g), a.degree_of(v)))  # g · v/‖v‖
register("embedding", lambda a, weight, _index, *_: a.degree_of(weight))

# Operations that return indices, which do not change with scale although their operands do.
RETURN_INDICES = {"argmax", "argmin", "max", "max_pool2d_with_indices", "min", "sort", "topk"}
# Operations that may lie between the mask and the softmax, where −3.4e38 stands for −∞.
ACCEPT_MASKED_SCORES = set(
    f"add sub amax max cat softmax safe_softmax view slice select repeat {REARRANGEMENTS}".split()
)
