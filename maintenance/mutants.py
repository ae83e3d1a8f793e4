"""Plant defects, one at a time, in a copy of the checkout: the tests that are named for a defect must turn red.

The list is ``maintenance/mutants.yml``: wrong mathematics that no generator makes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from maintenance.checkout import copy_checkout
from workflow import ROOT

LIST = Path(__file__).with_name("mutants.yml")
LIMIT = 300  # seconds for the tests of a module, which take half a minute: a mutant that needs more never ends
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "ci")
FAST = ("-m", "not slow and not colab and not whole and not project")


class Mutant(NamedTuple):
    """One defect: ``becomes`` in the place of ``text``, which stands once in ``file``."""

    id: str
    file: str
    text: str
    becomes: str
    breaks: str  # what is wrong with the mutant, in words
    tests: tuple[str, ...]  # files, relative to the root


def load() -> list[Mutant]:
    """The listed mutants. An entry without ``tests`` gets those named like its file or, without such, like its folder.

    The examples in the docstrings of the file are added to the tests of every mutant.
    """
    mutants = []
    for entry in yaml.safe_load(LIST.read_text(encoding="utf-8")):
        file = Path(entry["file"])
        has_own_tests = (ROOT / "tests" / f"test_{file.stem}.py").is_file()
        names = entry.pop("tests", None) or [file.stem if has_own_tests else file.parent.name]
        mutants.append(Mutant(**entry, tests=(*(f"tests/test_{name}.py" for name in names), str(file))))
    return mutants


def misplaced(mutants: Sequence[Mutant]) -> list[str]:
    """A line for each mutant that no longer applies: its text must stand exactly once in its file, and change it."""
    lines = []
    for mutant in mutants:
        file = ROOT / mutant.file
        count = file.read_text(encoding="utf-8").count(mutant.text) if file.is_file() else 0
        if mutant.text == mutant.becomes:
            lines.append(f"{mutant.id}: {mutant.text!r} becomes itself")
        elif count != 1:
            lines.append(f"{mutant.id}: {mutant.text!r} stands {count} times in {mutant.file}, not once")
        lines += [f"{mutant.id}: there is no {test}" for test in mutant.tests if not (ROOT / test).is_file()]
    return lines


def first_failure(root: Path, tests: Sequence[str], limit: int = LIMIT) -> str:
    """The first test that fails in a checkout, or what else stopped the tests; "" if all pass."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, *FAST, *tests]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # no bytecode: Python would take it for that of a mutant of the same length, written in the same second
    environment = os.environ | threads | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        process = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"not finished after {limit} s"
    if process.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", process.stdout, re.M)
    return failed[1] if failed else f"pytest ended with status {process.returncode}"


def plant(mutants: Sequence[Mutant]) -> list[str]:
    """Plant each mutant in a copy of the checkout, and print which test fails. Returns the ids of those that none sees.

    Raises:
        RuntimeError: a test fails even without a defect.
    """
    unseen = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copy = copy_checkout(Path(scratch) / "copy")
        all_tests = sorted({test for mutant in mutants for test in mutant.tests})
        if failed := first_failure(copy, all_tests, 9 * LIMIT):
            raise RuntimeError(f"{failed} fails even without a defect: no verdict")
        for mutant in mutants:
            file = copy / mutant.file
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(mutant.text, mutant.becomes), encoding="utf-8")
            seen_by = first_failure(copy, mutant.tests)
            file.write_text(text, encoding="utf-8")
            print(f"{mutant.id} ({mutant.breaks}): {seen_by or 'seen by NOTHING'}", flush=True)
            if not seen_by:
                unseen.append(mutant.id)
    return unseen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants with one of these in their id or file")
    words = parser.parse_args().words or [""]
    mutants = [mutant for mutant in load() if any(word in f"{mutant.id} {mutant.file}" for word in words)]
    if not mutants or misplaced(mutants):
        raise ValueError("\n".join(misplaced(mutants)) or f"no mutant has {' or '.join(words)} in its id or file")
    unseen = plant(mutants)
    print(f"RED: nothing sees {', '.join(unseen)}" if unseen else f"GREEN: all {len(mutants)} turn a test red")
    return int(bool(unseen))


if __name__ == "__main__":
    sys.exit(main())
