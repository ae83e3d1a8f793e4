"""Layouts of other libraries that hold no weights as such: parts of them, or another format; and what converts them."""

from __future__ import annotations

import re
from collections.abc import Collection

_ZERO_3 = "convert it with zero_to_fp32.py of DeepSpeed"
_MEGATRON = "convert it with tools/checkpoint/convert.py of Megatron-LM, or export it with Megatron-Bridge"
_PARTS = [  # of the names in a folder: a pattern, how many of it there are at least, and what is said
    (r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", 1, f"DeepSpeed's ZeRO-3, weights in parts: {_ZERO_3}"),
    (r"mp_rank_\d+_model_states\.pt", 2, "Megatron-DeepSpeed's, in parts: use its deepspeed_to_transformers.py"),
    (r"layer_\d+-model_\d+-model_states\.pt", 1,
     "GPT-NeoX's, a file a layer: convert it with tools/ckpts/convert_neox_to_hf.py of GPT-NeoX"),
    (r"pytorch_model_fsdp_\d+(?:_rank\d+\.bin)?", 1, "FSDP's, in parts: join them with accelerate merge-weights"),
    (r"mp_rank_\d+_\d+", 1, f"Megatron's, weights in parts: {_MEGATRON}"),
    (r"mp_rank_\d+", 2, f"Megatron's, weights in parts: {_MEGATRON}"),
    (r"consolidated\.\d+\.pth", 2, "Llama's, in parts: use convert_llama_weights_to_hf.py of transformers' sources"),
    (r".*-shard\d+\.pt", 1, "fairseq's, weights in parts: join them with consolidate_fsdp_shards.py of fairseq"),
]  # fmt: skip
_GGUF = "GGUF: load it with from_pretrained(…, gguf_file=…) of transformers, and save_pretrained"


def in_parts(names: Collection[str]) -> str | None:
    """What made a folder of such files and folders, where each holds a part of the weights, and what converts it.

    >>> in_parts({".metadata", "__0_0.distcp", "optimizer.pt"})[:45]
    "PyTorch's distributed checkpoint, in parts: c"
    >>> in_parts({"model.safetensors", "global_step100"})
    """
    if any(name == ".metadata" or name.endswith(".distcp") for name in names):
        convert = "torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
        if "meta.pt" in names:
            convert = f"lightning.pytorch.utilities.consolidate_checkpoint, or {convert}"
        if "common.pt" in names:
            convert = f"Megatron-Bridge, or {convert}"
        return f"PyTorch's distributed checkpoint, in parts: convert it with {convert}"
    for pattern, least, said in _PARTS:
        if sum(re.fullmatch(pattern, name) is not None for name in names) >= least:
            return said
    return None


def other_format(names: Collection[str]) -> str | None:
    """What weights are stored as where no file can be read, and what converts them.

    >>> other_format({"README.md", "model.Q4_K_M.gguf"})[:4]
    'GGUF'
    """
    if any(name.endswith(".gguf") for name in names):
        return _GGUF
    for ending, kind in ((".msgpack", "Flax"), (".h5", "TensorFlow or Keras"), (".nemo", "NeMo"), (".onnx", "ONNX")):
        if any(name.endswith(ending) for name in names):
            return f"{kind}'s format ({ending}): save the model from PyTorch with save_pretrained or torch.save"
    return None


def why_empty(parameters: dict[str, tuple[int, ...]]) -> str | None:
    """Of shapes by name: what the weights of no elements are that ZeRO-3 leaves in a model's own state dict.

    >>> why_empty({"wte.weight": (0,), "ln_f.weight": (8,)})
    'wte.weight has no elements, as in parts of ZeRO-3: convert it with zero_to_fp32.py of DeepSpeed'
    >>> why_empty({"unused": (0,), "ln_f.weight": (8,)})
    """
    empty = [name for name, shape in parameters.items() if shape == (0,)]
    weights = [name for name in empty if name.endswith(("weight", "bias"))] or empty[: len(empty) == len(parameters)]
    return f"{weights[0]} has no elements, as in parts of ZeRO-3: {_ZERO_3}" if weights else None


def megatron(names: Collection[str]) -> str:
    """What to add to a refusal of a file or tensors under such names, where they are Megatron's; or nothing.

    >>> megatron({"model", "optimizer"})
    ''
    """
    return f" (Megatron's: {_MEGATRON})" if {"language_model", "model0", "model_optim_rng"} & set(names) else ""
