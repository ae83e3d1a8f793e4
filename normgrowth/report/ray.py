"""What ``normgrowth ray`` shows of a table of ``saturation.along_ray``: in words, as JSON, and as a figure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from normgrowth import style
from normgrowth.saturation import ALL, half_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAR = 4.0  # scales beyond it are drawn in panels of their own


def as_text(table: pd.DataFrame, control: pd.DataFrame, description: Mapping[str, Any]) -> str:
    """The table, what chance would give, and the scale at which the agreement of each part halves; then the control.

    ``control`` is the table of an untrained model. ``description`` has ``class``, ``kind``, ``parameters``,
    ``sentences`` and ``tokens``.
    """
    lines = [
        "{class}, {kind}, {parameters:,} parameters; {sentences}, {tokens} tokens".format(**description),
        *_precision(table),
        *_rows(table),
        _chance(table),
        "an untrained model of the same configuration:",
        *_rows(control),
    ]
    return "\n".join(lines)


def _rows(table: pd.DataFrame) -> list[str]:
    """The table, half scales, and the reasons of what is missing."""
    shown = table.dropna(axis="columns", how="all")
    if list(table.part.unique()) == [ALL]:
        shown = shown.drop(columns="part")
    lines = [
        shown.assign(c=shown.c.map("{:g}".format)).to_string(index=False, na_rep="–", float_format="{:.4f}".format)
    ]
    for part, c in half_scales(table).items():
        name = "all parameters" if part == ALL else f"{part} alone"
        lines.append(f"agreement with {name} scaled halves at {_between(c, table[table.part == part])}")
    return lines + [f"– {name}: {reason}" for name, reason in table.attrs["reasons"].items()]


def as_json(table: pd.DataFrame, control: pd.DataFrame, description: Mapping[str, Any]) -> str:
    """Description, half scales (null if beyond what is known), chance, reasons, and the rows."""
    tables = {"trained": table, "untrained": control}
    rows = pd.concat([frame.assign(of=name) for name, frame in tables.items()], ignore_index=True)
    document = {
        **description,
        "precision": table.attrs["precision"],
        "reason": table.attrs["reason"],
        "half_scale": {
            name: {part: c if math.isfinite(c) else None for part, c in half_scales(frame).items()}
            for name, frame in tables.items()
        },
        "chance": table.attrs["chance"],
        "reasons": {name: frame.attrs["reasons"] for name, frame in tables.items()},
        "table": json.loads(rows.to_json(orient="records", double_precision=15)),
    }
    return json.dumps(document, indent=1, ensure_ascii=False)


def half_scales(table: pd.DataFrame) -> dict[str, float]:
    """``half_scale`` of each part that has a scale above 1."""
    measured = table[table.c > 1]
    return {part: half_scale(table, part) for part in measured.part.unique()}


def _between(half: float, table: pd.DataFrame) -> str:
    """A half scale of a part, and the scales between which it was interpolated."""
    scales = table.c
    if math.isnan(half):
        first = scales[(scales >= 1) & table.agreement.isna()].min()
        return f"more than c = {max(1.0, scales[scales < first].max()):g}; the agreement is not known at {first:g}"
    below = max(1.0, scales[scales < half].max())
    if half == math.inf:
        return f"more than c = {below:g}"
    return f"c = {half:.3g}, between {below:g} and {scales[scales >= half].min():g}"


def _precision(table: pd.DataFrame) -> list[str]:
    return [f"in {table.attrs['precision']}: {table.attrs['reason']}"] if table.attrs["reason"] else []


def _chance(table: pd.DataFrame) -> str:
    chance = table.attrs["chance"]
    if table.attrs["next_token"]:
        return f"chance: loss {chance['loss']:.4g}, which is ln(vocabulary)"
    return f"no next token: nearest sentence; chance: agreement {chance['agreement']:.3g}"


def plot(table: pd.DataFrame, path: Path) -> None:
    """Write the figure: agreement along the ray, and the loss below it where there are next tokens.

    A table of several parts has a curve for each of them; one of all parameters alone has the accuracy beside the
    agreement. Scales far beyond 1 have panels of their own, since what happens, happens close to 1.
    """
    import matplotlib.pyplot as plt

    rows = 2 if table.attrs["next_token"] else 1
    ranges = [scales for scales in (table.c[table.c <= FAR], table.c[table.c > FAR]) if len(scales)]
    widths = [5, 1.6][: len(ranges)]
    with plt.rc_context():
        style.use_style()
        figure, axes = plt.subplots(
            rows, len(ranges), squeeze=False, sharex="col", sharey="row", width_ratios=widths, figsize=(8, 2.8 * rows)
        )
        for column, scales in enumerate(ranges):
            _plot_agreement(axes[0, column], table)
            if table.attrs["next_token"]:
                _plot_loss(axes[1, column], table)
            _label_scales(axes[-1, column], scales)
        _name(axes[0], "Agreement with the unscaled model", "positions" if rows == 2 else "sentences")
        if rows == 2:
            _name(axes[1], "Loss of the next token at the best temperature", "nats")
        figure.supxlabel("parameters times $c$", fontsize=11)
        figure.savefig(path, dpi=200)
        plt.close(figure)


def _plot_agreement(ax: Axes, table: pd.DataFrame) -> None:
    _curves(ax, table, "agreement")
    if list(table.part.unique()) == [ALL] and table.attrs["next_token"]:
        ax.lines[0].set_label("agreement")
        ax.plot(table.c, table.accuracy, "s-", color=style.ORANGE, label="accuracy of\nthe next token")
    if "agreement" in table.attrs["chance"]:
        ax.axhline(table.attrs["chance"]["agreement"], label="chance", **style.THEORY)
    ax.set_ylim(-0.03, 1.05)


def _plot_loss(ax: Axes, table: pd.DataFrame) -> None:
    _curves(ax, table, "loss")
    chance = table.attrs["chance"]["loss"]
    ax.axhline(chance, label="chance,\nln(vocabulary)", **style.THEORY)
    ax.set_ylim(0, 1.08 * chance)


def _curves(ax: Axes, table: pd.DataFrame, column: str) -> None:
    """A curve for each part, in a colour and with a marker of its own."""
    for number, (part, rows) in enumerate(table.sort_values("c").groupby("part", sort=False)):
        colour = (*style.COLOURS, style.BLACK, "grey")[number % 8]
        marker = (*style.MARKERS, "x", "*")[number % 8]
        ax.plot(rows.c, rows[column], color=colour, marker=marker, linewidth=1.4, label=part)


def _name(row: Sequence[Axes], title: str, unit: str) -> None:
    """Title and unit of a row of panels, with its legend on the right; of curves that stand above, none again."""
    row[0].set_title(title)
    row[0].set_ylabel(unit if unit == "nats" else f"share of {unit}")
    lines = row[-1].lines if unit != "nats" else row[-1].lines[-1:]
    row[-1].legend(handles=list(lines), loc="upper left", bbox_to_anchor=(1.02, 1))


def _label_scales(ax: Axes, scales: pd.Series) -> None:
    """A logarithmic axis over some scales, with a tick at each that has room."""
    low, high = math.log(scales.min()), math.log(scales.max())
    margin = 0.06 * (high - low) or 0.5
    ax.set_xscale("log")
    ax.set_xlim(math.exp(low - margin), math.exp(high + margin))
    ticks: list[float] = []
    for c in sorted(scales.unique(), key=lambda c: (c != 1, abs(math.log(c)))):
        if all(abs(math.log(c / other)) > 0.07 * (high - low) for other in ticks):
            ticks.append(float(c))
    ax.set_xticks(ticks, [f"{c:g}" for c in ticks])
    ax.minorticks_off()
