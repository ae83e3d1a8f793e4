"""Shared module of the executable book on parameter norm growth: take what you need, ``from nbutils import norms``."""

__version__ = "0.1.0"
