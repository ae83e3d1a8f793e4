"""Keep measured seeds through a change that moves nothing: ``python -m maintenance.restamp BEFORE AFTER``.

BEFORE and AFTER are folders with a ``metrics.json`` of each of the same runs, under the same names: of `smoke` at seeds
0, 1 and 2 and of `book` at 0. A chapter keeps its seeds, under the hash of its code of today, only where every check of
it is the same in all pairs of runs, to the last bit. All else is printed.
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
MAY_DIFFER = {"versions"}  # of a record: what the run was made with, and not what it measured


def checks_of(judgement: Judgement, chapter: str) -> list[dict[str, Any]]:
    """All that the checks of a chapter say, in order, but for the versions of packages."""
    records = [record.as_dict() for record in judgement.records if record.chapter == chapter]
    return [{key: value for key, value in record.items() if key not in MAY_DIFFER} for record in records]


def moved(before: Judgement, after: Judgement, chapter: str) -> list[str]:
    """The checks of a chapter that are not the same in two runs, to the last bit."""
    old = {(check["claim"], check["check"]): check for check in checks_of(before, chapter)}
    new = {(check["claim"], check["check"]): check for check in checks_of(after, chapter)}
    return [": ".join(key) for key in {**old, **new} if old.get(key) != new.get(key)]


def hash_in(judgement: Judgement, chapter: str) -> str:
    """The hash of the code that a chapter was run from."""
    return next(stats["made_from"] for stats in judgement.run["notebooks"] if stats["chapter"] == chapter)


def unmoved(before: Sequence[Judgement], after: Sequence[Judgement]) -> dict[str, str]:
    """The chapters in which nothing moved, each with the hash of its code before; what moved is printed.

    Raises:
        ValueError: the runs are not those that decide, or those after are not of today's code.
    """
    for judgements in (before, after):
        given = tuple((judgement.run["profile"], judgement.run["seed"]) for judgement in judgements)
        if sorted(given) != sorted(RUNS):
            raise ValueError(f"the runs are {given}; give those of {RUNS}, as their metrics.json")
    today = sources.hashes()
    hashes = {}
    for chapter in book.chapters():
        if any(hash_in(judgement, chapter) != today[chapter] for judgement in after):
            raise ValueError(f"{chapter} was edited after it was run: run all again")
        changes = [name for pair in zip(before, after, strict=True) for name in moved(*pair, chapter)]
        old_hashes = {hash_in(judgement, chapter) for judgement in before}
        if changes or len(old_hashes) > 1:
            print(f"{chapter}: moved: {', '.join(dict.fromkeys(changes)) or 'the code between the runs before'}")
        else:
            hashes[chapter] = old_hashes.pop()
    return hashes


def restamp(kept: alarms.Kept, hashes: dict[str, str]) -> list[str]:
    """Give the kept seeds of chapters, measured at the code of ``hashes``, the hash of today's. Returns their names."""
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
    hashes = unmoved(before, after)
    for profile in alarms.WANTED:
        kept = alarms.load(profile)
        names = restamp(kept, hashes)
        alarms.save(kept)
        print(f"{profile}: the seeds of {len(names)} of {len(kept['chapters'])} chapters are of today's code")
    return int(len(hashes) < len(book.chapters()))


if __name__ == "__main__":
    sys.exit(main())
