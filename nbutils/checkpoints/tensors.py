"""One stored tensor, and whether it is a parameter: by name and shape, or where these do not tell by its values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 15  # values read at once: the float64 copies of two tensors then stay in the processor's cache
FLOATS = ("F64", "F32", "F16", "BF16")
LARGE_NEGATIVE = -1e3  # and below, to −∞: what a mask adds to the scores of the future
_BUFFER = re.compile(  # of transformers' models, and of PyTorch's modules
    r"(?:^|\.)(?:position_ids|token_type_ids|(?:original_)?inv_freq|freqs_cis|masked_bias|rotary_emb\.alpha"
    r"|(?:freqs_|rope_|rotary_)?(?:cos|sin)(?:_sin)?(?:_cached?)?"
    r"|(?:causal|attn|attention)_mask|running_mean|running_var|num_batches_tracked|relative_position_index"
    r"|relative_coords_table|embed_positions\.weights|pos_idx_to_embed|_float_tensor"
    r"|e_score_correction_bias|expert_bias|balancing_biases"  # of routers: moved by a rule, not by a gradient
    r"|final_logits_bias|layer_scalar|slope_rate|(?:query|key|diagonal)_decay|act_fn\.(?:beta|eps)|n(?:um)?_points_scale"
    r"|codebook\.(?:inited|initialized|cluster_size|cluster_usage|embed|embed_avg|embed_sum)"  # moving averages
    r"|(?:weight|bias)_integer|(?:weight|fc|act|norm)_scaling_factor|(?:x|input|output)_(?:min|max)|LayerNorm\.shift"
    r"|global_(?:mean|invstd)|norm_(?:mean|std)|vocoder\.(?:mean|scale))$"  # of the data
)
_MASK = re.compile(r"(?:^|\.)(?:mask|tril|triu)$")  # and not mask_token, which is trained
_POSITIONS = re.compile(r"(?:^|\.)(?:pe|pos(?:ition(?:al)?)?_enc(?:odings?)?|position_embedding)$")


class ReadError(ValueError):
    """A checkpoint that cannot be used; the message names the file and says why."""


def why_left_out(name: str, dtype: str, shape: tuple[int, ...]) -> str | None:
    """Why a stored tensor is no trainable parameter, or None if it is one.

    >>> why_left_out("transformer.h.0.attn.bias", "F32", (1, 1, 1024, 1024))
    'attention mask'
    """
    if name.endswith("n_averaged") and dtype not in FLOATS:
        return "counts averages: the weights beside it are averages (AveragedModel)"
    if dtype not in FLOATS and not dtype.startswith(("F", "C", "torch.complex")):
        return "not floating point"
    square = len(shape) > 1 and shape[-1] == shape[-2]
    if square and (_MASK.search(name) or (name.endswith("bias") and len(shape) == 4 and shape[:2] == (1, 1))):
        return "attention mask"
    return "buffer" if _BUFFER.search(name) else None


class Tensor(NamedTuple):
    """One stored tensor. ``read(start, out)`` fills ``out`` (float64) with its flat values from ``start`` on."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[int, NDArray[np.float64]], None]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def why_constant(name: str, tensor: Tensor) -> str | None:
    """Why the values of a tensor show that it is no parameter, or None: only values tell some buffers from parameters.

    A causal mask ``(…, n, n)`` under any name: 1 and 0, or 0 and a large negative number, with nothing else on either
    side of the diagonal; the identity, which weights may start from, is none. And position sinusoids under a name
    such as ``pe``, which learned ones have too: position 0 has sin 0 and cos 0, exactly.

    >>> def stored(x):
    ...     return Tensor("F64", x.shape, lambda start, out: np.copyto(out, x.ravel()[start : start + len(out)]))
    >>> [why_constant("sa.past", stored(x)) for x in (np.tri(3), np.eye(3))]
    ['attention mask', None]
    """
    if _is_causal(tensor):
        return "attention mask"
    if _POSITIONS.search(name) and len(tensor.shape) > 1 and tensor.size:
        first, d = np.empty(tensor.shape[-1]), tensor.shape[-1]
        tensor.read(0, first)
        odd, later = np.arange(d) % 2, np.arange(d) >= d / 2  # sines and cosines in turn, or one after the other
        if np.array_equal(first, odd) or np.array_equal(first, later):
            return "position sinusoids"
    return None


def _is_causal(tensor: Tensor) -> bool:
    shape = tensor.shape
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 2 or not tensor.size:
        return False
    n, values = shape[-1], np.empty(BLOCK)
    tensor.read(0, values[:2])  # on the diagonal, and above it
    seen, unseen = values[:2].copy()
    if (seen, unseen) not in ((1, 0), (0, 1)) and not (seen == 0 and unseen <= LARGE_NEGATIVE):
        return False  # nearly all weights: two values are read of them
    for start in range(0, tensor.size, BLOCK):
        block = values[: min(BLOCK, tensor.size - start)]
        tensor.read(start, block)
        row, column = np.divmod(np.arange(start, start + len(block)) % (n * n), n)
        if not np.array_equal(block, np.where(column <= row, seen, unseen)):
            return False
    return True
