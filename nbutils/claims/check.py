"""``nbutils check out.ipynb …``: judge notebooks that plain papermill ran, where a failed check stops nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nbutils.claims import MIME, OF_CHANCE
from nbutils.claims.records import Record, mark_and_text


def records_of(notebook: Path) -> list[Record]:
    """The records of the checks in an executed notebook, in order."""
    return _records(_outputs(json.loads(notebook.read_text(encoding="utf-8"))))  # nbformat takes 15 ms a chapter


def _outputs(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in node["cells"] for output in cell.get("outputs", ())]


def _records(outputs: list[dict[str, Any]]) -> list[Record]:
    return [Record.from_dict(output["data"][MIME]) for output in outputs if MIME in output.get("data", {})]


def _incomplete(node: dict[str, Any]) -> bool:
    """Whether a code cell did not run, or papermill was stopped: killed, out of memory or disconnected."""
    for cell in node["cells"]:
        is_code = cell["cell_type"] == "code" and "".join(cell["source"]).strip()
        if is_code and cell.get("execution_count") is None:
            return True
    papermill = node.get("metadata", {}).get("papermill", {})
    return papermill.get("end_time", "") is None  # papermill writes the time when it ends; others have no such entry


def judge(notebook: Path) -> tuple[bool, list[str]]:
    """Whether a chapter is complete and its checks hold, with lines of text: counts, and every check that fails.

    Raises:
        ValueError: the file does not exist or is not a notebook.
    """
    try:
        node = json.loads(notebook.read_text(encoding="utf-8"))
        outputs = _outputs(node)
    except FileNotFoundError:
        raise ValueError(f"{notebook}: no such file") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{notebook} is not a notebook: give an .ipynb that papermill wrote") from None
    records = _records(outputs)
    failed = [record for record in records if record.fails]
    left_open = [record for record in records if record.role == "open"]
    errors = [f"{output['ename']}: {output['evalue']}" for output in outputs if output["output_type"] == "error"]
    incomplete = not errors and _incomplete(node)

    held = len(records) - len(failed) - len(left_open)
    lines = [f"{notebook}: {held} checks hold, {len(failed)} fail, {len(left_open)} are left open"]
    for record in failed:
        mark, text = mark_and_text(record)
        lines.append(f"  {mark} {record.claim} {text}")
    if any(record.kind in OF_CHANCE for record in failed):
        lines.append("  derived and empirical checks fail by chance in a few of many runs: try other seeds, -p seed 1")
    if errors:
        lines.append(f"  stopped at {errors[0].splitlines()[0]}")
    if incomplete:
        lines.append("  incomplete: not all of its cells were run to their end")
    if not records:
        lines.append("  no checks: it was not executed, or is not a chapter of the book")
    return bool(records) and not (failed or errors or incomplete), lines
