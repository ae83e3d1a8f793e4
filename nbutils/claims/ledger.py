"""The ledger: a chapter says what it measured and the band it must lie in; verdicts follow from these checks.

A check never stops a notebook. It shows one line and leaves a record in the notebook's output. The scorecard
and ``metrics.json`` are made from these records.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nbutils import devices, intervals, notebook, profiles
from nbutils.claims.records import Band, Record, finite, line

MIME = "application/vnd.nbutils.claim+json"
ROLES = ("stated", "corrected", "counterexample")
KINDS = ("exact", "derived", "empirical")  # what a band means; see ``Ledger``
VERDICTS = ("confirmed", "partly confirmed", "refuted", "open")


class Ledger:
    """The checks of one chapter in one run. Each is of one kind:

    ========= ========================================================= ====================================
    exact     no chance in it: an identity, a bound, published numbers  rounding, or what is claimed
    derived   a random quantity with a known law or limit               theory ± the run's own sampling error
    empirical what trainings do: a statement on a population of them    an interval over n ≥ 8 of them
    ========= ========================================================= ====================================

    Where a derived or an empirical check fails, the workflow runs its chapter at two further seeds.

    Args:
        chapter: name of the chapter, as in ``book/`` without the ending.
        profile, seed, device: the notebook's parameters.

    >>> claims = Ledger("99-none", profile="smoke", seed=0, device="cpu")
    99-none, profile smoke on cpu
    >>> claims.check("square-root-growth", "exponent", 0.52, (0.45, 0.55), kind="derived")
    ✓ square-root-growth (stated) exponent: 0.52; band [0.45, 0.55]
    >>> claims.check_population("square-root-growth", "of nine", [3, 1, 4, 1, 5, 9, 2, 6, 5], (1, 6))
    ✓ square-root-growth (stated) of nine: median of 9: 4, interval [1, 6]; band [1, 6]
    """

    def __init__(self, chapter: str, *, profile: str, seed: int, device: str) -> None:
        self.run: dict[str, Any] = {
            "chapter": chapter,
            "profile": profiles.resolve(profile),
            "seed": int(seed),
            "device": devices.resolve(device),
            "versions": devices.versions(),
        }
        self._names: set[tuple[str, str]] = set()
        if not os.environ.get("NBUTILS_BOOK"):  # the workflow says it in its own way
            print(f"{chapter}, profile {self.run['profile']} on {self.run['device']}")

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
    ) -> None:
        """Check that ``measured`` lies in ``band`` (ends included; None is no bound).

        A counterexample names the value that the paper ``claimed``; its band must exclude that value, so that the check
        can only hold if the statement fails. An empirical check says how many trainings, ``n``, it rests on; where
        these are at hand one by one, ``check_population`` is the better one.

        Raises:
            ValueError: unknown role or kind, a name used twice, an empty band, a counterexample that the claim would
                pass, an empirical check that does not name its ``n``.
        """
        record = Record(claim, name, role, "band", kind, finite(measured), finite(expected), band, claimed=claimed, n=n)
        self._keep(record, _inside(measured, *band))

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
    ) -> None:
        """Check that all of many values lie between ``at_least`` and ``at_most``; measured is the one nearest an edge.

        Without either the values are margins, right side − left side of an inequality, and at least 0. Leave room for
        rounding (``intervals.rounding``). An empty set or a NaN does not hold; a value may be infinite where nothing
        bounds it, as the logarithm of an error that is exactly 0. Exact or derived: ask ``check_population`` of
        trainings.
        """
        if at_least is None and at_most is None:
            at_least = 0.0
        form = "smallest" if at_most is None else "largest" if at_least is None else "nearest"
        low, high = -math.inf if at_least is None else at_least, math.inf if at_most is None else at_most
        values = np.asarray(values, dtype=np.float64).ravel()
        with np.errstate(invalid="ignore"):  # ∞ − ∞ on an open side is no number, and fmin leaves it
            room = np.fmin(values - low, high - values)
        worst = float(values[np.argmin(room)]) if values.size else math.nan  # a NaN is the least of all
        record = Record(claim, name, role, form, kind, finite(worst), band=(low, high), samples=values.size)
        self._keep(record, low <= worst <= high)

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
    ) -> None:
        """Check that the mean over independent replicates is the one that theory gives, ``expected``; a derived check.

        The band is the theory give or take the sampling error that the replicates themselves show: Student's two-sided
        0.1 % point times their standard error. That may be at most ``resolution``, or the check fails as too vague; as
        a counterexample it fails, too, if its band has the value that the paper ``claimed``.

        Raises:
            ValueError: fewer than 8 replicates, or as ``check``.
        """
        found = intervals.mean(samples, 1 - intervals.FALSE_ALARM)
        half = found.value - found.low
        band = expected - half, expected + half
        vague = role == "counterexample" and claimed is not None and _inside(claimed, *band)
        holds = _inside(found.value, *band) and half <= resolution and not vague
        record = Record(claim, name, role, "mean", "derived", finite(found.value), float(expected), band)
        self._keep(replace(record, n=found.n, resolution=resolution, claimed=claimed), holds)

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
    ) -> None:
        """Check a statement on a population of trainings or networks; an empirical check.

        ``values``: one number a training, or true and false for a ``share``. It holds if the 95 % interval of the
        ``statistic`` (``median``, ``mean`` or ``share``), not the estimate alone, lies in ``band``.

        Raises:
            ValueError: fewer than 8 values, an unknown statistic, or as ``check``.
        """
        if statistic not in intervals.STATISTICS:
            raise ValueError(f"unknown statistic {statistic!r}: choose one of {', '.join(intervals.STATISTICS)}")
        found = intervals.STATISTICS[statistic](values)
        interval = finite(found.low), finite(found.high)
        holds = _inside(found.low, *band) and _inside(found.high, *band)
        record = Record(claim, name, role, "population", "empirical", finite(found.value), band=band, claimed=claimed)
        self._keep(replace(record, n=found.n, statistic=statistic, interval=interval), holds)

    def leave_open(self, claim: str, reason: str) -> None:
        """Say that this run cannot test the claim, and why. Never counted as passed."""
        self._keep(Record(claim, "open", "open", "open", reason=reason))

    def _keep(self, record: Record, holds: bool = False) -> None:
        """Complete a record, show it, and leave it in the notebook's output."""
        if record.band:
            low, high = (None if end is None or math.isinf(end) else float(end) for end in record.band)
            record = replace(record, band=(low, high), holds=bool(holds))
        fault = _fault(record) or ("names are unique in a chapter" if record.key in self._names else None)
        if fault:
            raise ValueError(f"check {record.check!r} of claim {record.claim!r}: {fault}")
        first, anchor = record.claim not in {claim for claim, _ in self._names}, None
        self._names.add(record.key)
        if first or record.holds is False:
            anchor = f"claim-{record.claim}" if first else f"failed-{record.claim}-{len(self._names)}"
        _show(replace(record, **self.run, anchor=anchor))


def _fault(record: Record) -> str | None:
    """Why a record is no check, whatever was measured."""
    if record.band is None:  # open
        return None
    (low, high), claimed = record.band, record.claimed
    refutes = record.role == "counterexample" and record.samples is None  # many values may be the premise of one
    has_it = claimed is not None and record.form != "mean" and _inside(claimed, low, high)  # such a mean does not hold
    faults = (
        (record.role not in ROLES, f"unknown role {record.role!r}, choose one of {', '.join(ROLES)}"),
        (record.kind not in KINDS, f"unknown kind {record.kind!r}, choose one of {', '.join(KINDS)}"),
        (
            record.kind == "empirical" and not record.n,
            "say on how many trainings this empirical check rests: n=… of check, or check_population",
        ),
        (low is None and high is None, "a band without bounds would pass anything"),
        (low is not None and high is not None and low > high, f"empty band [{low}, {high}]"),
        (refutes and claimed is None, "a counterexample excludes what the paper claimed: name the value, claimed=…"),
        (refutes and has_it, f"the band of a counterexample, [{low}, {high}], has the claimed {claimed}"),
    )
    return next((fault for found, fault in faults if found), None)


def _inside(value: float, low: float | None, high: float | None) -> bool:
    """Whether a value lies in a band, ends included; None is no bound. What is no finite number lies in none."""
    return bool(math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high))


def verdict(records: Iterable[Record]) -> str:
    """The verdict on one claim from the records of its checks; ``failed`` if any check does not hold.

    A check that failed here and held at two further seeds is ``noted``: it counts as held.

    ================ ========================================================================================
    confirmed        stated checks hold; nothing had to be corrected
    partly confirmed stated checks hold in a narrower reading, and the corrected statement holds
    refuted          a counterexample works, no stated check is left, and the corrected statement holds
    open             this run cannot test the claim
    ================ ========================================================================================

    A counterexample without a corrected statement, or a corrected statement with neither a stated check nor a
    counterexample, is no verdict: ``failed``.

    >>> verdict([Record("c", "a", "stated", holds=True), Record("c", "b", "corrected", holds=True)])
    'partly confirmed'
    """
    records = list(records)
    tested = [record for record in records if record.role != "open"]
    if not all(record.holds or record.noted for record in tested):
        return "failed"
    if len(tested) < len(records):  # one open part leaves the whole claim open
        return "open"
    roles = {record.role for record in tested}
    if roles == {"stated"}:
        return "confirmed"
    if {"stated", "corrected"} <= roles:
        return "partly confirmed"
    if roles == {"counterexample", "corrected"}:
        return "refuted"
    return "failed"


def _show(record: Record) -> None:
    """One line for the reader, and the record for the machine, in the notebook's output."""
    mark, body = line(record)
    notebook.show({"text/plain": f"{mark} {record.claim} {body}", MIME: record.as_dict()})
