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
from workflow import Run, book, report, sources, write_atomically
from workflow import run as runs

SHARE = 0.01  # of red runs, at most
WANTED = {"smoke": 100, "book": 20}  # runs that decide
CONFIDENCE = 0.95
# A chapter's own code failed, or a training's. What was killed, or had no time or no room, says nothing of the chapter.
RAISED = re.compile(r"(cell \[.* raised|of its trainings, \S+:) (?!TimeUp|OSError)\w+: ")

Kept = dict[str, Any]


def kept_in(profile: str, device: str = "cpu") -> Path:
    """The file of a profile, for each device apart."""
    return Path(__file__).with_name(f"alarms-{profile}{'' if device == 'cpu' else f'-{device}'}.json")


def load(profile: str, device: str = "cpu") -> Kept:
    """What is kept of a profile, by chapter; nothing before the first measurement."""
    file = kept_in(profile, device)
    empty = {"profile": profile, "device": device, "chapters": {}}
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else empty


def missing(found: Kept, chapter: str, made_from: str, seeds: Iterable[int]) -> list[int]:
    """The seeds at which a chapter, as it is today, has not been run yet."""
    entry = found["chapters"].get(chapter, {"made_from": None})
    return [seed for seed in seeds if entry["made_from"] != made_from or str(seed) not in entry["runs"]]


def measure(first: Run, seeds: Iterable[int], options: argparse.Namespace) -> Kept:
    """Run what these seeds still miss, and keep what each says. May be broken off and goes on where it was."""
    found, file = load(first.profile, first.device), kept_in(first.profile, first.device)
    today = sources.hashes()
    with runs.checkout():  # until all is judged: another run would change the notebooks that are read
        for seed in seeds:
            names = tuple(name for name in first.chapters if missing(found, name, today[name], [seed]))
            run = replace(first, seed=seed, chapters=names)
            if names:
                runs.execute([run], options)
                runs.rejudge(run, options)
                for name in names:
                    add(found, run, name, today[name])
                write_atomically(file, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return found


def add(found: Kept, run: Run, chapter: str, made_from: str) -> None:
    """Judge a chapter's executed notebook and add it to what is kept, unless it is undecided or kept already.

    An entry has ``made_from``, ``hardware`` and ``versions`` of the runs, and ``runs``: by seed the checks that did not
    hold, each with the values at two further seeds and whether it is ``red``.
    """
    entry = found["chapters"].get(chapter)
    if entry is None or entry["made_from"] != made_from:
        entry = {"made_from": made_from, "hardware": [], "versions": {}, "runs": {}}
    if str(run.seed) in entry["runs"]:
        return
    if why := _raised(run, chapter):
        entry["runs"][str(run.seed)] = [{"claim": "", "check": why, "red": True}]
    elif stats := _stats_if_decided(run, chapter, made_from):
        _add_records(entry, str(run.seed), stats, report.judged(run, chapter))
    else:
        return
    entry["runs"] = dict(sorted(entry["runs"].items(), key=lambda item: int(item[0])))
    found["chapters"] = dict(sorted({**found["chapters"], chapter: entry}.items()))


def _raised(run: Run, chapter: str) -> str:
    """The error that left a chapter without a result; "" where it has one, or was stopped from outside."""
    why = "" if run.notebook(chapter).exists() else report.why_not(run, chapter)
    return why if RAISED.search(why) else ""


def _stats_if_decided(run: Run, chapter: str, made_from: str) -> Kept:
    """Stats of a result of this code and device that, if chance may have failed it, was run at further seeds too."""
    if not run.notebook(chapter).exists():
        return {}
    stats = json.loads(run.stats(chapter).read_text(encoding="utf-8"))
    ended = (each.notebook(chapter).exists() or _raised(each, chapter) for each in run.further())
    judged = not report.may_be_chance(report.records_of(run.notebook(chapter))) or all(ended)
    return stats if judged and (stats["made_from"], stats["device"]) == (made_from, run.device) else {}


def _add_records(entry: Kept, seed: str, stats: Kept, records: Sequence[Record]) -> None:
    entry["hardware"] = sorted({*entry["hardware"], stats["hardware"]})
    entry["versions"] = stats["versions"]
    failed, facts = [record for record in records if record.holds is False], "claim check kind measured band further"
    entry["runs"][seed] = [{x: getattr(r, x) for x in facts.split()} | {"red": not r.noted} for r in failed]


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


def pooled(found: Kept, today: Mapping[str, str]) -> Pooled:
    """Counts over all chapters, every kept seed of each. A chapter that changed since is absent."""
    kept = {name: entry["runs"] for name, entry in found["chapters"].items() if entry["made_from"] == today.get(name)}
    red = {name: [any(check["red"] for check in run) for run in every.values()] for name, every in kept.items()}
    return Pooled(
        runs=min(map(len, kept.values()), default=0),
        share=1 - math.prod(1 - sum(every) / len(every) for every in red.values()),
        noted=sum(bool(run) for every in kept.values() for run in every.values()) - sum(map(sum, red.values())),
        absent=[name for name in book.chapters() if name not in kept],
        failed=[(name, seed, check) for name, every in kept.items() for seed, run in every.items() for check in run],
    )


def conclusion(found: Kept, counts: Pooled) -> str:
    """The last line; GREEN once as many runs of all chapters are measured as decide."""
    wanted = WANTED.get(found["profile"], 20)
    text = f"{100 * counts.share:.1f} % of {found['profile']} runs red (95 %: at most {100 * counts.upper:.1f} %), "
    text += f"{counts.runs} of {wanted} runs, {counts.noted} noted"
    text += f"; not measured since they changed: {', '.join(counts.absent)}" if counts.absent else ""
    if not counts.sound:
        return f"RED: {text}; sound is at most {100 * SHARE:g} % red"
    return f"{'GREEN' if counts.runs >= wanted and not counts.absent else 'SO FAR GREEN'}: {text}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, parents=[runs.OPTIONS])
    parser.add_argument("chapters", nargs="*", help="only these chapters")
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--first", type=int, default=9000, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many; 0 shows what is kept")
    options = parser.parse_args(argv)
    first = runs.asked(options.profile, options.first, options.chapters, options)
    seeds = range(options.first, options.first + options.seeds)
    found, today = measure(first, seeds, options), sources.hashes()
    counts = pooled(found, today)
    for chapter, seed, check in counts.failed:
        values = [format_number(each.get("measured")) for each in (check, *check.get("further", ()))]
        verdict = "red" if check["red"] else "noted"
        print(f"{verdict}: {chapter}, seed {seed}: {check['claim']}: {check['check']}: {', '.join(values)}")
    if left := [name for name in first.chapters if missing(found, name, today[name], seeds)]:
        print(f"RED: not every seed came to its end in {', '.join(left)}: see the messages above, and run it again")
        return 1
    print(conclusion(found, counts))
    return 0 if counts.sound else 1


if __name__ == "__main__":
    sys.exit(main())
