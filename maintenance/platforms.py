"""Other processors, emulated: one profile under switches that make libraries round otherwise, and what moved by it.

A platform on which every check measures what it measured on this processor, or on a platform before it, is none here:
its switch takes no effect. One may need instructions that are not here. Neither is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maintenance import copy_checkout
from nbutils import devices
from workflow import BUILD, compare, write_atomically


class Platform(NamedTuple):
    """What stands for another processor: variables of the environment, and how many notebooks run at once."""

    variables: Mapping[str, str]
    jobs: int = 2


LOOPS, MKL = {"ATEN_CPU_CAPABILITY": "default"}, {"MKL_CBWR": "COMPATIBLE"}
ONEDNN = {"ONEDNN_MAX_CPU_ISA": "SSE41", "NUMBA_CPU_NAME": "generic"}
OPENBLAS = {"OPENBLAS_CORETYPE": "Nehalem", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell"}
AVX512 = {"ATEN_CPU_CAPABILITY": "avx512", "MKL_CBWR": "AVX512", "OPENBLAS_CORETYPE": "SkylakeX"}
REVERSED = {"WORKFLOW_REVERSED_SUMS": "1", "PYTHONPATH": str(Path(__file__).with_name("reversed_sums"))}
PLATFORMS: Mapping[str, Platform] = {
    "a processor without AVX": Platform(LOOPS | MKL | ONEDNN | OPENBLAS),
    "a processor with AVX2": Platform(AVX2),
    "a processor with AVX-512": Platform(AVX512),
    "torch's plain loops": Platform(LOOPS),
    "MKL, the same on all processors": Platform(MKL),
    "oneDNN with SSE 4.1, numba generic": Platform(ONEDNN),
    "OpenBLAS for Nehalem, libm without FMA": Platform(OPENBLAS),
    "sums in another order": Platform(REVERSED),
    "every core for one notebook": Platform({}, jobs=1),
}
THIS = "this processor"
LEAST = 6  # platforms that take effect
TRIAL = "import torch; x = torch.rand(99, 99); (x @ x).exp().sum().item()"

Metrics = Mapping[str, Any]


def environment(platform: Platform) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [platform.variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **platform.variables, "PYTHONPATH": path}


def can_run(platform: Platform) -> bool:
    """Whether this processor has the instructions of a platform."""
    done = subprocess.run([sys.executable, "-c", TRIAL], env=environment(platform), capture_output=True)
    return done.returncode != -signal.SIGILL


def run_there(place: Path, platform: Platform, words: Sequence[str]) -> Metrics | None:
    """The metrics of a run in a copy of the checkout; None if it left none."""
    command = [sys.executable, "-m", "workflow", "run", *words, "--jobs", str(platform.jobs)]
    with open(place / "run.log", "w", encoding="utf-8") as log:
        subprocess.run(command, cwd=place, env=environment(platform), stdout=log, stderr=subprocess.STDOUT)
    found = sorted(place.glob("_build/*/metrics.json"))
    return compare.load(found[0]) if found else None


def judge(found: Metrics | None, before: Mapping[str, Metrics]) -> dict[str, Any]:
    """What moved against this processor: how many checks, the most, which do not hold, and whether the run is red.

    Not counted where every check measures what it did on a platform ``before``.
    """
    if found is None:
        return {"green": False, "why": "no report: see run.log"}
    for name, metrics in before.items():
        other = compare.compare(metrics, found)
        if not (other.moved or other.of("lost", "new")):
            return {"not counted": f"it rounds here as {name} does"}
    moves = compare.compare(before[THIS], found)
    failed = [r for r in found["records"] if r["holds"] is False]
    return {
        "green": found["run"]["green"],
        "why": "; ".join(f"{each['chapter']}: {each['claim']} {each['what']}" for each in found["problems"][:3]),
        "checks": len(found["records"]),
        "moved": len(moves.moved),
        "most": [[move.a.chapter, *move.a.key, move.distance, move.unit] for move in moves.moved[:5]],
        "failed": [[r["chapter"], r["claim"], r["check"], r["measured"], r.get("noted", False)] for r in failed],
        "appeared": len(moves.of("lost", "new")),
    }


def measure(profile: str, seed: int) -> dict[str, Any]:
    """Run the profile as it is, then on every platform. All are copies of one text, whatever is edited meanwhile.

    Raises:
        RuntimeError: the run as it is left no report.
    """
    words, folder = ["--profile", profile, "--seed", str(seed)], BUILD / "platforms"
    places = {name: copy_checkout(folder / str(number)) for number, name in enumerate([THIS, *PLATFORMS])}
    reference, found = run_there(places[THIS], Platform({}), words), {}
    if reference is None:
        raise RuntimeError(f"the run to compare with left no report: see {places[THIS]}/run.log")
    runs = {THIS: reference}
    for name, platform in PLATFORMS.items():
        if can_run(platform):
            metrics = run_there(places[name], platform, words)
            found[name] = judge(metrics, runs)
            runs |= {name: metrics} if metrics else {}
        else:
            found[name] = {"not counted": "it needs instructions that this processor has not"}
        print(f"{name}: {found[name]}", flush=True)
    facts = {"profile": profile, "seed": seed, "hardware": devices.hardware("cpu")}
    return facts | {name: reference["run"][name] for name in ("versions", "green")} | {"platforms": found}


def conclusion(found: Mapping[str, Any]) -> str:
    """Red by a platform, by the run without switches, or by fewer than six platforms that take effect."""
    counted = {name: entry for name, entry in found["platforms"].items() if "not counted" not in entry}
    wrong = [name for name, entry in counted.items() if not entry["green"]]
    wrong += [] if found["green"] else ["the run without switches"]
    wrong += [] if len(counted) >= LEAST else [f"only {len(counted)} platforms take effect; {LEAST} are needed"]
    return f"RED: {', '.join(wrong)}" if wrong else f"GREEN: {len(counted)} platforms that round otherwise, none red"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m maintenance platforms", description=__doc__)
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    found = measure(options.profile, options.seed)
    file = Path(__file__).with_name(f"platforms-{options.profile}.json")
    write_atomically(file, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(conclusion(found))
    return int(conclusion(found).startswith("RED"))
