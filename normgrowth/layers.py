"""The layer of a network that a parameter belongs to, from its name: one convention for tables, figures and files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

__all__ = ["layer_of", "layer_order", "layers", "type_of"]

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
    """The layer that a parameter belongs to, from its name.

    Layers are ``block 3``, with the number in the name, from 0; ``embeddings``; ``head`` for an output layer; and
    ``rest``. Under a module named ``encoder`` or ``decoder`` a block is ``encoder 3``, and the rest, such as the final
    norm, is ``encoder rest``.

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
    """The layer of each parameter of a network, from the names of all parameters.

    Layers are those of ``layer_of``, with two differences. If numbered blocks lie in several places, as in a text and a
    vision tower, a tower's layers carry its name, so that two towers never share one: ``text encoder 0``, ``vision
    embeddings``. If all blocks lie under one ``encoder``, or one ``decoder``, they are plain blocks: some models have
    the name in their modules, and others only in their files.

    >>> towers = ("text_model.encoder.layers.0.fc1", "vision_model.encoder.layers.0.fc1", "logit_scale")
    >>> list(layers(towers).values())
    ['text encoder 0', 'vision encoder 0', 'rest']
    >>> list(layers(["vit.encoder.layer.0.w", "vit.encoder.norm", "classifier.weight"]).values())
    ['block 0', 'rest', 'head']
    """
    by_name = {name: layer_of(name) for name in names}
    stacks = _stacks(by_name)
    if _is_one_stack(stacks):
        (side,) = stacks
        return {name: layer.replace(f"{side} rest", "rest").replace(side, "block") for name, layer in by_name.items()}
    towers: dict[str, str] = {}
    for paths in stacks.values():
        if len(paths) > 1:
            towers |= _towers(paths)
    return {name: f"{_tower_of(name, towers)} {layer}".strip() for name, layer in by_name.items()}


def _stacks(by_name: Mapping[str, str]) -> dict[str, set[str]]:
    """Paths of the stacks of numbered blocks, by their kind: ``{"encoder": {"text_model.encoder.layers."}}``."""
    stacks: dict[str, set[str]] = {}
    for name, layer in by_name.items():
        number = _BLOCK_NUMBER.search(name)
        if number and layer[-1].isdigit():
            kind = layer.rpartition(" ")[0]
            stacks.setdefault(kind, set()).add(name[: number.start(1)])
    return stacks


def _is_one_stack(stacks: Mapping[str, Collection[str]]) -> bool:
    """Whether all blocks lie in one stack, under an encoder or a decoder."""
    return set(stacks) in ({"encoder"}, {"decoder"}) and all(len(paths) == 1 for paths in stacks.values())


def _towers(paths: Iterable[str]) -> dict[str, str]:
    """Paths of stacks up to the part in which they first differ, with names: ``{"text_model.": "text", …}``."""
    parts = [path.split(".") for path in sorted(paths)]
    shortest = min(map(len, parts))
    first = next(i for i in range(shortest) if len({path[i] for path in parts}) > 1)
    words = {".".join(path[: first + 1]) + ".": path[first] for path in parts}
    short_words = {}
    for tower, word in words.items():
        short_words[tower] = re.sub(r"_?(?:model|tower|encoder|layers?|blocks?)$", "", word) or word
    are_distinct = len(set(short_words.values())) == len(short_words)
    return short_words if are_distinct else words


def _tower_of(name: str, towers: Mapping[str, str]) -> str:
    """The name of the innermost tower that a parameter lies in, or ``""``."""
    around = [tower for tower in towers if name.startswith(tower)]
    return towers[max(around, key=len)] if around else ""


def type_of(name: str) -> str:
    """The type of a parameter, from its name: embeddings, attention, mlp, norm, head, bias or other.

    The bias of a normalisation is ``norm``, every other bias ``bias``.

    >>> [type_of(f"h.0.{name}") for name in ("attn.c_attn.weight", "mlp.c_fc.weight", "ln_1.bias", "mlp.c_fc.bias")]
    ['attention', 'mlp', 'norm', 'bias']
    """
    if _NORM.search(name):
        return "norm"
    layer = layer_of(name)
    if layer in ("embeddings", "head") and not _BLOCK_NUMBER.search(name):
        return layer
    if name.endswith("bias"):
        return "bias"
    return next((kind for kind, pattern in _TYPES.items() if pattern.search(name)), "other")


def layer_order(layer: str) -> tuple[bool, str, int, int, int]:
    """Sorting key of a layer in tables: total, embeddings, blocks, encoder, decoder, head, rest; tower after tower.

    >>> sorted(["rest", "encoder rest", "block 10", "head", "block 9", "encoder 0", "embeddings"], key=layer_order)
    ['embeddings', 'block 9', 'block 10', 'encoder 0', 'encoder rest', 'head', 'rest']
    """
    sides = ("total", "embeddings", "block", "encoder", "decoder", "head", "rest")
    match = re.fullmatch(rf"(?:(.+) )??({'|'.join(sides)})(?: (\d+|rest))?", layer)
    if not match:  # a name of the reader's own
        return True, layer, 0, 0, 0
    tower, side, block = match.groups(default="")
    number = int(block) if block.isdigit() else 0
    return side != "total", tower, sides.index(side), block == "rest", number


def originals_first(name: str) -> tuple[bool, int, str]:
    """Sorting key that puts the original of tied tensors first: T5's ``shared`` before its copies in the two stacks.

    >>> sorted(["lm_head.weight", "encoder.embed_tokens.weight", "shared.weight"], key=originals_first)
    ['shared.weight', 'encoder.embed_tokens.weight', 'lm_head.weight']
    """
    return layer_of(name) != "embeddings", name.count("."), name
