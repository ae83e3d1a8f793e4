"""Trainings that take long or that several chapters share; the workflow runs each once for all chapters."""

from nbutils.shared_runs.catalogue import RECIPES, load, names

__all__ = ["RECIPES", "load", "names"]
