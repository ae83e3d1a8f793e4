"""The same seed gives the same numbers: bit for bit on one machine's CPU, within stated tolerances elsewhere."""

import os
import subprocess
import sys

import nbformat
import pytest
from conftest import copy_project

from nbutils.claims import verdict
from nbutils.claims.check import records_of
from workflow import book
from workflow.compare import compare
from workflow.judge import Judgement
from workflow.notebooks import glued

# Sums in another order differ by rounding, and so may a check, by this part of its own scale: half of its band, or its
# room to the edge of a band with one edge (`compare`). So small a move changes a verdict only where a check stands as
# close as that to its edge; a value that is rounding has a band of rounding to move in.
ACROSS_THREADS = 0.1

CHAPTER = "scale-invariance"  # draws, and trains networks in float64; one that is cheap


def execute(folder, *, chapter=CHAPTER, seed=3, threads=1, where="cpu"):
    """Run a chapter cold, in a process and a checkout of its own. Returns its records and the prose's numbers."""
    folder.mkdir()
    copy_project(folder)
    words = [sys.executable, "-m", "workflow.job", "chapter", chapter, "--profile", "smoke", "--seed", str(seed)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*words, "--device", where, "--threads", str(threads)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    notebook = folder / "_build" / "smoke" / f"seed-{seed}" / f"{chapter}.ipynb"
    return records_of(notebook), glued(nbformat.read(notebook, as_version=4))


def values(records):
    return {(r.chapter, r.key): (r.measured, r.band, r.holds) for r in records}


def as_run(records):
    """Records as ``compare`` takes them."""
    verdicts = {r.claim: verdict([x for x in records if x.claim == r.claim]) for r in records}
    return Judgement({}, records, verdicts, [])


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return execute(tmp_path_factory.mktemp("first") / "a")


def test_the_same_seed_gives_the_same_bits(first, tmp_path):
    again = execute(tmp_path / "again")
    assert len(first[0]) > 10 and values(first[0]) == values(again[0])
    assert first[1] == again[1], "the numbers in the prose"


def test_another_seed_gives_other_numbers(first, tmp_path):
    """Otherwise the test above would hold for a chapter that draws nothing."""
    records = first[0], execute(tmp_path / "4", seed=4)[0]
    drawn = [[r.measured for r in found if r.kind == "derived"] for found in records]
    assert len(drawn[0]) > 2 and not set(drawn[0]) & set(drawn[1])


def test_thread_counts_agree_to_a_tenth_of_a_checks_scale(first, tmp_path):
    other = execute(tmp_path / "two", threads=2)[0]
    found = compare(as_run(first[0]), as_run(other))
    assert not (found.verdicts or found.failing or found.lost) and len(other) == len(first[0])
    assert all(move.distance <= ACROSS_THREADS for move in found.moved), found.moved[:3]


@pytest.mark.slow
def test_the_whole_book_gives_the_same_bits(smoke, workflow, tmp_path, monkeypatch):
    """In another folder, cold."""
    copy_project(tmp_path / "again")
    done = workflow(tmp_path / "again")
    assert done.returncode == 0, done.stdout[-3000:]
    for chapter in book.chapters():
        first, again = (build / "seed-0" / f"{chapter}.ipynb" for build in (smoke, tmp_path / "again/_build/smoke"))
        assert values(records_of(first)) == values(records_of(again)), chapter
