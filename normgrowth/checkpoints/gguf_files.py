"""Tensors of GGUF files, dequantised by the package ``gguf``, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from normgrowth.checkpoints.containers import Contents
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.tensors import Tensor

NOTE = "dequantised from GGUF, whose converters also fold and reorder weights: near the norm of the model, not equal"


_BUFFERS = ("ROPE_FREQS", "ROPE_FACTORS_LONG", "ROPE_FACTORS_SHORT", "ATTN_ROT_EMBD", "FFN_EXP_PROBS_B")  # of gguf


def read(path: Path) -> Contents:
    """The tensors of a file by name, as float32, and those that are buffers in every architecture of GGUF.

    Raises:
        ReadError: the package is missing, or the file is damaged.
    """
    try:
        import gguf
    except ImportError:
        raise ReadError(
            "GGUF: pip install gguf, which dequantises it; or load it with from_pretrained(…, gguf_file=…) of "
            "transformers, and save_pretrained"
        ) from None
    try:
        entries = gguf.GGUFReader(path).tensors
    except Exception as error:  # its reader raises many kinds
        raise ReadError(f"GGUF, damaged ({error})") from error
    tensors = {str(entry.name): _tensor(entry) for entry in entries}
    buffers = {name for name in tensors if name.rpartition(".")[0].rpartition(".")[2] in _buffers()}
    return Contents(tensors, buffers, notes=[NOTE])


def _buffers() -> set[str]:
    """The last words of the names that gguf gives to tables of rotary embeddings and to biases of routers."""
    import gguf

    kinds = [getattr(gguf.MODEL_TENSOR, kind) for kind in _BUFFERS if hasattr(gguf.MODEL_TENSOR, kind)]
    return {gguf.TENSOR_NAMES[kind].rpartition(".")[2] for kind in kinds}


def _tensor(entry: Any) -> Tensor:
    from gguf.quants import dequantize

    def load() -> NDArray[Any]:
        return dequantize(entry.data, entry.tensor_type).reshape(-1)

    return Tensor(tuple(int(length) for length in reversed(entry.shape)), "float32", load, is_mapped=False)
