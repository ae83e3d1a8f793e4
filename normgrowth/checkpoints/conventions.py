"""Stored tensors that are no parameters by the conventions of torch and of common code: by name, beside what they
stand, or by their values."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from normgrowth.checkpoints.optimizers import is_state
from normgrowth.checkpoints.tensors import Tensor

_BUFFER = re.compile(
    r"(?:^|\.)(?:position_ids|token_type_ids|(?:original_)?inv_freq|freqs_cis|masked_bias"
    r"|(?:freqs_|rope_|rotary_)?(?:cos|sin)(?:_sin)?(?:_cached?)?"
    r"|(?:causal|attn|attention)_mask|running_mean|running_var|num_batches_tracked|relative_position_index"
    r"|relative_coords_table|embed_positions\.weights|_float_tensor"
    r"|e_score_correction_bias|expert_bias|balancing_biases|final_logits_bias)$"  # of routers: moved by a rule; of BART
)
_COUNTER = re.compile(r"(?:^|[._])(?:version|steps?|num_updates|iterations?|epochs?|count(?:er)?|initted)$")
_MASK = re.compile(r"(?:^|\.)(?:mask|tril|triu)$")  # but not mask_token, which is trained
_POSITIONS = re.compile(r"(?:^|\.)(?:pe|pos(?:ition(?:al)?)?_enc(?:odings?)?|position_embedding)$")
_FAKE = "fake_quant_enabled"
_LEARNED = "learning_enabled"  # of a fake quantisation whose scale is a parameter
_OF_PARAMETRIZATION = re.compile(r"(?:^|\.)parametrizations\.\w+\.\d+\.(?:_u|_v|base)$")
_SUFFIXES = {"_mask": "mask of pruning", "_u": "vector of spectral_norm", "_v": "vector of spectral_norm"}


def by_name(names: Collection[str]) -> dict[str, str]:
    """The names of tensors that are no parameters, whatever their values, and why."""
    measuring = _measuring_modules(names)
    return {name: why for name in names if (why := _by_name(name, names, measuring))}


def reasons(tensors: Mapping[str, Tensor], named: Mapping[str, str]) -> dict[str, str]:
    """The floating tensors that are no parameters, and why.

    Args:
        tensors: the floating tensors of a checkpoint.
        named: what ``by_name`` says of the names of all its tensors.
    """
    out = {}
    for name, tensor in tensors.items():
        if why := named.get(name) or _by_values(name, tensor):
            out[name] = why
    return out


def _measuring_modules(names: Collection[str]) -> tuple[str, ...]:
    """Prefixes of the modules that observe ranges or quantise for training, all of whose tensors are buffers."""
    all_names = set(names)
    prefixes = set()
    for name in names:
        prefix, _, last = name.rpartition(".")
        is_observer = last == "min_val" and f"{prefix}.max_val" in all_names
        is_fake = last == _FAKE and f"{prefix}.{_LEARNED}" not in all_names
        if is_observer or is_fake:
            prefixes.add(f"{prefix}.")
    return tuple(prefixes)


def _by_name(name: str, names: Collection[str], measuring: tuple[str, ...]) -> str | None:
    if measuring and name.startswith(measuring):
        return "of an observer or of fake quantisation"
    if _OF_PARAMETRIZATION.search(name):
        return "buffer of a parametrization"
    for suffix, why in _SUFFIXES.items():
        if name.endswith(suffix) and f"{name.removesuffix(suffix)}_orig" in names:
            return why
    if is_state(name):
        return "state of an optimizer"
    if _BUFFER.search(name):
        return "buffer"
    return None


def _by_values(name: str, tensor: Tensor) -> str | None:
    """Why the values are those of no parameter: a causal mask, sinusoids, or a count in one number.

    A causal mask ``(…, n, n)`` is recognised under any name: 1 and 0, or 0 and a large negative number, with one value
    on each side of the diagonal. The identity, from which weights may start, has zeros on both sides. Sinusoids may be
    the start of an embedding, which is called ``weight``.
    """
    if tensor.size == 1:
        return "buffer" if _COUNTER.search(name) else None
    is_weight = name.endswith("weight")
    if is_weight and not tensor.is_mapped:
        return None  # no look at its values, which would read all of them
    if _is_square(tensor) and (_MASK.search(name) or _is_bias_mask(name, tensor) or _is_causal(tensor)):
        return "attention mask"
    if not is_weight and _is_sinusoids(tensor, is_named=bool(_POSITIONS.search(name))):
        return "position sinusoids"
    return None


def _is_square(tensor: Tensor) -> bool:
    return len(tensor.shape) > 1 and tensor.shape[-1] == tensor.shape[-2] and tensor.size > 0


def _is_bias_mask(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is GPT-2's causal mask: a ``bias`` of shape ``(1, 1, n, n)``."""
    return name.endswith("bias") and len(tensor.shape) == 4 and tensor.shape[:2] == (1, 1)


def _is_causal(tensor: Tensor) -> bool:
    """Whether a square tensor has one value on and below the diagonal and another one above, as a causal mask has."""
    n = tensor.shape[-1]
    if n < 2:
        return False
    seen, unseen = map(float, tensor.first(2))  # on the diagonal, and above it
    is_added_to_scores = seen == 0 and unseen <= -1e3  # the large negative number stands for −∞
    if (seen, unseen) not in ((1, 0), (0, 1)) and not is_added_to_scores:
        return False  # nearly all weights leave here, after two of their values are read
    values = tensor.array()
    return bool((values == np.where(np.tri(n, dtype=bool), values.flat[0], values.flat[1])).all())


def _is_sinusoids(tensor: Tensor, is_named: bool) -> bool:
    """Whether a table ``(…, positions, channels)`` begins with sin 0 and cos 0 and keeps sin² + cos² = 1 everywhere.

    Sines and cosines come in turn, or all of one before all of the other. Of a table whose name speaks of positions the
    beginning is enough.
    """
    if len(tensor.shape) < 2 or tensor.shape[-1] < 2 or tensor.size == 0:
        return False
    channels = tensor.shape[-1]
    channel = np.arange(channels)
    first = tensor.first(channels).astype(np.float64)
    in_turn = channel % 2 == 1
    in_halves = channel >= channels / 2
    for is_cosine in (in_turn, in_halves, ~in_turn, ~in_halves):
        if (first == is_cosine).all():
            return is_named or _is_on_circles(tensor, is_cosine)
    return False


def _is_on_circles(tensor: Tensor, is_cosine: NDArray[np.bool_]) -> bool:
    """Whether sin² + cos² = 1 for every pair in two rows or more."""
    table = tensor.array().astype(np.float64).reshape(-1, len(is_cosine))
    pairs = min(is_cosine.sum(), (~is_cosine).sum())
    squares = table[:, is_cosine][:, :pairs] ** 2 + table[:, ~is_cosine][:, :pairs] ** 2
    tolerance = 0.02 if tensor.dtype in ("bfloat16", "float16") else 1e-4
    return len(table) > 1 and bool(np.abs(squares - 1).max() < tolerance)
