"""The ledger: a chapter says what it measured and the band it must lie in; verdicts follow from these checks.

A check never stops a notebook. It shows one line and leaves a record in the notebook's output. The scorecard,
``metrics.json`` and the JUnit file are made from these records.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nbutils import data
from nbutils import samples as intervals

MIME = "application/vnd.nbutils.claim+json"
ROLES = ("stated", "corrected", "counterexample")
KINDS = ("exact", "derived", "empirical")  # what a band means; see ``Ledger``
VERDICTS = ("confirmed", "refined", "refuted", "open")

Band = tuple[float | None, float | None]
Record = dict[str, Any]


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
    ✓ square-root-growth (stated) exponent: 0.52, band [0.45, 0.55]
    True
    >>> claims.check_population("square-root-growth", "of nine", [3, 1, 4, 1, 5, 9, 2, 6, 5], (1, 6))
    ✓ square-root-growth (stated) of nine: median of 9: 4, interval [1, 6], band [1, 6]
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
        low, high = (None if edge is None or math.isinf(edge) else float(edge) for edge in band)
        if low is None and high is None:
            raise ValueError(f"check {name!r} of {claim!r}: a band without bounds {band} would pass anything")
        if low is not None and high is not None and low > high:
            raise ValueError(f"check {name!r} of {claim!r}: empty band [{low}, {high}]")
        extra = _claimed(claim, name, role, claimed, low, high)
        holds = inside(measured, low, high)
        return self._record(
            claim, name, "band", measured, expected, [low, high], holds, role, kind=kind, **_count(n), **extra
        )

    def check_all(
        self,
        claim: str,
        name: str,
        margins: ArrayLike,
        *,
        kind: str,
        role: str = "stated",
        slack: float = 0.0,
        n: int | None = None,
    ) -> bool:
        """Check an inequality over all samples: every margin (right side − left side) is at least ``−slack``.

        ``slack`` is for rounding (``samples.rounding``). An empty set of samples or a NaN does not hold; a margin
        may be +∞, as of the logarithm of an error that is exactly 0. For trainings ask ``check_population``.
        """
        margins = np.asarray(margins, dtype=np.float64).ravel()
        worst = float(np.min(margins)) if margins.size else math.nan
        return self._record(
            claim, name, "inequality", worst, None, [0.0 - slack, None], worst >= -slack, role, kind=kind,
            samples=margins.size, **_count(n),
        )  # fmt: skip

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
        low, high = expected - half, expected + half
        if role == "counterexample" and claimed is None:
            raise ValueError(f"counterexample {name!r} of {claim!r}: name the value that the paper claimed")
        extra = {} if claimed is None else {"claimed": float(claimed)}
        told = role != "counterexample" or not inside(float(claimed or 0), low, high)  # else too noisy to refute
        holds = inside(found.value, low, high) and half <= resolution and told
        return self._record(
            claim, name, "mean", found.value, expected, [low, high], holds, role, kind="derived", n=found.n,
            resolution=resolution, **extra,
        )  # fmt: skip

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
        low, high = (None if edge is None or math.isinf(edge) else float(edge) for edge in band)
        if low is None and high is None:
            raise ValueError(f"check {name!r} of {claim!r}: a band without bounds {band} would pass anything")
        extra = _claimed(claim, name, role, claimed, low, high)
        holds = inside(found.low, low, high) and inside(found.high, low, high)
        return self._record(
            claim, name, "population", found.value, None, [low, high], holds, role, kind="empirical",
            statistic=statistic, interval=[_finite(found.low), _finite(found.high)], n=found.n, **extra,
        )  # fmt: skip

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
        band = [expected - (high - estimate), expected + (estimate - low)]
        return self._record(
            claim, name, "exponent", estimate, expected, band, holds, role, kind=kind, interval=[low, high],
            max_width=max_width, **_count(n),
        )  # fmt: skip

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
        return self._record(
            claim, name, "order", smallest, None, [float(margin), None], smallest > margin, role, kind=kind,
            strict=True, **_count(n),
        )  # fmt: skip

    def leave_open(self, claim: str, reason: str) -> None:
        """Say that this run cannot test the claim, and why. Never counted as passed."""
        self._record(claim, "open", "open", None, None, None, None, "open", kind=None, reason=reason)

    def _record(
        self,
        claim: str,
        name: str,
        form: str,
        measured: float | None,
        expected: float | None,
        band: list[float | None] | None,
        holds: bool | None,
        role: str,
        *,
        kind: str | None,
        **extra: Any,
    ) -> bool:
        if role not in (*ROLES, "open"):
            raise ValueError(f"unknown role {role!r} of check {name!r}: choose one of {', '.join(ROLES)}")
        if kind not in KINDS and role != "open":
            raise ValueError(f"unknown kind {kind!r} of check {name!r}: choose one of {', '.join(KINDS)}")
        if kind == "empirical" and not extra.get("n"):
            raise ValueError(f"empirical check {name!r} of {claim!r}: say by n=… on how many trainings it rests")
        if (claim, name) in self._names:
            raise ValueError(f"claim {claim!r} has a check {name!r} already: names of checks are unique in a chapter")
        first = claim not in {known for known, _ in self._names}
        self._names.add((claim, name))
        record = {
            "claim": claim,
            "check": name,
            "form": form,
            "kind": kind,
            "role": role,
            "measured": _finite(measured),
            "expected": _finite(expected),
            "band": band,
            "holds": None if holds is None else bool(holds),
            **self.run,
            **extra,
        }
        if first or not (holds or role == "open"):
            record["anchor"] = f"claim-{claim}" if first else f"failed-{claim}-{len(self._names)}"
        _show(record)
        if self._kept:
            with open(self._kept, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
        return bool(holds)


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


def _count(n: int | None) -> dict[str, int]:
    return {} if n is None else {"n": int(n)}


def _claimed(
    claim: str, name: str, role: str, claimed: float | None, low: float | None, high: float | None
) -> dict[str, float]:
    """The paper's value for a record; a counterexample needs one, outside of its band."""
    if role == "counterexample" and claimed is None:
        raise ValueError(f"counterexample {name!r} of {claim!r}: name the value that the paper claimed")
    if role == "counterexample" and inside(claimed, low, high):
        raise ValueError(f"counterexample {name!r} of {claim!r}: [{low}, {high}] has the claimed {claimed}")
    return {} if claimed is None else {"claimed": float(claimed)}


def inside(value: float, low: float | None, high: float | None) -> bool:
    """Whether a value lies in a band, ends included; None is no bound. What is no finite number lies in none.

    >>> inside(1.0, 1.0, None), inside(math.inf, 1.0, None), inside(math.nan, None, None)
    (True, False, False)
    """
    return bool(math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high))


def _finite(value: float | None) -> float | str | None:
    """JSON has no NaN: a number that is not finite is kept as text."""
    if value is None:
        return None
    return float(value) if math.isfinite(value) else str(float(value))


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

    >>> verdict([{"role": "stated", "holds": True}, {"role": "corrected", "holds": True}])
    'refined'
    """
    records = list(records)
    tested = [record for record in records if record["role"] != "open"]
    if not all(record["holds"] or record.get("noted") for record in tested) or not records:
        return "failed"
    if len(tested) < len(records):  # one open part leaves the whole claim open
        return "open"
    roles = {record["role"] for record in tested}
    if roles == {"stated"}:
        return "confirmed"
    if {"stated", "corrected"} <= roles:
        return "refined"
    if roles == {"counterexample", "corrected"}:
        return "refuted"
    return "failed"


def format_number(value: float | str | None) -> str:
    """A measured value or the end of a band as text; None is no bound.

    >>> format_number(0.123456789), format_number(None), format_number("nan")
    ('0.12346', '∞', 'nan')
    """
    if value is None:
        return "∞"
    return value if isinstance(value, str) else f"{value:.5g}"


def format_band(record: Record) -> str:
    """The band of a record as text.

    >>> format_band({"form": "order", "band": [0.0, None]})
    '> 0'
    """
    if record["band"] is None or record["band"] == [None, None]:
        return "no band"
    low, high = record["band"]
    if high is None:
        return f"{'>' if record.get('strict') or record['form'] == 'order' else '≥'} {format_number(low)}"
    if low is None:
        return f"≤ {format_number(high)}"
    return f"[{format_number(low)}, {format_number(high)}]"


def line(record: Record) -> tuple[str, str]:
    """What a reader sees of a check: its mark, and the text after the claim's name.

    >>> line({"role": "open", "reason": "no network"})
    ('○', 'open: no network')
    """
    if record["role"] == "open":
        return "○", f"open: {record['reason']}"
    what = {"inequality": "smallest margin ", "order": "smallest step "}.get(record["form"], "")
    if record["form"] == "population":
        low, high = map(format_number, record["interval"])
        what = f"{record['statistic']} of {record['n']}: "
        interval = f", interval [{low}, {high}]"
    else:
        interval = ""
    body = f"({record['role']}) {record['check']}: {what}{format_number(record['measured'])}{interval}"
    body += f", band {format_band(record)}"
    if record.get("further"):
        others = " and ".join(f"{format_number(each['measured'])} at seed {each['seed']}" for each in record["further"])
        told = "it does not hold at this seed, and held at two others" if record["noted"] else "looked at again"
        body += f"; {told}: {others}"
    return "✓" if record["holds"] else "◐" if record.get("noted") else "✗", body


COLOURS = {"✓": "#1a7f37", "✗": "#cf222e", "○": "#8a6d00", "◐": "#8a6d00"}


def as_html(record: Record) -> str:
    """The same as a line of a page, with the anchors that verdicts and banners link to.

    >>> as_html({"role": "open", "reason": "no network", "claim": "public-series"}).endswith("open: no network</div>")
    True
    """
    mark, body = line(record)
    anchor = f' id="{html.escape(record["anchor"])}"' if record.get("anchor") else ""
    return (
        f'<div class="nb-check"{anchor}><span style="color:{COLOURS[mark]};font-weight:bold">{mark}</span> '
        f"<code>{html.escape(record['claim'])}</code> {html.escape(body)}</div>"
    )


def _show(record: Record) -> None:
    """One line for the reader, and the record for the machine, in the notebook's output."""
    mark, body = line(record)
    text = f"{mark} {record['claim']} {body}"
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = lambda: None  # noqa: E731
    if get_ipython() is None:
        print(text)
    else:
        display({"text/html": as_html(record), "text/plain": text, MIME: record}, raw=True)
