"""The training step in the name of a checkpoint, or why a name has none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from normgrowth.checkpoints.containers import AVERAGE

_AMOUNT = r"((?:[1-9]\d{0,2}(?:[_,]\d{3})+|\d+)(?:\.\d+)?)([kKmMbB]?)"  # 1_000_000 and 1,000,000 are one number
_END = r"(?=$|[^A-Za-z0-9.]|\.(?!\d)|tokens)"
_WORDS = ("(?:global_?|train_?)?step", "checkpoint(?!\\d+$)|ckpt|iteration|iter|it", "ba")
_MARKERS = [re.compile(rf"(?<![A-Za-z])(?i:{words})s?[-_= ]?{_AMOUNT}{_END}") for words in _WORDS]
_MARKERS.insert(1, re.compile(rf"(?<![A-Za-z0-9.,]){_AMOUNT}(?i:[-_ ]?steps|step)(?![A-Za-z0-9])"))  # 1000steps
_FAIRSEQ = re.compile(r"checkpoint_\d+_([1-9]\d*)()")  # epoch and update: the update is the step
_PLAIN = re.compile(rf"(?i:model(?:[-_](?=\d+$)|(?=\d{{3,}}$)))?{_AMOUNT}")
_PADDED = re.compile(  # g_00005000, 0000100_adapters: a number of six digits or more, with zeros
    r"(?:[A-Za-z][A-Za-z_-]*[-_])?(0\d{5,})(?:[-_][A-Za-z][A-Za-z_-]*)?()"
)
_LABELLED = re.compile(r"step|iter|(?<![A-Za-z])(?:it|ba)[-_= ]?\d", re.I)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def step_of(name: str) -> int | None:
    """The training step in a name, or None for a name without a step, or with two.

    >>> names = ("step1000-tokens4B", "checkpoint-300000", "step_20k", "step-1.5M", "iter_0001000", "64")
    >>> [step_of(name) for name in names]
    [1000, 300000, 20000, 1500000, 1000, 64]
    >>> step_of("step1_000_000"), step_of("step1,000")
    (1000000, 1000)
    >>> step_of("ep0-ba100"), step_of("checkpoint_1_1600"), step_of("checkpoint1")  # the last is an epoch of fairseq
    (100, 1600, None)
    >>> step_of("model001000"), step_of("g_00005000"), step_of("ema_20")  # an average, by its name
    (1000, 5000, 20)
    """
    name = AVERAGE.sub("_", name).strip("_-. ")
    if fairseq := _FAIRSEQ.fullmatch(name):
        return _number(*fairseq.groups())
    for marker in _MARKERS:
        steps = {_number(*match.groups()) for match in marker.finditer(name)}
        if steps:
            return steps.pop() if len(steps) == 1 else None
    plain = _PLAIN.fullmatch(name) or _PADDED.fullmatch(name)
    return _number(*plain.groups()) if plain else None


def says_step(name: str) -> bool:
    """Whether a name calls its number a step: that of ``checkpoint-10`` may count epochs.

    >>> [says_step(name) for name in ("step10", "iter_0000010", "ep0-ba10", "checkpoint-10", "10")]
    [True, True, True, False, False]
    """
    return bool(_LABELLED.search(name))


def _number(digits: str, unit: str) -> int | None:
    """The whole number that digits and a unit stand for, as 1500 for ``1.5`` and ``k``; None for a fraction."""
    whole, _, decimals = re.sub("[_,]", "", digits).partition(".")
    number, fraction = divmod(int(whole + decimals) * _UNITS[unit.lower()], 10 ** len(decimals))
    return number if fraction == 0 else None


def no_step(names: Iterable[str]) -> str:
    """Why a checkpoint with these names has no place in a series."""
    has_epoch = any("epoch" in name.lower() or re.fullmatch(r"checkpoint\d+|ep\d+", name) for name in names)
    if has_epoch:
        return "no step (epochs are not steps; rename, such as step500, or give --step)"
    return "no step in its name, or two; --step takes a pattern that finds it"


StepOf = Callable[[str], int | None]  # from a name to its step


def by_pattern(pattern: str | None) -> StepOf:
    r"""A function that reads the step in a name by a regular expression; without one, ``step_of``.

    The one group of the expression is the step, with its unit such as k.

    Raises:
        ValueError: the pattern is not a regular expression, or has not exactly one group.

    >>> by_pattern(r"phase2_(\d+k)")("phase2_30k-best")
    30000
    """
    if pattern is None:
        return step_of
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--step {pattern!r} is not a regular expression: {error}") from None
    if compiled.groups != 1:
        raise ValueError(f"--step {pattern!r}: put ( ) around the number of the step, once")

    def step_by_pattern(name: str) -> int | None:
        match = compiled.search(name)
        amount = re.fullmatch(_AMOUNT, match[1]) if match and match[1] else None
        return _number(*amount.groups()) if amount else None

    return step_by_pattern
