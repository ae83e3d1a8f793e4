"""The ledger: a chapter says what it measured and the band it must lie in; verdicts follow from these checks.

A check never stops a notebook. It shows one line and leaves a record in the notebook's output. The scorecard,
``metrics.json`` and the JUnit file are made from these records.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nbutils import data
from nbutils import samples as intervals
from nbutils.claims.records import Band, Record, as_html, finite, line

MIME = "application/vnd.nbutils.claim+json"
ROLES = ("stated", "corrected", "counterexample")
KINDS = ("exact", "derived", "empirical")  # what a band means; see ``Ledger``
VERDICTS = ("confirmed", "refined", "refuted", "open")


class Ledger:
    """The checks of one chapter in one run. Each is of one kind:

    ========= ========================================================= ====================================
    exact     an identity, or a bound that holds for every input        rounding; red at once if it fails
    derived   a random quantity with a known law or limit               theory ± the run's own sampling error
    empirical what trainings do: a statement on a population of them    an interval over n ≥ 8 of them
    ========= ========================================================= ====================================

    Where a derived or an empirical check fails, the workflow runs its chapter at two further seeds.

    Args:
        chapter: name of the chapter, as in ``book/`` without the ending.
        profile, seed, device: the notebook's parameters.

    >>> claims = Ledger("99-none", profile="smoke", seed=0, device="cpu")
    99-none, profile smoke on cpu: not timed yet; progress bars show what runs
    >>> claims.check("square-root-growth", "exponent", 0.52, (0.45, 0.55), kind="derived")
    ✓ square-root-growth (stated) exponent: 0.52; band [0.45, 0.55]
    True
    >>> claims.check_population("square-root-growth", "of nine", [3, 1, 4, 1, 5, 9, 2, 6, 5], (1, 6))
    ✓ square-root-growth (stated) of nine: median of 9: 4, interval [1, 6]; band [1, 6]
    True
    """

    def __init__(self, chapter: str, *, profile: str, seed: int, device: str) -> None:
        from nbutils import device as devices
        from nbutils import profile as profiles

        self.run = {
            "chapter": chapter,
            "profile": profiles.resolve(profile),
            "seed": int(seed),
            "device": devices.resolve(device),
            "versions": devices.versions(),
        }
        self._names: set[tuple[str, str]] = set()
        self._kept = _kept_file(self.run)
        if not os.environ.get("NBUTILS_BOOK"):
            print(announcement(self.run))

    def check(
        self,
        claim: str,
        name: str,
        measured: float,
        band: Band,
        *,
        kind: str,
        role: str = "stated",
        expected: float | None = None,
        claimed: float | None = None,
        n: int | None = None,
    ) -> bool:
        """Check that ``measured`` lies in ``band`` (ends included; None is no bound).

        A counterexample names the value that the paper ``claimed``; its band must exclude that value, so that the check
        can only hold if the statement fails. An empirical check says how many trainings, ``n``, it rests on; where
        these are at hand one by one, ``check_population`` is the better one.

        Raises:
            ValueError: unknown role or kind, a name used twice, an empty band, a counterexample that the claim would
                pass, an empirical check that does not name its ``n``.
        """
        band = _band(claim, name, role, band, claimed)
        holds = inside(measured, *band)
        record = Record(claim, name, role, "band", kind, finite(measured), finite(expected), band, holds)
        return self._keep(replace(record, n=n, claimed=claimed))

    def check_all(
        self,
        claim: str,
        name: str,
        values: ArrayLike,
        *,
        kind: str,
        role: str = "stated",
        at_least: float | None = None,
        at_most: float | None = None,
        n: int | None = None,
    ) -> bool:
        """Check that all of many values lie between ``at_least`` and ``at_most``; measured is the one nearest an edge.

        Without either the values are margins, right side − left side of an inequality, and at least 0. Leave room for
        rounding (``samples.rounding``). An empty set or a NaN does not hold; a value may be infinite where nothing
        bounds it, as the logarithm of an error that is exactly 0. For trainings ask ``check_population``.
        """
        if at_least is None and at_most is None:
            at_least = 0.0
        band = _band(claim, name, "stated", (at_least, at_most), None)  # may be the premise of a counterexample
        values = np.asarray(values, dtype=np.float64).ravel()
        low, high = -math.inf if band[0] is None else band[0], math.inf if band[1] is None else band[1]
        with np.errstate(invalid="ignore"):  # ∞ − ∞ on an open side is no number, and fmin leaves it
            room = np.where(np.isnan(values), math.nan, np.fmin(values - low, high - values))
        worst = float(values[np.argmin(room)]) if values.size else math.nan  # a NaN is the least of all
        form = "largest" if at_least is None else "smallest" if at_most is None else "nearest"
        record = Record(claim, name, role, form, kind, finite(worst), band=band, holds=low <= worst <= high)
        return self._keep(replace(record, samples=values.size, n=n))

    def check_mean(
        self,
        claim: str,
        name: str,
        samples: ArrayLike,
        *,
        expected: float,
        resolution: float,
        role: str = "stated",
        claimed: float | None = None,
    ) -> bool:
        """Check that the mean over independent replicates is the one that theory gives, ``expected``; a derived check.

        The band is the theory give or take the sampling error that the replicates themselves show: Student's two-sided
        0.1 % point times their standard error. It may be at most ``resolution`` to each side, or nothing is told.

        Raises:
            ValueError: fewer than 8 replicates, or as ``check``.
        """
        found = intervals.mean(samples, 1 - intervals.FALSE_ALARM)
        half = found.value - found.low
        band = expected - half, expected + half
        if role == "counterexample" and claimed is None:
            raise ValueError(f"counterexample {name!r} of {claim!r}: name the value that the paper claimed")
        told = role != "counterexample" or not inside(claimed, *band)  # else too noisy to refute
        holds = inside(found.value, *band) and half <= resolution and told
        record = Record(claim, name, role, "mean", "derived", finite(found.value), float(expected), band, holds)
        return self._keep(replace(record, n=found.n, resolution=resolution, claimed=claimed))

    def check_population(
        self,
        claim: str,
        name: str,
        values: ArrayLike,
        band: Band,
        *,
        statistic: str = "median",
        role: str = "stated",
        claimed: float | None = None,
    ) -> bool:
        """Check a statement on a population of trainings or networks; an empirical check.

        ``values``: one number a training, or true and false for a ``share``. It holds if the 95 % interval of the
        ``statistic`` (``median``, ``mean`` or ``share``), not the estimate alone, lies in ``band``.

        Raises:
            ValueError: fewer than 8 values, an unknown statistic, or as ``check``.
        """
        if statistic not in intervals.STATISTICS:
            raise ValueError(f"unknown statistic {statistic!r}: choose one of {', '.join(intervals.STATISTICS)}")
        found = intervals.STATISTICS[statistic](values)
        band, interval = _band(claim, name, role, band, claimed), (finite(found.low), finite(found.high))
        holds = inside(found.low, *band) and inside(found.high, *band)
        record = Record(claim, name, role, "population", "empirical", finite(found.value), band=band, holds=holds)
        return self._keep(replace(record, n=found.n, statistic=statistic, interval=interval, claimed=claimed))

    def check_exponent(
        self,
        claim: str,
        name: str,
        estimate: float,
        interval: tuple[float, float],
        *,
        expected: float,
        max_width: float,
        kind: str,
        role: str = "stated",
        n: int | None = None,
    ) -> bool:
        """Check that a fitted exponent's confidence interval has the expected value and is at most ``max_width`` wide.

        The width is part of the check: an interval wide enough holds anything.
        """
        low, high = map(float, interval)
        if low > high:
            raise ValueError(f"check {name!r} of {claim!r}: empty interval [{low}, {high}]")
        holds = math.isfinite(estimate) and low <= expected <= high and high - low <= max_width
        # as a band for the estimate: the expected value, give or take the interval's own arms, if narrow enough
        band = expected - (high - estimate), expected + (estimate - low)
        record = Record(claim, name, role, "exponent", kind, finite(estimate), float(expected), band, holds)
        return self._keep(replace(record, n=n, interval=(finite(low), finite(high)), max_width=max_width))

    def check_order(
        self,
        claim: str,
        name: str,
        values: Sequence[float],
        *,
        kind: str,
        role: str = "stated",
        margin: float = 0.0,
        n: int | None = None,
    ) -> bool:
        """Check that finite ``values`` increase, each by more than ``margin``; measured is the smallest step."""
        values = np.asarray(values, dtype=np.float64)
        smallest = float(np.min(np.diff(values))) if np.isfinite(values).all() and len(values) > 1 else math.nan
        band, holds = (float(margin), None), smallest > margin
        return self._keep(Record(claim, name, role, "order", kind, finite(smallest), band=band, holds=holds, n=n))

    def leave_open(self, claim: str, reason: str) -> None:
        """Say that this run cannot test the claim, and why. Never counted as passed."""
        self._keep(Record(claim, "open", "open", "open", reason=reason))

    def _keep(self, record: Record) -> bool:
        """Show a record and leave it in the notebook's output."""
        claim, name = record.key
        if record.role not in (*ROLES, "open"):
            raise ValueError(f"unknown role {record.role!r} of check {name!r}: choose one of {', '.join(ROLES)}")
        if record.kind not in KINDS and record.role != "open":
            raise ValueError(f"unknown kind {record.kind!r} of check {name!r}: choose one of {', '.join(KINDS)}")
        if record.kind == "empirical" and not record.n:
            raise ValueError(f"empirical check {name!r} of {claim!r}: say by n=… on how many trainings it rests")
        if record.key in self._names:
            raise ValueError(f"claim {claim!r} has a check {name!r} already: names of checks are unique in a chapter")
        first = claim not in {known for known, _ in self._names}
        self._names.add(record.key)
        holds, anchor = bool(record.holds), None
        if first or not (holds or record.role == "open"):
            anchor = f"claim-{claim}" if first else f"failed-{claim}-{len(self._names)}"
        record = replace(record, **self.run, holds=None if record.holds is None else holds, anchor=anchor)
        _show(record)
        if self._kept:
            with open(self._kept, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(record.as_dict(), ensure_ascii=False) + "\n")
        return holds


def announcement(run: Mapping[str, Any]) -> str:
    """What a reader who runs a chapter alone should know first: profile, device, and how long it took when last timed.

    >>> announcement({"chapter": "99-none", "profile": "gpu", "device": "cuda"})
    '99-none, profile gpu on cuda: not timed yet; progress bars show what runs'
    """
    from nbutils import device as devices

    name = f"{run['chapter']}, profile {run['profile']} on {run['device']}"
    try:
        kept = json.loads(data.path("baselines/resources.json").read_text(encoding="utf-8"))[run["profile"]]
        seconds = kept["jobs"][run["chapter"]]["alone_seconds"]
    except (FileNotFoundError, KeyError):
        return f"{name}: not timed yet; progress bars show what runs"
    took = f"{max(seconds / 60, 0.1):.1f} min on {', '.join(kept['hardware'])}"
    return f"{name} ({devices.hardware(run['device'])}): took {took}"


def _kept_file(run: Mapping[str, Any]) -> Path | None:
    """A fresh file for the records in the folder ``NBUTILS_RESULTS``, if that is set."""
    folder = os.environ.get("NBUTILS_RESULTS")
    if not folder:
        return None
    file = Path(folder) / "records" / f"{run['chapter']}-{run['profile']}-{run['device']}-seed-{run['seed']}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("", encoding="utf-8")
    return file


def _band(claim: str, name: str, role: str, band: Band, claimed: float | None) -> Band:
    """A band as it is kept: it bounds something, and that of a counterexample excludes what the paper ``claimed``."""
    low, high = (None if edge is None or math.isinf(edge) else float(edge) for edge in band)
    if low is None and high is None:
        raise ValueError(f"check {name!r} of {claim!r}: a band without bounds {band} would pass anything")
    if low is not None and high is not None and low > high:
        raise ValueError(f"check {name!r} of {claim!r}: empty band [{low}, {high}]")
    if role == "counterexample" and claimed is None:
        raise ValueError(f"counterexample {name!r} of {claim!r}: name the value that the paper claimed")
    if role == "counterexample" and inside(claimed, low, high):
        raise ValueError(f"counterexample {name!r} of {claim!r}: [{low}, {high}] has the claimed {claimed}")
    return low, high


def inside(value: float, low: float | None, high: float | None) -> bool:
    """Whether a value lies in a band, ends included; None is no bound. What is no finite number lies in none.

    >>> inside(1.0, 1.0, None), inside(math.inf, 1.0, None), inside(math.nan, None, None)
    (True, False, False)
    """
    return bool(math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high))


def verdict(records: Iterable[Record]) -> str:
    """The verdict on one claim from the records of its checks; ``failed`` if any check does not hold.

    A check that failed here and held at two further seeds is ``noted``: it counts as held.

    ========== ==============================================================================================
    confirmed  stated checks hold; nothing had to be corrected
    refined    stated checks hold in a narrower reading, and the corrected statement holds
    refuted    a counterexample works, no stated check is left, and the corrected statement holds
    open       this run cannot test the claim
    ========== ==============================================================================================

    A counterexample without a corrected statement, or a corrected statement with neither a stated check nor a
    counterexample, is no verdict: ``failed``.

    >>> verdict([Record("c", "a", "stated", holds=True), Record("c", "b", "corrected", holds=True)])
    'refined'
    """
    records = list(records)
    tested = [record for record in records if record.role != "open"]
    if not all(record.holds or record.noted for record in tested) or not records:
        return "failed"
    if len(tested) < len(records):  # one open part leaves the whole claim open
        return "open"
    roles = {record.role for record in tested}
    if roles == {"stated"}:
        return "confirmed"
    if {"stated", "corrected"} <= roles:
        return "refined"
    if roles == {"counterexample", "corrected"}:
        return "refuted"
    return "failed"


def _show(record: Record) -> None:
    """One line for the reader, and the record for the machine, in the notebook's output."""
    mark, body = line(record)
    text = f"{mark} {record.claim} {body}"
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = lambda: None  # noqa: E731
    if get_ipython() is None:
        print(text)
    else:
        display({"text/html": as_html(record), "text/plain": text, MIME: record.as_dict()}, raw=True)
