"""The algebra of degrees: sums need equal degrees, in a product they add, and so on (Table 1 of the paper).

Degrees are fractions, so a rule can tell them from the plain numbers of a graph. A value that no scale changes, of
zeros and infinities, has ``EVERY`` degree; so has what is absent, such as a missing bias. Other constants, buffers too,
have degree 0. A rule is a plain function in ``RULES``, found by module class, by function or by method name;
``nbutils.homogeneity.rules`` has those of torch, and ``nbutils.homogeneity`` carries degrees through a graph by them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

__all__ = ["EVERY", "RULES", "Algebra", "EpsilonWarning", "NoRule", "NotHomogeneous", "rule"]

EVERY = -math.inf  # like the degree of the zero polynomial: in a sum it never counts, in a product it always wins
ZERO = Fraction(0)
Degree = Fraction | float
MASK_READERS = """add iadd add_ sub masked_fill masked_fill_ where MultiheadAttention TransformerEncoderLayer
    TransformerEncoder scaled_dot_product_attention invert logical_not bitwise_not getitem unsqueeze squeeze expand view
    reshape transpose permute repeat contiguous getattr size dim embedding Embedding"""
PARAMETERS = """weight bias in_proj_weight in_proj_bias q_proj_weight k_proj_weight v_proj_weight bias_k
    bias_v"""  # what the rules of torch.nn read
OPERANDS = ("input", "tensors", "other")  # keywords under which functions take what they work on, in order
IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "imatmul": "matmul", "ipow": "pow"}
RULES: dict[Any, Callable[..., Any]] = {}


class Mask(float):
    """``EVERY`` as the degree of an input: zeros and −∞ that are added, or a condition. Other uses are refused."""


class Leading(Fraction):
    """An asymptotic degree: of the leading term only, which may vanish on a region. One may not divide by it."""


class NotHomogeneous(ValueError):
    """There is no degree: ``node`` (of the graph), ``module_path`` and ``operation`` where the ``degrees`` meet."""

    def __init__(self, why: str, node: fx.Node, module_path: str, operation: str, degrees: tuple[Degree, ...]):
        self.node, self.module_path, self.operation, self.degrees = node, module_path, operation, degrees
        super().__init__(f"{_place(operation, node, module_path)}: {why}; it meets degree {shown(degrees) or 'none'}")


class NoRule(LookupError):
    """An operation that the algebra does not know; the message shows how to add it."""


class EpsilonWarning(UserWarning):
    """A normalization has ε > 0: the degree is that of ε = 0."""


def rule(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a rule for module classes, functions or method names.

    A rule takes the ``Algebra`` and the arguments of the operation (a module rule: the module before them), in which
    values of the graph are replaced by their degrees. It returns the degree of the result, or a tuple of degrees.
    Arguments that it does not read it takes under a name with a ``_``, as in ``*_``: they may not change with scale.

    >>> @rule(torch.sinc, "sinc")
    ... def sinc(algebra, x):
    ...     return algebra.constant(x)
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return add


def shown(degrees: Any) -> Any:
    """Degrees for people: whole ones as int, ``EVERY`` as a word, several joined by commas.

    >>> shown((Fraction(2), Fraction(1, 2), EVERY, None))
    '2, 1/2, every, –'
    """
    if isinstance(degrees, tuple):
        return ", ".join(str(shown(k)) for k in degrees)
    if degrees is None or degrees == EVERY:
        return "–" if degrees is None else "every"
    return int(degrees) if degrees == int(degrees) else degrees


def _place(operation: str, node: fx.Node, path: str) -> str:
    return f"{operation} at node {node.name!r}" + (f" in module {path!r}" if path else "")


class Algebra:
    """What rules are made of. ``rows`` has what was done, in order.

    >>> algebra = Algebra()
    >>> product = algebra.mul(Fraction(1), Fraction(1))  # a weight times an input
    >>> shown(algebra.add(product, Fraction(2))), shown(algebra.pow(product, 0.25))
    (2, Fraction(1, 2))
    """

    def __init__(self, approximate: bool = False):
        self.approximate = approximate
        self.rows: list[dict[str, Any]] = []
        self.frames: list[dict[str, Any]] = []

    def of(self, x: Any) -> Degree:
        """Degree of an operand: 1 for a parameter, 0 for a constant, ``EVERY`` for zeros, infinities and None."""
        if x is None or isinstance(x, Fraction):
            return EVERY if x is None else x
        if isinstance(x, nn.Parameter):
            return Fraction(1)
        if isinstance(x, tuple | list):
            return self.same(*x)
        x = torch.as_tensor(x)
        return EVERY if bool(((x == 0) | torch.isinf(x)).all()) else ZERO

    def add(self, *terms: Any) -> Degree:
        """A sum: equal degrees; asymptotically the largest of them, if its terms do not cancel."""
        degrees = {k for k in map(self.of, terms) if k != EVERY}
        if len(degrees) > 1:
            if not self.approximate:
                self.fail("a sum needs equal degrees", *terms)
            self.leads(f"asymptotic: of {shown(tuple(sorted(degrees)))} the largest")
        return max(degrees, default=EVERY)

    def same(self, *parts: Any) -> Degree:
        """Parts side by side, as in ``cat`` and ``where``: equal degrees, asymptotically too."""
        degrees = {k for k in map(self.of, parts) if k != EVERY}
        if len(degrees) > 1:
            self.fail("parts side by side need equal degrees", *parts)
        return max(degrees, default=EVERY)

    def mul(self, *factors: Any) -> Degree:
        """A product: degrees add."""
        return sum(map(self.of, factors), ZERO)

    def div(self, x: Any, y: Any) -> Degree:
        """A quotient: degrees subtract."""
        if isinstance(y, Leading):
            self.fail("the leading term of the divisor may vanish", x, y)
        return self.fail("the divisor is 0 or infinite", x, y) if self.of(y) == EVERY else self.of(x) - self.of(y)

    def pow(self, x: Any, exponent: Any) -> Degree:
        """A fixed power multiplies the degree; an exponent that is a value needs degree 0 on both sides."""
        if not isinstance(exponent, int | float):
            return self.constant(x, exponent)
        if isinstance(x, Leading) and exponent < 0:
            self.fail("the leading term of the divisor may vanish", x)
        if self.of(x) == EVERY:
            return EVERY if exponent > 0 else self.fail(f"0 or infinity to the power {exponent}", x)
        return self.of(x) * Fraction(exponent).limit_denominator(10**6)

    def constant(self, *xs: Any) -> Degree:
        """Any function at all: exact where its arguments do not change with scale, never otherwise."""
        if any(isinstance(x, Leading) for x in xs):
            self.fail("needs a degree that is exact, not asymptotic", *xs)
        return self.continuous(*xs)

    def continuous(self, *xs: Any) -> Degree:
        """A function that is continuous everywhere: as ``constant``, and a limit may be its argument, too."""
        return ZERO if all(self.of(x) in (ZERO, EVERY) for x in xs) else self.fail("needs degree 0", *xs)

    def bounded(self, x: Any) -> Degree:
        """A saturating function (softmax, σ, tanh): 0, exactly at degree 0 and asymptotically at a positive degree."""
        if not (self.approximate and self.of(x) > 0):
            return self.continuous(x)
        self.leads("asymptotic: saturates")
        return ZERO

    def far_linear(self, x: Any) -> Degree:
        """A function that is linear far out on either side (GELU, SiLU): asymptotically a positive degree stays."""
        if not (self.approximate and self.of(x) > 0):
            return self.continuous(x)
        self.leads("asymptotic: linear far from 0")
        return self.of(x)

    def normalized(self, x: Any, eps: float | None = None) -> Degree:
        """x over its own size: 0. With ε > 0 (None: machine ε) exact only where x does not change with scale."""
        if isinstance(eps, Fraction) or eps == EVERY:
            self.fail("ε is a value of the graph, not a number", x, eps)
        if self.of(x) not in (ZERO, EVERY) and (eps is None or eps > 0):
            if self.approximate and self.of(x) < 0:
                self.fail("ε outgrows x", x)
            self.note("machine ε taken as 0" if eps is None else f"ε = {eps:g} taken as 0", epsilon=True)
        return ZERO

    def affine(self, x: Any, weight: Any = None, bias: Any = None) -> Degree:
        """x · weight + bias. An absent weight is 1 and an absent bias 0."""
        return self.add(self.mul(x, 1 if weight is None else weight), bias)

    def fail(self, why: str, *operands: Any) -> Any:
        """Raise ``NotHomogeneous`` at the operation that is being looked at."""
        top = self.frames[-1]
        raise NotHomogeneous(why, top["node"], top["module"], top["operation"], tuple(map(self.of, operands)))

    def note(self, text: str, epsilon: bool = False) -> None:
        """Put a remark in the row of the current operation."""
        self.frames[-1]["note"].append(text)
        self.frames[-1]["epsilon"] |= epsilon

    def leads(self, text: str) -> None:
        """Put a remark, and mark the result as ``Leading``."""
        self.note(text)
        self.frames[-1]["leading"] = True

    def part(self, name: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Inside a rule: apply the rule of a part (a module, function or method name), so that errors name it."""
        top = self.frames[-1]
        return self.apply(top["node"], f"{top['module']}.{name}".lstrip("."), target, args, kwargs)

    def row(self, node: fx.Node, path: str, operation: str, degrees: Any = (), out: Any = None) -> dict[str, Any]:
        """Begin a row of the table."""
        self.rows.append({"node": node, "module": path, "operation": operation, "in": tuple(degrees), "out": out})
        self.rows[-1] |= {"note": [], "epsilon": False, "leading": False}
        return self.rows[-1]

    def apply(self, node: fx.Node, path: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Find the rule of an operation, run it, keep a row of it."""
        is_module = isinstance(target, nn.Module)
        name = type(target).__name__ if is_module else target if isinstance(target, str) else target.__name__
        found = module_rule(target) if is_module else RULES.get(target)
        in_place = found is None and not is_module and (name in IN_PLACE or name.endswith("_"))
        if in_place:
            found = RULES.get(IN_PLACE.get(name, name.rstrip("_")))
        operands = tuple(degrees_in([args, kwargs]))
        frame = self.row(node, path, name, operands)
        shape = name in ("size", "numel", "dim") or (name == "getattr" and args[1] in ("shape", "ndim"))
        frame["leading"] = not shape and any(isinstance(k, Leading) for k in operands)
        self.frames.append(frame)
        if found is None:
            raise NoRule(_how_to_add(name, node, path, target))
        if not is_module and kwargs.get("out") is not None:
            raise NoRule(f"{_place(name, node, path)}: out= changes another value; take what is returned instead")
        writes = _acts_in_place(target, args, kwargs)
        if is_module:  # arguments by position, however they were given
            bound = signature(type(target).forward).bind(target, *args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        else:
            args = (*args, *(kwargs[key] for key in OPERANDS if key in kwargs))
            kwargs = {key: value for key, value in kwargs.items() if key not in OPERANDS}
        masked = any(isinstance(k, Mask) for k in operands)
        if masked and name not in MASK_READERS.split():
            self.fail("a mask of degree EVERY is added or is a condition; give a Boolean factor degree 0", *operands)
        try:
            bound = signature(found).bind(self, *args, **kwargs)
        except TypeError as error:
            raise NoRule(f"{_place(name, node, path)}: its rule does not know these arguments: {error}") from error
        unread = tuple(degrees_in([value for key, value in bound.arguments.items() if key.startswith("_")]))
        if any(k not in (ZERO, EVERY) for k in unread):
            self.fail("an argument that the rule does not read changes with scale", *operands)
        out = found(self, *args, **kwargs)
        if frame["leading"]:
            out = tuple(map(_leading, out)) if isinstance(out, tuple) else _leading(out)
            for outer in self.frames[:-1]:
                outer["leading"] = True
        changed = args[1] if is_module else args[0] if args else None
        seen_later = (
            isinstance(out, Leading)
            and not isinstance(changed, Leading)
            and any(len(n.users) > 1 for n in node.all_input_nodes[:1])
        )
        if (in_place or writes) and (out != self.of(changed) or seen_later):
            self.fail("changes the degree of a value in place; write it out of place", changed, out)
        frame["out"] = out = Mask(EVERY) if masked and out == EVERY else out
        self.frames.pop()
        return out


signature = functools.cache(inspect.signature)  # of functions and rules, not of bound methods: they keep their module


def _leading(k: Any) -> Any:
    return Leading(k) if isinstance(k, Fraction) else k


def _acts_in_place(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a module or a function of torch.nn.functional has its ``inplace`` on."""
    if isinstance(target, nn.Module):
        return bool(getattr(target, "inplace", False))
    known = signature(target).parameters if inspect.isfunction(target) else ()
    at = list(known).index("inplace") if "inplace" in known else len(args)
    return bool(kwargs.get("inplace", at < len(args) and args[at]))


def degrees_in(arguments: Any) -> Iterator[Degree]:
    """The degrees among the arguments of an operation, nested ones too.

    >>> list(degrees_in((Fraction(2), ["no degree", {"dim": 1, "x": Fraction(1, 2)}])))
    [Fraction(2, 1), Fraction(1, 2)]
    """
    if isinstance(arguments, tuple | list | Mapping):
        for argument in arguments.values() if isinstance(arguments, Mapping) else arguments:
            yield from degrees_in(argument)
    elif isinstance(arguments, Fraction) or (isinstance(arguments, float) and arguments == EVERY):
        yield arguments


def _how_to_add(name: str, node: fx.Node, path: str, target: Any) -> str:
    """What to do about an operation without a rule."""
    is_module = isinstance(target, nn.Module)
    changed = is_module and any(base in RULES for base in type(target).__mro__)
    key = name if is_module else repr(name) if node.op == "call_method" else f"<the function {name}>"
    return (
        f"no rule for {_place(name, node, path)}"
        + (" (that of its class does not count: it has hooks, another forward or a parameter more)" if changed else "")
        + ". Say what it does to degrees, for example that it keeps them:\n\n"
        f"    @nbutils.homogeneity.rule({key})\n"
        f"    def {name.strip('_').lower()}(algebra{', module' if is_module else ''}, x):\n"
        "        return algebra.of(x)  # or algebra.mul(x, …), .add, .pow, .bounded, .constant, …\n"
    )


def module_rule(module: nn.Module) -> Callable[..., Any] | None:
    """Rule of a module's class, or of the base class whose forward it uses. None if hooks or a parametrization act.

    None, too, if a class of torch.nn has a parameter that its rule does not read, such as a slope.

    >>> from nbutils.homogeneity import rules  # fills RULES
    >>> module_rule(nn.Linear(2, 2)) is RULES[nn.Linear]
    True
    >>> module_rule(type("Twice", (nn.Linear,), {"forward": lambda self, x: 2 * x})(2, 2)) is None
    True
    """
    if is_parametrized(module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    if found := _root_mean_square(module):
        return found
    base: Any = next((base for base in type(module).__mro__ if base in RULES), None)
    own = "forward" in vars(module) or base is None or base.forward is not type(module).forward
    if own or (base.__module__.startswith("torch.") and not set(module._parameters) <= set(PARAMETERS.split())):
        return None
    return RULES[base]


def _root_mean_square(module: nn.Module) -> Callable[..., Any] | None:
    """Rule of a model's own normalisation by the root mean square, such as ``LlamaRMSNorm`` and ``T5LayerNorm``.

    Only the values of such a module show whether it multiplies by w or, as Gemma's, by 1 + w.
    """
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = module._parameters.get("weight")
    named = type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")) and not isinstance(module, nn.RMSNorm)
    if not named or eps is None or weight is None or weight.ndim != 1 or len(module._parameters) != 1:
        return None
    if len(signature(type(module).forward).parameters) != 2:
        return None
    with torch.no_grad():
        alone = copy.deepcopy(module)  # of this one a trace may have patched call and parameters
        ones = alone.forward(torch.ones_like(weight)).float() * math.sqrt(1 + float(eps))
        wide = weight.float()
        if torch.allclose(ones, wide, rtol=1e-3, atol=1e-3):
            return lambda a, m, x: a.affine(a.normalized(x, eps), m.weight)
        if torch.allclose(ones, 1 + wide, rtol=1e-3, atol=1e-3):
            return lambda a, m, x: a.mul(a.normalized(x, eps), a.add(1, m.weight))
    return None
