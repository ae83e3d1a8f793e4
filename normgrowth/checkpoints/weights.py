"""The weights of one checkpoint: tensors of torch, mapped from its files. No model is built, no code of a file runs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
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

BLOCK = 1 << 15  # values in float64 at once: those of two tensors then stay in the processor's cache
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
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
        ReadError: nothing is there, or not all of it, or what cannot be read, or must not be, or may be no weights.
    """
    found, at = Weights(), place
    try:
        for at in _files(place):
            state, beside = _stored(at)
            found.left_out |= beside
            seen: dict[object, str] = {}  # of this file: the storage of one that is closed may be another's later
            for name in sorted(state, key=originals_first):
                _add(found, _WRAPPER.sub("", name), state[name].detach(), seen)
        at = place
        _leave_out_averages(found)
        if why := "holds no parameters" if not found.parameters else layouts.why_empty(found.shapes):
            raise ReadError(why)
    except ReadError as error:
        raise ReadError(f"{at}: {error}") from error.__cause__
    except OSError as error:
        raise ReadError(f"{error.filename or at}: {error.strerror or error}") from error
    return found


def _stored(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors in a file, and what beside them is left out."""
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


def _add(found: Weights, name: str, tensor: Tensor, seen: dict[object, str]) -> None:
    """A stored tensor as a parameter, or as left out; what shares storage is tied."""
    if why := _why_unreadable(tensor):
        raise ReadError(f"tensor {name} {why}")
    if name in found.parameters or name in found.left_out:
        raise ReadError(f"tensor {name} is there twice")
    if _ADAPTER.search(name):
        raise ReadError(f"{name} belongs to an adapter that is not merged: {MERGE}")
    original = seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name) if tensor.numel() else name
    if original != name:
        found.left_out[name] = f"tied to {original}"
    elif why := why_left_out(name, tensor):
        found.left_out[name] = why
    else:
        found.parameters[name] = tensor


def _why_unreadable(tensor: Tensor) -> str | None:
    if tensor.is_quantized:
        return f"is {tensor.dtype}: a quantised model; its norm cannot be read from the file"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"is sparse or nested ({tensor.layout}); save it dense, with to_dense() or to_padded_tensor()"
    if type(tensor) is not torch.Tensor:
        return f"is a {type(tensor).__name__}, in parts or packed; save it whole, with full_tensor() or dequantize()"
    return "has no values: it is on the device meta" if tensor.is_meta else None


def why_left_out(name: str, tensor: Tensor) -> str | None:
    """Why a stored tensor is no trainable parameter, from its name, type, shape and values; or None if it is one.

    A causal mask ``(…, n, n)`` is one under any name: 1 and 0, or 0 and a large negative number, with nothing else on
    either side of the diagonal; the identity, which weights may start from, is none. Position sinusoids have names such
    as ``pe``, which learned ones have too: position 0 has sin 0 and cos 0, exactly.

    Raises:
        ReadError: it may be one, and its type is unknown, or that of a quantised model.
    """
    dtype, shape = tensor.dtype, tensor.shape
    if not (dtype.is_floating_point or dtype.is_complex):
        if dtype != torch.bool and name.endswith(("weight", "weight_packed")):
            raise ReadError(f"{name} is {dtype}: a quantised model; its norm cannot be read from the file")
        if name.endswith("n_averaged"):
            return "counts averages: the weights beside it are averages (AveragedModel)"
        return "not floating point"
    square = len(shape) > 1 and shape[-1] == shape[-2]
    if square and (_MASK.search(name) or (name.endswith("bias") and len(shape) == 4 and shape[:2] == (1, 1))):
        return "attention mask"
    if _BUFFER.search(name):
        return "buffer"
    if dtype not in FLOATS:
        raise ReadError(f"tensor {name} has dtype {dtype}; known are {', '.join(map(str, FLOATS))}")
    if square and _is_causal(tensor):
        return "attention mask"
    if _POSITIONS.search(name) and len(shape) > 1 and tensor.numel():
        first, place = tensor[(0,) * (len(shape) - 1)], torch.arange(shape[-1])
        odd, later = place % 2, place >= len(place) / 2  # sines and cosines in turn, or one after the other
        if torch.equal(first, odd.to(first)) or torch.equal(first, later.to(first)):
            return "position sinusoids"
    return None


def _is_causal(tensor: Tensor) -> bool:
    n = tensor.shape[-1]
    if n < 2 or not tensor.numel():
        return False
    seen, unseen = tensor[(0,) * (tensor.dim() - 1)][:2]  # on the diagonal, and above it
    if (seen, unseen) not in ((1, 0), (0, 1)) and not (seen == 0 and unseen <= -1e3):  # to −∞, as added to scores
        return False  # nearly all weights: two values are read of them
    expected = torch.where(torch.ones(n, n, dtype=torch.bool).tril(), seen, unseen)
    return bool((tensor == expected).all())


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
    ends: dict[str, set[tuple[str, tuple[int, ...]]]] = {}  # by what the names begin with: the rest, and the shape
    for parts in others:
        for i in range(len(parts)):
            ends.setdefault(".".join(parts[:i]), set()).add(("".join(parts[i:]), sizes[".".join(parts)]))
    wanted = [(copy, sizes[name]) for name, copy in copies.items() if sizes[name]]
    there = any(each.issuperset(wanted) for each in ends.values())
    if wanted and not (there and 2 * len(wanted) >= len(others)):
        first = next(iter(copies))
        raise ReadError(f"{first} may be an average of weights or a weight: save model.state_dict() alone")
    for name in copies:
        del found.parameters[name]
        found.left_out[name] = "an average of the weights"


def listing(place: Path) -> list[str]:
    """Names in a folder, those of folders with a ``/`` at their end."""
    return sorted(inside.name + "/" * inside.is_dir() for inside in place.iterdir())


def _files(place: Path) -> list[Path]:
    if place.is_file():
        if why := layouts.why_refused([place.name]):
            raise ReadError(why)
        return [place]
    names = weight_files(listing(place))
    if names[0].endswith(".index.json"):
        index, names = names[0], shards_of(place / names[0])
        if missing := [shard for shard in names if not (place / shard).is_file()]:
            count = f"{len(missing)} of {len(names)} missing"
            raise ReadError(f"{index} names {missing[0]}, which is not there ({count})")
    return [place / name for name in names]


def weight_files(names: Collection[str]) -> list[str]:
    """Of the names in a folder its weights, or their index: safetensors before pickles, one file before shards."""
    whole = {"model.safetensors", "pytorch_model.bin"} & set(names)
    indices = {"model.safetensors.index.json", "pytorch_model.bin.index.json"} & set(names)
    if not whole | indices and (why := layouts.why_refused(names)):
        raise ReadError(why)
    mine = sorted(name for name in names if "/" not in name and not OTHER_FILES.search(name))
    for suffix in (".safetensors", *PICKLES):
        files = [name for name in mine if name.endswith(suffix)]
        index = [name for name in mine if name.endswith(f"{suffix}.index.json")]
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
    """Names of the shards in an index, which are files of its folder."""
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if shards and all(shard == Path(shard).name for shard in shards):
            return shards
    raise ReadError(f"{index.name} is corrupt: its weight_map does not name files of the same folder")
