"""False alarms: how often a right result is called wrong, over fresh seeds that made no band.

A check that does not hold on such a seed is a false alarm, because the code is the one whose bands these are. A chapter
without a result is red, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbutils import claims
from workflow import ROOT, report
from workflow.summaries import rows

KEPT = ROOT / "tests" / "baselines" / "alarms.json"
RATE = 0.005  # of all checks over all seeds; below this, and no check twice, is green


def holds(record: claims.Record) -> bool | None:
    """Whether a recorded check holds today: against today's baseline where its band is from seeds, else as recorded.

    A fixed band stands in the chapter and is part of the record. None for a claim left open.
    """
    if "band_from" not in record:
        return record["holds"]
    band, _ = claims.seed_band(record["profile"], record["claim"], record["check"], record["expected"])
    if band is None or ("claimed" in record and claims.inside(record["claimed"], *band)):
        return False
    return claims.inside(float(record["measured"]), *band)


def measure(profile: str, seeds: Sequence[int], chapters: Sequence[str], build: Path) -> dict[str, Any]:
    """Judge every check of the executed notebooks ``build/<profile>/seed-<n>/``.

    Returns:
        As ``tests/baselines/alarms.json`` keeps it: counts, rate, the checks that failed with their seeds, notebooks
        that are not there, hardware and versions of the runs.

    Raises:
        ValueError: none of the notebooks is there, or a seed made the bands itself.
    """
    used = _seeds_of_baseline(profile) & set(seeds)
    if used:
        raise ValueError(
            f"seeds {sorted(used)} made the bands of {profile}: false alarms need fresh ones, --first 5000"
        )
    evaluated, left_open, names = 0, 0, set()
    failed: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    missing, machines, versions = [], set(), {}
    for seed in seeds:
        folder = build / profile / f"seed-{seed}"
        for chapter in chapters:
            if not (folder / f"{chapter}.ipynb").exists() or not (folder / f"{chapter}.json").exists():
                missing.append(f"{chapter}, seed {seed}")
                continue
            stats = json.loads((folder / f"{chapter}.json").read_text(encoding="utf-8"))
            machines.add(stats["hardware"])
            versions = stats["versions"]
            for record in report.records_of(folder / f"{chapter}.ipynb"):
                key, held = (chapter, record["claim"], record["check"]), holds(record)
                names.add(key)
                evaluated += held is not None
                left_open += held is None
                if held is False:
                    failed.setdefault(key, []).append({"seed": seed, "measured": record["measured"]})
    if not evaluated:
        raise ValueError(f"no executed notebook in {build}/{profile}/seed-{seeds[0]} and the {len(seeds) - 1} after it")
    failures = sum(map(len, failed.values()))
    twice = [" / ".join(key) for key, found in failed.items() if len(found) > 1]
    return {
        "profile": profile,
        "seeds": [seeds[0], seeds[-1]],
        "hardware": sorted(machines),
        "versions": versions,
        "distinct": len(names),
        "evaluated": evaluated,
        "left_open": left_open,
        "failures": failures,
        "rate": failures / evaluated,
        "failed": [
            {"chapter": chapter, "claim": claim, "check": check, "at": found}
            for (chapter, claim, check), found in sorted(failed.items())
        ],
        "twice": twice,
        "missing": missing,
        "green": failures / evaluated < RATE and not twice and not missing,
    }


def _seeds_of_baseline(profile: str) -> set[int]:
    file = ROOT / "tests" / "baselines" / f"{profile}.json"
    if not file.exists():
        return set()
    first, last = json.loads(file.read_text(encoding="utf-8"))["seeds"]
    return set(range(first, last + 1))


def keep(found: Mapping[str, Any], file: Path = KEPT) -> Path:
    """Write the result beside the baselines, for the pages and the history."""
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def load(file: Path = KEPT) -> dict[str, Any] | None:
    """The kept result; None before the first."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def markdown(found: Mapping[str, Any] | None) -> str:
    """The result as a table for the page on bands."""
    if found is None:
        return "Not measured yet: `make alarms`."
    first, last = found["seeds"]
    facts = [
        ("seeds", f"{first} to {last}"),
        ("profile", f"`{found['profile']}`"),
        ("checks of one seed", found["distinct"]),
        ("checks judged, all seeds", f"{found['evaluated']:,}"),
        ("that did not hold", found["failures"]),
        ("rate", f"{100 * found['rate']:.3f} %"),
        ("checks that failed at two seeds or more", len(found["twice"])),
        ("notebooks without a result", len(found["missing"])),
        ("hardware", ", ".join(found["hardware"])),
    ]
    return "\n".join([*rows(["false alarms", ""], facts), *_failed(found["failed"])])


def _failed(failed: Iterable[Mapping[str, Any]]) -> list[str]:
    cells = [
        (
            entry["chapter"],
            f"`{entry['claim']}`",
            entry["check"],
            ", ".join(f"{claims.format_number(at['measured'])} (seed {at['seed']})" for at in entry["at"]),
        )
        for entry in failed
    ]
    return ["", *rows(["chapter", "claim", "check", "measured"], cells)] if cells else []


def conclusion(found: Mapping[str, Any]) -> str:
    """The last line of the command."""
    said = (
        f"{found['failures']} of {found['evaluated']:,} checks did not hold ({100 * found['rate']:.3f} %), "
        f"{len(found['twice'])} at two seeds or more, {len(found['missing'])} notebook(s) without a result"
    )
    return (
        f"GREEN: {said}"
        if found["green"]
        else f"RED: {said}; green is below {100 * RATE:g} %, none twice, none missing"
    )
