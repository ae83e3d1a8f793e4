"""Keep measured seeds through a change that moves nothing: ``python -m maintenance.restamp BEFORE AFTER``.

BEFORE and AFTER are folders, each with the ``metrics.json`` of four runs: `smoke` at seeds 0, 1 and 2 and `book` at 0.
The files of a run have the same name in both. A chapter keeps its measured seeds, under the hash of its code today,
only if all its checks are equal to the last bit in every pair of runs. Chapters with a difference are printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maintenance import alarms
from workflow import book, sources, write
from workflow.judge import Judgement

RUNS = (("smoke", 0), ("smoke", 1), ("smoke", 2), ("book", 0))
MAY_DIFFER = {"versions"}  # field of a record that says how the run was made, not what it measured


def checks_of(judgement: Judgement, chapter: str) -> list[dict[str, Any]]:
    """The records of a chapter in order, as dictionaries, without the fields that may differ."""
    records = [record.as_dict() for record in judgement.records if record.chapter == chapter]
    return [{key: value for key, value in record.items() if key not in MAY_DIFFER} for record in records]


def differing_checks(before: Judgement, after: Judgement, chapter: str) -> list[str]:
    """Names of the checks of a chapter that differ between two runs, be it by one bit."""
    old = {(check["claim"], check["check"]): check for check in checks_of(before, chapter)}
    new = {(check["claim"], check["check"]): check for check in checks_of(after, chapter)}
    return [": ".join(key) for key in {**old, **new} if old.get(key) != new.get(key)]


def hash_in(judgement: Judgement, chapter: str) -> str:
    """The hash of the code from which a run made a chapter."""
    return next(stats["made_from"] for stats in judgement.run["notebooks"] if stats["chapter"] == chapter)


def unchanged_chapters(before: Sequence[Judgement], after: Sequence[Judgement]) -> dict[str, str]:
    """The chapters without a differing check, with the hash of their code before. Differences are printed.

    Raises:
        ValueError: the runs are not those of ``RUNS``, or those in ``after`` are not of today's code.
    """
    for judgements in (before, after):
        given_runs = tuple((judgement.run["profile"], judgement.run["seed"]) for judgement in judgements)
        if sorted(given_runs) != sorted(RUNS):
            raise ValueError(f"the runs are {given_runs}; give those of {RUNS}, as their metrics.json")
    today = sources.hashes()
    hashes = {}
    for chapter in book.chapters():
        if any(hash_in(judgement, chapter) != today[chapter] for judgement in after):
            raise ValueError(f"{chapter} was edited after it was run: run all again")
        changes = [
            name
            for run_before, run_after in zip(before, after, strict=True)
            for name in differing_checks(run_before, run_after, chapter)
        ]
        old_hashes = {hash_in(judgement, chapter) for judgement in before}
        if changes or len(old_hashes) > 1:
            print(f"{chapter}: moved: {', '.join(dict.fromkeys(changes)) or 'the code between the runs before'}")
        else:
            hashes[chapter] = old_hashes.pop()
    return hashes


def restamp(kept: alarms.Kept, hashes: dict[str, str]) -> list[str]:
    """Give kept seeds that were measured at the hash in ``hashes`` the hash of today's code, by chapter.

    Returns:
        The names of the chapters that got it.
    """
    today = sources.hashes()
    names = [name for name, made_from in hashes.items() if kept["chapters"].get(name, {}).get("made_from") == made_from]
    for name in names:
        kept["chapters"][name]["made_from"] = today[name]
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(argv)
    files = sorted(file.name for file in options.before.glob("*.json"))
    before = [write.load(options.before / name) for name in files]
    after = [write.load(options.after / name) for name in files]
    hashes = unchanged_chapters(before, after)
    for profile in alarms.WANTED:
        kept = alarms.load(profile)
        names = restamp(kept, hashes)
        alarms.save(kept)
        print(f"{profile}: the seeds of {len(names)} of {len(kept['chapters'])} chapters are of today's code")
    return int(len(hashes) < len(book.chapters()))


if __name__ == "__main__":
    sys.exit(main())
