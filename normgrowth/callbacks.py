"""Norms in the logs of a training: for the Trainer of ``transformers`` and for Lightning.

Each puts a ``NormTracker`` on the optimizer that really steps, so accumulation, skipped steps and clipping are right,
and logs ``NormTracker.latest`` through what the trainer logs with (TensorBoard, W&B, …).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from normgrowth.norms import NormTracker


def for_trainer(trainer: Any, **options: Any) -> Any:
    """Add norms to what a ``transformers.Trainer`` logs; before ``train()``. Returns the callback, with ``tracker``.

    The history is in each checkpoint as ``norms.pt``, and a training that is resumed goes on with it.

    Args:
        options: of ``NormTracker``, such as ``every`` or ``gradients``.
    """
    from transformers import TrainerCallback

    class Norms(TrainerCallback):
        tracker: NormTracker | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            file = Path(args.output_dir, f"checkpoint-{state.global_step}", "norms.pt")
            self.tracker = NormTracker(model, **options)
            if file.is_file():
                self.tracker.load_state_dict(torch.load(file, weights_only=True))
            elif state.global_step:
                warnings.warn(f"no {file}: norms begin at step {state.global_step}, counted from 0", stacklevel=2)
            self.detach = self.tracker.attach(kwargs["optimizer"])

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            if state.is_world_process_zero and folder.is_dir() and self.tracker:
                torch.save(self.tracker.state_dict(), folder / "norms.pt")

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.detach()

    norms, plain = Norms(), trainer.log

    def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        # not in on_log: the reporters' callbacks come before one that is added, and the trainer's own log before all
        plain(logs | norms.tracker.latest() if norms.tracker and "loss" in logs else logs, *args, **kwargs)

    trainer.log = log
    trainer.add_callback(norms)
    return norms


def for_lightning(**options: Any) -> Any:
    """A callback for ``Trainer(callbacks=[…])`` of Lightning, with ``tracker``; it logs at the trainer's own steps.

    The history is in each checkpoint.

    Args:
        options: of ``NormTracker``, such as ``every`` or ``gradients``.

    Raises:
        ValueError: at the start of training, for several optimizers.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback  # type: ignore[assignment]

    class Norms(Callback):
        tracker: NormTracker | None = None
        kept: dict[str, Any] | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if len(trainer.optimizers) != 1:
                raise ValueError(f"{len(trainer.optimizers)} optimizers: attach a NormTracker of its own to each")
            self.tracker = NormTracker(pl_module, **options)
            if self.kept:
                self.tracker.load_state_dict(self.kept)
            self.detach = self.tracker.attach(trainer.optimizers[0])

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if self.tracker and trainer.log_every_n_steps and self.tracker.steps % trainer.log_every_n_steps == 0:
                pl_module.log_dict(self.tracker.latest())

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.detach()

        def state_dict(self) -> dict[str, Any]:
            return self.tracker.state_dict() if self.tracker else {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.kept = state_dict

    return Norms()
