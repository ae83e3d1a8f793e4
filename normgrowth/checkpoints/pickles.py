"""Files of ``torch.save``: their tensors, and what else they say of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normgrowth.checkpoints import containers, optimizers, progress, unpickler
from normgrowth.checkpoints.containers import Contents
from normgrowth.checkpoints.layouts import ReadError, why_rank
from normgrowth.checkpoints.optimizers import Trained
from normgrowth.checkpoints.tensors import Tensor, of_torch

_OWN = {"layers", "steps", "at", "sums"}  # keys of a NormTracker's history


def read(path: Path) -> Contents:
    """The weights in a file, and what is left out beside them and why."""
    tree = _tree(path)
    if isinstance(tree, dict) and set(tree) == _OWN:
        raise ReadError("the norms that a tracker has saved, and no weights")
    if why := why_rank(tree):
        raise ReadError(why)
    chosen = containers.weights(tree)
    tensors = {name: _plain(name, value) for name, value in chosen.tensors.items()}
    return Contents(tensors, chosen.buffers, chosen.left_out, optimizers.trained(tree))


def step_in(path: Path) -> int | None:
    """The step that a file records, or None."""
    try:
        return progress.step_in(_tree(path))
    except ReadError:
        return None


def trained_in(path: Path) -> Trained:
    """What the optimizer in a file of its own trains; nothing if it cannot be read."""
    try:
        return optimizers.trained(_tree(path))
    except ReadError:
        return Trained()


def _tree(path: Path) -> Any:
    try:
        return unpickler.load(path)
    except ReadError:
        raise
    except OSError:
        raise
    except Exception as error:  # torch raises many kinds for a broken file
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise ReadError(f"refused: damaged, or not from torch.save ({reason or type(error).__name__})") from error


def _plain(name: str, tensor: Any) -> Tensor:
    """A tensor of torch as a stored one; raises ReadError for those whose values are not there as numbers."""
    import torch

    if tensor.is_quantized:
        raise ReadError(
            f"tensor {name} is {tensor.dtype}: a quantised model; its norm cannot be read from the file"
        )
    if tensor.is_nested or tensor.layout != torch.strided:
        raise ReadError(
            f"tensor {name} is sparse or nested ({tensor.layout}); save it dense, with to_dense() or to_padded_tensor()"
        )
    if tensor.is_meta:
        raise ReadError(f"tensor {name} has no values: it is on the device meta")
    return of_torch(tensor)
