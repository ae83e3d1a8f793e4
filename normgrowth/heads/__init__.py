"""What a saturated attention head attends to, and whether it picks one position or averages."""

from normgrowth.heads.attention import attention_scores, attention_weights, summaries
from normgrowth.heads.masks import Mask, allowed_positions, causal_mask, multiplicative_mask, windows, windows_of
from normgrowth.heads.summary import HeadSummary, classify, positions, saturated, summarise

__all__ = [
    "HeadSummary",
    "Mask",
    "allowed_positions",
    "attention_scores",
    "attention_weights",
    "causal_mask",
    "classify",
    "multiplicative_mask",
    "positions",
    "saturated",
    "summaries",
    "summarise",
    "windows",
    "windows_of",
]
