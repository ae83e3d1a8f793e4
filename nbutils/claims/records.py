"""The record that a check leaves in its notebook's output, and how a reader sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

Band = tuple[float | None, float | None]
Value = float | str | None  # JSON has no NaN: what is not finite is kept as text


@dataclass(frozen=True)
class Record:
    """One check: what was measured, the band it must lie in, whether it holds, and in which run.

    ``form`` is how it was checked (``band``, ``smallest``, ``largest``, ``nearest``, ``mean``, ``population``,
    ``open``); ``kind`` and ``role`` are those of ``Ledger``. Only some forms have the fields after ``versions``; the
    last two are the workflow's, which may run the chapter again at two further seeds.
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
    n: int | None = None  # trainings or replicates
    samples: int | None = None  # of which the worst was measured
    statistic: str | None = None
    interval: tuple[Value, Value] | None = None
    resolution: float | None = None
    reason: str | None = None  # why it is open
    anchor: str | None = None  # where pages link to
    further: tuple[Mapping[str, Any], ...] = ()  # seed, measured, holds
    noted: bool = False  # failed here, held at both further seeds

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Record:
        """A record from its JSON; fields of another version are left out."""
        known = {field.name for field in fields(cls)}
        facts: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in kept.items() if key in known}
        return cls(**facts)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what only some forms have is left out where it is not there."""
        always = ("kind", "measured", "expected", "band", "holds")  # 0 is there, too, and equals False
        return {key: x for key, x in asdict(self).items() if key in always or not (x is None or x is False or x == ())}

    @property
    def key(self) -> tuple[str, str]:
        """The names of claim and check, which no two checks of a chapter share."""
        return self.claim, self.check

    @property
    def fails(self) -> bool:
        """Whether it makes its claim fail, since it does not hold and was not noted."""
        return self.holds is False and not self.noted


def finite(value: float | None) -> Value:
    """A number as JSON can hold it."""
    if value is None:
        return None
    return float(value) if math.isfinite(value) else str(float(value))


def format_number(value: Value) -> str:
    """A measured value or the end of a band as text; None is no bound."""
    if value is None:
        return "∞"
    return value if isinstance(value, str) else f"{value:.5g}"


def format_band(record: Record) -> str:
    """The band of a record as text."""
    return _from_to(*record.band) if record.band else "no band"


def _from_to(low: Value, high: Value) -> str:
    if low is None or high is None:
        return f"≤ {format_number(high)}" if low is None else f"≥ {format_number(low)}"
    return f"[{format_number(low)}, {format_number(high)}]"


WHICH = {"smallest": "smallest ", "largest": "largest ", "nearest": "nearest an end "}  # of many values, the worst


def format_measured(record: Record) -> str:
    """What was measured: of what, the value, its interval, and what further seeds gave where these were run."""
    text = f"{record.statistic} of {record.n}: " if record.form == "population" else WHICH.get(record.form, "")
    text += format_number(record.measured)
    if record.interval:
        text += f", interval {_from_to(*record.interval)}"
    if record.further:
        text += "; it does not hold at this seed, and held at two others: " if record.noted else "; looked at again: "
        text += " and ".join(f"{format_number(each['measured'])} at seed {each['seed']}" for each in record.further)
    return text


def line(record: Record) -> tuple[str, str]:
    """What a reader sees of a check: its mark, and the text after the claim's name."""
    if record.role == "open":
        return "○", f"open: {record.reason}"
    body = f"({record.role}) {record.check}: {format_measured(record)}; band {format_band(record)}"
    return "✓" if record.holds else "◐" if record.noted else "✗", body
