"""The ledger of a chapter's checks: a measured value must lie in its band; verdicts follow from the checks.

A check never stops a notebook. It shows a line and leaves a record in the notebook's output. The scorecard and
``metrics.json`` are made from these records.
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
from nbutils.claims.records import Band, Record, json_value, mark_and_text

MIME = "application/vnd.nbutils.claim+json"
ROLES = ("stated", "corrected", "counterexample")
KINDS = ("exact", "published", "derived", "empirical")  # ``Ledger`` explains them
OF_CHANCE = ("derived", "empirical")  # a right check may fail at a seed
VERDICTS = ("confirmed", "partly confirmed", "refuted", "open")


class Ledger:
    """The checks of a chapter in a run. There are four kinds:

    ========= ======================================================= =========================================
    kind      statement                                               band
    ========= ======================================================= =========================================
    exact     without chance: an identity, a bound                    rounding
    published what a table or a file of the authors says              the claimed values
    derived   on a random quantity with a known law or limit          theory ± the run's own sampling error
    empirical on a population of trainings                            for an interval over n ≥ 8 trainings
    ========= ======================================================= =========================================

    If a derived or an empirical check fails, the workflow runs the chapter again at two further seeds.

    Args:
        chapter: name of the chapter's file in ``book/``, without the suffix.
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
        if not os.environ.get("NBUTILS_BOOK"):  # the workflow prints its own line
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
        """Check that ``measured`` lies in ``band``, ends included; None stands for no bound.

        A counterexample names the value that the paper ``claimed``, and its band must exclude that value: the check can
        only hold if the statement fails. An empirical check names ``n``, its number of trainings. If their values are
        available, use ``check_population``.

        Raises:
            ValueError: unknown role or kind, a name used twice, an empty band, a counterexample whose band contains the
                claimed value, an empirical check without ``n``.
        """
        record = Record(
            claim, name, role, "band", kind, json_value(measured), json_value(expected), band, claimed=claimed, n=n
        )
        self._enter(record, _inside(measured, *band))

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
        """Check that all values lie between ``at_least`` and ``at_most``; the measured value is the one nearest an end.

        If neither is given, the values are margins, right side − left side of an inequality, and must be at least 0.
        Leave room for rounding (``intervals.rounding``). The check fails for an empty set or a NaN. A value may be
        infinite on a side without a bound, as the logarithm of an error that is exactly 0. The kind is exact or
        derived; for a population of trainings, use ``check_population``.
        """
        if at_least is None and at_most is None:
            at_least = 0.0
        form = "nearest"
        if at_most is None:
            form = "smallest"
        elif at_least is None:
            form = "largest"
        low = -math.inf if at_least is None else at_least
        high = math.inf if at_most is None else at_most
        values = np.asarray(values, dtype=np.float64).ravel()
        with np.errstate(invalid="ignore"):  # ∞ − ∞ on a side without a bound is NaN, which fmin ignores
            room = np.fmin(values - low, high - values)
        worst = float(values[np.argmin(room)]) if values.size else math.nan  # argmin finds a NaN first
        record = Record(claim, name, role, form, kind, json_value(worst), band=(low, high), samples=values.size)
        self._enter(record, low <= worst <= high)

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
        """Check that the mean of independent replicates is the ``expected`` value of a theory; a derived check.

        The band is the expected value ± the sampling error of the replicates: Student's two-sided 0.1 % point times
        their standard error. If the sampling error exceeds ``resolution``, the check is too vague and fails. A
        counterexample also fails if its band contains the value that the paper ``claimed``.

        Raises:
            ValueError: fewer than 8 replicates, or as ``check``.
        """
        estimate = intervals.mean(samples, 1 - intervals.FALSE_ALARM)
        error = estimate.value - estimate.low
        band = (expected - error, expected + error)
        precise = error <= resolution
        allows_claimed = role == "counterexample" and claimed is not None and _inside(claimed, *band)
        holds = _inside(estimate.value, *band) and precise and not allows_claimed
        record = Record(claim, name, role, "mean", "derived", json_value(estimate.value), float(expected), band)
        self._enter(replace(record, n=estimate.n, resolution=resolution, claimed=claimed), holds)

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

        ``values`` has a number for every training, or true and false for a ``share``. The check holds if the whole 95 %
        interval of the ``statistic`` (``median``, ``mean`` or ``share``) lies in ``band``, not only the estimate.

        Raises:
            ValueError: fewer than 8 values, an unknown statistic, or as ``check``.
        """
        if statistic not in intervals.STATISTICS:
            raise ValueError(f"unknown statistic {statistic!r}: choose one of {', '.join(intervals.STATISTICS)}")
        estimate = intervals.STATISTICS[statistic](values)
        interval = (json_value(estimate.low), json_value(estimate.high))
        holds = _inside(estimate.low, *band) and _inside(estimate.high, *band)
        measured = json_value(estimate.value)
        record = Record(claim, name, role, "population", "empirical", measured, band=band, claimed=claimed)
        self._enter(replace(record, n=estimate.n, statistic=statistic, interval=interval), holds)

    def leave_open(self, claim: str, reason: str) -> None:
        """State that this run cannot test the claim, and why; an open claim never counts as passed."""
        self._enter(Record(claim, "open", "open", "open", reason=reason))

    def _enter(self, record: Record, holds: bool = False) -> None:
        """Complete a record, show it, and leave it in the notebook's output."""
        if record.band:
            low, high = (None if end is None or math.isinf(end) else float(end) for end in record.band)
            record = replace(record, band=(low, high), holds=bool(holds))
        fault = _fault(record)
        if record.key in self._names:
            fault = fault or "names are unique in a chapter"
        if fault:
            raise ValueError(f"check {record.check!r} of claim {record.claim!r}: {fault}")
        is_first = record.claim not in {claim for claim, _ in self._names}
        self._names.add(record.key)
        anchor = None
        if is_first:
            anchor = f"claim-{record.claim}"
        elif record.holds is False:
            anchor = f"failed-{record.claim}-{len(self._names)}"
        _show(replace(record, **self.run, anchor=anchor))


def _fault(record: Record) -> str | None:
    """Why a record is not a valid check, whatever was measured."""
    if record.band is None:  # an open claim
        return None
    low, high = record.band
    claimed = record.claimed
    refutes = record.role == "counterexample" and record.samples is None  # check_all may check the premise alone
    allows_claimed = claimed is not None and record.form != "mean" and _inside(claimed, low, high)  # check_mean fails
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
        (refutes and allows_claimed, f"the band of a counterexample, [{low}, {high}], contains the claimed {claimed}"),
    )
    return next((fault for applies, fault in faults if applies), None)


def _inside(value: float, low: float | None, high: float | None) -> bool:
    """Whether a value lies in a band, ends included. Values that are not finite lie in no band."""
    return bool(math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high))


def verdict(records: Iterable[Record]) -> str:
    """The verdict on a claim from the records of its checks; ``failed`` if a check does not hold.

    A check that failed at this seed and held at two further seeds is ``noted`` and counts as held.

    ================ ========================================================================================
    confirmed        stated checks hold, and no correction is needed
    partly confirmed stated checks hold in a narrower reading, and the corrected statement holds
    refuted          a counterexample holds, there is no stated check, and the corrected statement holds
    open             this run cannot test the claim
    ================ ========================================================================================

    The verdict is ``failed``, too, for a counterexample without a corrected statement, and for a corrected statement
    with neither a stated check nor a counterexample.

    >>> verdict([Record("c", "a", "stated", holds=True), Record("c", "b", "corrected", holds=True)])
    'partly confirmed'
    """
    records = list(records)
    tested = [record for record in records if record.role != "open"]
    if not all(record.holds or record.noted for record in tested):
        return "failed"
    if len(tested) < len(records):  # an open part leaves the whole claim open
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
    """Show a line for readers, and the record for the workflow, in the notebook's output."""
    mark, text = mark_and_text(record)
    notebook.show({"text/plain": f"{mark} {record.claim} {text}", MIME: record.as_dict()})
