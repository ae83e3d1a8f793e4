"""Reports of a measured series, or of one model: a summary in words, JSON for a program, a page to send."""

from normgrowth.report.page import plot, write
from normgrowth.report.summary import as_json, budget, exponents, growth, no_drift, square_root, summarise

__all__ = ["as_json", "budget", "exponents", "growth", "no_drift", "plot", "square_root", "summarise", "write"]
