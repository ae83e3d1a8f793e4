"""Tensors of GGUF files, dequantised by the package ``gguf``, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.tensors import Tensor

NOTE = "dequantised from GGUF, whose converters also fold and reorder weights: near the norm of the model, not equal"


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, as float32.

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
    return {str(entry.name): _tensor(entry) for entry in entries}


def _tensor(entry: Any) -> Tensor:
    from gguf.quants import dequantize

    def load() -> NDArray[Any]:
        return dequantize(entry.data, entry.tensor_type).reshape(-1)

    return Tensor(tuple(int(length) for length in reversed(entry.shape)), "float32", load, is_mapped=False)
