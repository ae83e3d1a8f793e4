"""The weights of one checkpoint: tensors of torch, mapped from its files. No model is built, no code of a file runs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nbutils.checkpoints import layouts, pickles
from nbutils.checkpoints.layouts import ReadError
from nbutils.layers import originals_first

BLOCK = 1 << 15  # values in float64 at once: those of two tensors then stay in the processor's cache
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
LARGE_NEGATIVE = -1e3  # and below, to −∞: what a mask adds to the scores of the future
MERGE = "merge it into its model first (merge_and_unload)"

_WRAPPER = re.compile(
    r"^(?:module\.)+|(?:(?<=^)|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
OTHER_FILES = re.compile(
    r"^(?!model_optim_rng)(?:.*)(?:optim|scheduler|training_args|rng_state|random_states|scaler|adapter)", re.I
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
_MASK = re.compile(r"(?:^|\.)(?:mask|tril|triu)$")  # and not mask_token, which is trained
_POSITIONS = re.compile(r"(?:^|\.)(?:pe|pos(?:ition(?:al)?)?_enc(?:odings?)?|position_embedding)$")


@dataclass
class Weights:
    """The parameters of one checkpoint, by name without wrappers' prefixes; and what is stored and is none, and why."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.parameters.items()}


def read(place: Path) -> Weights:
    """The weights of a checkpoint: of a file, or of a folder with one or several files.

    Raises:
        ReadError: nothing is there, shards are missing, a file is cut short, corrupt, unsafe, or a dtype unknown; only
            an adapter or one that is not merged, a quantised model, parts of ZeRO-3, FSDP or Megatron, another format,
            or tensors of which it is unclear that they are the weights.
    """
    found = Weights()
    try:
        for file in _files(place):
            state, beside = _stored(file)
            found.left_out |= beside
            seen: dict[object, str] = {}  # of this file: the storage of one that is closed may be another's later
            for raw in sorted(state, key=originals_first):
                name, tensor = plain_name(raw), state[raw].detach()
                try:
                    _add(found, name, tensor, seen)
                except ReadError as error:
                    raise ReadError(f"{file}: {error}") from None
        _leave_out_averages(found)
    except ReadError as error:
        raise error if str(error).startswith(str(place)) else ReadError(f"{place}: {error}") from error.__cause__
    except OSError as error:
        raise ReadError(f"{error.filename or place}: {error.strerror or error}") from error
    if why := "holds no parameters" if not found.parameters else layouts.why_empty(found.shapes):
        raise ReadError(f"{place}: {why}")
    return found


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes of wrappers."""
    return _WRAPPER.sub("", name)


def _stored(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors in a file, and what beside them is left out."""
    with path.open("rb") as file:
        if file.read(8) == b"version ":
            raise ReadError(f"{path}: a Git LFS pointer, not the weights (git lfs pull fetches them)")
    if path.suffix != ".safetensors":
        return pickles.state_dict(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, {}  # noqa: SIM118
    except SafetensorError as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise ReadError(f"{path}: cut short, damaged, or no safetensors file ({why})") from None
    except RuntimeError as error:  # of torch: one file may not be larger than memory and swap together
        raise ReadError(f"{path}: cannot be mapped; save it in shards (max_shard_size=…): {error}") from error


def _add(found: Weights, name: str, tensor: Tensor, seen: dict[object, str]) -> None:
    """A stored tensor as a parameter, or as left out; what shares storage is tied."""
    if why := _why_unreadable(tensor):
        raise ReadError(f"tensor {name} {why}")
    if name in found.parameters or name in found.left_out:
        raise ReadError(f"tensor {name} is there twice")
    refuse_adapter([name])
    original = seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name) if tensor.numel() else name
    numbers = tensor.is_floating_point() or tensor.is_complex()
    if original != name:
        found.left_out[name] = f"tied to {original}"
    elif not numbers and tensor.dtype != torch.bool and name.endswith(("weight", "weight_packed")):
        raise ReadError(f"{name} is {tensor.dtype}: a quantised model; its norm cannot be read from the file")
    elif why := why_left_out(name, tensor.dtype, tensor.shape):
        found.left_out[name] = why
    elif tensor.dtype not in FLOATS:
        raise ReadError(f"tensor {name} has dtype {tensor.dtype}; known are {', '.join(map(str, FLOATS))}")
    elif why := why_constant(name, tensor):
        found.left_out[name] = why
    else:
        found.parameters[name] = tensor


def refuse_adapter(names: Collection[str]) -> None:
    """Raise ReadError if one of the names belongs to an adapter that is not merged."""
    for name in filter(_ADAPTER.search, names):
        raise ReadError(f"{name} belongs to an adapter that is not merged: {MERGE}")


def _why_unreadable(tensor: Tensor) -> str | None:
    if tensor.is_quantized:
        return f"is {tensor.dtype}: a quantised model; its norm cannot be read from the file"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"is sparse or nested ({tensor.layout}); save it dense, with to_dense() or to_padded_tensor()"
    if type(tensor) is not torch.Tensor:
        return f"is a {type(tensor).__name__}, in parts or packed; save it whole, with full_tensor() or dequantize()"
    return "has no values: it is on the device meta" if tensor.is_meta else None


def why_left_out(name: str, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
    """Why a stored tensor is no trainable parameter, from its name, type and shape; or None if it is one."""
    if not (dtype.is_floating_point or dtype.is_complex):
        if name.endswith("n_averaged"):
            return "counts averages: the weights beside it are averages (AveragedModel)"
        return "not floating point"
    square = len(shape) > 1 and shape[-1] == shape[-2]
    if square and (_MASK.search(name) or (name.endswith("bias") and len(shape) == 4 and tuple(shape[:2]) == (1, 1))):
        return "attention mask"
    return "buffer" if _BUFFER.search(name) else None


def why_constant(name: str, tensor: Tensor) -> str | None:
    """Why a tensor is no parameter, from its values; or None: names do not distinguish some buffers from parameters.

    A causal mask ``(…, n, n)`` under any name: 1 and 0, or 0 and a large negative number, with nothing else on either
    side of the diagonal; the identity, which weights may start from, is none. And position sinusoids under a name
    such as ``pe``, which learned ones have too: position 0 has sin 0 and cos 0, exactly.
    """
    if tensor.dim() < 2 or not tensor.numel():
        return None
    if _is_causal(tensor):
        return "attention mask"
    if _POSITIONS.search(name):
        first, place = tensor[(0,) * (tensor.dim() - 1)], torch.arange(tensor.shape[-1])
        odd, later = place % 2, place >= len(place) / 2  # sines and cosines in turn, or one after the other
        if torch.equal(first, odd.to(first)) or torch.equal(first, later.to(first)):
            return "position sinusoids"
    return None


def _is_causal(tensor: Tensor) -> bool:
    n = tensor.shape[-1]
    if tensor.shape[-2] != n or n < 2:
        return False
    corner = (0,) * (tensor.dim() - 1)
    seen, unseen = float(tensor[(*corner, 0)]), float(tensor[(*corner, 1)])  # on the diagonal, and above it
    if (seen, unseen) not in ((1, 0), (0, 1)) and not (seen == 0 and unseen <= LARGE_NEGATIVE):
        return False  # nearly all weights: two values are read of them
    start = 0
    for (block,) in blocks(tensor):
        row, column = np.divmod(np.arange(start, start + len(block)) % (n * n), n)
        if not np.array_equal(block, np.where(column <= row, seen, unseen)):
            return False
        start += len(block)
    return True


def blocks(*tensors: Tensor) -> Iterator[NDArray[np.float64]]:
    """Flat values of tensors of one size in float64, a row a tensor, block by block; the memory is used again."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    size = flat[0].numel()
    room = torch.empty(len(flat), min(BLOCK, size), dtype=torch.float64)
    for start in range(0, size, BLOCK):
        block = room[:, : size - start]
        for row, values in zip(block, flat, strict=True):
            row.copy_(values[start : start + BLOCK])
        yield block.numpy()


def _leave_out_averages(found: Weights) -> None:
    """Averages of weights that are there too, named as these after ``ema.`` or so; some without dots."""
    sizes = found.shapes
    copies = {name: _AVERAGE.sub("", name).replace(".", "") for name in sizes if _AVERAGE.match(name)}
    others = [name.split(".") for name in sizes if name not in copies]
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}  # by what the names begin with, then by the rest
    for parts in others:
        for i in range(len(parts)):
            shapes.setdefault(".".join(parts[:i]), {})["".join(parts[i:])] = sizes[".".join(parts)]
    wanted = [(copy, sizes[name]) for name, copy in copies.items() if sizes[name]]
    same = any(all(below.get(copy) == shape for copy, shape in wanted) for below in shapes.values())
    if wanted and not (same and 2 * len(wanted) >= len(others)):
        first = next(iter(copies))
        raise ReadError(f"{first} may be an average of weights or a weight: save model.state_dict() alone")
    for name in copies:
        del found.parameters[name]
        found.left_out[name] = "an average of the weights"


def listing(place: Path) -> list[str]:
    """Names in a folder, those of folders with a ``/`` at their end."""
    return sorted(inside.name + "/" * inside.is_dir() for inside in place.iterdir())


def _files(place: Path) -> list[Path]:
    if not place.is_file():
        chosen = weight_files(listing(place))
        if chosen[0].endswith(".index.json"):
            index, chosen = place / chosen[0], shards_of(place / chosen[0])
            missing = [shard for shard in chosen if not (place / shard).is_file()]
            if missing:
                why = f"names {missing[0]}, which is not there ({len(missing)} of {len(chosen)} missing)"
                raise ReadError(f"{index}: {why}")
        return [place / name for name in chosen]
    if reason := layouts.other_format([place.name]) or layouts.in_parts([place.name]):
        raise ReadError(reason)
    return [place]


def weight_files(names: Collection[str]) -> list[str]:
    """Of the names in a folder those with its weights, or their index: safetensors before pickles, one before shards.

    Raises:
        ReadError: none is there, only an adapter, shards are missing, or there are several files and no index.
    """
    whole = {"model.safetensors", "pytorch_model.bin"} & set(names)
    indices = {"model.safetensors.index.json", "pytorch_model.bin.index.json"} & set(names)
    if not whole | indices and (why := layouts.in_parts(names)):
        raise ReadError(why)
    mine = sorted(name for name in names if "/" not in name and not OTHER_FILES.search(name))
    for suffix in (".safetensors", *PICKLES):
        files = [name for name in mine if name.endswith(suffix)]
        index = [name for name in mine if name.endswith(f"{suffix}.index.json")]
        if single := whole & set(files):
            return list(single)
        if index:
            return index[:1]
        if files:
            return _complete(files)
    if any(name.startswith("adapter_model.") for name in names):
        raise ReadError(f"only an adapter: {MERGE}")
    none = f"no .safetensors, {', '.join(PICKLES[:-1])} or {PICKLES[-1]} file in it" if names else "empty folder"
    raise ReadError(layouts.other_format(names) or none)


def shards_of(index: Path) -> list[str]:
    """Names of the shards in an index.

    Raises:
        ReadError: the index is corrupt, names none, or files of other folders.
    """
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        plain = all(shard == Path(shard).name for shard in shards)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReadError(f"{index}: corrupt: no weight_map") from error
    if not plain or not shards:
        raise ReadError(f"{index}: shards must be files of the same folder")
    return shards


def _complete(files: list[str]) -> list[str]:
    """Shards without an index: all must be there by their numbers."""
    parts = [part for file in files if (part := re.search(r"-(\d+)-of-(\d+)\.", file))]
    if len(files) == 1 and not parts:
        return files
    if len(parts) < len(files):
        raise ReadError(f"{len(files)} weight files and no index: {', '.join(files[:3])}")
    total = max(int(part[2]) for part in parts)
    missing = sorted(set(range(1, total + 1)) - {int(part[1]) for part in parts})
    if missing or len(files) != total:
        raise ReadError(f"{len(files)} of {total} shards; missing {', '.join(map(str, missing))}")
    return files
