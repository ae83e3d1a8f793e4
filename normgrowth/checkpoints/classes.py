"""What a model's own class says of its parameters: that of ``config.json``, built on torch's device without memory."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from normgrowth.checkpoints.tensors import Shape


class ModelClass(NamedTuple):
    """A class and, for its configuration, which names are parameters, which buffers, and which are one parameter."""

    name: str
    parameters: dict[str, Shape]
    buffers: set[str]
    ties: dict[str, str]  # {alias: original}


def of_folder(folder: Path, stored: Collection[str]) -> ModelClass | None:
    """The class that ``config.json`` of a folder names, with its names as they are stored.

    None without a configuration, without ``transformers``, for a class that it does not know, and for one to which most
    of the stored names are foreign. Code beside the weights is not run.
    """
    config = _config(folder)
    if config is None:
        return None
    try:
        import torch
        from transformers.utils import logging
    except ImportError:
        return None
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            model = _class(config)
    except Exception:  # a configuration of another version, or a class that needs another library
        return None
    finally:
        logging.set_verbosity(verbosity)
    return _as_stored(model, stored) if model is not None else None


def _config(folder: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if isinstance(config, dict) and (config.get("architectures") or config.get("model_type")):
            return config
    return None


def _class(config: dict[str, Any]) -> Any:
    """The model that a configuration describes, or None if transformers has no such class."""
    import transformers

    names = config.get("architectures") or []
    kind = getattr(transformers, str(names[0]), None) if names else None
    if kind is not None and getattr(kind, "config_class", None) is not None:
        return kind(kind.config_class.from_dict(config))
    if not names and config.get("model_type") in transformers.CONFIG_MAPPING:
        return transformers.AutoModel.from_config(transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config))
    return None


def _as_stored(model: Any, stored: Collection[str]) -> ModelClass | None:
    """The names of a model, with or without the prefix of its base, as most of the stored ones have it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    originals: dict[int, str] = {}
    ties = {}
    for name, parameter in parameters.items():
        original = originals.setdefault(id(parameter), name)
        if original != name:
            ties[next(iter(_in_files(model, {name: parameter})))] = next(iter(_in_files(model, {original: parameter})))
            ties[name] = original
    of_files = parameters | _in_files(model, parameters)
    buffers = dict(model.named_buffers())
    buffers |= _in_files(model, buffers)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names = [*of_files, *buffers]
    rest = set(stored)
    forms = (lambda name: name, lambda name: name.removeprefix(prefix), lambda name: prefix + name)
    renamed = max(forms, key=lambda form: sum(form(name) in rest for name in names))
    if 2 * sum(name in rest for name in set(map(renamed, names))) < len(rest):
        return None
    return ModelClass(
        type(model).__name__,
        {renamed(name): tuple(parameter.shape) for name, parameter in of_files.items()},
        {renamed(name) for name in buffers if name not in of_files},
        {renamed(alias): renamed(original) for alias, original in ties.items()},
    )


def _in_files(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors under the names that ``save_pretrained`` gives them: files keep the names of earlier versions."""
    try:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(model, tensors) or tensors
    except Exception:  # no such function in this version, or a conversion that needs values
        return tensors
