"""Other processors, emulated: one profile under switches that make libraries round otherwise, and what moved by it.

A switch that changes no bit of ``workflow.probe`` here cannot take effect on this processor, one that
changes them as another does is no platform more, and one may need instructions that are not here: these are named and
not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nbutils import device as devices
from nbutils.claims.records import Record, format_number
from workflow import BUILD, ROOT, compare, jobs
from workflow.mutants import NOT_COPIED
from workflow.summaries import rows


class Platform(NamedTuple):
    """What stands for another processor: variables of the environment, and how many notebooks run at once."""

    variables: Mapping[str, str]
    jobs: int = 2


OLD = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Nehalem",
    "NUMBA_CPU_NAME": "generic",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA",
}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell"}
AVX512 = {"ATEN_CPU_CAPABILITY": "avx512", "MKL_CBWR": "AVX512", "OPENBLAS_CORETYPE": "SkylakeX"}
REVERSED = {"WORKFLOW_REVERSED_SUMS": "1", "PYTHONPATH": str(ROOT / "workflow" / "emulate")}
PLATFORMS: Mapping[str, Platform] = {
    "a processor without AVX": Platform(OLD),
    "a processor with AVX2": Platform(AVX2),
    "a processor with AVX-512": Platform(AVX512),
    "torch's plain loops": Platform({"ATEN_CPU_CAPABILITY": "default"}),
    "MKL, the same on all processors": Platform({"MKL_CBWR": "COMPATIBLE"}),
    "oneDNN with SSE 4.1, numba generic": Platform({"ONEDNN_MAX_CPU_ISA": "SSE41", "NUMBA_CPU_NAME": "generic"}),
    "OpenBLAS for Nehalem, libm without FMA": Platform(
        {"OPENBLAS_CORETYPE": "Nehalem", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA"}
    ),
    "sums in another order": Platform(REVERSED),
    "every core for one notebook": Platform({}, jobs=1),
}


TEXT = BUILD / "platforms" / "text"  # the one that all are copies of


def kept_in(profile: str) -> Path:
    """Where the last measurement of a profile stands."""
    return ROOT / "tests" / "baselines" / f"platforms-{profile}.json"


def environment(platform: Platform) -> dict[str, str]:
    """The variables of a process on this platform."""
    path = os.pathsep.join(filter(None, [platform.variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **platform.variables, "PYTHONPATH": path}


def bits(platform: Platform) -> str:
    """What ``workflow.probe`` prints there, with as many threads as a job has; "" if this processor cannot run it."""
    threads = "1" if platform.jobs > 1 else str(len(os.sched_getaffinity(0)))
    told = environment(platform) | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    words = [sys.executable, "-m", "workflow.probe"]
    done = subprocess.run(words, cwd=ROOT, env=told, capture_output=True, text=True)
    if done.returncode == -signal.SIGILL:
        return ""
    done.check_returncode()
    return done.stdout.strip()


def run_there(place: Path, platform: Platform, words: list[str]) -> dict[str, Any] | None:
    """A run in a copy of the text; its metrics, None if it left none."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(TEXT, place)
    command = [sys.executable, "-m", "workflow", "run", *words, "--jobs", str(platform.jobs)]
    with open(place / "run.log", "w", encoding="utf-8") as log:
        subprocess.run(command, cwd=place, env=environment(platform), stdout=log, stderr=subprocess.STDOUT)
    try:
        (metrics,) = place.glob("_build/*/metrics.json")
        return compare.load(metrics)
    except ValueError:
        return None


def against(reference: Mapping[str, Any], found: Mapping[str, Any] | None) -> dict[str, Any]:
    """What moved between two runs: how many checks, the largest move, which do not hold, and whether it is red."""
    if found is None:
        return {"green": False, "why": "no report: see run.log"}
    moves = compare.compare(reference, found)
    failed = [record for record in map(Record.of, found["records"]) if record.holds is False]
    return {
        "green": found["run"]["green"],
        "why": "; ".join(f"{each['chapter']}: {each['claim']} {each['what']}" for each in found["problems"][:3]),
        "checks": len(found["records"]),
        "moved": len(moves.moved),
        "most": [[*move.key, move.distance, move.unit] for move in moves.moved[:5]],
        "failed": [[r.chapter, r.claim, r.check, r.measured, r.noted] for r in failed],
        "appeared": len(moves.only_a) + len(moves.only_b),
    }


def not_counted(probes: Mapping[str, str]) -> dict[str, str]:
    """Why a platform is none here, by what its probe printed; "" for one that rounds in a way of its own."""
    first, why = {bits(Platform({})): "this processor"}, {}
    for name, probe in probes.items():
        like = first.setdefault(probe, name)
        why[name] = "" if like == name else f"it rounds here as {like} does"
        if not probe:
            why[name] = "it needs instructions that this processor has not"
    return why


def measure(profile: str, seed: int) -> dict[str, Any]:
    """Run the profile as it is, then on every platform that takes effect here and does not round as one before it.

    All are copies of one text: what is edited meanwhile is not among them.
    """
    words, folder = ["--profile", profile, "--seed", str(seed)], BUILD / "platforms"
    shutil.rmtree(TEXT, ignore_errors=True)
    shutil.copytree(ROOT, TEXT, ignore=shutil.ignore_patterns(*NOT_COPIED))
    why, found = not_counted({name: bits(platform) for name, platform in PLATFORMS.items()}), {}
    print(f"{list(why.values()).count('')} of {len(PLATFORMS)} platforms round in a way of their own", flush=True)
    reference = run_there(folder / "as-it-is", Platform({}), words)
    if reference is None:
        raise RuntimeError(f"the run to compare with left no report: see {folder.relative_to(ROOT)}/as-it-is/run.log")
    for number, (name, platform) in enumerate(PLATFORMS.items(), 1):
        found[name] = {"not counted": why[name]}
        if not why[name]:
            found[name] = against(reference, run_there(folder / str(number), platform, words))
        print(f"{name}: {_told(found[name])}", flush=True)
    return {
        "profile": profile,
        "seed": seed,
        "hardware": devices.hardware("cpu"),
        "versions": reference["run"]["versions"],
        "green": reference["run"]["green"],
        "platforms": found,
    }


def _told(entry: Mapping[str, Any]) -> str:
    if "not counted" in entry:
        return f"not counted: {entry['not counted']}"
    if not entry.get("checks"):
        return f"RED: {entry['why']}"
    noted = sum(each[-1] for each in entry["failed"])
    said = f"{entry['moved']} of {entry['checks']} checks moved, {noted} noted"
    return f"GREEN: {said}" if entry["green"] else f"RED: {said}; {entry['why']}"


def red(found: Mapping[str, Any]) -> list[str]:
    """What makes a measurement red: a red platform, or fewer than six that take effect."""
    counted = {name: entry for name, entry in found["platforms"].items() if "not counted" not in entry}
    said = [name for name, entry in counted.items() if not entry["green"]]
    said += [] if found["green"] else ["the run without switches"]
    return said + ([] if len(counted) >= 6 else [f"only {len(counted)} platforms take effect; six are needed"])


def markdown(profile: str) -> str:
    """The kept measurement as tables for the page on how the book is run."""
    file = kept_in(profile)
    if not file.exists():
        return f"Not measured yet: `make platforms PROFILE={profile}`."
    found = json.loads(file.read_text(encoding="utf-8"))
    cells, most = [], []
    for name, entry in found["platforms"].items():
        cells.append((name, _told(entry).replace("GREEN: ", "green: ").replace("RED: ", "**red**: ")))
        for chapter, claim, check, distance, unit in entry.get("most", ())[:1]:
            most.append((name, chapter, f"`{claim}`", check, f"{format_number(distance)} {unit}"))
    lines = [f"Profile `{found['profile']}`, seed {found['seed']}, on {found['hardware']}.", ""]
    lines += rows(["platform", "against the run without switches"], cells)
    return "\n".join([*lines, "", *rows(["platform", "chapter", "claim", "the check that moved most", "by"], most)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workflow.platforms", description=__doc__)
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    found = measure(arguments.profile, arguments.seed)
    jobs.put(kept_in(arguments.profile), json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {kept_in(arguments.profile).relative_to(ROOT)}")
    wrong = red(found)
    count = sum("not counted" not in entry for entry in found["platforms"].values())
    print(f"RED: {', '.join(wrong)}" if wrong else f"GREEN: {count} platforms that round otherwise, none red")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
