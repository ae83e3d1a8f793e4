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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nbutils import data

MIME = "application/vnd.nbutils.claim+json"
ROLES = ("stated", "corrected", "counterexample")
VERDICTS = ("confirmed", "refined", "refuted", "open")
FALSE_ALARM = 1e-3  # two-sided probability that a right result leaves its seed band

Band = tuple[float | None, float | None]
Record = dict[str, Any]


class Ledger:
    """The checks of one chapter in one run.

    Args:
        chapter: name of the chapter, as in ``book/`` without the ending.
        profile, seed, device: the notebook's parameters.

    >>> claims = Ledger("99-none", profile="smoke", seed=0, device="cpu")
    99-none, profile smoke on cpu: not timed yet; progress bars show what runs
    >>> claims.check("square-root-growth", "exponent", 0.52, band=(0.45, 0.55))
    ✓ square-root-growth (stated) exponent: 0.52, band [0.45, 0.55]
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
        band: Band | None = None,
        *,
        role: str = "stated",
        expected: float | None = None,
        claimed: float | None = None,
    ) -> bool:
        """Check that ``measured`` lies in ``band`` (ends included; None is no bound).

        Without a band it comes from the measured seed-to-seed spread (``seed_band``), around ``expected`` if there is a
        theory, else around the mean over seeds. A counterexample names the value that the paper ``claimed``; its band
        must exclude that value, so that the check can only hold if the statement fails. Where a band from seeds has it,
        the noise is too large to refute anything, and the check does not hold.

        Raises:
            ValueError: unknown role, a name used twice, an empty band, a counterexample that the claim would pass.
        """
        source = None
        if band is None:
            band, source = seed_band(self.run["profile"], claim, name, expected)
        low, high = (None if edge is None or math.isinf(edge) else float(edge) for edge in band or (None, None))
        if band is not None and low is None and high is None:
            raise ValueError(f"check {name!r} of {claim!r}: a band without bounds {band} would pass anything")
        if low is not None and high is not None and low > high:
            raise ValueError(f"check {name!r} of {claim!r}: empty band [{low}, {high}]")
        if role == "counterexample":
            if claimed is None:
                raise ValueError(f"counterexample {name!r} of {claim!r}: name the value that the paper claimed")
            if band is not None and inside(claimed, low, high):
                if source is None:
                    raise ValueError(f"counterexample {name!r} of {claim!r}: [{low}, {high}] has the claimed {claimed}")
                band, source = None, f"the band [{low:.5g}, {high:.5g}] from {source}, has the claimed value {claimed}"
        extra = {} if source is None else {"band_from": source}
        if claimed is not None:
            extra["claimed"] = float(claimed)
        holds = band is not None and inside(measured, low, high)
        return self._record(claim, name, "band", measured, expected, [low, high], holds, role, **extra)

    def check_all(self, claim: str, name: str, margins: ArrayLike, *, role: str = "stated", slack: float = 0.0) -> bool:
        """Check an inequality over all samples: every margin (right side − left side) is at least ``−slack``.

        ``slack`` is for rounding. An empty set of samples or a NaN does not hold; a margin
        may be +∞, as of the logarithm of an error that is exactly 0.
        """
        margins = np.asarray(margins, dtype=np.float64).ravel()
        worst = float(np.min(margins)) if margins.size else math.nan
        return self._record(
            claim, name, "inequality", worst, None, [0.0 - slack, None], worst >= -slack, role, samples=margins.size
        )

    def check_exponent(
        self,
        claim: str,
        name: str,
        estimate: float,
        interval: tuple[float, float],
        *,
        expected: float,
        max_width: float,
        role: str = "stated",
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
            claim, name, "exponent", estimate, expected, band, holds, role, interval=[low, high], max_width=max_width
        )

    def check_order(
        self, claim: str, name: str, values: Sequence[float], *, role: str = "stated", margin: float = 0.0
    ) -> bool:
        """Check that finite ``values`` increase, each by more than ``margin``; measured is the smallest step."""
        values = np.asarray(values, dtype=np.float64)
        smallest = float(np.min(np.diff(values))) if np.isfinite(values).all() and len(values) > 1 else math.nan
        return self._record(
            claim, name, "order", smallest, None, [float(margin), None], smallest > margin, role, strict=True
        )

    def leave_open(self, claim: str, reason: str) -> None:
        """Say that this run cannot test the claim, and why. Never counted as passed."""
        self._record(claim, "open", "open", None, None, None, None, "open", reason=reason)

    def _record(
        self,
        claim: str,
        name: str,
        kind: str,
        measured: float | None,
        expected: float | None,
        band: list[float | None] | None,
        holds: bool | None,
        role: str,
        **extra: Any,
    ) -> bool:
        if role not in (*ROLES, "open"):
            raise ValueError(f"unknown role {role!r} of check {name!r}: choose one of {', '.join(ROLES)}")
        if (claim, name) in self._names:
            raise ValueError(f"claim {claim!r} has a check {name!r} already: names of checks are unique in a chapter")
        first = claim not in {known for known, _ in self._names}
        self._names.add((claim, name))
        record = {
            "claim": claim,
            "check": name,
            "kind": kind,
            "role": role,
            "measured": _finite(measured),
            "expected": _finite(expected),
            "band": band,
            "holds": None if holds is None else bool(holds),
            **self.run,
            **extra,
        }
        _show(record, anchor=first)
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


@cache
def _baselines(name: str) -> Mapping[str, Any]:
    try:
        return json.loads(data.path(f"baselines/{name}.json").read_text(encoding="utf-8"))["checks"]
    except FileNotFoundError:
        return {}


def seed_band(
    profile: str, claim: str, check: str, expected: float | None = None
) -> tuple[tuple[float, float] | None, str]:
    """Band of a check from the spread over seeds in ``tests/baselines/<profile>.json``, and where it came from.

    The one rule: a prediction interval, centre ± t·s·√(1 + 1/N), with s the standard deviation over N seeds and t the
    two-sided 0.1 % point of Student's t with N − 1 degrees of freedom. Centre: ``expected`` if given, else the mean.
    No baseline at all gives no band, and the check does not hold.

    >>> band, source = seed_band("smoke", "t5-direction", "null walk: cosine between t and 2t", expected=0.5**0.5)
    >>> round(sum(band) / 2, 4), source
    (0.7071, 'smoke, 20 seeds')
    """
    name, found = baseline(profile, claim, check)
    if found is None:
        return None, f"no baseline for {claim}/{check} in profile {profile}: run `make baselines`"
    return prediction_band(found["mean"], found["sd"], found["n"], expected), f"{name}, {found['n']} seeds"


def baseline(profile: str, claim: str, check: str) -> tuple[str, Mapping[str, Any] | None]:
    """Mean, standard deviation (``sd``) and number of seeds (``n``) of a check, and the profile that they are from.

    The ``gpu`` profile falls back to ``book``, with its wider bands, while it has no baseline of its own.

    >>> _, found = baseline("book", "t5-direction", "null walk: cosine between t and 2t")
    >>> found["n"], round(found["mean"], 2)  # a walk turns by 45° while t doubles: 1/√2
    (20, 0.71)
    """
    for name in ("gpu", "book") if profile == "gpu" else (profile,):
        found = _baselines(name).get(f"{claim}/{check}")
        if found:
            return name, found
    return profile, None


def prediction_band(mean: float, sd: float, n: int, expected: float | None = None) -> tuple[float, float]:
    """Prediction interval for one more seed, two-sided probability ``FALSE_ALARM`` of leaving it.

    >>> low, high = prediction_band(mean=1.0, sd=0.1, n=20)
    >>> round(low, 3), round(high, 3)
    (0.602, 1.398)
    """
    from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats takes a second to import

    if n < 3:
        raise ValueError(f"{n} seeds: a spread needs at least 3")
    centre = mean if expected is None else expected
    half = float(stdtrit(n - 1, 1 - FALSE_ALARM / 2)) * sd * math.sqrt(1 + 1 / n)
    return centre - half, centre + half


def verdict(records: Iterable[Record]) -> str:
    """The verdict on one claim from the records of its checks; ``failed`` if any check does not hold.

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
    if not all(record["holds"] for record in tested) or not records:
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

    >>> format_band({"kind": "order", "band": [0.0, None]})
    '> 0'
    """
    if record["band"] is None or record["band"] == [None, None]:
        return "no band"
    low, high = record["band"]
    if high is None:
        return f"{'>' if record.get('strict') or record['kind'] == 'order' else '≥'} {format_number(low)}"
    if low is None:
        return f"≤ {format_number(high)}"
    return f"[{format_number(low)}, {format_number(high)}]"


def _show(record: Record, *, anchor: bool) -> None:
    """One line for the reader, and the record for the machine, in the notebook's output."""
    if record["role"] == "open":
        mark, colour, body = "○", "#8a6d00", f"open: {record['reason']}"
    else:
        mark, colour = ("✓", "#1a7f37") if record["holds"] else ("✗", "#cf222e")
        what = {"inequality": "smallest margin ", "order": "smallest step "}.get(record["kind"], "")
        body = f"{record['check']}: {what}{format_number(record['measured'])}, band {format_band(record)}"
        if record.get("band_from") and not record["holds"]:
            body += f" ({record['band_from']})"
    label = "" if record["role"] == "open" else f" ({record['role']})"
    text = f"{mark} {record['claim']}{label} {body}"
    identifier = f' id="claim-{html.escape(record["claim"])}"' if anchor else ""
    shown = (
        f'<div class="nb-check"{identifier}><span style="color:{colour};font-weight:bold">{mark}</span> '
        f"<code>{html.escape(record['claim'])}</code>{html.escape(label)} {html.escape(body)}</div>"
    )
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = lambda: None  # noqa: E731
    if get_ipython() is None:
        print(text)
    else:
        display({"text/html": shown, "text/plain": text, MIME: record}, raw=True)
