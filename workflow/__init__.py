"""From the chapters' sources to the executed, checked and rendered book. Snakemake runs it; see ``Snakefile``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"
TOKEN = BUILD / ".run"  # the name of the last run that began


@dataclass(frozen=True)
class Run:
    """What is executed: chapters in one profile, at one seed, on one device; and where all lies that it leaves.

    >>> run = Run("smoke", 7, chapters=("t5",))
    >>> str(run.notebook("t5").relative_to(BUILD)), run.further()[0].seed
    ('smoke/seed-7/t5.ipynb', 1000010)
    """

    profile: str
    seed: int = 0
    device: str = "cpu"
    chapters: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Of the executed notebooks, with ``trainings/`` and ``logs/``."""
        return BUILD / self.profile / f"seed-{self.seed}"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def reports(self) -> Path:
        """Folder of ``metrics.json`` and ``summary.md``."""
        return BUILD / self.profile

    @property
    def html(self) -> Path:
        """Folder of the pages: ``_build/html`` for the book, ``_build/<profile>/html`` for other profiles."""
        return BUILD / "html" if self.profile == "book" else self.reports / "html"

    @property
    def metrics_of_seed(self) -> Path:
        """The report for machines, of one seed of several that ran together."""
        return self.folder / "metrics.json"

    @property
    def metrics(self) -> Path:
        """The report for machines, of a run of all chapters."""
        return self.reports / "metrics.json"

    @property
    def staging(self) -> Path:
        """Folder in which Sphinx makes the pages, with their sources."""
        return self.reports / "pages"

    @property
    def index(self) -> Path:
        """The first of the rendered pages."""
        return self.html / "index.html"

    def notebook(self, chapter: str) -> Path:
        return self.folder / f"{chapter}.ipynb"

    def stats(self, chapter: str) -> Path:
        """Time, memory, versions and the hash of what it was made from, beside the notebook."""
        return self.folder / f"{chapter}.json"

    @property
    def trainings(self) -> Path:
        """Folder of the shared trainings, each in a folder of its name."""
        return self.folder / "trainings"

    def training_stats(self, name: str) -> Path:
        """The same as ``stats``, of a shared training."""
        return self.trainings / name / "stats.json"

    def log(self, job: str) -> Path:
        """What a job printed; empty or gone where it succeeded."""
        return self.logs / f"{job}.log"

    def unfinished(self, chapter: str) -> Path:
        """The notebook of a chapter while its job runs; one that is left there is of a job that failed."""
        return self.logs / f"{chapter}.ipynb"

    def further(self, chapters: tuple[str, ...] = ()) -> tuple[Run, Run]:
        """The same at the two seeds, far from any of a person's, that judge a check which chance may have failed."""
        first_seed = (self.seed + 1_000_003) % 2**31
        second_seed = (self.seed + 2_000_006) % 2**31
        chapters = chapters or self.chapters
        return replace(self, seed=first_seed, chapters=chapters), replace(self, seed=second_seed, chapters=chapters)


def in_words(runs: Iterable[Run]) -> str:
    """Seeds and chapters of runs, in as few words as a command line has room for.

    >>> in_words([Run("smoke", 7, chapters=("t5", "mask")), Run("smoke", 8, chapters=("t5", "mask"))])
    '7,8:t5,mask'
    """
    seeds: dict[tuple[str, ...], list[int]] = {}
    for run in runs:
        seeds.setdefault(run.chapters, []).append(run.seed)
    return " ".join(f"{','.join(map(str, of_same))}:{','.join(chapters)}" for chapters, of_same in seeds.items())


def from_words(words: str, profile: str, device: str) -> list[Run]:
    """The runs that ``in_words`` wrote.

    >>> from_words("7:t5", "smoke", "cpu")
    [Run(profile='smoke', seed=7, device='cpu', chapters=('t5',))]
    """
    groups = [word.split(":") for word in words.split()]
    return [
        Run(profile, int(seed), device, tuple(chapters.split(",")))
        for seeds, chapters in groups
        for seed in seeds.split(",")
    ]


def commit() -> str | None:
    """What git calls this state of the checkout; None where there is no git, or no repository."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_atomically(target: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old one or the whole new one."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
