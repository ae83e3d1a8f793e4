"""Which layer of a network a parameter belongs to, from its name: one convention for tables, figures and files."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BLOCK_NUMBER = re.compile(r"(?:^|\.)(?:h|\w*layers?|\w*blocks?)\.(\d+)(?:\.|$)")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?!un_?embed)(?:wte|wpe|shared|(?:\w+_)?embed(?!_out)(?:_\w+)?|\w*embeddings?(?:_(?:table|layer|matrix))?)"
    r"(?:\.|$)"
)
_HEAD = re.compile(
    r"(?:^|\.)(?:lm_head|head|embed_out|un_?embed(?:ding)?|readout|cls|predictions|classifier|score|proj_out|qa_outputs"
    r"|output(?:_layer)?|(?:transformer|model)\.ff_out)(?:\.|$)"
)
_NORM = re.compile(r"(?:^|[._])(?:\w*norm\w*|ln(?:_?\w+)?|\w+_ln)(?:\.|$)", re.I)
_TYPES = {
    "attention": re.compile(
        r"(?:^|[._])(?:\w*attn\w*|\w*attention|[qkvo]_?(?:[ab]_)?proj|qkv|query|key|value|SelfAttention)(?:[._]|$)",
        re.I,
    ),
    "mlp": re.compile(
        r"(?:^|[._])(?:\w*mlp|ffn|feed_?forward|fc_?\d|c_fc|ff_\w+|DenseReluDense|intermediate|output|experts?|moe|gate|w[i123o]|dense_\w+|linear\d|(?:up|down)_proj)(?:[._]|$)",
        re.I,
    ),
}


def layer_of(name: str) -> str:
    """Which part of a network a parameter belongs to, from its name.

    ``block 3``, numbered as in the name, from 0; ``embeddings``; ``head`` for an output layer; or ``rest``. Under a
    module named ``encoder`` or ``decoder`` the blocks are ``encoder 3`` and the rest, such as the final norm,
    ``encoder rest``.

    >>> [layer_of(name) for name in ("transformer.h.3.mlp.c_fc.weight", "decoder.block.11.layer.0.DenseReluDense.wo")]
    ['block 3', 'decoder 11']
    >>> [layer_of(name) for name in ("wte.weight", "lm_head.weight", "encoder.final_layer_norm.weight", "ln_f.bias")]
    ['embeddings', 'head', 'encoder rest', 'rest']
    """
    number = _BLOCK_NUMBER.search(name)
    above = name[: number.start() + 1] if number else name
    sides = re.findall(r"(?:^|\.)(encoder|decoder)(?=\.)", above)
    if number:
        return f"{sides[0] if sides else 'block'} {int(number[1])}"
    if _EMBEDDING.search(name):
        return "embeddings"
    if _HEAD.search(name):
        return "head"
    return f"{sides[0]} rest" if sides else "rest"


def layers(names: Iterable[str]) -> dict[str, str]:
    """The layer of each parameter of a network, from all of its names: as ``layer_of``, and never shared by two towers.

    Where numbered blocks lie in several places, as of a text and a vision tower, a tower's layers carry its name:
    ``text encoder 0``, ``vision embeddings``. Where all lie under one ``encoder``, or one ``decoder``, they are plain
    blocks, as in the files of some models and in the modules of others.

    >>> towers = ("text_model.encoder.layers.0.fc1", "vision_model.encoder.layers.0.fc1", "logit_scale")
    >>> list(layers(towers).values())
    ['text encoder 0', 'vision encoder 0', 'rest']
    >>> list(layers(["vit.encoder.layer.0.w", "vit.encoder.norm", "classifier.weight"]).values())
    ['block 0', 'rest', 'head']
    """
    found = {name: layer_of(name) for name in names}
    places: dict[str, set[str]] = {}  # of each kind of block, where its numbered lists lie
    for name, layer in found.items():
        if layer[-1].isdigit() and (number := _BLOCK_NUMBER.search(name)):
            places.setdefault(layer.rpartition(" ")[0], set()).add(name[: number.start(1)])
    if len(places) == 1 and not {"encoder", "decoder"}.isdisjoint(places):
        (side,) = places
        if len(places[side]) == 1:
            return {name: layer.replace(f"{side} rest", "rest").replace(side, "block") for name, layer in found.items()}
    towers = {tower: word for kind in places.values() if len(kind) > 1 for tower, word in _towers(kind).items()}
    for name, layer in found.items():
        tower = max((tower for tower in towers if name.startswith(tower)), key=len, default="")
        found[name] = f"{towers.get(tower, '')} {layer}".strip()
    return found


def _towers(places: Iterable[str]) -> dict[str, str]:
    """Paths of lists of blocks, cut where they first differ, with the name of each: ``{"text_model.": "text"}``."""
    paths = [place.split(".") for place in sorted(places)]
    first = next(i for i in range(min(map(len, paths))) if len({path[i] for path in paths}) > 1)
    cut = {".".join(path[: first + 1]) + ".": path[first] for path in paths}
    plain = {
        tower: re.sub(r"_?(?:model|tower|encoder|layers?|blocks?)$", "", word) or word for tower, word in cut.items()
    }
    return plain if len(set(plain.values())) == len(plain) else cut


def type_of(name: str) -> str:
    """What a parameter is for, from its name: embeddings, attention, mlp, norm, head, bias or other.

    The bias of a normalisation is ``norm``, every other one ``bias``.

    >>> [type_of(f"h.0.{name}") for name in ("attn.c_attn.weight", "mlp.c_fc.weight", "ln_1.bias", "mlp.c_fc.bias")]
    ['attention', 'mlp', 'norm', 'bias']
    """
    if _NORM.search(name):
        return "norm"
    if layer_of(name) in ("embeddings", "head") and not _BLOCK_NUMBER.search(name):
        return layer_of(name)
    if name.endswith("bias"):
        return "bias"
    return next((kind for kind, pattern in _TYPES.items() if pattern.search(name)), "other")


def layer_order(layer: str) -> tuple[bool, str, int, int, int]:
    """Sorting key of a layer in tables: total, embeddings, blocks, encoder, decoder, head, rest; tower after tower.

    >>> sorted(["rest", "encoder rest", "block 10", "head", "block 9", "encoder 0", "embeddings"], key=layer_order)
    ['embeddings', 'block 9', 'block 10', 'encoder 0', 'encoder rest', 'head', 'rest']
    """
    sides = ("total", "embeddings", "block", "encoder", "decoder", "head", "rest")
    found = re.fullmatch(rf"(?:(.+) )??({'|'.join(sides)})(?: (\d+|rest))?", layer)
    if not found:  # a name of the reader's own
        return True, layer, 0, 0, 0
    tower, side, place = found.groups(default="")
    return side != "total", tower, sides.index(side), place == "rest", int(place) if place.isdigit() else 0


def originals_first(name: str) -> tuple[bool, int, str]:
    """Key to sort by: of tied tensors the first counts, T5's ``shared`` and not its copies in encoder and decoder.

    >>> sorted(["lm_head.weight", "encoder.embed_tokens.weight", "shared.weight"], key=originals_first)
    ['shared.weight', 'encoder.embed_tokens.weight', 'lm_head.weight']
    """
    return layer_of(name) != "embeddings", name.count("."), name
