"""The degree of a network in its parameters, by the rules of Table 1 along a forward pass and by measurement.

A value v has degree k if v(cθ) = c^k v(θ) for all c > 0. Here c multiplies *every* parameter, frozen ones too, and
c^``k_in`` every input. ``degree`` runs a module once and carries degrees along, ``explain`` shows them;
``measure_degree`` looks at numbers instead. All take the same ``inputs`` and ``k_in``.
"""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from nbutils.homogeneity import rules  # noqa: F401  fills RULES
from nbutils.homogeneity.algebra import EVERY, Algebra, EpsilonWarning, NoRule, NotHomogeneous, rule, shown
from nbutils.homogeneity.forward import Forward, carry, watch
from nbutils.homogeneity.measure import measure_degree, one_minus_cosine, plain, scalable

__all__ = [
    "EVERY", "Algebra", "EpsilonWarning", "NoRule", "NotHomogeneous", "degree", "explain", "measure_degree",
    "one_minus_cosine", "rule", "scalable",
]  # fmt: skip


def degree(
    module: nn.Module, inputs: Any, k_in: Any = 0, approximate: bool = False, check: bool = False
) -> int | Fraction:
    """Degree of a module in all its parameters and its inputs, by the rules of Table 1.

    A copy of the module runs once on the inputs, and each operation hands on the degree of its value. What Python does
    with values is not seen, so a branch or a number that is made of them is refused, but for truths and places that
    are the same at every scale. The degree is that of the branch taken. What leaves torch by
    ``torch.FloatTensor([…])``, DLPack or another thread is not noticed: ``check`` shows it.

    Args:
        module: in ``eval()`` mode, if it has dropout. It is left as it is.
        inputs: a tensor, a tuple of them, or by name, as ``{"input_ids": …}``. Whole numbers and truths are constants.
        k_in: degree of the inputs: one number for all, or one for each, as a list or by name. A mask of 0 and −∞ has
            degree ``EVERY``.
        approximate: the asymptotic degree. Softmax, σ and tanh of a positive degree have degree 0, GELU and the like
            keep a positive degree, and a sum has the largest degree of its terms. This is bookkeeping, no proof: it
            fails where leading terms cancel, or vanish on a region, as that of ``elu(-abs(x))`` does. What divides by
            such a value (but for its norm), or is not continuous in it, is refused, and so is the larger of two
            unequal degrees.
        check: run the module at two scales, too, and raise where the outputs do not have the degree.

    Returns:
        The degree of the (first) output; a Fraction only where it is no whole number.

    Raises:
        NotHomogeneous: there is none, or a forward pass cannot see it; names the operation and its module.
        NoRule: an operation is not known; says how to add it.

    An ε of at most 0.001 that is added to the size of a vector, or is its lower bound, is taken as 0, in a norm of
    torch and in one that is written by hand: the paper leaves it out, before Lemma 5. An exact degree comes with an
    ``EpsilonWarning`` then, and ``explain`` has a note. Asymptotically ε is nothing.

    >>> net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    >>> degree(net, torch.ones(4))
    2
    """
    algebra = Forward(approximate)
    k, by_module = carry(module, inputs, k_in, algebra)
    places = dict.fromkeys(row["module"] or row["operation"] for row in algebra.rows if row["epsilon"])
    if places and not approximate:
        message = f"the degree is exact for ε = 0 only, in {', '.join(places)}"
        warnings.warn(message, EpsilonWarning, stacklevel=2)
    if k == EVERY:
        raise ValueError("the output is 0 or infinite at every scale: it has every degree")
    if check:
        _check(module, inputs, k_in, by_module, (1e3, 1e4) if approximate else (10, 100))
    return shown(k)


def _check(module: nn.Module, inputs: Any, k_in: Any, by_module: list[Any], scales: tuple[float, float]) -> None:
    """Raise if the output of the whole does not scale by its degree, and name the first part that does not."""
    outputs: list[Tensor] = []
    with plain(module, experts="eager") as copied:
        watch(copied, lambda _, out: outputs.append(out.detach().double().clone()))
        with scalable(copied, inputs, k_in) as output, torch.no_grad():
            for c in scales:
                output(float(c))
    half, ratio = len(outputs) // 2, scales[1] / scales[0]
    each = list(zip(by_module, outputs[:half], outputs[half:], strict=False))
    unlike = [name for (name, k), low, high in each if k != EVERY and not _close(high, low * ratio ** float(k))]
    if not _close(outputs[-1], outputs[half - 1] * ratio ** float(by_module[-1][1])):
        seen = math.log(outputs[-1].norm() / outputs[half - 1].norm(), ratio)
        why = f"by the rules its degree is not that of the outputs, which from scale {scales[0]:g} to {scales[1]:g}"
        raise NotHomogeneous(f"{why} grow by the power {seen:.4g} in all", "check", unlike[0], ())


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 0.05 * b.norm())


COLUMNS = ["module", "operation", "degree in", "degree out", "note"]


def explain(module: nn.Module, inputs: Any, k_in: Any = 0, approximate: bool = False) -> pd.DataFrame:
    """The table of operations: in which module, what they do, degree in and out, notes.

    Where ``degree`` would raise, the table ends, and the note with a ✗ says why.

    >>> net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Softmax(-1))
    >>> table = explain(net, torch.ones(4))
    >>> table["degree out"].tolist()[-2:], table["note"].iloc[-1]
    ([1, '–'], '✗ needs degree 0')
    """
    algebra = Forward(approximate)
    try:
        carry(module, inputs, k_in, algebra)
    except (NotHomogeneous, NoRule):
        if not algebra.rows:
            raise
    table = [
        (row["module"], row["operation"], shown(row["in"]), shown(row["out"]), "; ".join(row["note"]))
        for row in algebra.rows
    ]
    return pd.DataFrame(table, columns=COLUMNS, dtype=object)
