"""Trainings that take long or that chapters share: made once by the workflow, or on the spot where there is none."""

from nbutils.shared_runs.catalogue import RECIPES, load, names

__all__ = ["RECIPES", "load", "names"]
