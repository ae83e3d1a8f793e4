"""The record that a check leaves in its notebook's output, and its text for readers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

Band = tuple[float | None, float | None]
Value = float | str | None  # JSON has no NaN: a value that is not finite is stored as text


@dataclass(frozen=True)
class Record:
    """A check: the measured value, the band it must lie in, whether the check holds, and its run.

    ``form`` is the form of the check (``band``, ``smallest``, ``largest``, ``nearest``, ``mean``, ``population``,
    ``open``); ``kind`` and ``role`` are those of ``Ledger``. Only some forms have the fields after ``versions``. The
    workflow, which may run the chapter again at two further seeds, fills the last two.
    """

    claim: str
    check: str
    role: str
    form: str = "band"
    kind: str | None = None
    measured: Value = None
    expected: Value = None
    band: Band | None = None
    holds: bool | None = None
    chapter: str = ""
    profile: str = ""
    seed: int = 0
    device: str = ""
    versions: Mapping[str, str] | None = None
    claimed: float | None = None  # by the paper
    n: int | None = None  # number of trainings or replicates
    samples: int | None = None  # number of values, of which ``measured`` is the worst
    statistic: str | None = None
    interval: tuple[Value, Value] | None = None
    resolution: float | None = None
    reason: str | None = None  # why the claim is open
    anchor: str | None = None  # target of links from other pages
    further: tuple[Mapping[str, Any], ...] = ()  # seed, measured and holds at further seeds
    noted: bool = False  # failed at this seed, held at both further seeds

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Record:
        """A record from a dictionary as JSON gives it. Fields unknown to this version of the class are dropped."""
        facts: dict[str, Any] = {}
        for name in (field.name for field in fields(cls)):
            if name in stored:
                value = stored[name]
                facts[name] = tuple(value) if isinstance(value, list) else value
        return cls(**facts)

    def as_dict(self) -> dict[str, Any]:
        """The record as a dictionary for JSON, without empty fields that only some forms have."""
        always = ("kind", "measured", "expected", "band", "holds")
        facts = {}
        for name, value in asdict(self).items():
            is_empty = value is None or value is False or value == ()  # a number 0 is not empty
            if name in always or not is_empty:
                facts[name] = value
        return facts

    @property
    def key(self) -> tuple[str, str]:
        """The names of the claim and of the check: unique in a chapter."""
        return self.claim, self.check

    @property
    def fails(self) -> bool:
        """Whether the check makes its claim fail: it does not hold and is not noted."""
        return self.holds is False and not self.noted


def json_value(number: float | None) -> Value:
    """A number as JSON can store it: NaN and infinities become text."""
    if number is None:
        return None
    return float(number) if math.isfinite(number) else str(float(number))


def format_number(value: Value) -> str:
    """A measured value or an end of a band as text, with five digits. None, an absent upper bound, becomes "∞"."""
    if value is None:
        return "∞"
    return value if isinstance(value, str) else f"{value:.5g}"


def format_band(record: Record) -> str:
    """The band of a record as text."""
    return _interval_text(*record.band) if record.band else "no band"


def _interval_text(low: Value, high: Value) -> str:
    if low is None:
        return f"≤ {format_number(high)}"
    if high is None:
        return f"≥ {format_number(low)}"
    return f"[{format_number(low)}, {format_number(high)}]"


WORST = {"smallest": "smallest ", "largest": "largest ", "nearest": "nearest an end "}  # which of many values decides


def format_measured(record: Record) -> str:
    """The measured value as text, with its statistic, its interval, and the values at further seeds, if any."""
    text = WORST.get(record.form, "")
    if record.form == "population":
        text = f"{record.statistic} of {record.n}: "
    text += format_number(record.measured)
    if record.interval:
        text += f", interval {_interval_text(*record.interval)}"
    if record.further:
        if record.noted:
            text += "; it does not hold at this seed, and held at two others: "
        else:
            text += "; rerun at two other seeds: "
        text += " and ".join(f"{format_number(run['measured'])} at seed {run['seed']}" for run in record.further)
    return text


def mark_and_text(record: Record) -> tuple[str, str]:
    """The line of a check for readers: its mark, and the text that follows the claim's name.

    Marks are ✓ (holds), ✗ (fails), ◐ (noted) and ○ (open).
    """
    if record.role == "open":
        return "○", f"open: {record.reason}"
    mark = "✗"
    if record.holds:
        mark = "✓"
    elif record.noted:
        mark = "◐"
    return mark, f"({record.role}) {record.check}: {format_measured(record)}; band {format_band(record)}"
