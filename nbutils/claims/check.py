"""``nbutils check out.ipynb …``: judge notebooks that plain papermill ran, where a check that fails stops nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nbutils.claims import MIME
from nbutils.claims.records import Record, line


def records_of(notebook: Path) -> list[Record]:
    """The records of the checks in an executed notebook, in order."""
    return _records(_outputs(json.loads(notebook.read_text(encoding="utf-8"))))  # nbformat takes 15 ms a chapter


def _outputs(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in node["cells"] for output in cell.get("outputs", ())]


def _records(outputs: list[dict[str, Any]]) -> list[Record]:
    return [Record.of(output["data"][MIME]) for output in outputs if MIME in output.get("data", {})]


def _broken_off(node: dict[str, Any]) -> bool:
    """Whether a cell was not run, or papermill did not come to its end: killed, out of memory or disconnected."""
    waiting = [cell for cell in node["cells"] if cell["cell_type"] == "code" and cell.get("execution_count") is None]
    papermill = node.get("metadata", {}).get("papermill", {})
    return any("".join(cell["source"]).strip() for cell in waiting) or papermill.get("end_time", "") is None


def judge(notebook: Path) -> tuple[bool, list[str]]:
    """Whether a chapter ran to its end and its checks hold, and lines that say so: each check that fails, and a count.

    Raises:
        ValueError: no such file, or no notebook.
    """
    try:
        node = json.loads(notebook.read_text(encoding="utf-8"))
        outputs = _outputs(node)
    except FileNotFoundError:
        raise ValueError(f"{notebook}: no such file") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{notebook} is no notebook: give what papermill wrote, an .ipynb") from None
    records = _records(outputs)
    stopped = [f"{output['ename']}: {output['evalue']}" for output in outputs if output["output_type"] == "error"]
    broken_off = not stopped and _broken_off(node)
    failed = [record for record in records if record.fails]
    lines = [f"  {mark} {record.claim} {text}" for record in failed for mark, text in [line(record)]]
    if any(record.kind != "exact" for record in failed):
        lines.append("  chance fails some checks in one run of many, all but exact ones: try other seeds, -p seed 1")
    if stopped:
        lines.append(f"  stopped at {stopped[0].splitlines()[0]}")
    if broken_off:
        lines.append("  broken off: not all of its cells were run to their end")
    if not records:
        lines.append("  no check: it was not executed, or is no chapter of the book")
    left = sum(record.role == "open" for record in records)
    counts = f"{len(records) - left - len(failed)} checks hold, {len(failed)} fail, {left} are left open"
    return not (failed or stopped or broken_off) and bool(records), [f"{notebook}: {counts}", *lines]
