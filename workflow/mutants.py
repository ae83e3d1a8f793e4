"""Planted defects: does wrong mathematics, or a wrong judgement of a run, turn a test red?

``python -m workflow.mutants`` plants those listed in ``tests/mutants.yml``, which no generator makes;
``--sample 400 --seed 1`` a random sample of those that one makes (``workflow.defects``). Each is judged by the tests of
its module, a survivor by the chapters that use it. All work is on copies of the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from workflow import BUILD, ROOT, chapters, cluster, defects, dependencies, git
from workflow.defects import Mutant
from workflow.jobs import THREADS, die_with_run, put
from workflow.summaries import rows

KEPT = ROOT / "tests" / "baselines" / "mutants.json"  # of the last whole run and of samples, for the pages
SHARE = 0.9  # of the defects that are no equivalents; below it the run is red
LIMIT = 150  # seconds for the tests of a module, which take 30 at most: then it never ends
LOADED = ("hypothesis", "pandas", "pytest", "scipy.stats", "scipy.integrate", "torch._dynamo", "transformers")
NOT_COPIED = (".git", ".venv", "_build", ".snakemake", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not colab and not whole and not project")


class Outcome(NamedTuple):
    """What became of a mutant: ``killed``, ``survived``, or ``invalid`` (the tests fail without it, too)."""

    id: str
    result: str
    by: str  # the first test that failed, or what else stopped it
    seconds: float


def plant(mutants: Mapping[str, Mutant], told: Path, *, jobs: int = 1) -> dict[str, Outcome]:
    """Plant the defects one at a time, in copies of the checkout, one for each of ``jobs`` processes.

    Each outcome is a line in the file ``told`` at once, with the mutant's stamp. What the tests load is loaded once and
    forked for each mutant; nbutils and workflow come from the copy. A test that kills must pass without the defect.
    """
    for name in LOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, _workers(jobs, scratch) as pool:
        running = {pool.submit(_judge, stamp, mutant, told): stamp for stamp, mutant in mutants.items()}
        done = tqdm(as_completed(running), total=len(running), unit="mutant")
        return {running[each]: each.result() for each in done}


def look_in_chapters(survivors: Mapping[str, Mutant], told: Path, *, jobs: int = 1) -> None:
    """What becomes of defects that no test saw, in the smoke runs of the chapters that use their file."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, _workers(jobs, scratch) as pool:
        running = [pool.submit(_run_chapters, stamp, mutant, told) for stamp, mutant in survivors.items()]
        for each in tqdm(as_completed(running), total=len(running), desc="chapters", unit="mutant"):
            each.result()


def _workers(jobs: int, scratch: str) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _settle, (scratch,))


def _settle(scratch: str) -> None:
    """A worker's own copy of the checkout becomes its working folder."""
    copy = Path(scratch) / str(os.getpid())
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    os.chdir(copy)
    # a mutant of the same length and second would run from the old bytecode
    sys.dont_write_bytecode = True
    os.environ.update(dict.fromkeys(THREADS, "1"), PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
    die_with_run()


@contextlib.contextmanager
def _planted(mutant: Mutant) -> Iterator[None]:
    file = Path(mutant.file)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutant.text, mutant.becomes), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(text, encoding="utf-8")


def _judge(stamp: str, mutant: Mutant, told: Path) -> Outcome:
    """What becomes of a mutant in the copy that is the working folder."""
    with _planted(mutant):
        outcome = _tested(mutant.id, mutant.tests)
    if outcome.result == "killed" and not _sound((outcome.by,) if "::" in outcome.by else mutant.tests):
        return outcome._replace(result="invalid", by=f"without a defect, too: {outcome.by}")
    _tell(told, stamp, outcome)
    return outcome


@cache
def _sound(tests: tuple[str, ...]) -> bool:
    """Whether tests pass without a defect, in time."""
    return _tested("", tests).result == "survived"


def _run_chapters(stamp: str, mutant: Mutant, told: Path) -> None:
    """Run the chapters that use the file, the quickest first, up to the first that is red."""
    started, by = time.monotonic(), ""
    with _planted(mutant):
        for chapter in using(mutant.file):
            words = [sys.executable, "-m", "workflow", "run", "--profile", "smoke", "--jobs", "1", chapter]
            if subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
                by = f"chapter {chapter}"
                break
    seconds = round(time.monotonic() - started, 1)
    _tell(told, stamp, Outcome(mutant.id, "killed" if by else "survived", by or "no chapter", seconds))


def using(file: str) -> list[str]:
    """The chapters that run a file's code, the quickest first."""
    seconds = cluster.recorded("smoke")
    found = [name for name in chapters() if file in dependencies.of_chapter(name)]
    return sorted(found, key=lambda name: seconds.get(name, {}).get("alone_seconds", 1e9))


def _tested(name: str, tests: Sequence[str]) -> Outcome:
    """Fork, run the tests up to the first that fails, and say which."""
    started, reading = time.monotonic(), tempfile.TemporaryFile("w+")  # noqa: SIM115  the child writes into it
    child = os.fork()
    if child == 0:
        _pytest(tests, reading.fileno())
    while (waited := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() - started > LIMIT:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Outcome(name, "killed", f"not finished after {LIMIT} s", LIMIT)
        time.sleep(0.05)
    reading.seek(0)
    by, seconds = reading.read(), round(time.monotonic() - started, 1)
    match os.waitstatus_to_exitcode(waited[1]):
        case 0:
            return Outcome(name, "survived", "", seconds)
        case code:  # 2: a file cannot be imported
            return Outcome(name, "killed", by or f"pytest ended with status {code}", seconds)


def _pytest(tests: Sequence[str], told: int) -> None:
    """In the child: pytest, quiet. The first test that fails goes to the file ``told``; never returns."""
    import hypothesis
    import pytest

    class First:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                os.write(told, report.nodeid.encode())

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                os.write(told, f"{report.nodeid} cannot be collected".encode())

    status: int = 99
    try:
        os.setsid()
        die_with_run()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        for name in [name for name in sys.modules if name.split(".")[0] in ("nbutils", "workflow", "conftest")]:
            del sys.modules[name]
        sys.path[:] = [os.getcwd(), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        # a slow machine kills no mutant, nor an example that was found for another
        fixed = {"database": None, "derandomize": True, "suppress_health_check": list(hypothesis.HealthCheck)}
        hypothesis.settings.register_profile("patient", deadline=None, **fixed)
        status = int(pytest.main([*OPTIONS, "--hypothesis-profile", "patient", *tests], plugins=[First()]))
    finally:
        os._exit(status)


def share(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> float:
    """Killed of all that are no equivalents."""
    counted = [outcome.result for mutant, outcome in zip(mutants, outcomes, strict=True) if not mutant.equivalent]
    return counted.count("killed") / len(counted) if counted else 1.0


def problems(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> list[str]:
    """What makes the run red."""
    said = [f"{o.id}: no verdict: {o.by}" for o in outcomes if o.result == "invalid"]
    said += [
        f"{mutant.id}: said to be equivalent, but {outcome.by} kills it"
        for mutant, outcome in zip(mutants, outcomes, strict=True)
        if mutant.equivalent and outcome.result == "killed"
    ]
    found = share(mutants, outcomes)
    return said + ([f"{100 * found:.1f} % are killed; at least {100 * SHARE:g} % must be"] if found < SHARE else [])


def summary(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is kept of a run; ``survived`` has the equivalents, too."""
    killed = [outcome for outcome in outcomes if outcome.result == "killed"]
    left = [mutant for mutant, outcome in zip(mutants, outcomes, strict=True) if outcome.result != "killed"]
    return {
        "planted": len(mutants),
        "killed": len(killed),
        "by_chapters": sum(outcome.by.startswith("chapter ") for outcome in killed),
        "files": len({mutant.file for mutant in mutants}),
        "minutes": round(sum(outcome.seconds for outcome in outcomes) / 60),
        "commit": git("rev-parse", "--short", "HEAD"),
        "survived": [{"id": each.id, "breaks": each.breaks, "equivalent": each.equivalent} for each in left],
    }


def kept() -> dict[str, Any]:
    """``listed``: the last run of the whole list, with its ids; ``samples``: by seed the first run and the last."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"listed": {}, "samples": {}}


def keep(found: dict[str, Any], file: Path | None = None) -> None:
    """Write results beside the baselines, for the pages."""
    put(file or KEPT, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def sentence() -> str:
    """The kept results, for the page on how the book is run."""
    found = kept()
    if not found["listed"]:
        return "Not measured yet: `make mutants`."
    said = [f"Of {found['listed']['planted']} listed defects {found['listed']['killed']} turned a test red."]
    for name, sample in found["samples"].items():
        first, now = sample["first"], sample["now"]
        unseen = [each for each in now["survived"] if not each["equivalent"]]
        said.append(
            f"Of {first['planted']} that {sample['tool']} made in {first['files']} modules ({name})"
            f" {first['killed']} were seen at first, {first['by_chapters']} of them by a chapter alone. Of the others"
            f" {len(now['survived']) - len(unseen)} change nothing that can be seen; {len(unseen)} are not seen today."
        )
    return " ".join(said)


def markdown(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> str:
    """The table of all mutants: survivors first."""
    pairs = sorted(zip(mutants, outcomes, strict=True), key=lambda pair: pair[1].result == "killed")
    cells = (
        (m.id, m.breaks, f"equivalent: {m.equivalent}" if m.equivalent else o.result, o.by, f"{o.seconds:.1f}")
        for m, o in pairs
    )
    lines = [f"## Planted defects: {100 * share(mutants, outcomes):.1f} % killed", ""]
    return "\n".join([*lines, *rows(["mutant", "what it breaks", "result", "by", "s"], cells)]) + "\n"


def judged(mutants: Sequence[Mutant], file: Path, jobs: int) -> list[Outcome]:
    """By tests, survivors by chapters. What ``file`` has of the same defects and the same tests is not judged again."""
    stamped, known = {_stamp(mutant): mutant for mutant in mutants}, _told(file)
    if left := {stamp: mutant for stamp, mutant in stamped.items() if stamp not in known}:
        known |= plant(left, file, jobs=jobs)
    unseen = {
        stamp: mutant
        for stamp, mutant in stamped.items()
        if known[stamp][1:3] == ("survived", "") and not mutant.equivalent and using(mutant.file)
    }
    if unseen:
        look_in_chapters(unseen, file, jobs=jobs)
        known |= {stamp: _told(file)[stamp] for stamp in unseen}
    return [known[stamp]._replace(id=mutant.id) for stamp, mutant in stamped.items()]


def _stamp(mutant: Mutant) -> str:
    """Of a defect and all that judges it."""
    tests = ((ROOT / name).read_text(encoding="utf-8") for name in mutant.tests)  # the module is one: its examples
    parts = [mutant.id, mutant.file, mutant.text, mutant.becomes, *tests]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _tell(file: Path, stamp: str, outcome: Outcome) -> None:
    with file.open("a", encoding="utf-8") as told:
        print(json.dumps([stamp, outcome], ensure_ascii=False), file=told)


def _told(file: Path) -> dict[str, Outcome]:
    """The last word on each defect, by its stamp."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else ()
    return {stamp: Outcome(*outcome) for stamp, outcome in map(json.loads, lines)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workflow.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants with one of these in their id or file")
    parser.add_argument("--sample", type=int, default=0, help="so many generated ones instead")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args(argv)
    count, seed = arguments.sample, arguments.seed
    name = f"sample of {count}, seed {seed}" if count else "listed"
    try:
        mutants = defects.sample(count, seed, arguments.words) if count else defects.chosen(arguments.words)
    except ValueError as error:
        print(f"error: {error}")
        return 2
    BUILD.mkdir(exist_ok=True)
    outcomes = judged(mutants, BUILD / "mutants.jsonl", arguments.jobs)
    put(BUILD / "mutants.md", markdown(mutants, outcomes))
    found, whole = problems(mutants, outcomes), kept()
    if count and not arguments.words:
        now = summary(mutants, outcomes)
        first = whole["samples"].get(name, {"first": now})["first"]
        whole["samples"][name] = {"tool": defects.tool(), "first": first, "now": now}
    elif not arguments.words:
        whole["listed"] = summary(mutants, outcomes) | {"ids": [mutant.id for mutant in mutants]}
    keep(whole)
    said = f"{100 * share(mutants, outcomes):.1f} % of {sum(not each.equivalent for each in mutants)} killed ({name})"
    print("\n".join([*found, f"{'RED' if found else 'GREEN'}: {said}"]))
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
