"""Norms in the logs of a training, and its null model: for the Trainer of ``transformers`` and for Lightning.

``for_trainer`` and ``for_lightning`` attach a ``NormTracker`` to the optimizer that really steps, so that accumulation,
skipped steps and clipping are accounted for, and log ``NormTracker.latest`` wherever the trainer logs (TensorBoard,
W&B, …). ``noise_for_trainer`` and ``noise_for_lightning`` attach ``NoiseGradients``, with or without norms beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from normgrowth.norms import NoiseGradients, NormTracker

__all__ = ["for_lightning", "for_trainer", "noise_for_lightning", "noise_for_trainer"]


def for_trainer(trainer: Any, **options: Any) -> Any:
    """Add norms to the logs of a ``transformers.Trainer``. Call it before ``train()``.

    The history is saved with each checkpoint as ``norms.pt``, and a training that is resumed goes on with that of the
    folder it is resumed from.

    Args:
        trainer: the ``transformers.Trainer``.
        options: of ``NormTracker``, such as ``every`` or ``gradients``.

    Returns:
        The callback. Once training has begun, its attribute ``tracker`` is the ``NormTracker``.
    """
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint

    class Norms(TrainerCallback):
        tracker: NormTracker | None = None
        detach: Callable[[], None] | None = None
        resumed_from: str | None = None  # the folder of a checkpoint

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.end()
            file = Path(self.resumed_from or args.output_dir, "norms.pt")
            self.tracker = NormTracker(model, **options)
            if state.global_step and file.is_file():
                self.tracker.load_state_dict(torch.load(file, weights_only=True))
            elif state.global_step:
                warnings.warn(f"no {file}: norms begin at step {state.global_step}, counted from 0", stacklevel=2)
            self.detach = self.tracker.attach(kwargs["optimizer"])

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            if state.is_world_process_zero and folder.is_dir() and self.tracker:
                torch.save(self.tracker.state_dict(), folder / "norms.pt")

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.end()

        def end(self) -> None:
            """Detach the tracker, also that of a training that was interrupted, whose optimizer may go on."""
            if self.detach:
                self.detach()
            self.detach = None

    norms = Norms()
    log_without_norms = trainer.log
    train_without_norms = trainer.train

    def train_with_norms(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        source = resume_from_checkpoint
        norms.resumed_from = get_last_checkpoint(trainer.args.output_dir) if source is True else source or None
        return train_without_norms(resume_from_checkpoint, *args, **kwargs)

    def log_with_norms(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if norms.tracker and "loss" in logs:
            logs = logs | norms.tracker.latest()
        log_without_norms(logs, *args, **kwargs)

    # An on_log of the callback would be too late: the trainer and the reporters' callbacks have logged by then.
    trainer.log = log_with_norms
    trainer.train = train_with_norms
    trainer.add_callback(norms)
    return norms


def noise_for_trainer(trainer: Any, *, seed: int = 0) -> Any:
    """Put noise in place of every gradient of a ``transformers.Trainer``. Call it before ``train()``.

    A training that is resumed goes on with its noise.

    Args:
        trainer: the ``transformers.Trainer``.
        seed: of ``NoiseGradients``.

    Returns:
        The callback. Once training has begun, its attribute ``noise`` is the ``NoiseGradients``.
    """
    from transformers import TrainerCallback

    class Noise(TrainerCallback):
        noise: NoiseGradients | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.noise:  # of a training that was interrupted, whose optimizer may go on
                self.noise.remove()
            self.noise = NoiseGradients(kwargs["optimizer"], seed=seed, steps=state.global_step)

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            if self.noise:
                self.noise.remove()

    noise = Noise()
    trainer.add_callback(noise)
    return noise


def for_lightning(**options: Any) -> Any:
    """A callback for ``Trainer(callbacks=[…])`` of Lightning, which logs norms at the steps at which the trainer logs.

    The history is saved with each checkpoint, and a training that is resumed goes on with it.

    Args:
        options: of ``NormTracker``, such as ``every`` or ``gradients``.

    Returns:
        The callback. Once training has begun, its attribute ``tracker`` is the ``NormTracker``.

    A step of several optimizers is one step of each.
    """
    callback_class: Any = _lightning_callback()

    class Norms(callback_class):
        tracker: NormTracker | None = None
        loaded_state: dict[str, Any] | None = None  # from a checkpoint, until training starts
        detach: Sequence[Callable[[], None]] = ()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.end()
            self.tracker = NormTracker(pl_module, **options)
            if self.loaded_state:
                self.tracker.load_state_dict(self.loaded_state)
            self.detach = [self.tracker.attach(optimizer) for optimizer in trainer.optimizers]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if self.tracker and trainer.log_every_n_steps and self.tracker.steps % trainer.log_every_n_steps == 0:
                pl_module.log_dict(self.tracker.latest())

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.end()

        def end(self) -> None:
            """Detach the tracker, also that of a training that was interrupted, whose optimizer may go on."""
            for detach in self.detach:
                detach()
            self.detach = ()

        def state_dict(self) -> dict[str, Any]:
            return self.tracker.state_dict() if self.tracker else {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded_state = state_dict

    return Norms()


def noise_for_lightning(*, seed: int = 0) -> Any:
    """A callback for ``Trainer(callbacks=[…])`` of Lightning, which puts noise in place of every gradient.

    A training that is resumed goes on with its noise.

    Args:
        seed: of ``NoiseGradients``.

    Returns:
        The callback. Once training has begun, its attribute ``noise`` is the ``NoiseGradients``.

    Raises:
        ValueError: at the start of training, if there are several optimizers.
    """
    callback_class: Any = _lightning_callback()

    class Noise(callback_class):
        noise: NoiseGradients | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            optimizer = _only_optimizer(trainer, "NoiseGradients")
            if self.noise:  # of a training that was interrupted, whose optimizer may go on
                self.noise.remove()
            self.noise = NoiseGradients(optimizer, seed=seed, steps=trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.noise:
                self.noise.remove()

    return Noise()


def _lightning_callback() -> type:
    """The base class of Lightning's callbacks, under either of its names."""
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback  # type: ignore[assignment]
    return Callback


def _only_optimizer(trainer: Any, instrument: str) -> Any:
    """The optimizer of a Lightning trainer; raises ValueError if there are several."""
    if len(trainer.optimizers) != 1:
        raise ValueError(f"{len(trainer.optimizers)} optimizers: attach a {instrument} of its own to each")
    return trainer.optimizers[0]
