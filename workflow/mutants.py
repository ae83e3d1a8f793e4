"""Planted defects: does wrong mathematics in ``nbutils`` turn a test red? The list is ``tests/mutants.yml``.

``python -m workflow.mutants [WORD ...]`` (only those whose id has one of the words) works on copies of the checkout and
writes ``_build/mutants.md`` and ``_build/mutants.json``; ``tests/baselines/`` keeps the count over the whole list.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from workflow import BUILD, ROOT
from workflow.jobs import die_with_run, put
from workflow.summaries import rows

LIST = ROOT / "tests" / "mutants.yml"
KEPT = ROOT / "tests" / "baselines" / "mutants.json"  # of the last whole run, for the pages
SHARE = 0.95  # of the mutants that are no equivalents; below it the run is red
LIMIT = 900  # seconds, before a mutant is taken for one that never ends
LOADED = ("hypothesis", "pandas", "pytest", "scipy.stats", "scipy.integrate", "torch._dynamo", "transformers")
NOT_COPIED = (".git", ".venv", "_build", ".snakemake", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis")


class Mutant(NamedTuple):
    """One defect: ``becomes`` in the place of ``text``, which stands once in ``file``."""

    id: str
    file: str
    text: str
    becomes: str
    breaks: str  # what is wrong then, in words
    tests: tuple[str, ...]  # files, relative to the root
    chapter: str = ""  # run in the smoke profile if the tests stay green
    equivalent: str = ""  # why nothing can see it
    quick: bool = False  # part of `make test`


class Outcome(NamedTuple):
    """What became of a mutant: ``killed``, ``survived``, or ``invalid`` (no test ran)."""

    id: str
    result: str
    by: str  # the first test that failed, or what else stopped it
    seconds: float


def load(file: Path = LIST) -> list[Mutant]:
    """The listed mutants.

    Raises:
        ValueError: an unknown or missing field, an id used twice; the message names the mutant.
    """
    found: dict[str, Mutant] = {}
    for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
        changed = Path(entry.get("file", ""))
        names = entry.pop("tests", None) or [changed.parent.name if changed.stem == "__init__" else changed.stem]
        try:
            mutant = Mutant(**entry, tests=tuple(f"tests/test_{name}.py" for name in names))
        except TypeError as error:
            raise ValueError(f"{file.name}: mutant {entry.get('id', entry)!r}: {error}") from None
        if mutant.id in found:
            raise ValueError(f"{file.name}: mutant {mutant.id!r} is listed twice")
        found[mutant.id] = mutant
    return list(found.values())


def misplaced(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """A line for each mutant that no longer applies: its text must stand exactly once in its file, and change it."""
    said = []
    for mutant in mutants:
        file = root / mutant.file
        count = file.read_text(encoding="utf-8").count(mutant.text) if file.is_file() else 0
        if count != 1 or mutant.text == mutant.becomes:
            said.append(f"{mutant.id}: {mutant.text!r} stands {count} times in {mutant.file}; it must stand there once")
        said += [f"{mutant.id}: there is no {test}" for test in mutant.tests if not (root / test).is_file()]
    return said


def plant(mutants: Sequence[Mutant], *, jobs: int = 1) -> list[Outcome]:
    """Plant the defects one at a time, in copies of the checkout, one for each of ``jobs`` processes.

    What the tests load is loaded once and forked for each mutant; nbutils comes from the copy. A test that kills a
    mutant must pass without it.
    """
    for name in LOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        places = [Path(scratch) / str(number) for number in range(min(jobs, len(mutants)))]
        children = []
        for number, place in enumerate(places):
            shutil.copytree(ROOT, place / "copy", ignore=shutil.ignore_patterns(*NOT_COPIED))
            child = os.fork()
            if child == 0:
                _work(mutants[number :: len(places)], place)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        lines = [line for place in places for line in (place / "outcomes").read_text(encoding="utf-8").splitlines()]
    found = {outcome.id: outcome for outcome in (Outcome(*json.loads(line)) for line in lines)}
    return [found.get(each.id, Outcome(each.id, "invalid", "its process ended before it", 0.0)) for each in mutants]


def _work(mutants: Sequence[Mutant], place: Path) -> None:
    """In a child: what becomes of these mutants in this copy, a line of JSON each. Never returns."""
    try:
        die_with_run()
        os.chdir(place / "copy")
        for name in [name for name in sys.modules if name.split(".")[0] in ("nbutils", "workflow", "conftest")]:
            del sys.modules[name]
        sys.path[:] = [str(place / "copy"), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        os.environ.update(PYTHONPATH=str(place / "copy"), OMP_NUM_THREADS="1")
        # a mutant of the same length and second would run from the old bytecode
        sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
        sound: dict[str, bool] = {}
        with open(place / "outcomes", "w", encoding="utf-8") as told:
            for mutant in mutants:
                outcome = _outcome(mutant, sound)
                print(json.dumps(outcome), file=told, flush=True)
                print(f"{outcome.result:9} {outcome.id:24} {outcome.seconds:6.1f} s  {outcome.by}", flush=True)
    except BaseException as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _outcome(mutant: Mutant, sound: dict[str, bool]) -> Outcome:
    """What becomes of a mutant in the copy that is the working folder. ``sound``: whether a test passes without one."""
    file = Path(mutant.file)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutant.text, mutant.becomes), encoding="utf-8")
    try:
        outcome = _tested(mutant.id, mutant.tests)
        if outcome.result == "survived" and mutant.chapter:
            outcome = _run(mutant.id, mutant.chapter)
    finally:
        file.write_text(text, encoding="utf-8")
    if outcome.result == "killed" and "::" in outcome.by:
        if outcome.by not in sound:
            sound[outcome.by] = _tested("", [outcome.by]).result == "survived"
        if not sound[outcome.by]:
            return outcome._replace(result="invalid", by=f"fails without a defect, too: {outcome.by}")
    return outcome


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
        case 1 if by:
            return Outcome(name, "killed", by, seconds)
        case code:
            return Outcome(name, "invalid", by or f"pytest ended with status {code}", seconds)


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
        # a slow machine kills no mutant
        hypothesis.settings.register_profile(
            "patient", deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-profile", "patient"]
        status = int(pytest.main([*options, *tests], plugins=[First()]))
    finally:
        os._exit(status)


def _run(name: str, chapter: str) -> Outcome:
    started = time.monotonic()
    words = [sys.executable, "-m", "workflow", "run", "--profile", "smoke", "--jobs", "1", chapter]
    red = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 1
    seconds = round(time.monotonic() - started, 1)
    return Outcome(name, "killed" if red else "survived", f"chapter {chapter}" if red else "", seconds)


def share(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> float:
    """Killed of all that are no equivalents."""
    results = {outcome.id: outcome.result for outcome in outcomes}
    counted = [mutant.id for mutant in mutants if not mutant.equivalent]
    return sum(results[name] == "killed" for name in counted) / len(counted) if counted else 1.0


def problems(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> list[str]:
    """What makes the run red."""
    results = {outcome.id: outcome for outcome in outcomes}
    said = [f"{o.id}: no verdict: {o.by}" for o in outcomes if o.result == "invalid"]
    said += [
        f"{mutant.id}: said to be equivalent, but {results[mutant.id].by} kills it"
        for mutant in mutants
        if mutant.equivalent and results[mutant.id].result == "killed"
    ]
    found = share(mutants, outcomes)
    return said + ([f"{100 * found:.1f} % are killed; at least {100 * SHARE:g} % must be"] if found < SHARE else [])


def summary(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the pages say of a whole run, and which mutants it had: a test compares them with today's list."""
    results = {outcome.id: outcome.result for outcome in outcomes}
    counted = [mutant for mutant in mutants if not mutant.equivalent]
    return {
        "planted": len(counted),
        "killed": sum(results[mutant.id] == "killed" for mutant in counted),
        "survived": [f"{mutant.id}: {mutant.breaks}" for mutant in counted if results[mutant.id] != "killed"],
        "equivalent": [f"{mutant.id}: {mutant.equivalent}" for mutant in mutants if mutant.equivalent],
        "files": len({mutant.file for mutant in mutants}),
        "ids": [mutant.id for mutant in mutants],
    }


def keep(found: dict[str, Any], file: Path = KEPT) -> None:
    """Write the summary of a whole run beside the baselines, for the pages."""
    put(file, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def merged(listed: Sequence[Mutant], chosen: Sequence[Mutant], outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """The kept summary with these mutants judged anew; None if one of the list was never planted."""
    before = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"ids": [], "survived": []}
    survived = {text.partition(":")[0] for text in before["survived"]}
    known = {name: Outcome(name, "survived" if name in survived else "killed", "", 0.0) for name in before["ids"]}
    known |= {outcome.id: outcome for outcome in outcomes}
    if any(mutant.id not in known for mutant in listed):
        return None
    return summary(listed, [known[mutant.id] for mutant in listed])


def sentence() -> str:
    """The kept result, for the page on how the book is run."""
    if not KEPT.exists():
        return "Not measured yet: `make mutants`."
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    said = f"Of {kept['planted']} defects planted in {kept['files']} modules {kept['killed']} turned a test red."
    for what, listed in (("Survived", kept["survived"]), ("No test can see", kept["equivalent"])):
        said += f" {what}: {'; '.join(listed)}." if listed else ""
    return said


def markdown(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> str:
    """The table of all mutants: survivors first."""
    results = {outcome.id: outcome for outcome in outcomes}
    lines = [f"## Planted defects: {100 * share(mutants, outcomes):.1f} % killed", ""]
    order = sorted(mutants, key=lambda mutant: results[mutant.id].result == "killed")
    cells = (
        (
            mutant.id,
            mutant.breaks,
            f"`{mutant.text.strip()}` → `{mutant.becomes.strip()}`",
            f"equivalent: {mutant.equivalent}" if mutant.equivalent else results[mutant.id].result,
            results[mutant.id].by,
            f"{results[mutant.id].seconds:.1f}",
        )
        for mutant in order
    )
    return "\n".join([*lines, *rows(["mutant", "what it breaks", "change", "result", "by", "s"], cells)]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workflow.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants with one of these in their id or file")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args(argv)
    listed = load()
    chosen = [m for m in listed if not arguments.words or any(word in f"{m.id} {m.file}" for word in arguments.words)]
    if not chosen or misplaced(chosen):
        print(
            "\n".join(misplaced(chosen) or [f"error: no mutant has {' or '.join(arguments.words)} in its id or file"])
        )
        return 2
    outcomes = plant(chosen, jobs=arguments.jobs)
    BUILD.mkdir(exist_ok=True)
    put(BUILD / "mutants.md", markdown(chosen, outcomes))
    kept = {"share": share(chosen, outcomes), "outcomes": [outcome._asdict() for outcome in outcomes]}
    put(BUILD / "mutants.json", json.dumps(kept, indent=1) + "\n")
    found = problems(chosen, outcomes)
    if (whole := merged(listed, chosen, outcomes)) is not None:
        keep(whole)
    killed = f"{100 * kept['share']:.1f} % of {sum(not mutant.equivalent for mutant in chosen)} killed"
    print("\n".join([*found, f"{'RED' if found else 'GREEN'}: {killed}"]))
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
