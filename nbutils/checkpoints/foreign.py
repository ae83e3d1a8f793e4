"""Layouts that are not read here, and the tool of their own that turns them into weights that are."""

from __future__ import annotations

import re
from pathlib import Path

ADAPTER = re.compile(
    r"(?:^|\.)(?:base_layer|lora_(?:A|B|E|embedding_[AB]|magnitude_vector)|ia3_l|vera_lambda_[bd]|vera_[AB]|hada_w[12]_[ab]"
    r"|lokr_w[12](?:_[ab])?|oft_[rRs]|boft_[Rs]|prompt_encoder|modules_to_save)(?:\.|$)"
)
AVERAGED = re.compile(
    r"^(?:ema|ema_model|model_ema|ema_(?:network|denoiser|unet|encoder)|averaged_model|shadow_params)\."
)
GATHER = "DeepSpeed's zero_to_fp32.py, in the checkpoint's folder, gathers them into one file"

_LAYOUTS = (  # a file's name, and what to do; the first that fits
    (r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", f"DeepSpeed ZeRO-3, weights in shards: {GATHER}"),
    (r"\.distcp", "a sharded torch.distributed.checkpoint (DCP, FSDP): convert it by accelerate merge-weights, or by "
     "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt"),
    (r"model_optim_rng\.pt|model_rng\.pt", "Megatron, sharded by its own rule: convert it to Hugging Face by Megatron "
     "Bridge, or by Megatron-LM's tools/checkpoint/convert.py"),
    (r"\.gguf", "GGUF, mostly quantised: from_pretrained(folder, gguf_file=…), then save_pretrained"),
    (r"\.h5|\.msgpack|\.ckpt\.index", "weights of TensorFlow or Flax: load them there and save a PyTorch state_dict"),
)  # fmt: skip


def why_foreign(place: Path, depth: int = 3) -> str | None:
    """Which layout a folder without readable weights has, and what converts it; None if nothing known is there.

    Names alone tell, down to ``depth`` folders.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "__0_0.distcp").touch()
    ...     why_foreign(Path(folder))[:44]
    'a sharded torch.distributed.checkpoint (DCP,'
    """
    if place.is_file():
        names = [place.name]
    else:
        names = [f.name for deep in range(depth) for f in place.glob("*/" * deep + "*")]
    for pattern, what in _LAYOUTS:
        if any(re.search(rf"(?:{pattern})$", name) for name in names):
            return what
    return None
