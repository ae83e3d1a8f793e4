"""Any number of kept runs as one page: how checks, time and memory went, and which verdicts changed."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from nbutils.claims.records import Record
from workflow.compare import load


class Point(NamedTuple):
    """One run in the trend."""

    name: str
    started: str
    commit: str
    hardware: str
    checks: int
    failing: int
    noted: int
    open: int
    cpu_minutes: float
    peak_mb: float
    chapters: dict[str, float]  # CPU seconds
    verdicts: dict[str, str]


def point(place: Path) -> Point:
    """A run's numbers, as its ``metrics.json`` has them."""
    metrics = load(place)
    run, records = metrics["run"], list(map(Record.of, metrics["records"]))
    notebooks = run.get("notebooks", ())
    chapters = {each.get("chapter", ""): each.get("cpu_seconds") or math.nan for each in notebooks}
    return Point(
        name=f"{run.get('profile', '')}, seed {run.get('seed', '')}",
        started=min((each.get("started", "") for each in notebooks), default=""),
        commit=str(run.get("commit", "")),
        hardware=str(run.get("hardware", "")),
        checks=len(records),
        failing=sum(record.fails for record in records),
        noted=sum(record.noted for record in records),
        open=sum(record.role == "open" for record in records),
        cpu_minutes=sum(chapters.values()) / 60,
        peak_mb=max((each.get("peak_mb") or math.nan for each in notebooks), default=math.nan),
        chapters=chapters,
        verdicts=dict(metrics["verdicts"]),
    )


def figure(points: Sequence[Point]) -> str:
    """Checks, CPU time and peak memory of each run, as SVG that is readable on light and dark."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 10, "svg.hashsalt": "trend"}):
        from matplotlib.figure import Figure

        drawn = Figure(figsize=(9, 2.8), layout="constrained")
        panels = (
            ("checks", {"checks": [p.checks for p in points]}),
            ("failing or noted checks", {"failing": [p.failing for p in points], "noted": [p.noted for p in points]}),
            ("CPU time (minutes)", {"time": [p.cpu_minutes for p in points]}),
            ("peak memory (MB)", {"memory": [p.peak_mb for p in points]}),
        )
        for ax, (title, lines) in zip(drawn.subplots(1, 4), panels, strict=True):
            for (label, values), marker, hue in zip(lines.items(), "os", ("#2a7de1", "#e1812c"), strict=False):
                ax.plot(range(1, len(points) + 1), values, marker + "-", color=hue, label=label)
            ax.set_ylim(0, 1.1 * max(1, *(v for values in lines.values() for v in values if v == v)))
            ax.set_ylabel(title, color="#808080")
            ax.set_xlabel("run", color="#808080")
            ax.set_xticks(range(1, len(points) + 1))
            ax.tick_params(colors="#808080")
            ax.patch.set_alpha(0)
            for side in ax.spines.values():
                side.set_color("#808080")
            if len(lines) > 1:
                ax.legend(labelcolor="#808080", framealpha=0)
        drawn.patch.set_alpha(0)
        out = io.StringIO()
        drawn.savefig(out, format="svg", metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue(), flags=re.S)
    return text[text.index("<svg") :]


def _table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    def cells(row: Iterable[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row) + "</tr>"

    return f"<table>{cells(heads, 'th')}{''.join(cells(row, 'td') for row in rows)}</table>"


STYLE = """:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
div{overflow-x:auto}svg{max-width:100%;height:auto;min-width:40rem}table{border-collapse:collapse;margin:1rem 0}
th,td{border-bottom:1px solid #8886;padding:.25rem .6rem;text-align:left;white-space:nowrap}"""


def page(points: Sequence[Point]) -> str:
    """The whole page; runs are numbered in the order of their start."""
    numbers = [f"run {i}" for i in range(1, len(points) + 1)]
    facts = (
        (i, p.started[:16].replace("T", " "), p.commit, p.name, p.hardware, p.checks, p.failing, p.noted, p.open,
         f"{p.cpu_minutes:.1f}", f"{p.peak_mb:.0f}")
        for i, p in enumerate(points, 1)
    )  # fmt: skip
    heads = ("run", "started", "commit", "of", "hardware", "checks", "failing", "noted", "open", "CPU min", "peak MB")
    names = dict.fromkeys(name for p in points for name in p.chapters)
    times = ([name, *(f"{p.chapters[name]:.0f}" if name in p.chapters else "–" for p in points)] for name in names)
    claims = dict.fromkeys(claim for p in points for claim in p.verdicts)
    changed = [(claim, *(p.verdicts.get(claim, "none") for p in points)) for claim in claims]
    changed = [row for row in changed if len(set(row[1:])) > 1]
    first, last = points[0], points[-1]
    alt = (
        f"Four panels over {len(points)} runs: checks from {first.checks} to {last.checks}, failing from "
        f"{first.failing} to {last.failing}, CPU minutes from {first.cpu_minutes:.1f} to "
        f"{last.cpu_minutes:.1f}, peak memory from {first.peak_mb:.0f} to {last.peak_mb:.0f} MB."
    )
    drawn = figure(points).replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1)
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Runs of the book</title><style>{STYLE}</style>
<h1>{len(points)} runs of the book</h1><p>In the order in which they started. Cost is told, and is comparable on one
kind of hardware only.</p><div>{drawn}</div><div>{_table(heads, facts)}</div>
<h2>Verdicts that changed</h2><div>{_table(["claim", *numbers], changed) if changed else "<p>None.</p>"}</div>
<h2>CPU seconds of each chapter</h2><div>{_table(["chapter", *numbers], times)}</div></html>
"""


def write(places: Sequence[Path], out: Path) -> Path:
    """Make the page of these runs.

    Raises:
        ValueError: fewer than two, or one of them is no run.
    """
    if len(places) < 2:
        raise ValueError(f"a trend needs at least two runs; got {len(places)}")
    points = sorted(map(point, places), key=lambda each: each.started)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(points), encoding="utf-8")
    return out
