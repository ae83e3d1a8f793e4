"""Instruments for the parameter norm of your own models: norms, growth, degree, saturation, attention heads.

Import the part that you need, ``from normgrowth import norms``: this face loads nothing.
"""

__version__ = "0.1.0"
