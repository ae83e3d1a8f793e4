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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
SHARE = 0.9  # of a sample, equivalents apart; of the list all must be killed
LIMIT = 300  # seconds for the tests of a module, which take half a minute: then it never ends
LOADED = ("hypothesis", "pandas", "pytest", "scipy.stats", "scipy.integrate", "torch._dynamo", "transformers")
NOT_COPIED = (".git", ".venv", "_build", ".snakemake", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis")
NO_CHAPTER = "no chapter, either"
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not colab and not whole and not project")


class Outcome(NamedTuple):
    """What became of a mutant: ``killed``, ``survived``, or ``invalid`` (the tests fail without it, too)."""

    id: str
    result: str
    by: str  # the first test that failed, or what else stopped it
    seconds: float


Judge = Callable[[Mutant], Outcome]


def plant(mutants: Mapping[str, Mutant], judge: Judge, told: Path, jobs: int) -> dict[str, Outcome]:
    """Plant the defects one at a time, in copies of the checkout, one for each of ``jobs`` processes.

    Each outcome is a line in the file ``told`` at once, with the mutant's stamp, unless it is ``invalid``. What the
    tests load is loaded once and forked for each mutant; nbutils and workflow come from the copy.
    """
    for name in LOADED:
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as scratch,
        ProcessPoolExecutor(jobs, fork, _settle, (scratch,)) as pool,
    ):
        running = {pool.submit(judge, mutant): stamp for stamp, mutant in mutants.items()}
        outcomes = {}
        for each in tqdm(as_completed(running), total=len(running), desc=judge.__name__, unit="mutant"):
            stamp, outcome = running[each], each.result()
            outcomes[stamp] = outcome
            if outcome.result != "invalid":
                with told.open("a", encoding="utf-8") as lines:
                    print(json.dumps([stamp, outcome], ensure_ascii=False), file=lines)
        return outcomes


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
    if text.count(mutant.text) != 1:
        raise ValueError(f"{mutant.id}: {mutant.file} has changed since the defect was made: begin again")
    file.write_text(text.replace(mutant.text, mutant.becomes), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(text, encoding="utf-8")


def by_tests(mutant: Mutant) -> Outcome:
    """What the tests say of a mutant, in the copy that is the working folder. What kills must pass without it."""
    with _planted(mutant):
        outcome = _tested(mutant.id, mutant.tests)
    alone = outcome.by.startswith("tests/") and "::" in outcome.by  # a docstring alone knows no markers of pytest
    if outcome.result == "killed" and not _sound((outcome.by,) if alone else mutant.tests):
        return outcome._replace(result="invalid", by=f"without a defect, too: {outcome.by}")
    return outcome


def by_chapters(mutant: Mutant) -> Outcome:
    """What the smoke runs of the chapters that use its file say, the quickest first, up to the first that is red."""
    started, result, by = time.monotonic(), "survived", NO_CHAPTER
    for chapter in using(mutant.file):
        if not _green(chapter):
            result, by = "invalid", f"without a defect, too: chapter {chapter}"
            break
        with _planted(mutant):
            red = not _green.__wrapped__(chapter)
        if red:
            result, by = "killed", f"chapter {chapter}"
            break
    return Outcome(mutant.id, result, by, round(time.monotonic() - started, 1))


@cache
def _sound(tests: tuple[str, ...]) -> bool:
    """Whether tests pass without a defect, in time."""
    return _tested("", tests).result == "survived"


@cache
def _green(chapter: str) -> bool:
    """Whether the smoke run of a chapter is green in this copy."""
    jobs = str(os.cpu_count())  # with fewer each job takes more threads, beside those of other workers
    words = [sys.executable, "-m", "workflow", "run", "--profile", "smoke", "--jobs", jobs, "--time-limit", "900"]
    return not subprocess.run([*words, chapter], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


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
        def tell(self, text: str) -> None:
            os.pwrite(told, text.encode(), 0) if not os.fstat(told).st_size else None

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                self.tell(report.nodeid)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                self.tell(f"{report.nodeid} cannot be collected")

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


def problems(mutants: Sequence[Mutant], outcomes: Sequence[Outcome], least: float) -> list[str]:
    """What makes the run red: a share below ``least``, a defect without a verdict, an equivalent that is none."""
    said = [f"{o.id}: no verdict: {o.by}" for o in outcomes if o.result == "invalid"]
    said += [
        f"{mutant.id}: said to be equivalent, but {outcome.by} kills it"
        for mutant, outcome in zip(mutants, outcomes, strict=True)
        if mutant.equivalent and outcome.result == "killed"
    ]
    found = share(mutants, outcomes)
    return said + ([f"{100 * found:.1f} % are killed; at least {100 * least:g} % must be"] if found < least else [])


def summary(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is kept of a run; ``survived`` has the equivalents, too."""
    killed = [outcome for outcome in outcomes if outcome.result == "killed"]
    left = [mutant for mutant, outcome in zip(mutants, outcomes, strict=True) if outcome.result != "killed"]
    return {
        "planted": len(mutants),
        "killed": len(killed),
        "by_chapters": sum(outcome.by.startswith("chapter ") for outcome in killed),
        "files": len({mutant.file for mutant in mutants}),
        "share": share(mutants, outcomes),
        "minutes": round(sum(outcome.seconds for outcome in outcomes) / 60),
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
        same = sum(bool(each["equivalent"]) for each in now["survived"])
        seen, left = first["planted"] - same, len(now["survived"]) - same
        made = f"{sample['tool']} made in {first['files']} modules ({name}, at {sample['commit']})"
        at_first = f"{first['killed']} were seen at first, {100 * first['killed'] / seen:.1f} %"
        asked = first["by_chapters"]  # None: the tests alone were asked
        by = "by tests alone" if asked is None else f"{asked} of them by a chapter alone"
        said.append(
            f"Of {first['planted']} that {made} {same} change nothing that can be seen. Of the other {seen},"
            f" {at_first}, {by}; today {left} are not seen."
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
    """What becomes of each. What ``file`` has of the same defect and the same judges is not judged again."""
    known: dict[str, Outcome] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError):  # torn, where a run was killed
            stamp, outcome = json.loads(line)
            known[stamp] = Outcome(*outcome)
    judges = ("nbutils/**/*.py", "workflow/*.py", "book/*.md", "tests/[!t]*.py", "constraints.txt")
    everywhere = _digest(path for pattern in judges for path in ROOT.glob(pattern))
    stamped = {}
    for mutant in mutants:
        tests = _digest(ROOT / name for name in mutant.tests)
        stamped[_of((everywhere, tests, *mutant[:4], mutant.equivalent))] = mutant
    if left := {stamp: mutant for stamp, mutant in stamped.items() if stamp not in known}:
        known |= plant(left, by_tests, file, jobs)
    survived = {stamp for stamp, outcome in known.items() if outcome[1:3] == ("survived", "")}
    unseen = {stamp: m for stamp, m in stamped.items() if stamp in survived and not m.equivalent and using(m.file)}
    known |= plant(unseen, by_chapters, file, jobs) if unseen else {}
    return [known[stamp] for stamp in stamped]


def _digest(files: Iterable[Path]) -> str:
    return _of(path.read_text(encoding="utf-8") for path in sorted(files))


def _of(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


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
    commit = f"{git('rev-parse', '--short', 'HEAD')}{'+' if git('status', '--porcelain') else ''}"  # + edited since
    outcomes = judged(mutants, BUILD / "mutants.jsonl", arguments.jobs)
    put(BUILD / "mutants.md", markdown(mutants, outcomes))
    found, whole = problems(mutants, outcomes, SHARE if count else 1.0), kept()
    now = summary(mutants, outcomes)
    if count and not arguments.words:
        facts = {"tool": defects.tool(), "seed": seed, "commit": commit, "first": now}
        whole["samples"][name] = whole["samples"].get(name, facts) | {"now": now}
    elif not arguments.words:
        whole["listed"] = now | {"commit": commit, "ids": [mutant.id for mutant in mutants]}
    keep(whole)
    said = f"{100 * share(mutants, outcomes):.1f} % of {sum(not each.equivalent for each in mutants)} killed ({name})"
    print("\n".join([*found, f"{'RED' if found else 'GREEN'}: {said}"]))
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
