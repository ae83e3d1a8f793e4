"""What the functions, methods and modules of torch do to degrees: the rows of Table 1, operation by operation.

Importing this module enters them in ``algebra.RULES``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nbutils.homogeneity.algebra import EVERY, RULES, ZERO, Algebra, Degree, NoRule, degrees_in, rule

__all__: list[str] = []  # to be found in RULES


def everywhere(names: str, function: Callable[..., Any]) -> None:
    """Enter a rule for the functions of these names in torch and operator, and for the tensor methods."""
    for name in names.split():
        found = [getattr(home, name, None) for home in (torch, F, torch.linalg, torch.special, operator)]
        rule(*filter(callable, found), *([name] if hasattr(Tensor, name) else []))(function)


def modules(names: str, function: Callable[..., Any]) -> None:
    """Enter a rule for classes of torch.nn."""
    rule(*(getattr(nn, name) for name in names.split()))(function)


def first(function: Callable[[Algebra, Any], Any]) -> Callable[..., Any]:
    """A rule in which only the first operand counts."""
    return lambda a, x, *_, **__: function(a, x)


def extreme(a: Algebra, x: Any, other: Any = None, *_: Any, dim: Any = None, **__: Any) -> Any:
    """``max`` and ``min``: of all entries, along a dimension (with their places), or of two values."""
    if dim is not None or isinstance(other, int):
        return a.of(x), ZERO
    return a.same(x, other)


def truth(a: Algebra, x: Any, y: Any) -> Degree:
    """A comparison: the same at every scale if both sides have one degree."""
    a.add(x, y)
    return ZERO


def clamp(a: Algebra, x: Any, min: Any = None, max: Any = None) -> Degree:
    """Exact if the bounds have the degree of x (0 and ∞ have); asymptotically two finite numbers as bounds rule."""
    finite = all(isinstance(bound, int | float) and math.isfinite(bound) for bound in (min, max))
    if not (a.approximate and finite and a.of(x) > 0):
        return a.same(x, min, max)
    a.leads("asymptotic: saturates")
    return a.same(min, max)


def hardtanh(a: Algebra, x: Any, min_val: float = -1, max_val: float = 1, inplace: bool = False) -> Degree:
    return clamp(a, x, min_val, max_val)


def attribute(a: Algebra, x: Any, name: str) -> Any:
    """``x.shape`` and the like, transposes, and the fields of what ``max`` and ``sort`` return."""
    if isinstance(x, tuple) and name in ("values", "indices"):
        return x[name == "indices"]
    if name in ("T", "mT", "H", "mH", "data"):
        return a.of(x)
    if name in ("shape", "ndim", "dtype", "device"):
        return ZERO
    raise NoRule(f"no rule for attribute {name!r} at node {a.frames[-1]['node'].name!r}")


def cast(a: Algebra, x: Any, *args: Any, **kwargs: Any) -> Degree:
    """``to`` and ``type``: whole numbers are rounded ones, and so may be those of another value of degree 0."""
    given = (*args, *kwargs.values())
    kinds = [t for t in given if isinstance(t, torch.dtype)]
    floating = all(t.is_floating_point for t in kinds) and not any(k in (ZERO, EVERY) for k in degrees_in(given))
    return a.of(x) if floating else a.constant(x)


def cast_by_name(a: Algebra, x: Any, dtype: Any, *_: Any, **__: Any) -> Degree:
    """``type`` takes names of types, too, which are not read."""
    return cast(a, x, dtype) if isinstance(dtype, torch.dtype) else unread(a, f"the type {dtype!r}", "a torch.dtype")


def unread(a: Algebra, what: str, instead: str) -> Any:
    raise NoRule(f"{what} at node {a.frames[-1]['node'].name!r} is not read: give {instead}")


def einsum(a: Algebra, equation: Any, *xs: Any) -> Degree:
    """A product. ``xs`` may be a list; and values and lists of subscripts may take turns, without an equation."""
    if not isinstance(equation, str):
        xs = (equation, *xs)[: (len(xs) + 1) // 2 * 2 : 2]  # a last list is that of the result
    return a.mul(*(xs[0] if isinstance(xs[0], tuple | list) else xs))


def dropout(a: Algebra, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Degree:
    """The identity, outside of training."""
    return a.fail("dropout in training mode is random; call eval()", x) if training and p else a.of(x)


def layer_norm(
    a: Algebra, x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Degree:
    return a.affine(a.normalized(x, eps), weight, bias)


def rms_norm(a: Algebra, x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Degree:
    return a.affine(a.normalized(x, eps), weight)


def norm(a: Algebra, x: Any, p: Any = 2, *_: Any, ord: Any = 2, **__: Any) -> Degree:
    """Degree 1, but the norm of order 0 counts entries."""
    if isinstance(p, Fraction) or isinstance(ord, Fraction):
        a.fail("the order of the norm is not a number", x)
    return ZERO if 0 in (p, ord) else a.of(x)


def normalize(a: Algebra, x: Any, p: Any = 2, dim: Any = 1, eps: float = 1e-12, **_: Any) -> Degree:
    """x over its norm; that of order 0 does not change with scale."""
    return a.fail("a norm of order 0 does not normalize", x) if p == 0 else a.normalized(x, eps)


def embedding(
    a: Algebra, index: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Degree:
    return a.of(weight) if max_norm is None else a.fail("max_norm rescales rows", weight)


def attention(
    a: Algebra, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0, *_: Any, **__: Any
) -> Degree:
    """softmax(q·k + mask)·v. A mask that is Boolean, or of 0 and −∞, has ``EVERY`` degree."""
    scores = a.part("scores", "add", a.mul(query, key), float_mask(attn_mask))
    weights = a.part("weights", "softmax", scores)
    return a.mul(dropout(a, weights, dropout_p), value)


def float_mask(mask: Any) -> Any:
    """A mask as it is added to scores: a Boolean one adds 0 and −∞ only."""
    return None if isinstance(mask, Tensor) and mask.dtype == torch.bool else mask


everywhere(  # positively homogeneous of degree 1 in the first operand, and nothing else counts
    """relu leaky_relu abs absolute neg mean sum nanmean amax amin cumsum trace matrix_norm std clone contiguous
    detach float double half cpu cuda reshape view flatten unflatten ravel squeeze
    unsqueeze expand broadcast_to repeat repeat_interleave tile t adjoint transpose permute movedim swapaxes
    swapdims chunk split tensor_split unbind narrow select index_select gather take_along_dim diagonal diag tril triu
    flip roll pixel_shuffle interpolate unfold fold avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d lp_pool1d lp_pool2d invert bitwise_not""",
    first(Algebra.of),
)
everywhere("softmax softmin sigmoid tanh erf softsign hardsigmoid", first(Algebra.bounded))
FAR_LINEAR = "gelu silu mish softplus elu selu celu hardswish glu logsigmoid log_softmax logsumexp tanhshrink"
everywhere(FAR_LINEAR, first(Algebra.far_linear))
everywhere("exp expm1 exp2 log log1p log2 log10 sin cos floor ceil round long int", first(Algebra.constant))
everywhere("sign argmax argmin argsort numel size dim isfinite isnan isinf bool logical_not", first(lambda a, x: ZERO))
everywhere("ones_like new_ones", first(lambda a, x: ZERO))
everywhere("zeros_like new_zeros", first(lambda a, x: EVERY))
everywhere("sort topk kthvalue mode", first(lambda a, x: (a.of(x), ZERO)))
everywhere("median", lambda a, x, dim=None, keepdim=False: a.of(x) if dim is None else (a.of(x), ZERO))
everywhere("sqrt", first(lambda a, x: a.pow(x, 0.5)))
everywhere("rsqrt", first(lambda a, x: a.pow(x, -0.5)))
everywhere("square var", first(lambda a, x: a.pow(x, 2)))
everywhere("reciprocal", first(lambda a, x: a.pow(x, -1)))
everywhere("add sub subtract", lambda a, x, y, alpha=1: a.add(x, a.mul(y, alpha)))
everywhere("maximum minimum fmax fmin", Algebra.same)
everywhere("eq ne lt le gt ge", truth)
everywhere("mul multiply matmul mm bmm dot mv outer inner", Algebra.mul)
everywhere("div divide truediv true_divide", Algebra.div)
everywhere("pow float_power", Algebra.pow)
everywhere("floordiv floor_divide mod remainder", Algebra.constant)
everywhere("einsum", einsum)
everywhere("cat concat concatenate stack hstack vstack", first(Algebra.of))
everywhere("masked_fill", lambda a, x, mask, value: a.same(x, value))
everywhere("where", lambda a, condition, x, y: a.same(x, y))
everywhere("pad", lambda a, x, pad, mode="constant", value=None: a.same(x, value))
everywhere("linear conv1d conv2d conv3d", lambda a, x, weight, bias=None, *_, **__: a.affine(x, weight, bias))
everywhere("conv_transpose1d conv_transpose2d conv_transpose3d", RULES[F.conv1d])
everywhere("bilinear", lambda a, x, y, weight, bias=None: a.affine(a.mul(x, y), weight, bias))
everywhere("addmm baddbmm addmv", lambda a, bias, x, y, beta=1, alpha=1: a.add(a.mul(bias, beta), a.mul(x, y, alpha)))
everywhere("embedding", embedding)
everywhere("prelu", lambda a, x, weight: a.add(x, a.mul(x, weight)))  # max(0, x) + weight · min(0, x)
everywhere("layer_norm", layer_norm)
everywhere("rms_norm", rms_norm)
everywhere("norm vector_norm", norm)
everywhere("normalize", normalize)
everywhere("cosine_similarity", lambda a, x, y, *_, eps=1e-8, **__: a.mul(a.normalized(x, eps), a.normalized(y, eps)))
everywhere("max min", extreme)
everywhere("clamp clip", clamp)
everywhere("hardtanh", hardtanh)
everywhere("relu6", lambda a, x, inplace=False: clamp(a, x, 0, 6))
everywhere("to", cast)
everywhere("type", cast_by_name)
everywhere("view_as reshape_as expand_as", lambda a, x, other: a.of(x))
everywhere("dropout", dropout)
everywhere("scaled_dot_product_attention", attention)
rule(getattr)(attribute)
rule(operator.getitem)(lambda a, x, index: x[index] if isinstance(x, tuple) else a.of(x))

# --- Rules of modules -------------------------------------------------------------------------------------------------

modules(
    """Identity ReLU LeakyReLU Flatten Unflatten Fold Unfold PixelShuffle Upsample AvgPool1d AvgPool2d AvgPool3d
    LPPool1d LPPool2d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d ZeroPad1d ZeroPad2d ReflectionPad1d
    ReflectionPad2d ReplicationPad1d ReplicationPad2d""",
    lambda a, m, x: a.of(x),
)
modules(
    "MaxPool1d MaxPool2d MaxPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d",
    lambda a, m, x: (a.of(x), ZERO) if m.return_indices else a.of(x),
)
modules("Softmax Softmin Softmax2d Sigmoid Tanh Softsign Hardsigmoid", lambda a, m, x: a.bounded(x))
modules("Hardtanh ReLU6", lambda a, m, x: clamp(a, x, m.min_val, m.max_val))
modules("GELU SiLU Mish Softplus ELU SELU CELU Hardswish GLU", lambda a, m, x: a.far_linear(x))
modules("LogSigmoid LogSoftmax Tanhshrink", lambda a, m, x: a.far_linear(x))
modules("Linear Conv1d Conv2d Conv3d", lambda a, m, x: a.affine(x, m.weight, m.bias))
modules("ConvTranspose1d ConvTranspose2d ConvTranspose3d", lambda a, m, x, *_: a.affine(x, m.weight, m.bias))
modules("Bilinear", lambda a, m, x, y: a.affine(a.mul(x, y), m.weight, m.bias))
modules("PReLU", lambda a, m, x: a.add(x, a.mul(x, m.weight)))
modules("LayerNorm GroupNorm", lambda a, m, x: a.affine(a.normalized(x, m.eps), m.weight, m.bias))
modules("RMSNorm", lambda a, m, x: a.affine(a.normalized(x, m.eps), m.weight))
modules("Dropout Dropout1d Dropout2d Dropout3d AlphaDropout", lambda a, m, x: dropout(a, x, m.p, m.training))
modules("Embedding", lambda a, m, x: a.of(m.weight) if m.max_norm is None else a.fail("max_norm rescales rows", x))


@rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def batch_norm(a: Algebra, m: Any, x: Any) -> Degree:
    """With statistics of the batch it is like layer norm. Running ones are constants: an affine map, ε and all."""
    if m.training or m.running_mean is None:
        return a.affine(a.normalized(x, m.eps), m.weight, m.bias)
    return a.affine(a.part("running_mean", "sub", x, m.running_mean), m.weight, m.bias)


@rule(nn.MultiheadAttention)
def multihead(
    a: Algebra, m: Any, q: Any, k: Any, v: Any,
    key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None, *_: Any,
) -> tuple[Degree, Degree]:  # fmt: skip
    """Three projections, attention, a projection. Returns the degrees of the output and of the attention weights."""
    weights = [m.in_proj_weight] * 3 if m._qkv_same_embed_dim else [m.q_proj_weight, m.k_proj_weight, m.v_proj_weight]
    projected = zip("qkv", (q, k, v), weights, strict=True)
    q, k, v = (a.part(f"in_proj.{name}", F.linear, x, weight, m.in_proj_bias) for name, x, weight in projected)
    k = a.part("bias_k", torch.cat, [k, m.bias_k]) if m.bias_k is not None else k
    v = a.part("bias_v", torch.cat, [v, m.bias_v]) if m.bias_v is not None else v
    mask = a.same(float_mask(attn_mask), float_mask(key_padding_mask))
    heads = a.part("attention", F.scaled_dot_product_attention, q, k, v, mask, m.dropout if m.training else 0)
    return a.part("out_proj", m.out_proj, heads), ZERO if need_weights else EVERY


@rule(nn.TransformerEncoderLayer)
def encoder_layer(a: Algebra, m: Any, x: Any, src_mask: Any = None, padding: Any = None, *_: Any) -> Degree:
    """Two residual blocks, each with its norm before (``norm_first``) or after the sum."""

    def attend(h: Degree) -> Degree:
        h = a.part("self_attn", m.self_attn, h, h, h, key_padding_mask=padding, attn_mask=src_mask)[0]
        return a.part("dropout1", m.dropout1, h)

    def feed(h: Degree) -> Degree:
        h = a.part("activation", m.activation, a.part("linear1", m.linear1, h))
        return a.part("dropout2", m.dropout2, a.part("linear2", m.linear2, a.part("dropout", m.dropout, h)))

    for i, block in (1, attend), (2, feed):
        norm = m.norm1 if i == 1 else m.norm2
        inner = block(a.part(f"norm{i}", norm, x) if m.norm_first else x)
        x = a.part(f"residual{i}", torch.add, x, inner)
        x = x if m.norm_first else a.part(f"norm{i}", norm, x)
    return x


@rule(nn.TransformerEncoder)
def encoder(a: Algebra, m: Any, x: Any, mask: Any = None, padding: Any = None, *_: Any) -> Degree:
    for i, layer in enumerate(m.layers):
        x = a.part(f"layers.{i}", layer, x, mask, padding)
    return x if m.norm is None else a.part("norm", m.norm, x)
