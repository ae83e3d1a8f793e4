"""Degrees along one run of a module, by the rules of Table 1: ``degree`` returns the last, ``explain`` shows all.

A value v has degree k if v(cθ) = c^k v(θ) for all c > 0. Here c multiplies *every* registered parameter, frozen ones
too, but for whole numbers, and c to the power of ``k_in`` every input.
"""

from __future__ import annotations

import contextlib
import math
from fractions import Fraction
from typing import Any

import pandas as pd
import torch
from torch import nn

from normgrowth.homogeneity.algebra import EVERY, NotHomogeneous, shown
from normgrowth.homogeneity.forward import Forward, carry
from normgrowth.homogeneity.measure import scalable


def degree(
    module: nn.Module, inputs: Any, k_in: Any = 0, approximate: bool = False, check: bool = False
) -> int | Fraction:
    """Degree of a module in all its parameters and its inputs, by the rules of Table 1.

    A copy of the module runs once on the inputs, and each operation hands on the degree of its value. What Python does
    with values is not seen, so a branch or a number that is made of them is refused, but for truths and places that
    are the same at every scale. The degree is that of the branch taken. What leaves torch by ``torch.FloatTensor([…])``
    or ``x.new([…])``, pickle, bytes, DLPack or another thread is not noticed: ``check`` shows it.

    Args:
        module: in ``eval()`` mode, if it has dropout. It is left as it is.
        inputs: a tensor, a tuple of them, or by name, as ``{"input_ids": …}``.
        k_in: degree of the inputs. Whole numbers and truths are constants, as is a mask of 0 and −∞.
        approximate: the asymptotic degree. Softmax, σ and tanh of a positive degree have degree 0, GELU and the like
            keep a positive degree, and a sum has the largest degree of its terms. This is bookkeeping, no proof: it
            fails where leading terms cancel, or vanish on a region, as that of ``elu(-abs(x))`` does. What divides by
            such a value, or rounds it, is refused, and so are ``maximum`` and ``minimum`` of two degrees. Its norm and
            deviation may be divided by; a deviation to which leading terms add nothing makes the degree wrong. Signs
            and comparisons are those of this run.
        check: run the module at two scales, too, and raise where the output does not have the degree.

    Returns:
        The degree of the (first) output; a Fraction only where it is no whole number.

    Raises:
        NotHomogeneous: there is none, a forward pass cannot see it, or an operation has no rule (the message says how
            to add one). Names the operation and its module.

    An ε > 0 in a norm is a term of degree 0, which the paper leaves out, before Lemma 5: the degree is asymptotic then.

    >>> net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    >>> degree(net, torch.ones(4))
    2
    """
    k = carry(module, inputs, k_in, Forward(approximate))
    if k == EVERY:
        raise ValueError("the output is 0 or infinite at every scale: it has every degree")
    if check:
        _check(module, inputs, k_in, k, *((1e3, 1e4) if approximate else (10.0, 100.0)))
    return shown(k)


def _check(module: nn.Module, inputs: Any, k_in: Any, k: Fraction, low: float, high: float) -> None:
    """Raise if the output at two scales is not as the degree says."""
    with scalable(module, inputs, k_in) as output, torch.no_grad():
        small, large = output(low), output(high)
    if not (large - small * (high / low) ** float(k)).norm() <= 0.05 * large.norm():
        power = float((large.norm() / small.norm()).log()) / math.log(high / low)
        why = f"by the rules its degree is {shown(k)}, but from scale {low:g} to {high:g} the output grows by the power"
        raise NotHomogeneous(f"{why} {power:.4g} in all")


def explain(module: nn.Module, inputs: Any, k_in: Any = 0, approximate: bool = False) -> pd.DataFrame:
    """The table of operations: in which module, what they do, degree in and out, notes.

    Where ``degree`` would raise, the table ends, and the note with a ✗ says why.

    >>> net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Softmax(-1))
    >>> table = explain(net, torch.ones(4))
    >>> table["degree out"].tolist()[-2:], table["note"].iloc[-1]
    ([1, '–'], '✗ needs degree 0')
    """
    algebra = Forward(approximate)
    with contextlib.suppress(NotHomogeneous):
        carry(module, inputs, k_in, algebra)
    table = [
        (row["module"], row["operation"], shown(row["in"]), shown(row["out"]), "; ".join(row["note"]))
        for row in algebra.rows
    ]
    return pd.DataFrame(table, columns=["module", "operation", "degree in", "degree out", "note"], dtype=object)
