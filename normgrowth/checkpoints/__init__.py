"""Norms along a series of checkpoints: found, read tensor by tensor, compared, and kept for the next time."""

from normgrowth.checkpoints.find import Skip, grouped
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.series import Series, series

__all__ = ["ReadError", "Series", "Skip", "grouped", "series"]
