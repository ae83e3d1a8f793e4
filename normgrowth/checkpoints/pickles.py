"""Files of ``torch.save``: their tensors, and what else they say of the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from normgrowth.checkpoints import containers, optimizers, progress, unpickler
from normgrowth.checkpoints.containers import Contents
from normgrowth.checkpoints.layouts import ReadError, why_rank
from normgrowth.checkpoints.optimizers import Trained
from normgrowth.checkpoints.progress import Progress
from normgrowth.checkpoints.tensors import Tensor, of_torch
from normgrowth.checkpoints.unpickler import Inert

_OWN = {"layers", "steps", "sums"}  # keys of a NormTracker's history


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what a damaged or hostile file leads to as ReadError: torch and Python raise many kinds."""
    try:
        yield
    except (ReadError, OSError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise ReadError(f"refused: damaged, or not from torch.save ({reason or type(error).__name__})") from error


def _is_own(tree: Any) -> bool:
    return isinstance(tree, dict) and set(tree) >= _OWN


def _has_arrays(tree: Any, depth: int = 5) -> bool:
    """Whether containers have objects of numpy, or of JAX, which keeps arrays of numpy."""
    if isinstance(tree, Inert) and tree.module.partition(".")[0] in ("numpy", "jax", "jaxlib"):
        return True
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return depth > 0 and any(_has_arrays(value, depth - 1) for value in inner)


def read(path: Path) -> Contents:
    """The weights in a file, and what is left out beside them and why."""
    with _plain_errors():
        tree = unpickler.load(path)
        if _is_own(tree):
            raise ReadError("holds the history of a NormTracker (norms.pt of the callbacks), and no weights")
        if why := why_rank(tree):
            raise ReadError(why)
        chosen = containers.weights(tree)
        if not chosen.tensors and _has_arrays(tree):
            raise ReadError("holds arrays of numpy or JAX, no tensors: save them with safetensors.numpy.save_file")
        tensors = {name: _plain(name, value) for name, value in chosen.tensors.items()}
        notes = [*chosen.notes, *optimizers.notes(tree)]
        return Contents(tensors, chosen.buffers, chosen.left_out, optimizers.trained(tree), notes)


def may_hold_weights(path: Path) -> bool:
    """Whether a matrix of floating numbers is in a file, or the file cannot be read: reading it will say why."""
    with suppress(ReadError), _plain_errors():
        return containers.has_matrix(unpickler.load(path))
    return True


def progress_in(path: Path) -> Progress:
    """What a file records of the training; nothing if it cannot be read."""
    with suppress(ReadError), _plain_errors():
        tree = unpickler.load(path)
        if not _is_own(tree):
            return progress.inside(tree)
    return Progress()


def trained_in(path: Path) -> Trained:
    """What the optimizer in a file of its own trains; nothing if it cannot be read."""
    with suppress(ReadError), _plain_errors():
        return optimizers.trained(unpickler.load(path))
    return Trained()


def _plain(name: str, tensor: Any) -> Tensor:
    """A tensor of torch as a stored one; raises ReadError for those whose values are not there as numbers."""
    import torch

    if tensor.is_quantized:
        raise ReadError(f"tensor {name} is {tensor.dtype}: a quantised model; its norm cannot be read from the file")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise ReadError(
            f"tensor {name} is sparse or nested ({tensor.layout}); save it dense, with to_dense() or to_padded_tensor()"
        )
    if tensor.is_meta:
        raise ReadError(f"tensor {name} has no values: it is on the device meta")
    return of_torch(tensor)
