"""What the norms of a single model show: a table, JSON for a program, bars."""

from __future__ import annotations

import json
from pathlib import Path

from normgrowth import style
from normgrowth.checkpoints import MeasuredModel, Skip, grouped

MOST_BARS = 80  # so that a figure can be read


def as_text(measured: MeasuredModel) -> str:
    """The table, what else is to be known of the norm, and which tensors were left out and why."""
    table = measured.table
    total = table.iloc[0]
    formats = {
        "norm": "{:.6g}".format,
        "share": "{:.2f}".format,
        "parameters": "{:,}".format,
    }
    columns = {"share": "% of ρ²"}
    cells = table.assign(**{name: table[name].map(form) for name, form in formats.items()}).rename(columns=columns)
    width = max(map(len, cells.layer))
    names = {"layer": lambda layer: f"{layer:{width}}"}
    lines = [
        f"{measured.label}: norm {total.norm:.6g}, {total.parameters:,} parameters",
        cells.to_string(index=False, formatters=names, justify="right"),
    ]
    if measured.notes:
        lines += ["to know:", *(f"  {note}" for note in measured.notes)]
    if measured.left_out:
        left_out = [Skip(name, why) for name, why in measured.left_out.items()]
        lines += ["tensors left out:", *(f"  {line}" for line in grouped(left_out))]
    return "\n".join(lines)


def as_json(measured: MeasuredModel) -> str:
    """The table as a list of rows, and which tensors were left out and why."""
    document = {
        "model": measured.label,
        "table": json.loads(measured.table.to_json(orient="records", double_precision=15)),
        "left_out": measured.left_out,
        "notes": list(measured.notes),
        "parameters": int(measured.table.parameters.iloc[0]),
    }
    return json.dumps(document, indent=1, ensure_ascii=False)


def plot(measured: MeasuredModel, path: Path) -> None:
    """Bars of the norm of each row, with its share of ρ²; of very many rows, those with the largest norms."""
    import matplotlib.pyplot as plt

    style.use_style()
    rows = measured.table[1:] if len(measured.table) > 1 else measured.table
    shown = rows.loc[sorted(rows.norm.nlargest(MOST_BARS).index)]
    label = r"parameter norm $\rho$"
    if len(shown) < len(rows):
        label += f": the {len(shown)} largest of {len(rows)}"
    ax = style.axes(label, "", height=1.1 + 0.24 * len(shown))
    bars = ax.barh(shown.layer, shown.norm, color=style.BLUE)
    ax.bar_label(bars, [f"{share:.3g} %" for share in shown.share], padding=3, fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.12, y=0.5 / len(shown))
    ax.grid(False, axis="y")
    total = measured.table.iloc[0]
    ax.set_title(rf"$\rho$ = {total.norm:.5g} in all; share of $\rho^2$ beside each bar", fontsize=10)
    plt.savefig(path, dpi=200, bbox_inches="tight")
    plt.close()
