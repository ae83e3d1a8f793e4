"""*Your norm* on a model of the reader's: its parameters, where the model is, and parts that may fail by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from nbutils import notebook
from normgrowth import checkpoints, sentences
from normgrowth.checkpoints.find import checkpoints as find_checkpoints
from normgrowth.checkpoints.find import grouped, model_folder
from normgrowth.checkpoints.places import Checkpoint
from normgrowth.checkpoints.single import NO_STEP
from normgrowth.checkpoints.single import locate as locate_model

T = TypeVar("T")

SHIPPED = 24  # sentences, where the reader gives none
LARGE = 50_000_000  # parameters of a model that is measured at fewer checkpoints and scales
EXPECTED_ERRORS = (ValueError, OSError, OverflowError)  # their messages say what is wrong with a file or a model


class Refused(ValueError):
    """A parameter of the notebook that cannot be used. IPython shows the reason in one line, without a traceback.

    Used in ``your-own``.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"Refused: {self}"]


# ---- parameters ----


def check_parameters(*, mine: Any, match: Any, tokenizer_from: Any, lr: Any, decay: Any) -> None:
    """Raise ``Refused`` with one line for the first of the reader's parameters that cannot be used.

    ``lr`` and ``decay`` may be None: then nothing is said of weight decay (``require_rates``).

    Used in ``your-own``.

    >>> check_parameters(mine=None, match="*", tokenizer_from=None, lr="fast", decay=0.0)
    Traceback (most recent call last):
    nbutils.experiments.your_model.Refused: lr = 'fast': give a number above 0, the mean learning rate of the run
    """
    is_place = {name: _is_text(value) for name, value in (("mine", mine), ("tokenizer_from", tokenizer_from))}
    if mine is not None and not is_place["mine"]:
        raise Refused(f"mine = {mine!r}: give a folder, a repository org/name of the Hub, or None")
    if not isinstance(match, str) or not match:
        raise Refused(f"match = {match!r}: give a pattern for names of folders or revisions, such as 'stage1-*'")
    if tokenizer_from is not None and not is_place["tokenizer_from"]:
        raise Refused(f"tokenizer_from = {tokenizer_from!r}: give a folder, a repository org/name of the Hub, or None")
    if lr is not None and (not _is_number(lr) or lr <= 0):
        raise Refused(f"lr = {lr!r}: give a number above 0, the mean learning rate of the run")
    if decay is not None and (not _is_number(decay) or decay < 0):
        raise Refused(f"decay = {decay!r}: give a number, 0 or above, the weight decay of the run")


def require_rates(lr: float | None, decay: float | None) -> None:
    """Raise ValueError where the reader has not said the mean learning rate and the weight decay of the run.

    Used in ``your-own``.
    """
    if lr is None or decay is None:
        raise ValueError(
            "set lr and decay, the mean learning rate and weight decay of your run: no checkpoint says them"
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str | Path) and bool(str(value).strip())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_sentences(given: Any) -> list[str]:
    """The reader's sentences: a list of them, or the lines of a UTF-8 text file. None for those that ship.

    Used in ``your-own``.

    >>> len(read_sentences(None)), read_sentences(["One.", " ", "Two."])
    (24, ['One.', 'Two.'])
    """
    wanted = "give a list of strings, or a text file with one sentence a line"
    if given is None:
        return sentences.first(SHIPPED)
    if isinstance(given, list | tuple):
        if not all(isinstance(sentence, str) for sentence in given):
            raise Refused(f"sentences: a list of {_types(given)}: {wanted}")
        lines = list(given)
    elif _is_text(given):
        lines = _lines(Path(given), wanted)
    else:
        raise Refused(f"sentences = {given!r}: {wanted}")
    filled = [line.strip() for line in lines if line.strip()]
    if not filled:
        raise Refused(f"sentences: none in {given!r}: {wanted}")
    return filled


def _types(values: Sequence[Any]) -> str:
    return ", ".join(sorted({type(value).__name__ for value in values}))


def _lines(file: Path, wanted: str) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Refused(f"sentences = {str(file)!r}: {error.strerror or error}; {wanted}") from None
    except UnicodeDecodeError:
        raise Refused(f"sentences = {str(file)!r}: not a text in UTF-8; {wanted}") from None


# ---- where the model is ----


class Source(NamedTuple):
    """Where the checkpoints of a series are, in the order of steps, or the one model.

    Used in ``your-own``.
    """

    place: str  # a folder, or a repository of the Hub
    checkpoints: list[Checkpoint]
    is_series: bool


def locate(mine: str | Path, match: str = "*") -> Source:
    """Find a series of checkpoints, or a single model. Without a network, that of the Hub's cache.

    Used in ``your-own``.

    Raises:
        Refused: there is neither.
    """
    try:
        return _locate(str(mine), match)
    except (ValueError, OSError) as error:
        reason = reason_of(error).removeprefix(f"{mine}: ")
        raise Refused(f"mine = {str(mine)!r}: {reason}") from None


def _locate(mine: str, match: str) -> Source:
    if match == "*":
        try:
            model = locate_model(mine)
        except ConnectionError:
            mine = str(model_folder(mine))  # an earlier download; otherwise the error is raised again
            model = locate_model(mine)
        if model is not None:
            return Source(mine, [model], False)
    series, skipped = find_checkpoints(mine, match)
    if not series:
        names = "" if match == "*" else f" that matches {match!r}"
        reasons = ["no model, and no checkpoint with a step in its name" + names, *grouped(skipped)]
        raise ValueError("; ".join(reasons))
    return Source(mine, series, True)


# ---- parts ----


class Parts:
    """Parts of the chapter. One that fails on the reader's model says why, and the next one runs.

    On the series that the chapter makes itself nothing may fail, so there every error stops the run.

    Used in ``your-own``.

    >>> part = Parts(may_fail=True)
    >>> with part("norms", dashes=["own_end"]):
    ...     raise ValueError("no weights")
    norms: not measured: no weights
    own_end = –
    >>> with part("growth"):
    ...     part.require("norms")
    growth: not measured: no weights
    >>> part.reasons
    {'norms': 'no weights', 'growth': 'no weights'}
    """

    def __init__(self, *, may_fail: bool) -> None:
        self.may_fail = may_fail
        self.reasons: dict[str, str] = {}  # why parts were not measured

    @contextmanager
    def __call__(self, title: str, *, dashes: Sequence[str] = ()) -> Iterator[None]:
        """Run the ``with`` block. If it fails, ``dashes`` names the numbers of the text that become a dash."""
        try:
            yield
        except Exception as error:  # what can be wrong with a stranger's model has no list
            if not self.may_fail or isinstance(error, NameError):
                raise
            _close_figures()
            self.reasons[title] = reason_of(error)
            verb = "not drawn" if "figure" in title else "not measured"
            text = f"{verb}: {self.reasons[title]}"
            notebook.show({"text/plain": f"{title}: {text}", "text/markdown": f"**{title}**: {text}"})
            notebook.glue(**dict.fromkeys(dashes, "–"))

    def require(self, title: str) -> None:
        """Raise ValueError with the reason if a part was not measured."""
        if title in self.reasons:
            raise ValueError(self.reasons[title])


def reason_of(error: Exception) -> str:
    """One line: the message of an error, with its class unless the message is made for readers.

    Used in ``your-own``.
    """
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    message = " ".join(str(error).split()).replace("--tokenizer", "tokenizer_from")
    if isinstance(error, EXPECTED_ERRORS):
        return message
    return f"{type(error).__name__}: {message}".rstrip(": ")


def _close_figures() -> None:
    """Close figures, so that none that is half drawn is shown."""
    import matplotlib.pyplot as plt

    plt.close("all")


# ---- measurements ----


def series_of_one(model: checkpoints.MeasuredModel) -> checkpoints.MeasuredSeries:
    """The norms of a single model as a series with one step, 0.

    Used in ``your-own``.
    """
    table = model.table[["layer", "norm"]].copy()
    table.insert(0, "step", NO_STEP)
    table[["cos_similarity", "displacement_sq", "inner"]] = math.nan
    parameters = int(model.table.parameters.iloc[0])
    return checkpoints.MeasuredSeries(table, [], [], model.left_out, parameters, model.label)


def growing(series: checkpoints.MeasuredSeries) -> pd.DataFrame:
    """Rows of the total, of a series with at least two checkpoints that count.

    Used in ``your-own``.

    Raises:
        ValueError: only one counts.
    """
    total = series.table.query("layer == 'total'").reset_index(drop=True)
    if len(total) < 2:
        others = [f"{skip.label}: {skip.why}" for skip in series.duplicates + series.skipped]
        why = f" ({'; '.join(others)})" if others else ""
        raise ValueError(f"growth needs a series of two checkpoints or more that differ, and one counts here{why}")
    return total


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many of the items, evenly spaced, the first and the last among them.

    Used in ``your-own``.

    >>> spread(range(10), 4)
    [0, 3, 6, 9]
    """
    places = np.linspace(0, len(items) - 1, min(len(items), most), dtype=int)
    return [items[place] for place in places]


def print_deviations(tables: Mapping[Any, pd.DataFrame], asked: Mapping[Any, float]) -> None:
    """Print which tables of ``models`` are not in float64, or not at the scale that was asked for, and why.

    Used in ``your-own``.

    Args:
        tables: with ``c``, ``precision`` and ``reason`` in ``attrs``.
        asked: the scale of each.
    """
    for name, table in tables.items():
        attributes = table.attrs
        if attributes["reason"] or attributes["c"] != asked[name]:
            print(f"{name}: at c = {attributes['c']:g} in {attributes['precision']}: {attributes['reason']}")
