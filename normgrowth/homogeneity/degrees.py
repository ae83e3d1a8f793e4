"""Degrees along one run of a module, by the rules of Table 1: ``degree`` returns the last one, ``explain`` all of them.

A value v has degree k if v(cθ) = c^k v(θ) for all c > 0. Here c multiplies *every* registered parameter, frozen ones
too, or those that ``parameters`` selects, and c to the power ``input_degree`` multiplies every input. Integers and
booleans are not multiplied.
"""

from __future__ import annotations

import contextlib
from fractions import Fraction
from typing import Any

import pandas as pd
from torch import nn

from normgrowth.homogeneity.algebra import EVERY, NotHomogeneous, readable
from normgrowth.homogeneity.check import check_degree
from normgrowth.homogeneity.forward import Forward, carry
from normgrowth.homogeneity.measure import Selection


def degree(
    module: nn.Module,
    inputs: Any,
    input_degree: Any = 0,
    approximate: bool = False,
    check: bool = False,
    parameters: Selection = None,
) -> int | Fraction:
    """Degree of a module in its parameters, or some of them, and its inputs, by the rules of Table 1.

    A copy of the module runs once on the inputs, and every operation passes on the degree of its value. What Python
    does with values is not seen, so a branch or a number that is computed from values is refused, unless it depends
    only on booleans and indices that are the same at every scale. The degree is that of the branch taken. Values that
    leave torch by ``torch.FloatTensor([…])`` or ``x.new([…])``, pickle, bytes, DLPack or another thread go unnoticed:
    ``check`` detects this.

    Args:
        module: in ``eval()`` mode if it has dropout. It is left unchanged.
        inputs: a tensor, a tuple of tensors, or tensors by name, as ``{"input_ids": …}``.
        input_degree: degree of the inputs. Integers and booleans are constants, and so is a mask of 0 and −∞.
        approximate: compute the asymptotic degree. Softmax, σ and tanh of a positive degree have degree 0, GELU and
            similar functions keep a positive degree, and a sum has the largest degree of its terms, as have parts side
            by side. The leading part of each value is carried along: a softmax is 1 at its largest score, of a value
            with an upper bound that part is left which is negative, and two terms of a sum may
            cancel. Where the leading part is 0, the degree is refused, as it is where lower terms are seen to decide in
            a softmax, σ, tanh or a norm with an ε. So are division by a value whose leading part is 0 somewhere,
            rounding, and
            ``maximum`` and ``minimum`` of values with different degrees unless one is a constant. This is bookkeeping,
            not a proof: where a comparison, a sort or a maximum meets equal leading parts, lower terms are not
            asked, and terms that cancel in a matrix product or a sum of many are not seen.
        check: also run the module at several scales, in float64 throughout, and raise if the output does not have the
            degree. An exact degree must hold from scale 1 to 10 and from 10 to 100; an asymptotic one from 10³ to 10⁴,
            or further up, as long as nothing overflows.
        parameters: which parameters c multiplies, by name; the others are constants. All by default.

    Returns:
        The degree of the (first) output, as a Fraction only where it is not an integer.

    Raises:
        NotHomogeneous: there is no degree, a forward pass cannot see it, or an operation has no rule (the message says
            how to add one). Names the operation and its module.
        ValueError: the output is 0 or infinite at every scale, an input is not a tensor, a number or text, or no
            parameter is selected; with ``check``, a number overflows at scales that are needed.

    An ε > 0 in a norm is a term of degree 0, which the paper leaves out (before Lemma 5): the degree is then
    asymptotic.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    >>> degree(net, torch.ones(4)), degree(net, torch.ones(4), parameters=lambda name: name == "0.weight")
    (2, 1)
    """
    k = carry(module, inputs, input_degree, Forward(approximate), parameters)
    if k == EVERY:
        raise ValueError("the output is 0 or infinite at every scale: it has every degree")
    if check:
        check_degree(module, inputs, input_degree, k, approximate, parameters)
    return readable(k)


def explain(
    module: nn.Module, inputs: Any, input_degree: Any = 0, approximate: bool = False, parameters: Selection = None
) -> pd.DataFrame:
    """A table of operations: the module in which each runs, its name, degrees in and out, and notes.

    Arguments are those of ``degree``. Where ``degree`` would raise, the table ends, and the note with a ✗ says why.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Softmax(-1))
    >>> table = explain(net, torch.ones(4))
    >>> table["degree out"].tolist()[-2:], table["note"].iloc[-1]
    ([1, '–'], '✗ needs degree 0')
    """
    algebra = Forward(approximate)
    with contextlib.suppress(NotHomogeneous):
        carry(module, inputs, input_degree, algebra, parameters)
    table = [
        (row["module"], row["operation"], readable(row["in"]), readable(row["out"]), "; ".join(row["note"]))
        for row in algebra.rows
    ]
    return pd.DataFrame(table, columns=["module", "operation", "degree in", "degree out", "note"], dtype=object)
