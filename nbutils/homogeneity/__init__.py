"""The degree of a network in its parameters, by the rules of Table 1 over its graph and by measurement.

A value v has degree k if v(cθ) = c^k v(θ) for all c > 0. Here c multiplies *every* parameter, frozen ones too, and
c^``k_in`` every input. ``degree`` carries degrees through the ``torch.fx`` graph of a module, ``explain`` shows them;
``measure_degree`` and ``scaling_error`` look at numbers instead. All take the same ``k_in``.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pandas as pd
import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from nbutils.homogeneity import rules  # noqa: F401  fills RULES
from nbutils.homogeneity.algebra import (
    EVERY,
    ZERO,
    Algebra,
    Degree,
    EpsilonWarning,
    Mask,
    NoRule,
    NotHomogeneous,
    module_rule,
    shown,
)
from nbutils.homogeneity.algebra import rule as rule  # chapters and errors say homogeneity.rule

__all__ = ["degree", "explain", "measure_degree", "one_minus_cosine", "rule", "scaling_error"]


class _Tracer(fx.Tracer):
    """Stops at modules with a rule, and at those of torch.nn, so that one without a rule is named."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if is_parametrized(m) or isinstance(m, ParametrizationList):
            return False  # the weight is made in Python, which is looked into
        return module_rule(m) is not None or super().is_leaf_module(m, module_qualified_name)


def _input_degrees(module: nn.Module, k_in: Any) -> dict[str, Degree]:
    """Degree of each input by name: of all that have no default, or of those that ``k_in`` lists or names."""
    plain = [p for p in inspect.signature(module.forward).parameters.values() if "VAR" not in p.kind.name]
    names, needed = [p.name for p in plain], [p.name for p in plain if p.default is p.empty]
    if isinstance(k_in, Sequence):
        k_in = dict(zip(names, k_in, strict=False))
    given = dict(k_in) if isinstance(k_in, Mapping) else dict.fromkeys(needed, k_in)
    if set(given) - set(names) or set(needed) - set(given):
        raise ValueError(
            f"k_in gives a degree for {list(given)}; the inputs are {names}, of which {needed} must have one"
        )
    return {name: Mask(k) if k == EVERY else Fraction(k) for name, k in given.items()}


def _trace(module: nn.Module, given: Mapping[str, Any]) -> fx.Graph:
    """The graph of a module; inputs that are not given have their defaults."""
    if module_rule(module) is not None:
        graph = fx.Graph()
        inputs: dict[str, Any] = {name: graph.placeholder(name) for name in given}
        name = type(module).__name__.lower()
        graph.output(graph.create_node("call_module", "", kwargs=inputs, name=name))
        return graph
    if module._forward_hooks or module._forward_pre_hooks:
        raise NoRule("the module has hooks, which the trace does not see; put it into an nn.Sequential")
    parameters = inspect.signature(module.forward).parameters.values()
    fixed = {p.name: p.default for p in parameters if p.name not in given and p.default is not p.empty}
    try:
        return _Tracer().trace(module, concrete_args=fixed or None)
    except (fx.proxy.TraceError, TypeError, ValueError) as error:  # ValueError: more arguments than fx can fix
        error.add_note(
            "torch.fx cannot trace this. Give the module that it is in a rule: then it is not looked into. "
            "Or measure: nbutils.homogeneity.measure_degree needs no trace."
        )
        raise


def _is_assert(node: fx.Node) -> bool:
    return node.op == "call_function" and "_assert" in getattr(node.target, "__name__", "")


def _is_guard(node: fx.Node) -> bool:
    """What ``torch.fx`` adds to check that inputs have their defaults."""
    return _is_assert(node) or (bool(node.users) and all(map(_is_assert, node.users)))


def _interpret(module: nn.Module, k_in: Any, algebra: Algebra) -> Degree:
    """Carry degrees through the graph of a module. Of several outputs the first one counts."""
    given, before = _input_degrees(module, k_in), set(vars(module))
    values: dict[fx.Node, Any] = {}
    try:
        for node in _trace(module, given).nodes:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
            if node.op == "placeholder" and node.target in given:
                values[node] = given[node.target]
                algebra.row(node, "", "input", out=values[node])
            elif _is_guard(node) or (node.op == "placeholder" and all(map(_is_guard, node.users))):
                values[node] = ZERO
            elif node.op == "placeholder":
                raise ValueError(f"k_in gives no degree for the input {node.target!r}")
            elif node.op == "get_attr":
                tensor = operator.attrgetter(node.target)(module)
                values[node] = algebra.of(tensor)
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "constant"
                algebra.row(node, node.target, kind, out=values[node])
            elif node.op == "call_module":
                values[node] = algebra.apply(node, node.target, module.get_submodule(node.target), args, kwargs)
            elif node.op in ("call_function", "call_method"):
                stack = list(node.meta.get("nn_module_stack", {}).values())
                values[node] = algebra.apply(node, stack[-1][0] if stack else "", node.target, args, kwargs)
        return algebra.of(_first_output(args[0]))
    finally:
        for name in set(vars(module)) - before:  # constants that fx has hung onto the module
            delattr(module, name)


def _first_output(out: Any) -> Any:
    """Of the outputs of a module the first one, as of attention with its weights."""
    while isinstance(out, tuple | list | Mapping):
        out = next(iter(out.values() if isinstance(out, Mapping) else out))
    return out


def degree(module: nn.Module, k_in: Any = 1, *, approximate: bool = False) -> int | Fraction:
    """Degree of a module in all its parameters and its inputs, by the rules of Table 1.

    Args:
        module: in ``eval()`` mode, if it has dropout. It is not run and not changed.
        k_in: degree of the inputs: one number for all that have no default, or one for each, as a list or by name.
            Inputs left out keep their default. A mask of 0 and −∞ has degree ``EVERY``, and so has a Boolean one
            that is only a condition or an ``attn_mask``; other Boolean inputs have 0, the index of an embedding any.
        approximate: the asymptotic degree. Softmax, σ and tanh of a positive degree have degree 0, GELU and the like
            keep a positive degree, and a sum has the largest degree of its terms. This is bookkeeping, no proof: it
            fails where leading terms cancel, or vanish on a region, as that of ``elu(-abs(x))`` does. What divides by
            such a value, or is not continuous in it, is refused, and so is the larger of two unequal degrees.

    Returns:
        The degree of the (first) output; a Fraction only where it is no whole number.

    Raises:
        NotHomogeneous: there is none; says which operation ends it.
        NoRule: an operation is not known; says how to add it.

    A normalization with ε > 0 is not homogeneous, unless its input has degree 0. The exact degree is then that of
    ε = 0, as the paper has it before Lemma 5, with an ``EpsilonWarning`` and notes in ``explain``. To raise would leave
    no common model with a degree, on account of a term that shows at small scales only. Asymptotically ε is nothing, so
    there is no warning.

    >>> degree(nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False)), k_in=0)
    2
    """
    algebra = Algebra(approximate)
    k = _interpret(module, k_in, algebra)
    touched = [row["module"] or row["node"].name for row in algebra.rows if row["epsilon"]]
    if touched and not approximate:
        warnings.warn(f"the degree is exact for ε = 0 only, in {', '.join(touched)}", EpsilonWarning, stacklevel=2)
    if k == EVERY:
        raise ValueError("the output is 0 or infinite at every scale: it has every degree")
    return shown(k)


COLUMNS = ["node", "module", "operation", "degree in", "degree out", "note"]


def explain(module: nn.Module, k_in: Any = 1, *, approximate: bool = False) -> pd.DataFrame:
    """The table of nodes: where they are, what they do, degree in and out, notes. Parts of a module have own rows.

    Where ``degree`` would raise, the table ends, and the note with a ✗ says why.

    >>> table = explain(nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Softmax(-1)), k_in=0)
    >>> table["degree out"].tolist(), table["note"].iloc[-1]
    ([0, 1, 1, '–'], "✗ Softmax at node '_2' in module '2': needs degree 0; it meets degree 1")
    """
    algebra = Algebra(approximate)
    try:
        _interpret(module, k_in, algebra)
    except (NotHomogeneous, NoRule) as error:
        if not algebra.frames:
            raise
        algebra.frames[-1]["note"].append(f"✗ {str(error).splitlines()[0]}")
    table = [
        (r["node"].name, r["module"], r["operation"], shown(r["in"]), shown(r["out"]), "; ".join(r["note"]))
        for r in algebra.rows
    ]
    return pd.DataFrame(table, columns=COLUMNS, dtype=object)


# --- Measurement ------------------------------------------------------------------------------------------------------


def one_minus_cosine(a: Tensor, b: Tensor, dim: int = -1) -> Tensor:
    """1 − cos of the angle between a and b in float64, as ½‖â − b̂‖²: good down to 1e-32, not 1e-16.

    NaN where a or b is zero.

    >>> a, b = torch.tensor([[1.0, 0.0], [1.0, 1e-10]], dtype=torch.float64)
    >>> f"{one_minus_cosine(a, b).item():.3g}"  # ½ · 10⁻²⁰
    '5e-21'
    """
    a, b = (x.double() / x.double().abs().amax(dim, keepdim=True) for x in (a, b))  # squares do not overflow
    a, b = (x / x.norm(dim=dim, keepdim=True) for x in (a, b))
    return 0.5 * (a - b).square().sum(dim)


@contextmanager
def scalable(module: nn.Module, inputs: Any, k_in: Any) -> Iterator[Callable[[Any], Tensor]]:
    """The first output of a module as a function of the scale c, in float64, flattened. The module stays as it is.

    >>> with scalable(nn.Linear(2, 1, bias=False), torch.ones(2), k_in=1) as output:
    ...     round(float(output(3.0) / output(1.0)), 6)  # weights and inputs times 3
    9.0
    """
    named = list(inputs) if isinstance(inputs, Mapping) else None
    inputs = list(inputs.values()) if named else inputs if isinstance(inputs, tuple | list) else (inputs,)
    if isinstance(k_in, Mapping):
        k_in = [k_in[name] for name in named or list(inspect.signature(module.forward).parameters)[: len(inputs)]]
    powers = [float(k) for k in (k_in if isinstance(k_in, Sequence) else [k_in] * len(inputs))]

    def double(x: Any) -> Any:
        return x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x

    inputs = [double(x) for x in inputs]
    parameters = {name: double(x) for name, x in module.named_parameters()}
    buffers = {name: double(x) for name, x in module.named_buffers()}

    def output(c: Any) -> Tensor:
        tensors = {name: c * x for name, x in parameters.items()} | {name: x.clone() for name, x in buffers.items()}
        scaled = [
            x * c**k if isinstance(x, Tensor) and x.is_floating_point() and k not in (0, EVERY) else x
            for x, k in zip(inputs, powers, strict=True)
        ]
        args, kwargs = ((), dict(zip(named, scaled, strict=True))) if named else (tuple(scaled), {})
        try:
            found = torch.func.functional_call(module, tensors, args, kwargs)
        except IndexError as error:
            largest = max(
                (int(x.max()) for x in inputs if isinstance(x, Tensor) and not x.is_floating_point()), default=0
            )
            message = f"an input has {largest}, which a table of the model has no row for; is the tokenizer its own?"
            raise ValueError(f"{message} ({error})") from error
        return _first_output(found).reshape(-1)

    fused = torch.backends.mha.get_fastpath_enabled()  # fused kernels have no forward-mode derivative
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), _plain_experts(module):
            yield output
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def _plain_experts(module: Any) -> Iterator[None]:
    """Experts of ``transformers`` one by one: grouped products know neither float64 nor forward derivatives."""
    of_its_own = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if of_its_own is None or not hasattr(module, "set_experts_implementation"):
        yield
        return
    module.set_experts_implementation("eager")
    try:
        yield
    finally:
        module.set_experts_implementation(of_its_own)


def measure_degree(module: nn.Module, inputs: Any, scales: Sequence[float], *, k_in: Any = 1) -> pd.DataFrame:
    """Degree by numbers: at each scale c by Euler's identity, and from it to the next scale by the log-ratio.

    With D = d/dt f(e^t cθ) at t = 0, a derivative along all parameters and inputs, k-homogeneous f have D = k·f
    (Lemma 9). ``euler`` is the k that fits best, ⟨D, f⟩/⟨f, f⟩, and ``residual`` is ‖D − k·f‖/‖f‖, which is 0 if one k
    fits all outputs; both are NaN where f has no derivative, as √x at 0.
    Where a module has no such derivative in torch, as BLOOM's GELU, D is a difference over c·e^±0.001, right to about
    1e-6, and a ``RuntimeWarning`` says so. ``log_ratio`` is ln(‖f(c'θ)‖/‖f(cθ)‖) / ln(c'/c) with the next scale c', NaN
    at the last one.

    The derivative is asked of the module's own code: where that detaches a value or leaves float64 it may be wrong,
    with a residual of 0. So the outputs at c·e^±0.001 are asked as well, and a ``RuntimeWarning`` names the scales at
    which the two differ by more than 1 %: believe ``log_ratio`` there. (A bias that opens a unit just there differs,
    too.)

    Args:
        module: runs in its present mode (dropout must be off), in float64, with its buffers as they are.
        inputs: a tensor, a tuple of them, or by name, as ``{"input_ids": …, "decoder_input_ids": …}`` of an
            encoder–decoder. Those of whole numbers are not scaled.
        scales: positive numbers c.
        k_in: inputs are multiplied by c^k_in: one number for all of them, or one for each, as a list or by name.

    Raises:
        ValueError: the output is zero or not finite at some scale; a token that the model does not know.

    >>> measure_degree(nn.Linear(4, 2, bias=False), torch.ones(4), [1, 10])["euler"].round(6).tolist()
    [2.0, 2.0]
    """
    rows: list[tuple[float, float, float, float]] = []
    unlike: list[str] = []
    zero, step, reason = torch.zeros((), dtype=torch.float64), 1e-3, ""
    with scalable(module, inputs, k_in) as output:
        for c in map(float, scales):
            try:
                f, along = torch.func.jvp(lambda t, c=c: output(c * t.exp()), (zero,), (torch.ones_like(zero),))[:2]
            except RuntimeError as error:  # a NotImplementedError is one
                if not re.search("forward AD|functorch|forward-mode", str(error)):
                    raise
                reason = str(error).splitlines()[0]
                with torch.no_grad():
                    f, low, high = (output(c * math.exp(t)) for t in (0, -step, step))
                along = (high - low) / (2 * step)
            size = f.norm()
            if not 0 < size < math.inf:
                raise ValueError(f"the output has norm {float(size)} at scale {c}: there is no degree to measure")
            k = along @ f / size**2
            with torch.no_grad():
                near, far = (output(c * math.exp(sign * step)).norm().log() for sign in (-1, 1))
            seen = float(far - near) / (2 * step)
            if abs(float(k) - seen) > 0.01 * max(1, abs(seen)):  # NaN, as of √x at 0, is shown in the table
                unlike.append(f"{float(k):.4g} against {seen:.4g} at scale {c:g}")
            rows.append((c, float(k), float((along - k * f).norm() / size), float(size.log())))
    if reason:
        warnings.warn(f"D by differences, since torch has no derivative here ({reason})", RuntimeWarning, stacklevel=2)
    if unlike:
        why = "the derivative is not that of the outputs: euler and the local log-ratio are"
        warnings.warn(f"{why} {', '.join(unlike)}", RuntimeWarning, stacklevel=2)
    table = pd.DataFrame(rows, columns=["scale", "euler", "residual", "log_size"])
    steps = table.log_size.diff() / table.scale.map(math.log).diff()
    return table.drop(columns="log_size").assign(log_ratio=steps.shift(-1))


def scaling_error(
    module: nn.Module,
    inputs: Any,
    scales: Sequence[float],
    k: float | None = None,
    *,
    k_in: Any = 1,
    reference: float = 1.0,
) -> pd.DataFrame:
    """The error of Definition 4 against c: how far f(cθ) is from c^k f(θ).

    ``absolute`` is the largest such error over the outputs, ``relative`` that over c^k, ``one_minus_cosine`` the angle
    between f(cθ) and f(θ), for which k does not matter. With another ``reference`` r, f(rθ)/r^k stands for f(θ): with a
    large r it is close to the limit. k is the asymptotic ``degree`` unless given; the rest as in ``measure_degree``.

    >>> net = nn.Linear(1, 1).requires_grad_(False)
    >>> net.weight[:], net.bias[:] = 1, 1
    >>> scaling_error(net, torch.ones(1), [1, 10])[["absolute", "relative"]].values.tolist()  # c² + c against 2c²
    [[0.0, 0.0], [90.0, 0.9]]
    """
    k = float(degree(module, k_in, approximate=True) if k is None else k)
    rows = []
    with scalable(module, inputs, k_in) as output, torch.no_grad():
        start = output(float(reference)) / float(reference) ** k
        for c in map(float, scales):
            f = output(c)
            error = float((f - c**k * start).abs().max())
            rows.append((c, error, error / c**k, float(one_minus_cosine(f, start))))
    return pd.DataFrame(rows, columns=["scale", "absolute", "relative", "one_minus_cosine"])
