"""``nbutils check out.ipynb …``: judge notebooks that plain papermill ran, where a failed check stops nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nbutils.claims import MIME, OF_CHANCE
from nbutils.claims.records import Record, mark_and_text


class Judgement(NamedTuple):
    """What an executed notebook says: its checks in order, and ``faults``, why the notebook itself is not sound.

    ``seconds`` has, for every check, the time of the cells since the check before it; ``duration``, that of all cells.
    """

    notebook: Path
    records: list[Record]
    faults: list[str]
    seconds: list[float]
    duration: float
    started: str  # as papermill wrote it

    def is_sound(self, strict: bool = False) -> bool:
        """Whether the notebook is complete and no check fails; with ``strict``, whether nothing is left open either."""
        left_open = strict and any(record.role == "open" for record in self.records)
        return not (self.faults or left_open or any(record.fails for record in self.records))

    def lines(self, strict: bool = False) -> list[str]:
        """Counts, every check that fails or is left open, and what is wrong with the notebook."""
        failed = [record for record in self.records if record.fails]
        left_open = [record for record in self.records if record.role == "open"]
        held = len(self.records) - len(failed) - len(left_open)
        lines = [f"{self.notebook}: {held} checks hold, {len(failed)} fail, {len(left_open)} are left open"]
        if strict and left_open:
            lines[0] += ", which --strict forbids"
        for record in failed + left_open:
            mark, text = mark_and_text(record)
            lines.append(f"  {mark} {record.claim} {text}")
        if any(record.kind in OF_CHANCE for record in failed):
            lines.append(
                "  derived and empirical checks fail by chance in a few of many runs: try other seeds, -p seed 1"
            )
        return lines + [f"  {fault}" for fault in self.faults]


def records_of(notebook: Path) -> list[Record]:
    """The records of the checks in an executed notebook, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]  # nbformat takes 15 ms a chapter
    return [record for cell in cells for record in _records(cell)]


def _records(cell: dict[str, Any]) -> list[Record]:
    outputs = [output.get("data", {}) for output in cell.get("outputs", ())]
    return [Record.from_dict(data[MIME]) for data in outputs if MIME in data]


def judge(notebook: Path) -> Judgement:
    """Whether a chapter is complete and its checks hold.

    Raises:
        ValueError: the file does not exist or is not a notebook.
    """
    try:
        node = json.loads(notebook.read_text(encoding="utf-8"))
        cells = list(node["cells"])
        papermill = node.get("metadata", {}).get("papermill", {})
    except FileNotFoundError:
        raise ValueError(f"{notebook}: no such file") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{notebook} is not a notebook: give an .ipynb that papermill wrote") from None
    records: list[Record] = []
    seconds: list[float] = []
    duration = 0.0
    for cell in cells:
        duration += cell.get("metadata", {}).get("papermill", {}).get("duration") or 0.0  # None if it did not end
        for record in _records(cell):
            records.append(record)
            seconds.append(duration - sum(seconds))
    was_stopped = papermill.get("end_time", "") is None  # papermill writes the time when it ends
    faults = list(_faults(cells, was_stopped, bool(records)))
    return Judgement(notebook, records, faults, seconds, duration, papermill.get("start_time") or "")


def _faults(cells: Iterable[dict[str, Any]], was_stopped: bool, has_checks: bool) -> Iterable[str]:
    """What is wrong with a notebook: a cell raised, papermill was stopped before its end, or there are no checks."""
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    errors = [f"{output['ename']}: {output['evalue']}" for output in outputs if output["output_type"] == "error"]
    code = [cell for cell in cells if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
    if errors:
        yield f"stopped at {errors[0].splitlines()[0]}"
    elif was_stopped or any(cell.get("execution_count") is None for cell in code):
        yield "incomplete: not all of its cells were run to their end"
    if not has_checks:
        yield "no checks: it was not executed, or is not a chapter of the book"
