"""Any number of kept runs, in the order of their start: checks, cost, and the verdicts that changed, as Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from workflow import compare


def facts(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """One run as a row."""
    run, notebooks = metrics["run"], pd.DataFrame(metrics["run"]["notebooks"])
    named = {name: run[name] for name in ("commit", "profile", "seed", "hardware", "noted")}
    failing = sum(record["holds"] is False and not record.get("noted") for record in metrics["records"])
    cost = {"CPU min": round(notebooks["cpu_seconds"].sum() / 60, 1), "peak MB": notebooks["peak_mb"].max()}
    return {
        "started": notebooks["started"].min(),
        **named,
        "checks": len(metrics["records"]),
        "failing": failing,
    } | cost


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m maintenance trend", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="of each a metrics.json, or a folder that has one")
    every = sorted(map(compare.load, parser.parse_args(argv).runs), key=lambda metrics: facts(metrics)["started"])
    print(pd.DataFrame(map(facts, every)).to_markdown(index=False))
    verdicts = pd.DataFrame([metrics["verdicts"] for metrics in every]).fillna("none").T
    changed = verdicts[verdicts.nunique(axis=1) > 1]
    print(f"\nVerdicts that changed:\n\n{changed.to_markdown()}" if len(changed) else "\nNo verdict changed.")
    return 0
