"""A network against its saturated counterpart: how its representations change when all parameters are scaled by c."""

from normgrowth.saturation.batches import Batch, batches_by_length, check_unpadded, forward, real_tokens
from normgrowth.saturation.common import most_common, own
from normgrowth.saturation.parts import PARTS, part_scaled, split
from normgrowth.saturation.ray import ALL, SCALES, along_ray, half_scale
from normgrowth.saturation.scaling import mode, scaled
from normgrowth.saturation.similarity import Layer, Similarity, compare, layers, pairs, similarity

__all__ = [
    "ALL",
    "PARTS",
    "SCALES",
    "Batch",
    "Layer",
    "Similarity",
    "along_ray",
    "batches_by_length",
    "check_unpadded",
    "compare",
    "forward",
    "half_scale",
    "layers",
    "mode",
    "most_common",
    "own",
    "pairs",
    "part_scaled",
    "real_tokens",
    "scaled",
    "similarity",
    "split",
]
