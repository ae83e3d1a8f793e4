"""A network against its saturated counterpart: how its representations change when all parameters are scaled by c."""

from normgrowth.saturation.batches import Batch, batches_by_length, check_unpadded, forward, real_tokens
from normgrowth.saturation.scaling import mode, scaled
from normgrowth.saturation.similarity import Layer, Similarity, compare, layers, pairs, similarity

__all__ = [
    "Batch",
    "Layer",
    "Similarity",
    "batches_by_length",
    "check_unpadded",
    "compare",
    "forward",
    "layers",
    "mode",
    "pairs",
    "real_tokens",
    "scaled",
    "similarity",
]
