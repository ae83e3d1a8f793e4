"""A saved model of ``transformers``, read from a folder or the Hub, and what saturation, heads and degree say of it.

Models are in float32 and with plain attention, whatever the files hold: at c = 1000 float16 overflows. No code of a
folder is run: neither pickled nor beside its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from normgrowth import heads, homogeneity, saturation
from normgrowth.checkpoints import find, weights

LONGEST = 512  # tokens of a sentence
TWO = "encoder–decoder"
HOW = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": False}


class Saved(NamedTuple):
    """A model in evaluation mode and what it reads: token numbers of each sentence, in its decoder the same."""

    model: Any
    sentences: list[list[int]]
    kind: str  # "causal", "encoder", or "encoder–decoder"


def load(place: str | Path, sentences: Sequence[str], *, tokenizer: str | Path | None = None) -> Saved:
    """A model as ``save_pretrained`` leaves it, and sentences in its tokens, cut where it has no more positions.

    Args:
        place: the folder, or a repository ``org/name`` or ``org/name@revision`` of the Hub, or of its cache.
        tokenizer: the same of a tokenizer from elsewhere.

    Raises:
        ValueError: no model of ``transformers``, one that needs code of its own or other weights, or whose weights
            ``checkpoints`` refuses; a tokenizer that knows no word.
        FileNotFoundError, ConnectionError: no such folder or repository, or the Hub is needed and does not answer.
    """
    import transformers as tf

    if isinstance(sentences, str) or not sentences:
        raise ValueError("sentences: give a list of one or more")
    folder = find.model_folder(str(place))
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{place}: an adapter that is not merged: {weights.MERGE}")
    weights.read(folder)  # refuses what is none
    with _refused_of(place):
        config = tf.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = kind_of(config)
        model, found = _auto(kind).from_pretrained(folder, **HOW, output_loading_info=True)
    if missing := sorted(name for name in found["missing_keys"] if "pooler" not in name):  # of BERT, and unused here
        raise ValueError(f"{place}: {type(model).__name__} needs {missing[0]}, which is not among the saved weights")
    at = folder if tokenizer is None else find.model_folder(str(tokenizer), weights=False)
    with _refused_of(f"{tokenizer or place}, its tokenizer, if it has one (give another: --tokenizer)"):
        words = tf.AutoTokenizer.from_pretrained(at, trust_remote_code=False)
        check_knows_words(words, sentences)
    limits = (getattr(config.get_text_config(), "max_position_embeddings", None), words.model_max_length, LONGEST)
    longest = min(limit for limit in limits if limit and limit > 0)
    ids = words(list(sentences), truncation=True, max_length=longest)["input_ids"]
    return Saved(model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), ids, kind)


def untrained(one: Saved, seed: int = 0) -> Saved:
    """The control: a model of the same configuration, with the initial values that ``transformers`` draws for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _auto(one.kind).from_config(one.model.config, **HOW)
    return one._replace(model=model.eval().to(one.model.device))


def kind_of(config: Any) -> str:
    """What a configuration makes: ``causal``, ``encoder`` or ``encoder–decoder``.

    A model that is listed for masked words as well as for the next one, as BERT is, is an encoder unless it says so.
    """
    import transformers as tf

    if config.is_encoder_decoder:
        return TWO
    may_be = type(config) in tf.MODEL_FOR_CAUSAL_LM_MAPPING and getattr(config, "attn_type", "") != "bi"  # XLNet's
    both = type(config) in tf.MODEL_FOR_MASKED_LM_MAPPING
    says_so = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    return "causal" if may_be and (says_so or not both) else "encoder"


def similarity(one: Saved, c: float = 1000.0) -> pd.DataFrame:
    """:class:`saturation.Similarity` between the model and itself at ``c``, a row a layer; layer 0 is the embedding."""
    decoder = one.sentences if one.kind == TWO else None
    table = pd.DataFrame(saturation.similarity(one.model, one.sentences, c, decoder=decoder)._asdict())
    return table.set_index(pd.Index(_layers(one, len(table), 0), name="layer"))


def attention(one: Saved, c: float = 1000.0) -> pd.DataFrame:
    """What each head attends to at ``c``: its kind (``heads.classify``) and the numbers of ``heads.summarise``.

    In float64: at c = 1000 float32 rounds scores of T5 that differ to ties (its position bias grows like c, the rest
    of a score like c⁴).
    """
    decoder = one.sentences if one.kind == TWO else None
    pad = one.model.config.get_text_config().pad_token_id or 0
    size = {"max_tokens": LONGEST * len(one.sentences), "device": one.model.device}  # all in one
    (batch,) = saturation.batches_by_length(one.sentences, decoder=decoder, pad=pad, **size)
    scores = heads.attention_scores(one.model, batch, c, dtype=torch.float64)
    names = _layers(one, len(scores), 1)
    windows = heads.windows(one.model) if decoder is None else [None] * len(scores)
    rows = []
    for layer, here, window in zip(names, scores, windows, strict=True):
        causal = one.kind == "causal" or str(layer).startswith("decoder")
        allowed = heads.allowed_positions(batch, causal=causal, window=window)
        found = heads.summarise(here.softmax(-1), allowed)
        each = pd.DataFrame(found._asdict()).assign(kind=heads.classify(found), layer=layer)
        rows.append(each.rename_axis("head").reset_index())
    return pd.concat(rows).set_index(["layer", "head"])


def by_layer(table: pd.DataFrame) -> pd.DataFrame:
    """What to print of one of these tables; of heads their kinds counted and their means, a row a layer."""
    if "kind" not in table:
        return table.drop(columns=["common", "anisotropy_scaled"], errors="ignore")
    layers = table.groupby("layer", sort=False)
    kinds = ("argmax-like", "mean-like", "sink", "other")  # as ``heads.classify`` has them
    counts = {kind: (table.kind == kind).groupby("layer", sort=False).sum() for kind in kinds}
    return pd.DataFrame(counts).assign(positions=layers.positions.mean(), masked=layers.masked_mass.max())


def first(one: Saved) -> dict[str, torch.Tensor]:
    """The first sentence as a model takes it, by name, on the CPU."""
    ids = torch.tensor(one.sentences[:1])
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if one.kind == TWO else {})


def degree(one: Saved, c: float = 1000.0) -> pd.DataFrame:
    """``homogeneity.measure_degree`` of the first sentence's logits, or of what an encoder ends in, up to ``c``.

    Moves the model to the CPU: not every device has float64.
    """
    scales = [*(s for s in (1.0, 10.0, 100.0) if s < c), c]
    return homogeneity.measure_degree(one.model.cpu(), first(one), scales, input_degree=0).set_index("scale")


def _auto(kind: str) -> Any:
    import transformers as tf

    return {"causal": tf.AutoModelForCausalLM, "encoder": tf.AutoModel, TWO: tf.AutoModelForSeq2SeqLM}[kind]


def _layers(one: Saved, count: int, first: int) -> list[Any]:
    """Names of layers from ``first`` on; those of an encoder–decoder say in which part they are."""
    numbers = range(first, first + count)
    if one.kind != TWO:
        return list(numbers)
    encoder = one.model.config.num_hidden_layers + 1
    return [f"encoder {i}" if i < encoder else f"decoder {i - encoder + first}" for i in numbers]


def check_knows_words(tokenizer: Any, sentences: Sequence[str]) -> None:
    """Raise ValueError for a tokenizer of ``transformers`` that tells no word of the sentences from another.

    For a folder without one ``AutoTokenizer`` may make one up, with special tokens alone, or with one for every word.
    """
    special = {*tokenizer.all_special_ids, tokenizer.unk_token_id}
    known = {token for ids in tokenizer(list(sentences))["input_ids"] for token in ids} - special
    if len(known) < 2:
        raise ValueError(
            f"this tokenizer knows no word: {len(sentences)} sentences give {len(known)} different tokens, "
            "special ones left out"
        )


@contextmanager
def _refused_of(place: object) -> Iterator[None]:
    """What ``transformers`` refuses, in one line."""
    try:
        yield
    except Exception as error:  # it raises many kinds
        first = str(error).strip().partition("\n")[0]
        why = "needs code of its own, which is not run here" if "trust_remote_code" in str(error) else first
        raise ValueError(f"{place}: {why}") from error
