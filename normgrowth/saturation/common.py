"""The two parts of the raw similarity: what all tokens share, and what is the tokens' own.

With unit vectors u of the tokens and u′ of the same tokens at scale c, raw is the mean of u·u′. For the mean vectors m
and m′ it is m·m′, the common part, plus the mean of (u − m)·(u′ − m′), which is the tokens' own. By Cauchy and Schwarz
these are at most ‖m‖‖m′‖ and √((1 − ‖m‖²)(1 − ‖m′‖²)). n tokens of equal weight have ‖m‖² = ω + (1 − ω)/n, where ω is
their anisotropy, the mean of u·v over pairs of different tokens.
"""

from __future__ import annotations

import math

import pandas as pd

ALIKE = 1e-9  # below this all tokens point one way, up to rounding


def most_common(anisotropy: float, anisotropy_scaled: float, tokens: int) -> float:
    """The largest common part that tokens of equal weight can have, given how alike they are at both scales.

    >>> round(most_common(0.81, 0.64, 10**9), 6)  # √(ωω′) for many tokens
    0.72
    >>> most_common(0.0, 0.0, 3)  # three orthogonal directions, as in saturation.compare
    0.3333333333333333
    """
    squares = [omega + (1 - omega) / tokens for omega in (anisotropy, anisotropy_scaled)]
    return math.sqrt(max(squares[0], 0.0) * max(squares[1], 0.0))  # 0 may be rounded to below 0


def own(table: pd.DataFrame, tokens: int) -> pd.Series:
    """The tokens' own part of raw over the largest value that it could have, by layer; NaN where all tokens are alike.

    For tokens of equal weight this is a correlation, from −1 to 1. Sentences of unlike length give their tokens other
    weights, which may lead past these ends by little: the ends are returned then.

    >>> columns = {"raw": [0.9], "common": [0.3], "anisotropy": [0.2], "anisotropy_scaled": [0.2]}
    >>> own(pd.DataFrame(columns), 10**9).round(6).tolist()  # 0.6 of 0.8
    [0.75]
    """
    rest = (1 - table.anisotropy) * (tokens - 1) / tokens
    rest_scaled = (1 - table.anisotropy_scaled) * (tokens - 1) / tokens
    largest = (rest * rest_scaled).clip(lower=0) ** 0.5
    return ((table.raw - table.common) / largest.where(largest > ALIKE)).clip(-1.0, 1.0)
