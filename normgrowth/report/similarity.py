"""The part of a report that loads a model: how like itself it stays when scaled, beside what all tokens share.

With unit vectors u of the tokens and u′ of the same tokens at scale c, raw is the mean of u·u′, and its common part is
m·m′ for the mean vectors m and m′. By Cauchy and Schwarz |m·m′| ≤ ‖m‖‖m′‖, and n tokens of equal weight have
‖m‖² = ω + (1 − ω)/n, where ω is their anisotropy, the mean of u·v over pairs of different tokens.
"""

from __future__ import annotations

import math
from html import escape

import pandas as pd

HEADINGS = {  # by column of ``models.similarity``
    "raw": "raw",
    "common": "common",
    "centred": "centred",
    "anisotropy": "ω",
    "anisotropy_scaled": "ω′",
}
TITLE = "<h2>Similarity of the last checkpoint to its scaled self</h2>\n"
EXPLANATION = """\
<p>Let u be the unit vector of a token’s representation, and u′ that of the same token with all parameters times c. Raw
is the mean of u·u′. It has two parts: the common one, m·m′, where m and m′ are the means of u and u′, and the mean of
<span>(u − m)·(u′ − m′)</span>, which is the tokens’ own. Where raw is hardly more than its common part, it comes from a
direction that all tokens share at both scales, and says nothing about saturation; read the centred similarity, the same
cosine after both means are taken away.</p>
<p>The common part is at most ‖m‖‖m′‖. For n tokens of equal weight that is
<span>√((ω + (1 − ω)/n)(ω′ + (1 − ω′)/n)),</span> about √(ωω′): ω is the mean cosine of two different tokens of the
model, ω′ that at scale c.</p>"""


def most_common(anisotropy: float, anisotropy_scaled: float, tokens: int) -> float:
    """The largest common part that tokens of equal weight can have, given how alike they are at both scales.

    >>> round(most_common(0.81, 0.64, 10**9), 6)  # √(ωω′) for many tokens
    0.72
    >>> most_common(0.0, 0.0, 3)  # three orthogonal directions, as in saturation.compare
    0.3333333333333333
    """
    squares = [omega + (1 - omega) / tokens for omega in (anisotropy, anisotropy_scaled)]
    return math.sqrt(max(squares[0], 0.0) * max(squares[1], 0.0))  # 0 may be rounded to below 0


def section(table: pd.DataFrame, model: str) -> str:
    """HTML of a table of ``models.similarity``, with what its columns mean.

    Args:
        table: by layer; ``table.attrs`` has ``c``, ``precision`` and ``reason``.
        model: which model it is, in words.
    """
    scale = table.attrs
    last = table.iloc[-1]
    centred = "has no value, since all tokens are alike" if math.isnan(last.centred) else f"is {_number(last.centred)}"
    lead = (
        f"{model}, measured in {scale['precision']} at c = {scale['c']:g}. In the last layer raw is "
        f"{_number(last.raw)}, its common part {_number(last.common)}; the centred similarity {centred}."
    )
    reason = f" Why not at the c asked for, or in float64: {scale['reason']}." if scale["reason"] else ""
    return f"{TITLE}<p>{escape(lead + reason)}</p>\n{_html_table(table)}\n{EXPLANATION}"


def not_measured(reason: str) -> str:
    """HTML in the place of the section, where there is nothing to load or it cannot be measured."""
    return f"{TITLE}<p>Not measured: {escape(reason)}</p>"


def _html_table(table: pd.DataFrame) -> str:
    """Rows by layer, numbers to three decimals; a dash for a number that does not exist."""
    headings = "".join(f'<th scope="col">{heading}</th>' for heading in ("layer", *HEADINGS.values()))
    rows = []
    for layer, values in table[list(HEADINGS)].iterrows():
        cells = "".join(f"<td>{_number(value)}</td>" for value in values)
        rows.append(f'<tr><th scope="row">{escape(str(layer))}</th>{cells}</tr>')
    return f"<table>\n<thead><tr>{headings}</tr></thead>\n<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table>"


def _number(value: float) -> str:
    """Three decimals with a true minus sign, and none before 0.000; a dash if there is no number."""
    if math.isnan(value):
        return "–"
    return f"{round(value, 3) + 0.0:.3f}".replace("-", "−")
