"""The part of a report that loads a model: how like itself it stays when scaled, beside what all tokens share."""

from __future__ import annotations

import math
from html import escape

import pandas as pd

HEADINGS = {  # by column of ``models.similarity``
    "raw": "raw",
    "common": "common",
    "own": "own",
    "centred": "centred",
    "anisotropy": "ω",
    "anisotropy_scaled": "ω′",
}
TITLE = "<h2>Similarity of the last checkpoint to its scaled self</h2>\n"
EXPLANATION = """\
<p>Let u be the unit vector of a token’s representation, and u′ that of the same token with all parameters times c. Raw
is the mean of u·u′. It has two parts: the common one, m·m′, where m and m′ are the means of u and u′, and the mean of
<span>(u − m)·(u′ − m′)</span>, which is the tokens’ own. Where raw is hardly more than its common part, it comes from a
direction that all tokens share at both scales, and says nothing about saturation. Own is the second part over the
largest value that it could have: 1 for a saturated layer, and 0 where a token’s own direction is lost.</p>
<p>The common part is at most ‖m‖‖m′‖. For n tokens of equal weight that is
<span>√((ω + (1 − ω)/n)(ω′ + (1 − ω′)/n)),</span> about √(ωω′): ω is the mean cosine of two different tokens of the
model, ω′ that at scale c. The tokens’ own part is at most about <span>√((1 − ω)(1 − ω′)).</span></p>
<p>Centred is the mean cosine after the mean representation is taken from all, at both scales. It misleads where a few
tokens are far longer than the others, as the first token of a sentence is in many language models: the mean is then
theirs, and what is left of the others is its negative, alike at both scales. Where centred is high and own is not, take
own.</p>"""


def section(table: pd.DataFrame, tokens: int, model: str) -> str:
    """HTML of a table of ``models.similarity``, with what its columns mean.

    Args:
        table: by layer; ``table.attrs`` has ``c``, ``precision`` and ``reason``.
        tokens: how many there are in all sentences.
        model: which model it is, in words.
    """
    scale = table.attrs
    last = table.iloc[-1]
    lead = (
        f"{model}, {tokens:,} tokens, measured in {scale['precision']} at c = {scale['c']:g}. In the last layer raw is "
        f"{_number(last.raw)}, its common part {_number(last.common)}; own is {_number(last.own)}."
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
