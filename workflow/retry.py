"""What a run must make anew although its job ended well: what waited for the Hub, and what was edited meanwhile."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Sequence

from workflow import jobs, report, run_folder, stale


def left_open(profile: str, seed: int, names: Sequence[str]) -> None:
    """Remove results that left a claim open for want of the Hub, if it answers now: then they are made anew."""
    claims, expected = report.load_claims(), report.load_verdicts()
    waiting = {claim for claim, verdict in expected.items() if verdict.startswith("open or ")}
    for name in sorted({name for claim in waiting & set(claims) for name in claims[claim]["chapters"]} & set(names)):
        notebook = run_folder(profile, seed) / f"{name}.ipynb"
        try:
            left = {record.claim for record in report.records_of(notebook) if record.role == "open"}
        except (OSError, ValueError, KeyError):
            continue  # none, or damaged
        if left & waiting and hub_answers():
            print(f"{name} left {', '.join(sorted(left & waiting))} open; the Hub answers now, so it is made anew")
            notebook.unlink()
            notebook.with_suffix(".json").unlink(missing_ok=True)


def hub_answers(timeout: float = 3.0) -> bool:
    """Whether the Hub of models can be asked now; False if it is not wanted (``HF_HUB_OFFLINE``)."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        with urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=timeout):
            return True
    except (OSError, ValueError):  # no network; an address that is none
        return False


def edited(profile: str, seed: int, names: Sequence[str], device: str) -> None:
    """Remove what was made from a text or module that changed later in the same run, and say so as of a failed job.

    A job looks at its own end alone; a report of all must not mix old code with new.
    """
    for path, why in list(stale.remove_unsound(profile, [seed], names, device)):
        error = run_folder(profile, seed) / "logs" / f"{path.stem}.error.json"
        if why == stale.OLDER and not error.exists():
            error.parent.mkdir(parents=True, exist_ok=True)
            jobs.note_error(error, path.stem, "it, or a module of it, changed while the run went on: run it again")
