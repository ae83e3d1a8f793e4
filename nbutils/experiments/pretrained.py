"""The models of Figure 4: pretrained models from a package or from the hub, and random models of the same shapes.

A missing model is not replaced by another: ``ModelMissing`` says what is missing and what to do. Random models need no
download, so one half of the figure can be run on every machine.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nbutils.experiments import packaged
from nbutils.experiments.packaged import ModelMissing
from normgrowth.checkpoints import find
from normgrowth.models import CAUSAL, kind_of
from normgrowth.precision import free_memory

# The models of the published figure, by the names in book/data/sim_by_layer.csv, and their repositories on the hub.
HUB: Mapping[str, str] = {
    "bert-base-cased": "google-bert/bert-base-cased",
    "roberta-base": "FacebookAI/roberta-base",
    "t5-base": "google-t5/t5-base",
    "xlnet-base-cased": "xlnet/xlnet-base-cased",
}
# Pythia, one recipe in several sizes, and its smallest here at earlier steps: small models against larger ones.
SERIES: Mapping[str, str] = {
    "pythia-70m": "EleutherAI/pythia-70m",
    "pythia-160m": "EleutherAI/pythia-160m",
    "pythia-410m": "EleutherAI/pythia-410m",
    "pythia-70m, step 512": "EleutherAI/pythia-70m@step512",
    "pythia-70m, step 16000": "EleutherAI/pythia-70m@step16000",
}

COPIES = 5  # what readings of a model take at most, in times its float32 weights: float64, scaled, activations


class LoadedModel(NamedTuple):
    """A pretrained model in float32 and in evaluation mode, with its tokenizer and its source.

    Used in ``not-saturated``, ``survives`` and ``today``.
    """

    model: nn.Module
    tokenizer: Any
    source: str  # package and version, or repository


def from_package(name: str) -> LoadedModel:
    """A trained model that came in a package, a key of ``packaged.MODELS``; causal ones with the layer of their logits.

    Used in ``not-saturated``, ``survives`` and ``today``.

    Raises:
        ValueError: an unknown name.
        ModelMissing: a package is not installed, has another file, the model's folder cannot be written, or less memory
            is free than its readings take, as on Binder.
    """
    _return_freed_memory()
    packed = packaged.find(name)
    needed = COPIES * packed.megabytes
    free = free_memory() // 2**20
    if free < needed:
        raise ModelMissing(f"{packed.title} takes about {needed} MB of memory, and {free} MB are free here")
    return _load(packaged.folder(name), packed.source, with_logits=True)


def from_hub(name: str) -> LoadedModel:
    """A model of ``HUB`` or ``SERIES``, by its key, from the hub, or from its cache if the hub does not answer.

    Used in ``not-saturated``.

    Raises:
        ModelMissing: the hub does not answer and the model is not in its cache, or the download fails.
    """
    repository = {**HUB, **SERIES}[name]
    try:
        return _load(find.model_folder(repository), repository)
    except ConnectionError as error:
        reason = "is not in the hub's cache, and huggingface.co does not answer: run this once where it does"
        raise ModelMissing(f"{name} {reason}") from error
    except Exception as error:  # whatever the readers raise, the chapter needs a sentence
        raise ModelMissing(f"{name} could not be read from {repository}: {error}") from error


def _silence_transformers() -> None:
    """Switch off the progress bars and reports of ``transformers``."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _load(folder: Path, source: str, *, with_logits: bool = False) -> LoadedModel:
    """Load a folder that ``save_pretrained`` has written; causal models without their logits, unless asked for."""
    import transformers as tf

    _silence_transformers()
    config = tf.AutoConfig.from_pretrained(folder, local_files_only=True)
    loader = tf.AutoModelForCausalLM if with_logits and kind_of(config) == CAUSAL else tf.AutoModel
    model = loader.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = tf.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return LoadedModel(model.eval(), tokenizer, source)


def configuration(name: str, *, width: int = 768, depth: int = 12, heads: int = 12, vocab: int = 32_000) -> Any:
    """Configuration of one of the paper's four models, without the hub; by default in its ``base`` size.

    All settings on which a random network depends are those of the released configuration, except for the size of the
    vocabulary: rows of the embedding are independent draws, so their number does not matter.

    Used in ``similarity`` and ``not-saturated``.

    Raises:
        ValueError: an unknown name.

    >>> [configuration(name).layer_norm_eps for name in ("bert-base-cased", "roberta-base")]
    [1e-12, 1e-05]
    """
    import transformers as tf

    bert: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    bert |= {"vocab_size": vocab, "intermediate_size": 4 * width}
    t5: dict[str, Any] = {"d_model": width, "num_layers": depth, "num_heads": heads, "d_kv": width // heads}
    match name:
        case "bert-base-cased":
            return tf.BertConfig(**bert)
        case "roberta-base":
            return tf.RobertaConfig(**bert, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)
        case "t5-base":
            return tf.T5Config(**t5, vocab_size=vocab, d_ff=4 * width)
        case "xlnet-base-cased":
            return tf.XLNetConfig(vocab_size=vocab, d_model=width, n_layer=depth, n_head=heads, d_inner=4 * width)
        case _:
            raise ValueError(f"unknown model {name!r}: choose one of {', '.join(HUB)}")


def random_model(config: Any, seed: int, *, with_logits: bool = False) -> nn.Module:
    """A network of a configuration with the initial weights that ``transformers`` draws for it, in evaluation mode.

    ``transformers`` draws from torch's global generator only. It is set to ``seed`` for the draw and restored after it.
    ``with_logits`` asks for a language model with the layer of its logits.

    Used in ``similarity``, ``not-saturated`` and ``survives``.

    >>> model = random_model(configuration("bert-base-cased", width=8, depth=1, heads=2, vocab=10), seed=0)
    >>> round(float(model.embeddings.position_embeddings.weight.detach().std()), 3), model.training
    (0.02, False)
    """
    import transformers as tf

    _silence_transformers()
    _return_freed_memory()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loader = tf.AutoModelForCausalLM if with_logits else tf.AutoModel
        return loader.from_config(config, dtype=torch.float32).eval()


def permute_entries(model: nn.Module, rng: torch.Generator) -> None:
    """Put the entries of each parameter tensor in random order, in place: what was learned is gone, the norms stay.

    The rows of a matrix are permuted first, and then the entries within each piece of 65,536: an entry may come to any
    place, and a processor permutes pieces that fit its cache several times as fast. ``rng`` is a generator on the CPU.

    Used in ``not-saturated`` and ``your-own``.

    >>> layer = nn.Linear(2, 2)
    >>> before = layer.weight.detach().flatten().sort().values
    >>> permute_entries(layer, torch.Generator().manual_seed(0))
    >>> torch.equal(layer.weight.detach().flatten().sort().values, before)
    True
    """
    for parameter in model.parameters():
        if parameter.ndim == 0:
            continue
        rows = torch.randperm(len(parameter), generator=rng).to(parameter.device)
        entries = parameter.data[rows].flatten()
        for piece in entries.split(1 << 16):
            piece.copy_(piece[torch.randperm(len(piece), generator=rng).to(piece.device)])
        parameter.data = entries.view_as(parameter)


def round_to_4_bits(model: nn.Module, *, along: int = -1) -> None:
    """Round each matrix to 4 bits, in place, as the format Q4_1 does: 16 levels for each 32 neighbours of an axis.

    The lowest level of a block and the step between levels are kept in 16 bits. Vectors, and matrices whose axis
    ``along`` has no multiple of 32 entries, stay as they are.

    Used in ``not-saturated``.

    >>> layer = nn.Linear(32, 1, bias=False)
    >>> round_to_4_bits(layer)
    >>> len(layer.weight.unique()) <= 16
    True
    """
    for parameter in model.parameters():
        if parameter.ndim < 2 or parameter.shape[along] % 32:
            continue
        turned = parameter.data.transpose(along, -1)
        blocks = turned.reshape(-1, 32)
        for piece in blocks.split(1 << 15):  # a vocabulary at once takes a gigabyte
            lowest = piece.amin(1, keepdim=True)
            step = ((piece.amax(1, keepdim=True) - lowest) / 15).half().float()
            lowest = lowest.half().float()
            levels = ((piece - lowest) / step.clamp(min=1e-8)).round().clamp(0, 15)
            piece.copy_(lowest + step * levels)
        parameter.data = blocks.view(turned.shape).transpose(along, -1).contiguous()


def _return_freed_memory() -> None:
    """Let glibc return the memory of large tensors: it would keep an earlier model's in pieces too small for the next.

    Other C libraries are left as they are.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_mmap_threshold = -3  # man 3 mallopt
        libc.mallopt(m_mmap_threshold, 1 << 18)


@contextmanager
def scaled_by_module(
    model: nn.Module, c: float | Callable[[str], float], *, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Multiply the parameters of each module by ``c``, or each parameter by ``c(name)``, only while that module runs.

    The outputs are those of ``saturation.scaled``, with the copy of a single module in memory instead of the whole
    model's. It is meant for models whose modules compute with their own parameters, such as those of ``HUB``.

    Used in ``similarity``, ``not-saturated``, ``survives`` and ``today``.

    Raises:
        ValueError: ``dtype`` is not ``None``.

    >>> layer = nn.Linear(2, 2)
    >>> with scaled_by_module(layer, 1000.0):
    ...     large = layer(torch.ones(2))
    >>> torch.allclose(large, 1000 * layer(torch.ones(2)))
    True
    """
    if dtype is not None:
        raise ValueError(f"dtype {dtype}: modules are scaled in the model's own precision; take saturation.scaled")
    factors = {parameter: c(name) if callable(c) else c for name, parameter in model.named_parameters()}
    unscaled: dict[nn.Parameter, torch.Tensor] = {}

    def before(module: nn.Module, arguments: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if factors[parameter] != 1:
                unscaled[parameter] = parameter.data
                parameter.data = parameter.data * factors[parameter]

    def after(module: nn.Module, arguments: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in unscaled:
                parameter.data = unscaled.pop(parameter)

    modules = [] if all(factor == 1 for factor in factors.values()) else list(model.modules())
    hooks = [module.register_forward_pre_hook(before) for module in modules]
    hooks += [module.register_forward_hook(after, always_call=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
