"""Layouts of other libraries that cannot be read as they are, and the tools that join or convert them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any


class ReadError(ValueError):
    """A checkpoint that cannot be used; the message names the file and says why."""


_ZERO_3 = "convert it with zero_to_fp32.py of DeepSpeed"
_MEGATRON = "convert it with tools/checkpoint/convert.py of Megatron-LM, or export it with Megatron-Bridge"
_SUFFIX = r"\.(?:safetensors|bin|pt|pth|ckpt|tar|pth\.tar|pt\.tar)"
_RANK = (  # model_rank0.pt; not Composer's file of rank 0, which is whole, and nothing of LoRA's ranks
    r"(?!ep\d+-ba\d+-rank0\.|mp_rank_\d+_model_states)(?!.*(?:optim|scheduler|rng|random|lora|adapter))"
    rf".*(?<![a-z])rank[-_.]?\d+.*{_SUFFIX}"
)
_AXIS = r"(?<![a-z])(?:tp|pp|sdp)[-_=]?"
_OTHER_RANK = (  # model_tp1_pp0.pt, tp_rank_world_size=0_2: not the first of a kind, or one of several
    rf"(?!.*(?:optim|scheduler|rng|random))(?:(?=.*{_AXIS}\d+[-_.]{_AXIS}\d).*{_AXIS}0*[1-9]"
    rf"|.*(?<![a-z])rank_world_size=\d+_(?!1(?!\d))\d).*{_SUFFIX}"
)
_LAYOUTS = (  # a pattern for names in a folder, how many names must match it, and the refusal
    (r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", 1, f"DeepSpeed's ZeRO-3, weights in parts: {_ZERO_3}"),
    (r"mp_rank_\d+_model_states\.pt", 2, "Megatron-DeepSpeed's, in parts: use its deepspeed_to_transformers.py"),
    (r"layer_\d+-model_\d+-model_states\.pt", 1,
     "GPT-NeoX's, a file a layer: convert it with tools/ckpts/convert_neox_to_hf.py of GPT-NeoX"),
    (r"pytorch_model_fsdp_\d+_rank\d+\.bin", 1, "FSDP's, in parts: join them with accelerate merge-weights"),
    (r"mp_rank_\d+_\d+", 1, f"Megatron's, weights in parts: {_MEGATRON}"),
    (r"mp_rank_\d+", 2, f"Megatron's, weights in parts: {_MEGATRON}"),
    (r"consolidated\.\d+\.pth", 2, "Llama's, in parts: use convert_llama_weights_to_hf.py of transformers' sources"),
    (r".*-shard\d+\.pt", 1, "fairseq's, weights in parts: join them with consolidate_fsdp_shards.py of fairseq"),
    (r"model_world_size_\d+_rank_\d+\.pt", 1,
     "verl's, weights in parts, a rank each: join them with python -m verl.model_merger merge"),
    (r"model-rank-\d+-part-\d+\.safetensors", 1,
     "vLLM's sharded state, weights in parts, a rank each: give the model from which vLLM has made it"),
    (r".*pp-rank-\d+-of-\d+.*\.safetensors", 1,
     "nanotron's, weights in parts: convert it with examples/llama/convert_nanotron_to_hf.py of nanotron"),
    (_OTHER_RANK, 1, "the file of one rank of several, by its name: join them with the tools of their library"),
    (_RANK, 1,
     "the file of one rank, which may hold a part of the weights: save them whole, or rename it if it does"),
)  # fmt: skip
_PARALLEL = re.compile(r"(?:(?:tensor|pipeline|expert)_)?(?:model_)?parallel_size|tp_size|pp_size")


def why_refused(names: Collection[str]) -> str | None:
    """Why a folder with these files and folders in it cannot be read, and which tool joins or converts them."""
    if "model_config.json" in names and "checkpoint_metadata.json" in names:
        return _reason("nanotron")
    for pattern, least, reason in _LAYOUTS:
        matches = [name for name in names if re.fullmatch(pattern, name.rstrip("/"), re.I)]
        if len(matches) >= least:
            return reason
    return None


def _reason(library: str) -> str:
    return next(reason for _, _, reason in _LAYOUTS if reason.startswith(library))


def why_part(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why tensors with these names and shapes are parts of weights: those of FSDP1 or of ZeRO-3.

    FSDP1 keeps weights flat. ZeRO-3, and FSDP1 on some ranks, leave weights without elements: most of them, or one
    whose bias has elements. A single tensor without elements is harmless.
    """
    fsdp = "of FSDP1, a rank's part of weights: save the whole (FULL_STATE_DICT)"
    flat = next((name for name in shapes if re.search(r"(?:^|[._])flat_param", name)), None)
    wrapped = [name for name in shapes if "_fsdp_wrapped_module" in name]
    if flat or (wrapped and all(len(shapes[name]) < 2 for name in wrapped)):
        return f"{flat or wrapped[0]} is {fsdp}"
    if not shapes:
        return None
    weights = [name for name in shapes if name.endswith("weight")] or list(shapes)
    empty = [name for name in weights if shapes[name] == (0,)]
    biases = {name: shapes.get(re.sub("weight$", "bias", name), ()) for name in weights}
    beside = [name for name in empty if biases[name] not in ((), (0,))]
    if beside or 2 * len(empty) >= len(weights):
        return f"{(beside or empty)[0]} has no elements, as in parts of ZeRO-3: {_ZERO_3}"
    for name, bias in biases.items():  # a norm has as many elements in one as in the other
        if len(bias) == 1 and len(shapes[name]) == 1 and bias != shapes[name]:
            return f"{name} is flat and has not as many elements as its bias: {fsdp}"
    return None


def why_shard(name: str) -> str | None:
    """Why a file alone is a part of the weights: it is one of several, by its name."""
    count = re.search(r"-\d+-of-0*(\d+)\.", name)
    is_part = count is not None and int(count[1]) > 1
    return "one of several files with the weights: give their folder, with its index" if is_part else None


def why_rank(tree: Any) -> str | None:
    """Why a file whose arguments speak of several ranks to a model holds a part of the weights."""
    for name, size in _parallel_sizes(tree):
        if isinstance(size, int) and size > 1:
            return f"a rank's part of weights ({name} is {size}); Megatron's: {_MEGATRON}"
    return None


def _parallel_sizes(tree: Any) -> Iterator[tuple[str, Any]]:
    """Sizes in the arguments that Megatron and its like store beside the weights, and DeepSpeed's own."""
    if isinstance(tree, dict):
        yield "mp_world_size", tree.get("mp_world_size")
    for key in ("args", "cfg", "config", "hyper_parameters"):
        arguments = tree.get(key) if isinstance(tree, dict) else None
        if isinstance(arguments, dict) and not isinstance(tree.get("state_dict"), dict):
            yield from ((str(name), size) for name, size in arguments.items() if _PARALLEL.fullmatch(str(name)))


def megatron(names: Collection[str]) -> str:
    """An addition to the refusal of a file or of tensors whose names are Megatron's: how to convert them; or ``""``."""
    is_megatron = not {"language_model", "model0", "model_optim_rng"}.isdisjoint(names)
    return f" (Megatron's: {_MEGATRON})" if is_megatron else ""
