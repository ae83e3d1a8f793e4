"""Which layer of a network a parameter belongs to, from its name: one convention for tables, figures and files."""

from __future__ import annotations

import re

_BLOCK_NUMBER = re.compile(r"(?:^|\.)(?:h|\w*layers?|\w*blocks?)\.(\d+)(?:\.|$)")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?!un_?embed)(?:wte|wpe|shared|(?:\w+_)?embed(?!_out)(?:_\w+)?|\w*embeddings?(?:_(?:table|layer|matrix))?)"
    r"(?:\.|$)"
)
_HEAD = re.compile(
    r"(?:^|\.)(?:lm_head|head|embed_out|un_?embed(?:ding)?|readout|cls|predictions|classifier|score|proj_out|qa_outputs"
    r"|output)(?:\.|$)"
)


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


def layer_order(layer: str) -> tuple[int, int, int]:
    """Sorting key of a layer in tables: total, embeddings, blocks, encoder, decoder, head, rest.

    >>> sorted(["rest", "encoder rest", "block 10", "head", "block 9", "encoder 0", "embeddings"], key=layer_order)
    ['embeddings', 'block 9', 'block 10', 'encoder 0', 'encoder rest', 'head', 'rest']
    """
    side, _, place = layer.partition(" ")
    sides = ("total", "embeddings", "block", "encoder", "decoder", "head", "rest")
    return sides.index(side), place == "rest", int(place) if place.isdigit() else 0


def originals_first(name: str) -> tuple[bool, int, str]:
    """Key to sort by: of tied tensors the first counts, T5's ``shared`` and not its copies in encoder and decoder.

    >>> sorted(["lm_head.weight", "encoder.embed_tokens.weight", "shared.weight"], key=originals_first)
    ['shared.weight', 'encoder.embed_tokens.weight', 'lm_head.weight']
    """
    return layer_of(name) != "embeddings", name.count("."), name
