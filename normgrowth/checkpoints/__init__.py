"""Norms along a series of checkpoints, which are read tensor by tensor and compared; a later run goes on from there."""

from normgrowth.checkpoints.find import grouped
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.places import Skip
from normgrowth.checkpoints.series import MeasuredSeries, series
from normgrowth.checkpoints.single import MeasuredModel, single

__all__ = ["MeasuredModel", "MeasuredSeries", "ReadError", "Skip", "grouped", "series", "single"]
