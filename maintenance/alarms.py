"""How often a run is red although nothing is wrong: whole runs at fresh seeds, judged as any other run.

What is kept of a chapter holds for its code: an edit of that voids it, an edit of prose or of the workflow does not.
Seeds may be added at any time; none is ever dropped or drawn again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from scipy.special import betaincinv

from nbutils.claims.records import Record, format_number
from workflow import Run, book, execute, run, sources, write_atomically
from workflow.collect import Collected
from workflow.judge import after_reruns, chance_may_have_failed

SHARE = 0.01  # of red runs, at most
WANTED = {"smoke": 100, "book": 20}  # runs that decide
CONFIDENCE = 0.95
# A chapter's own code failed, or a training's. What was killed, or had no time or no room, says nothing of the chapter.
RAISED = re.compile(
    r"(cell \[.* raised|of its trainings, \S+:) (?!TimeUp|Cancelled|OSError)\w+: (?!device 'cuda' was asked for)"
)

Kept = dict[str, Any]


def file_of(profile: str, device: str = "cpu") -> Path:
    """The file with the results of a profile on a device."""
    return Path(__file__).with_name(f"alarms-{profile}{'' if device == 'cpu' else f'-{device}'}.json")


def load(profile: str, device: str = "cpu") -> Kept:
    """The stored results of a profile, by chapter; empty before the first measurement."""
    file = file_of(profile, device)
    empty = {"profile": profile, "device": device, "chapters": {}}
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else empty


def save(kept: Kept) -> None:
    """Write the results of a profile to its file."""
    text = json.dumps(kept, indent=1, ensure_ascii=False) + "\n"
    write_atomically(file_of(kept["profile"], kept["device"]), text)


def missing(kept: Kept, chapter: str, made_from: str, seeds: Iterable[int]) -> list[int]:
    """The seeds at which a chapter, as it is today, has not been run yet."""
    entry = kept["chapters"].get(chapter, {"made_from": None})
    return [seed for seed in seeds if entry["made_from"] != made_from or str(seed) not in entry["runs"]]


def measure(first: Run, seeds: Iterable[int], options: argparse.Namespace) -> Kept:
    """Run chapters at all seeds that they lack, as one run, and save what came out.

    One that is stopped can go on: its notebooks are there.
    """
    kept = load(first.profile, first.device)
    today = sources.hashes()
    requests = []
    for seed in seeds:
        chapters = tuple(name for name in first.chapters if missing(kept, name, today[name], [seed]))
        if chapters:
            requests.append(replace(first, seed=seed, chapters=chapters))
    if not requests:
        return kept
    with execute.lock_checkout():  # until all is judged: another run would change the notebooks that are read
        results = run.measured(requests, options, rerun_if_stopped=True)  # each chapter by itself
        for request, result in zip(requests, results, strict=True):
            for chapter in request.chapters:
                add(kept, chapter, today[chapter], result.collected, result.reruns)
        save(kept)
    return kept


def add(kept: Kept, chapter: str, made_from: str, collected: Collected, reruns: Sequence[Collected]) -> None:
    """Judge a chapter of a run and add it to what is kept, unless it is undecided or kept already.

    An entry has ``made_from``, ``hardware`` and ``versions`` of the runs, and ``runs``: by seed the checks that did not
    hold, each with the values at two further seeds and whether it is ``red``.
    """
    entry = kept["chapters"].get(chapter)
    if entry is None or entry["made_from"] != made_from:
        entry = {"made_from": made_from, "hardware": [], "versions": {}, "runs": {}}
    seed = str(collected.run.seed)
    if seed in entry["runs"]:
        return
    if error := _raised(collected, chapter):
        entry["runs"][seed] = [{"claim": "", "check": error, "red": True}]
    elif _is_decided(chapter, made_from, collected, reruns):
        stats = collected.stats[chapter]
        entry["hardware"] = sorted({*entry["hardware"], stats["hardware"]})
        entry["versions"] = stats["versions"]
        records = after_reruns(chapter, collected, reruns)
        entry["runs"][seed] = [_failed(record) for record in records if record.holds is False]
    else:
        return
    entry["runs"] = dict(sorted(entry["runs"].items(), key=lambda item: int(item[0])))
    kept["chapters"] = dict(sorted({**kept["chapters"], chapter: entry}.items()))


def _raised(collected: Collected, chapter: str) -> str:
    """The error that left a chapter without a result; "" if it has a result or was stopped from outside."""
    reason = collected.missing.get(chapter, "")
    return reason if RAISED.search(reason) else ""


def _is_decided(chapter: str, made_from: str, collected: Collected, reruns: Sequence[Collected]) -> bool:
    """Whether there is a result of this code and, if chance may have failed it, the reruns of it have ended."""
    if chapter not in collected.records or collected.stats[chapter]["made_from"] != made_from:
        return False
    if not chance_may_have_failed(collected.records[chapter]):
        return True
    return bool(reruns) and all(chapter in rerun.records or _raised(rerun, chapter) for rerun in reruns)


def _failed(record: Record) -> dict[str, Any]:
    """The stored fields of a check that did not hold."""
    fields = ("claim", "check", "kind", "measured", "band", "further")
    return {field: getattr(record, field) for field in fields} | {"red": not record.noted}


class Pooled(NamedTuple):
    """All chapters together: a run is red if one of its chapters is."""

    runs: int  # of the chapter that has fewest
    share: float  # of red runs: 1 − Π (1 − red runs of a chapter / its runs)
    noted: int  # runs of single chapters that noted a check and were green
    absent: list[str]  # chapters without a run of today's code
    failed: list[tuple[str, str, dict[str, Any]]]  # chapter, seed, check

    @property
    def sound(self) -> bool:
        return self.runs > 0 and self.share <= SHARE + 1e-9  # 1 − 0.99 is not 0.01

    @property
    def upper(self) -> float:
        """The share of red runs that is not exceeded with 95 % confidence (Clopper and Pearson, one-sided)."""
        red = self.share * self.runs
        return float(betaincinv(red + 1, self.runs - red, CONFIDENCE)) if red < self.runs else 1.0


def pooled(kept: Kept, today: Mapping[str, str]) -> Pooled:
    """Counts over all chapters, every kept seed of each. A chapter that changed since is absent."""
    runs = {name: entry["runs"] for name, entry in kept["chapters"].items() if entry["made_from"] == today.get(name)}
    red = {name: [any(check["red"] for check in checks) for checks in seeds.values()] for name, seeds in runs.items()}
    failed_in_none = math.prod(1 - sum(of_chapter) / len(of_chapter) for of_chapter in red.values())
    failed_runs = sum(bool(checks) for seeds in runs.values() for checks in seeds.values())
    red_runs = sum(map(sum, red.values()))
    return Pooled(
        runs=min(map(len, runs.values()), default=0),
        share=1 - failed_in_none,
        noted=failed_runs - red_runs,
        absent=[name for name in book.chapters() if name not in runs],
        failed=[
            (name, seed, check) for name, seeds in runs.items() for seed, checks in seeds.items() for check in checks
        ],
    )


def conclusion(kept: Kept, counts: Pooled) -> str:
    """The last line; GREEN once as many runs of all chapters are measured as decide."""
    wanted = WANTED.get(kept["profile"], 20)
    text = f"{100 * counts.share:.1f} % of {kept['profile']} runs red (95 %: at most {100 * counts.upper:.1f} %), "
    text += f"{counts.runs} of {wanted} runs, {counts.noted} noted"
    if counts.absent:
        text += f"; not measured since they changed: {', '.join(counts.absent)}"
    if not counts.sound:
        return f"RED: {text}; sound is at most {100 * SHARE:g} % red"
    decided = counts.runs >= wanted and not counts.absent
    return f"{'GREEN' if decided else 'SO FAR GREEN'}: {text}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, parents=[execute.OPTIONS])
    parser.add_argument("chapters", nargs="*", help="only these chapters")
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--first", type=int, default=9000, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many; 0 shows what is kept")
    options = parser.parse_args(argv)
    first = run.requested(options.profile, options.first, options.chapters, options)
    seeds = range(options.first, options.first + options.seeds)
    kept = measure(first, seeds, options)
    today = sources.hashes()
    counts = pooled(kept, today)
    for chapter, seed, check in counts.failed:
        values = [format_number(measured.get("measured")) for measured in (check, *check.get("further", ()))]
        state = "red" if check["red"] else "noted"
        print(f"{state}: {chapter}, seed {seed}: {check['claim']}: {check['check']}: {', '.join(values)}")
    if left := [name for name in first.chapters if missing(kept, name, today[name], seeds)]:
        print(f"RED: not every seed came to its end in {', '.join(left)}: see the messages above, and run it again")
        return 1
    print(conclusion(kept, counts))
    return 0 if counts.sound else 1


if __name__ == "__main__":
    sys.exit(main())
