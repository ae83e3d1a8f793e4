"""Layouts of other libraries that cannot be read as they are, and the tools that join or convert them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping


class ReadError(ValueError):
    """A checkpoint that cannot be used; the message names the file and says why."""


_ZERO_3 = "convert it with zero_to_fp32.py of DeepSpeed"
_MEGATRON = "convert it with tools/checkpoint/convert.py of Megatron-LM, or export it with Megatron-Bridge"
_LAYOUTS = (  # a pattern for names in a folder, how many names must match it, and the refusal
    (r"\.metadata|.*\.distcp", 1,
     "PyTorch's distributed checkpoint, in parts: convert it with torch.distributed.checkpoint.format_utils."
     "dcp_to_torch_save, or Lightning's with lightning.pytorch.utilities.consolidate_checkpoint, or Megatron's with "
     "Megatron-Bridge"),
    (r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", 1, f"DeepSpeed's ZeRO-3, weights in parts: {_ZERO_3}"),
    (r"mp_rank_\d+_model_states\.pt", 2, "Megatron-DeepSpeed's, in parts: use its deepspeed_to_transformers.py"),
    (r"layer_\d+-model_\d+-model_states\.pt", 1,
     "GPT-NeoX's, a file a layer: convert it with tools/ckpts/convert_neox_to_hf.py of GPT-NeoX"),
    (r"pytorch_model_fsdp_\d+(?:_rank\d+\.bin)?", 1, "FSDP's, in parts: join them with accelerate merge-weights"),
    (r"mp_rank_\d+_\d+", 1, f"Megatron's, weights in parts: {_MEGATRON}"),
    (r"mp_rank_\d+", 2, f"Megatron's, weights in parts: {_MEGATRON}"),
    (r"consolidated\.\d+\.pth", 2, "Llama's, in parts: use convert_llama_weights_to_hf.py of transformers' sources"),
    (r".*-shard\d+\.pt", 1, "fairseq's, weights in parts: join them with consolidate_fsdp_shards.py of fairseq"),
    (r".*\.gguf", 1, "GGUF: load it with from_pretrained(…, gguf_file=…) of transformers, and save_pretrained"),
)  # fmt: skip


def why_refused(names: Collection[str]) -> str | None:
    """Why a folder with these files and folders in it cannot be read, and which tool joins or converts them."""
    for pattern, least, reason in _LAYOUTS:
        matches = [name for name in names if re.fullmatch(pattern, name.rstrip("/"))]
        if len(matches) >= least:
            return reason
    return None


def why_empty(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why a state dict with these shapes cannot be read: ZeRO-3 leaves weights without elements in it."""
    empty = [name for name, shape in shapes.items() if shape == (0,)]
    weights = [name for name in empty if name.endswith(("weight", "bias"))]
    if not weights and len(empty) == len(shapes):
        weights = empty
    return f"{weights[0]} has no elements, as in parts of ZeRO-3: {_ZERO_3}" if weights else None


def megatron(names: Collection[str]) -> str:
    """An addition to the refusal of a file or of tensors whose names are Megatron's: how to convert them; or ``""``."""
    is_megatron = not {"language_model", "model0", "model_optim_rng"}.isdisjoint(names)
    return f" (Megatron's: {_MEGATRON})" if is_megatron else ""
