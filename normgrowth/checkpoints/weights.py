"""The weights of one checkpoint: tensors of torch, mapped from its files. No model is built; stored code never runs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from normgrowth.checkpoints import layouts, pickles
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.layers import originals_first

BLOCK = 1 << 15  # values converted to float64 at a time: blocks of two tensors fit into the processor's cache
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MERGE = "merge it into its model first (merge_and_unload)"

_WRAPPER = re.compile(
    r"^(?:module\.)+|(?:(?<=^)|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
OTHER_FILES = re.compile(
    r"^(?!model_optim_rng)(?:.*)(?:optim|scheduler|training_args|rng_state|random_states|scaler|adapter)"
    r"|^norms\.pt$",  # of our callbacks
    re.I,
)
_ADAPTER = re.compile(  # of PEFT
    r"(?:^|\.)(?:base_layer|modules_to_save|lora_\w+|ia3_l|vera_\w+|hada_\w+|lokr_\w+|b?oft_[Rs]|ranknum|trainable_tokens_"
    r"\w+)(?:\.|$)"
)
_AVERAGE = re.compile(r"^(?:module\.|model\.)*(?:ema|ema_model|model_ema|averaged_model|swa_model)\.(?:module\.)*")
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
_MASK = re.compile(r"(?:^|\.)(?:mask|tril|triu)$")  # but not mask_token, which is trained
_POSITIONS = re.compile(r"(?:^|\.)(?:pe|pos(?:ition(?:al)?)?_enc(?:odings?)?|position_embedding)$")


@dataclass
class Weights:
    """Parameters of one checkpoint, by name without wrappers' prefixes, and stored tensors left out, with reasons."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.parameters.items()}


def read(place: Path) -> Weights:
    """The weights of a checkpoint, which is one file or a folder with one or several files.

    Raises:
        ReadError: no weights are there, or not all of them; they cannot be read, or not safely; or a tensor may be a
            weight or not.
    """
    weights = Weights()
    path = place  # the file that an error names
    try:
        for path in _files(place):
            stored, left_out = _stored(path)
            weights.left_out |= left_out
            # Names by storage, of this file alone: a later file may use the storage of one that is closed again.
            names: dict[object, str] = {}
            for name in sorted(stored, key=originals_first):
                _add(weights, _WRAPPER.sub("", name), stored[name].detach(), names)
        path = place
        _leave_out_averages(weights)
        if not weights.parameters:
            raise ReadError("holds no parameters")
        if why := layouts.why_empty(weights.shapes):
            raise ReadError(why)
    except ReadError as error:
        raise ReadError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise ReadError(f"{error.filename or path}: {error.strerror or error}") from error
    return weights


def _stored(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors in a file, and which others in it are left out and why."""
    with path.open("rb") as file:
        if file.read(8) == b"version ":
            raise ReadError("a Git LFS pointer, not the weights (git lfs pull fetches them)")
    if path.suffix != ".safetensors":
        return pickles.state_dict(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, {}  # noqa: SIM118
    except SafetensorError as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise ReadError(f"cut short, damaged, or no safetensors file ({why})") from None
    except RuntimeError as error:  # of torch: one file may not be larger than memory and swap together
        raise ReadError(f"cannot be mapped; save it in shards (max_shard_size=…): {error}") from error


def _add(weights: Weights, name: str, tensor: Tensor, names: dict[object, str]) -> None:
    """Add a stored tensor to ``weights``, as a parameter or as left out.

    ``names`` has the first name of each storage in the file: a second tensor in the same storage is tied to it.
    """
    _refuse_unusable(weights, name, tensor)
    original = name
    if tensor.numel():
        original = names.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
    if original != name:
        weights.left_out[name] = f"tied to {original}"
    elif why := why_left_out(name, tensor):
        weights.left_out[name] = why
    else:
        weights.parameters[name] = tensor


def _refuse_unusable(weights: Weights, name: str, tensor: Tensor) -> None:
    """Raise ReadError for a tensor that cannot be read, occurs twice, or belongs to an adapter."""
    if why := _why_unreadable(tensor):
        raise ReadError(f"tensor {name} {why}")
    if name in weights.parameters or name in weights.left_out:
        raise ReadError(f"tensor {name} is there twice")
    if _ADAPTER.search(name):
        raise ReadError(f"{name} belongs to an adapter that is not merged: {MERGE}")


def _why_unreadable(tensor: Tensor) -> str | None:
    if tensor.is_quantized:
        return f"is {tensor.dtype}: a quantised model; its norm cannot be read from the file"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"is sparse or nested ({tensor.layout}); save it dense, with to_dense() or to_padded_tensor()"
    if type(tensor) is not torch.Tensor:
        return f"is a {type(tensor).__name__}, in parts or packed; save it whole, with full_tensor() or dequantize()"
    return "has no values: it is on the device meta" if tensor.is_meta else None


def why_left_out(name: str, tensor: Tensor) -> str | None:
    """Why a stored tensor is not a trainable parameter, from its name, dtype, shape and values; None for a parameter.

    A causal mask ``(…, n, n)`` is recognised under any name: 1 and 0, or 0 and a large negative number, with one value
    on each side of the diagonal. The identity, from which weights may start, has zeros on both sides. Position
    sinusoids have names such as ``pe``, as learned positions may; they are recognised by position 0, which has sin 0
    and cos 0 exactly.

    Raises:
        ReadError: the tensor may be a parameter, and its dtype is unknown or that of a quantised model.
    """
    dtype = tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return _why_not_floating(name, dtype)
    if _is_square(tensor) and (_MASK.search(name) or _is_bias_mask(name, tensor)):
        return "attention mask"
    if _BUFFER.search(name):
        return "buffer"
    if dtype not in FLOATS:
        raise ReadError(f"tensor {name} has dtype {dtype}; known are {', '.join(map(str, FLOATS))}")
    if _is_square(tensor) and _is_causal(tensor):
        return "attention mask"
    if _POSITIONS.search(name) and _starts_like_sinusoids(tensor):
        return "position sinusoids"
    return None


def _why_not_floating(name: str, dtype: torch.dtype) -> str:
    if dtype != torch.bool and name.endswith(("weight", "weight_packed")):
        raise ReadError(f"{name} is {dtype}: a quantised model; its norm cannot be read from the file")
    if name.endswith("n_averaged"):
        return "counts averages: the weights beside it are averages (AveragedModel)"
    return "not floating point"


def _is_square(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2]


def _is_bias_mask(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is GPT-2's causal mask: a ``bias`` of shape ``(1, 1, n, n)``."""
    return name.endswith("bias") and tensor.dim() == 4 and tensor.shape[:2] == (1, 1)


def _is_causal(tensor: Tensor) -> bool:
    """Whether a square tensor has one value on and below the diagonal and another one above, as a causal mask has."""
    n = tensor.shape[-1]
    if n < 2 or not tensor.numel():
        return False
    seen, unseen = tensor[(0,) * (tensor.dim() - 1)][:2]  # on the diagonal, and above it
    is_added_to_scores = seen == 0 and unseen <= -1e3  # the large negative number stands for −∞
    if (seen, unseen) not in ((1, 0), (0, 1)) and not is_added_to_scores:
        return False  # nearly all weights leave here, after two of their values are read
    expected = torch.where(torch.ones(n, n, dtype=torch.bool).tril(), seen, unseen)
    return bool((tensor == expected).all())


def _starts_like_sinusoids(tensor: Tensor) -> bool:
    """Whether position 0 has sin 0 and cos 0: in turn, or all sines before all cosines."""
    if tensor.dim() < 2 or not tensor.numel():
        return False
    first = tensor[(0,) * (tensor.dim() - 1)]
    channel = torch.arange(len(first))
    in_turn = channel % 2
    one_after_the_other = channel >= len(channel) / 2
    return torch.equal(first, in_turn.to(first)) or torch.equal(first, one_after_the_other.to(first))


def blocks(*tensors: Tensor) -> Iterator[NDArray[np.float64]]:
    """Values of tensors of one size, flat and in float64, block by block: arrays ``(tensors, values)``.

    Each block is overwritten by the next.
    """
    flat = [tensor.reshape(-1) for tensor in tensors]
    size = flat[0].numel()
    room = torch.empty(len(flat), min(BLOCK, size), dtype=torch.float64)
    for start in range(0, size, BLOCK):
        block = room[:, : size - start]
        for row, values in zip(block, flat, strict=True):
            row.copy_(values[start : start + BLOCK])
        yield block.numpy()


def _leave_out_averages(weights: Weights) -> None:
    """Leave out averages of weights: tensors with the names and shapes of others, after a prefix such as ``ema.``.

    Raises:
        ReadError: a name has such a prefix, but the weights that it would be an average of are not there.
    """
    shapes = weights.shapes
    # Some trainers write the names of averages without dots.
    averages = {name: _AVERAGE.sub("", name).replace(".", "") for name in shapes if _AVERAGE.match(name)}
    if not averages:
        return
    originals = {name: shape for name, shape in shapes.items() if name not in averages}
    wanted = [(name_without_dots, shapes[name]) for name, name_without_dots in averages.items() if shapes[name]]
    has_originals = any(rest.issuperset(wanted) for rest in _rests_by_prefix(originals).values())
    covers_half = 2 * len(wanted) >= len(originals)
    if wanted and not (has_originals and covers_half):
        first = next(iter(averages))
        raise ReadError(f"{first} may be an average of weights or a weight: save model.state_dict() alone")
    for name in averages:
        del weights.parameters[name]
        weights.left_out[name] = "an average of the weights"


def _rests_by_prefix(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, set[tuple[str, tuple[int, ...]]]]:
    """For each prefix of the names: the rest of each name, without dots, and the shape of its tensor."""
    rests: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        for i in range(len(parts)):
            prefix = ".".join(parts[:i])
            rests.setdefault(prefix, set()).add(("".join(parts[i:]), shape))
    return rests


def listing(place: Path) -> list[str]:
    """Names in a folder, sorted; those of folders end with a ``/``."""
    return sorted(f"{inside.name}/" if inside.is_dir() else inside.name for inside in place.iterdir())


def _files(place: Path) -> list[Path]:
    """The files with the weights of a checkpoint."""
    if place.is_file():
        if why := layouts.why_refused([place.name]):
            raise ReadError(why)
        return [place]
    names = weight_files(listing(place))
    if names[0].endswith(".index.json"):
        index = names[0]
        names = shards_of(place / index)
        missing = [shard for shard in names if not (place / shard).is_file()]
        if missing:
            count = f"{len(missing)} of {len(names)} missing"
            raise ReadError(f"{index} names {missing[0]}, which is not there ({count})")
    return [place / name for name in names]


def weight_files(names: Collection[str]) -> list[str]:
    """The names of the weights among those in a folder, or that of their index.

    safetensors come before pickles, and one file with all weights before shards.

    Raises:
        ReadError: no weights are there, an adapter alone, several files without an index, or another library's layout.
    """
    whole = {"model.safetensors", "pytorch_model.bin"} & set(names)
    indices = {"model.safetensors.index.json", "pytorch_model.bin.index.json"} & set(names)
    why = layouts.why_refused(names)
    if why and not whole and not indices:
        raise ReadError(why)
    candidates = sorted(name for name in names if "/" not in name and not OTHER_FILES.search(name))
    for suffix in (".safetensors", *PICKLES):
        files = [name for name in candidates if name.endswith(suffix)]
        index = [name for name in candidates if name.endswith(f"{suffix}.index.json")]
        if single := whole & set(files):
            return list(single)
        if index:
            return index[:1]
        if len(files) > 1 or any(re.search(r"-\d+-of-\d+\.", file) for file in files):
            raise ReadError(f"{len(files)} weight files and no index: {', '.join(files[:3])}")
        if files:
            return files
    if any(name.startswith("adapter_model.") for name in names):
        raise ReadError(f"only an adapter: {MERGE}")
    raise ReadError(f"no .safetensors, {', '.join(PICKLES[:-1])} or {PICKLES[-1]} file in it")


def shards_of(index: Path) -> list[str]:
    """Names of the shards in an index; raises ReadError unless all are files of its folder."""
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if shards and all(shard == Path(shard).name for shard in shards):
            return shards
    raise ReadError(f"{index.name} is corrupt: its weight_map does not name files of the same folder")
