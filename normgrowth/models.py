"""A saved model of ``transformers``, from a folder or the Hub, and its saturation, its heads and its degree.

Models are loaded in float32 and without fused attention, whatever the files hold, and measured in float64 where the
memory has room for it: at c = 1000 float16 overflows, and so do the squares that trained models compute in float32. No
code of a folder is run, neither pickled code nor files beside the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from normgrowth import heads, homogeneity, precision, saturation
from normgrowth.checkpoints import find, weights

__all__ = [
    "CAUSAL",
    "ENCODER",
    "ENCODER_DECODER",
    "SavedModel",
    "attention",
    "by_layer",
    "degree",
    "first_sentence",
    "from_config",
    "kind_of",
    "load",
    "ray",
    "similarity",
    "untrained",
]

MAX_TOKENS = 512  # of a sentence
BATCH_TOKENS = 512  # more are hardly faster, and take memory
ATTENTION_BYTES = 1 << 27  # of the attention weights of a batch, all layers together
CAUSAL = "causal"
ENCODER = "encoder"
ENCODER_DECODER = "encoder–decoder"
LOAD_OPTIONS = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": False}


class SavedModel(NamedTuple):
    """A model in evaluation mode, and token ids of each sentence. A decoder reads the same sentences as its encoder."""

    model: Any
    sentences: list[list[int]]
    kind: str  # "causal", "encoder", or "encoder–decoder"


def load(source: str | Path, sentences: Sequence[str], *, tokenizer: str | Path | None = None) -> SavedModel:
    """Load a model that ``save_pretrained`` has written, and encode sentences, cut to the positions that it has.

    Args:
        source: the folder, or a repository ``org/name`` or ``org/name@revision`` of the Hub or of its cache.
        tokenizer: another folder or repository to take the tokenizer from.

    Raises:
        ValueError: there is no model of ``transformers``, it needs code of its own, its weights do not fit or
            ``checkpoints`` refuses them, or the tokenizer knows no word.
        FileNotFoundError: there is no such folder or repository.
        ConnectionError: the Hub is needed and does not answer.
    """
    import transformers as tf

    if isinstance(sentences, str) or not sentences:
        raise ValueError("sentences: give a list of one or more")
    folder = find.model_folder(str(source))
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{source}: an adapter that is not merged: {weights.MERGE}")
    weights.read(folder)  # only to raise if the weights are incomplete, damaged or unsafe
    with _one_line_errors(source):
        config = tf.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = kind_of(config)
        model, info = _auto_class(kind).from_pretrained(
            folder, **LOAD_OPTIONS, output_loading_info=True, ignore_mismatched_sizes=True
        )
    if why := _why_other(model, info):
        raise ValueError(f"{source}: {type(model).__name__} {why}")
    tokenizer_folder = folder if tokenizer is None else find.model_folder(str(tokenizer), weights=False)
    with _one_line_errors(f"{tokenizer or source}, its tokenizer, if it has one (give another: --tokenizer)"):
        encode = tf.AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
        check_knows_words(encode, sentences)
    positions = _positions(model)
    limits = [limit for limit in (positions, encode.model_max_length, MAX_TOKENS) if limit and limit > 0]
    ids = encode(list(sentences), truncation=True, max_length=min(limits))["input_ids"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return SavedModel(model.eval().to(device), ids, kind)


def _why_other(model: Any, info: Mapping[str, Any]) -> str | None:
    """Why the saved weights are not those of a model, by what ``from_pretrained`` says of its loading; or None.

    Heads that it leaves out, and BERT's pooler, are not used here. Blocks are: a file that has more of them than the
    configuration is another model.
    """
    missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
    unknown = sorted(info["unexpected_keys"])
    if info["mismatched_keys"]:
        name, saved, needed = min(info["mismatched_keys"])
        return f"needs {name} of shape {tuple(needed)}, and the saved one has {tuple(saved)}"
    if missing:
        instead = f"; {unknown[0]} is, which it does not know" if unknown else ""
        return f"needs {missing[0]}, which is not among the saved weights{instead}"
    kinds = {_without_numbers(name) for name in model.state_dict()}
    beyond = next((name for name in unknown if _without_numbers(name) in kinds), None)
    return f"has no {beyond}, which is among the saved weights: its configuration has fewer layers" if beyond else None


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _positions(model: Any) -> int | None:
    """Number of positions that a model has, if that is bounded.

    A table of positions that has a row for padding, as RoBERTa's, begins after that row.
    """
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(module, torch.nn.Embedding) and "position" in name.rpartition(".")[2] and padding is not None:
            return module.num_embeddings - padding - 1
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def untrained(saved: SavedModel, seed: int = 0) -> SavedModel:
    """The control: a model of the same configuration, with the initial values that ``transformers`` draws for it."""
    model = from_config(saved.model.config, seed)
    return saved._replace(model=model.to(saved.model.device))


def from_config(config: Any, seed: int = 0) -> Any:
    """A model of a configuration with the initial values that ``transformers`` draws for it, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _auto_class(kind_of(config)).from_config(config, **LOAD_OPTIONS).eval()


def kind_of(config: Any) -> str:
    """The kind of model that a configuration describes: ``causal``, ``encoder`` or ``encoder–decoder``.

    Models such as BERT, which ``transformers`` offers for masked words as well as for the next word, are encoders
    unless their configuration says otherwise.
    """
    import transformers as tf

    if config.is_encoder_decoder:
        return ENCODER_DECODER
    is_bidirectional = getattr(config, "attn_type", "") == "bi"  # XLNet's
    can_predict_next = type(config) in tf.MODEL_FOR_CAUSAL_LM_MAPPING and not is_bidirectional
    can_fill_masks = type(config) in tf.MODEL_FOR_MASKED_LM_MAPPING
    declared_causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    return CAUSAL if can_predict_next and (declared_causal or not can_fill_masks) else ENCODER


def similarity(saved: SavedModel, c: float = 1000.0) -> pd.DataFrame:
    """:class:`saturation.Similarity` of the model at scales 1 and c, by ``layer``; layer 0 is the embedding.

    The column ``own`` is the part of ``raw`` that is not common to all tokens, over the largest value that it could
    have (``saturation.own``).

    In float64 throughout, or where that is not possible at the largest scale that stays finite: see ``at_scale``.
    """

    def measure(scale: float, dtype: torch.dtype | None) -> pd.DataFrame:
        by_number = saturation.similarity(
            saved.model,
            saved.sentences,
            scale,
            decoder=_decoder_sentences(saved),
            max_tokens=BATCH_TOKENS,
            padding=False,
            dtype=dtype,
        )
        table = pd.DataFrame(by_number._asdict())
        tokens = sum(map(len, saved.sentences))
        table.insert(2, "own", saturation.own(table, tokens))
        return table.set_index(pd.Index(_layer_names(saved, len(table), 0), name="layer"))

    return at_scale(saved, c, measure)


def attention(saved: SavedModel, c: float = 1000.0) -> pd.DataFrame:
    """The kind of each head at scale c (``heads.classify``) and the numbers of ``heads.summarise``.

    Computed in float64 throughout: at c = 1000 float32 rounds different scores of T5 to ties, because its position bias
    grows like c and the rest of a score like c⁴. Where that is not possible: see ``at_scale``.

    Returns:
        A table by ``layer`` and ``head``; layers are numbered from 1, and layers without attention are not counted.

    Raises:
        ValueError: the model has no attention.
    """
    masks = _masks(saved)
    names = _layer_names(saved, len(masks), 1)
    config = saved.model.config.get_text_config()
    weights_per_pair = len(masks) * getattr(config, "num_attention_heads", 1)  # for each pair of a query and a key
    batches = saturation.batches_by_length(
        saved.sentences,
        decoder=_decoder_sentences(saved),
        max_tokens=BATCH_TOKENS,
        padding=False,
        max_pairs=ATTENTION_BYTES / (8 * weights_per_pair),
        pad=getattr(config, "pad_token_id", None) or 0,
        device=saved.model.device,
    )

    def measure(scale: float, dtype: torch.dtype | None) -> pd.DataFrame:
        tables = []
        summaries = heads.summaries(saved.model, batches, scale, masks=masks, dtype=dtype)
        for name, summary in zip(names, summaries, strict=True):
            table = pd.DataFrame(summary._asdict()).assign(kind=heads.classify(summary), layer=name)
            tables.append(table.rename_axis("head").reset_index())
        return pd.concat(tables).set_index(["layer", "head"])

    return at_scale(saved, c, measure)


def _masks(saved: SavedModel) -> list[heads.Mask]:
    """Which positions each layer with attention sees; those of an encoder, then those of its decoder."""
    config = saved.model.config
    if saved.kind != ENCODER_DECODER:
        return [heads.Mask(saved.kind == CAUSAL, window) for window in heads.windows(saved.model)]
    decoder = getattr(config, "decoder", None) or config.get_text_config(decoder=True)
    masks = [heads.Mask(False, window) for window in heads.windows_of(_encoder_config(config))]
    return masks + [heads.Mask(True, window) for window in heads.windows_of(decoder)]


def _encoder_config(config: Any) -> Any:
    """The configuration of the encoder of an encoder–decoder."""
    return getattr(config, "encoder", None) or config.get_text_config(encoder=True)


def at_scale(saved: SavedModel, c: float, measure: Callable[[float, torch.dtype | None], pd.DataFrame]) -> pd.DataFrame:
    """A table that ``measure`` makes at scale c in float64 or, if that is not possible, nearest to it.

    Where the memory has no room for float64 (``precision.choose``) the model's own precision is taken; where a number
    overflows at c, the largest scale at which none does, to a tenth. ``table.attrs`` has ``c``, the ``precision``, and
    the ``reason`` for another c or precision than those asked for, or "".

    Raises:
        ValueError: c is not a positive number.
        OverflowError: a number overflows at scale 1.
    """
    _check_scale(c)
    dtype, reason = precision.choose(saved.model)
    own = str(next(saved.model.parameters()).dtype if dtype is None else dtype).removeprefix("torch.")
    try:
        return _with_attributes(measure(c, dtype), c, own, reason)
    except OverflowError as error:
        if c <= 1:
            raise
        reason = "; ".join(filter(None, [reason, str(error)]))
    finite = 1.0
    table = measure(finite, dtype)
    overflowing = c
    while overflowing / finite > 1.1:
        middle = float(f"{math.sqrt(finite * overflowing):.3g}")
        try:
            table = measure(middle, dtype)
            finite = middle
        except OverflowError:
            overflowing = middle
    return _with_attributes(table, finite, own, reason)


def _check_scale(c: float) -> None:
    """Raise ValueError unless c is a positive number."""
    if not 0 < c < math.inf:
        raise ValueError(f"c = {c:g}: give a positive number; the saturated form is the limit of large ones")


def _with_attributes(table: pd.DataFrame, c: float, own: str, reason: str) -> pd.DataFrame:
    """The table, which says at which scale and in which precision it was measured."""
    table.attrs.update(c=c, precision=own, reason=reason)
    return table


def by_layer(table: pd.DataFrame) -> pd.DataFrame:
    """A table of ``similarity`` or ``degree`` as it is, or one of ``attention`` with a row for each layer.

    The row of a layer counts its heads of each kind, and has their mean ``positions`` and largest ``masked`` weight.
    """
    if "kind" not in table:
        return table
    layers = table.groupby("layer", sort=False)
    kinds = ("argmax-like", "mean-like", "sink", "other")  # as in ``heads.classify``
    counts = {kind: (table.kind == kind).groupby("layer", sort=False).sum() for kind in kinds}
    return pd.DataFrame(counts).assign(positions=layers.positions.mean(), masked=layers.masked_mass.max())


def first_sentence(saved: SavedModel) -> dict[str, torch.Tensor]:
    """Inputs of the model for its first sentence, by name, ``(1, T)``, int64, on the CPU."""
    ids = torch.tensor(saved.sentences[:1])
    if saved.kind == ENCODER_DECODER:
        return {"input_ids": ids, "decoder_input_ids": ids}
    return {"input_ids": ids}


def degree(saved: SavedModel, c: float = 1000.0) -> pd.DataFrame:
    """``homogeneity.measure_degree`` of the first sentence's logits, or of an encoder's last representations.

    The scales are c and, as far as they are smaller, 1, 10 and 100. Moves the model to the CPU, since not every device
    has float64.
    """
    _check_scale(c)
    saved.model.cpu()
    dtype, reason = precision.choose(saved.model)
    if dtype is None:
        raise ValueError(f"{reason}. By the rules, without float64: homogeneity.degree(model, ids, approximate=True)")
    scales = [scale for scale in (1.0, 10.0, 100.0) if scale < c]
    table = homogeneity.measure_degree(saved.model.cpu(), first_sentence(saved), [*scales, c], input_degree=0)
    return _with_attributes(table.set_index("scale"), c, "float64", "")


def _auto_class(kind: str) -> Any:
    """The class of ``transformers`` that loads models of a kind."""
    import transformers as tf

    classes = {
        CAUSAL: tf.AutoModelForCausalLM,
        ENCODER: tf.AutoModel,
        ENCODER_DECODER: tf.AutoModelForSeq2SeqLM,
    }
    return classes[kind]


def _decoder_sentences(saved: SavedModel) -> list[list[int]] | None:
    """Token ids that the decoder reads with each sentence; None for a model that is not an encoder–decoder."""
    return saved.sentences if saved.kind == ENCODER_DECODER else None


def _layer_names(saved: SavedModel, count: int, first: int) -> list[Any]:
    """Numbers of ``count`` layers from ``first`` on; for an encoder–decoder with the name of its part."""
    numbers = range(first, first + count)
    if saved.kind != ENCODER_DECODER:
        return list(numbers)
    decoder_start = _encoder_config(saved.model.config).num_hidden_layers + 1
    return [
        f"encoder {number}" if number < decoder_start else f"decoder {number - decoder_start + first}"
        for number in numbers
    ]


def check_knows_words(tokenizer: Any, sentences: Sequence[str]) -> None:
    """Raise ValueError if a tokenizer of ``transformers`` encodes all words of the sentences alike.

    For a folder without a tokenizer ``AutoTokenizer`` may invent one that has special tokens alone, or one token for
    every word.
    """
    special = {*tokenizer.all_special_ids, tokenizer.unk_token_id}
    tokens = {token for ids in tokenizer(list(sentences))["input_ids"] for token in ids} - special
    words = {word for sentence in sentences for word in sentence.split()}
    if len(tokens) < min(2, len(words)):
        raise ValueError(
            f"this tokenizer knows no word: {len(words)} different words give {len(tokens)} different tokens, "
            "special ones left out"
        )


@contextmanager
def _one_line_errors(source: object) -> Iterator[None]:
    """Turn an error of ``transformers``, which may be long, into a ValueError of one line that names the source."""
    try:
        yield
    except Exception as error:  # transformers raises errors of many classes
        reason, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        while reason.endswith((":", ",", " or", " and")) and rest:  # a list of what would have been needed
            reason = f"{reason} {rest.pop(0)}"
        if "trust_remote_code" in str(error):
            reason = "needs code of its own, which is not run here"
        raise ValueError(f"{source}: {reason}") from error


def ray(saved: SavedModel, scales: Sequence[float] | None = None, *, parts: bool = False) -> pd.DataFrame:
    """``saturation.along_ray`` of all parameters, and with ``parts`` of each part that the model has by itself.

    In float64 throughout where the memory has room. ``table.attrs`` has the ``precision`` besides, and the ``reason``
    for another one, or "".

    Raises:
        ValueError: the parts of the model cannot be told, or a scale is not positive.
    """
    dtype, reason = precision.choose(saved.model)
    table = saturation.along_ray(
        saved.model,
        saved.sentences,
        saturation.SCALES if scales is None else scales,
        [saturation.ALL, *saturation.PARTS] if parts else None,
        decoder=_decoder_sentences(saved),
        dtype=dtype,
    )
    own = next(saved.model.parameters()).dtype if dtype is None else dtype
    table.attrs.update(precision=str(own).removeprefix("torch."), reason=reason)
    return table
