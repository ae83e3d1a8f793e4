"""A model that runs on one sentence with its attention weights or its layers held constant, and what depends on it.

Modes of torch see every function that a forward pass calls. A first pass notes which call made which attention weights;
in later passes the same call gives something else. A call is known by its number within the call of its module, since
the number of calls before it may change: tokens go to other experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PRODUCTS = ("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__")  # names of torch's functions
SEED = 0  # of the random vectors that gradients are taken of


class Support:
    """Which entries of a parameter some value depends on, by its gradient, which is not 0 there."""

    def __init__(self, gradient: Tensor):
        """``gradient``: of the parameter's shape."""
        nonzero = gradient != 0
        self.shape = gradient.shape
        self.is_empty = not bool(nonzero.any())
        self.along = [  # for each dimension, which of its indices have an entry, of a shape that broadcasts
            nonzero.any(_other_dimensions(nonzero, d), keepdim=True) if nonzero.ndim > 1 else nonzero
            for d in range(nonzero.ndim)
        ]

    def empty_rows(self) -> Tensor:
        """Slices without an entry, in the dimension where they make up most of the parameter; bool, broadcastable."""
        if not self.along:
            return torch.tensor(self.is_empty)
        return max((~rows for rows in self.along), key=lambda rows: float(rows.double().mean()))

    def rows_apart_from(self, other: Support) -> Tensor:
        """Slices that ``other`` does not depend on, in the dimension where both depend on different slices."""
        apart = [~others for rows, others in zip(self.along, other.along, strict=True) if not (rows & others).any()]
        return apart[0] if apart else torch.zeros_like(self.along[0])

    def is_apart_from(self, other: Support) -> bool:
        """Whether both depend on different slices of the parameter."""
        return any(not (rows & others).any() for rows, others in zip(self.along, other.along, strict=True))


class Factor(NamedTuple):
    """One of two tensors that are multiplied."""

    supports: dict[str, Support]  # what it depends on, by name of the parameter
    alone: set[str]  # names of those parameters of which it depends on other entries than the other factor
    is_nonlinear: bool  # in one of these


def _other_dimensions(x: Tensor, dimension: int) -> list[int]:
    return [d for d in range(x.ndim) if d != dimension]


def supports(values: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Support]:
    """Of the parameters that a random combination of values depends on, the entries; the others are left out."""
    gradients = _gradients(values, parameters, create_graph=False)
    return {name: Support(gradient) for name, gradient in gradients.items()}


def _gradients(values: Sequence[Tensor], parameters: Mapping[str, Tensor], create_graph: bool) -> dict[str, Tensor]:
    """Gradients of a random combination of the values that have one, by name of the parameters that they reach."""
    values = [value for value in values if value.requires_grad]
    if not values:
        return {}
    generator = torch.Generator().manual_seed(SEED)
    directions = [torch.randn(value.shape, generator=generator).to(value) for value in values]
    gradients = torch.autograd.grad(
        values,
        list(parameters.values()),
        directions,
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
    )
    return {name: gradient for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}


# ---- runs ----


Call = tuple[nn.Module, int, int]  # the module whose code calls, its how many'th pass, and the number within this


class _Calls(TorchFunctionMode):
    """Within a ``with`` block: sees the calls that give a floating-point tensor, and may change their result."""

    def __init__(self, model: nn.Module, see: Callable[[Call, Any, Sequence[Any], Tensor], Tensor]):
        """``see``: takes the call, its function, arguments and result, and returns the result to use."""
        super().__init__()
        self.model = model
        self.see = see
        self.passes: Counter[nn.Module] = Counter()
        self.open: list[tuple[nn.Module, int]] = [(model, 0)]  # modules that are running, the innermost last
        self.count: Counter[tuple[nn.Module, int]] = Counter()

    def __enter__(self) -> _Calls:
        self.hooks: list[Any] = []
        for module in self.model.modules():
            self.hooks.append(module.register_forward_pre_hook(self._open))
            self.hooks.append(module.register_forward_hook(self._close, prepend=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        super().__exit__(*error)

    def _open(self, module: nn.Module, _args: Any) -> None:
        self.passes[module] += 1
        self.open.append((module, self.passes[module]))

    def _close(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.open.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or not result.is_floating_point() or func is Tensor.detach:
            return result  # hooks call detach, in some passes only
        self.count[self.open[-1]] += 1
        call = (*self.open[-1], self.count[self.open[-1]])
        return self.see(call, func, args, result)


class Run:
    """A model of ``transformers`` on one sentence, which may run with parts of its computation held constant."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor]):
        """The first passes: which calls make attention weights, which modules end a layer, which are norms.

        Raises:
            ValueError: the model returns no attention weights or no representations, or others than it computes.
        """
        self.model = model
        self.inputs = inputs
        self.parameters = dict(model.named_parameters())
        self.gains: set[str] = set()  # names of the parameters of norms
        self.forward()  # so that what a model keeps from its first pass is there, and calls are the same from now on
        made: list[tuple[Call, Tensor]] = []
        ends: list[tuple[nn.Module, int, Any]] = []
        with self._watched(ends):
            states = self.states(self.forward())

        def note(call: Call, func: Any, args: Sequence[Any], result: Tensor) -> Tensor:
            made.append((call, result))
            return result

        with _Calls(model, note):
            output = self.forward()
        attention = self.attention(output)
        kind = type(model).__name__
        if not attention or not states:
            missing = "attention weights" if not attention else "representations of its layers"
            implementation = getattr(model.config, "_attn_implementation", None)
            advice = "" if implementation in (None, "eager") else '. Load it with attn_implementation="eager"'
            raise ValueError(f"the parts of {kind} cannot be told: it returns no {missing}{advice}")
        _check_attention(kind, output)
        first_call: dict[int, Call] = {}
        for call, result in made:
            first_call.setdefault(_storage(result), call)
        if any(_storage(weights) not in first_call for weights in attention):
            raise ValueError(f"the parts of {kind} cannot be told: no function of torch makes its attention weights")
        self.attention_calls = {first_call[_storage(weights)] for weights in attention}
        storages = {_storage(tensor) for tensor in states}  # which may be transposed
        tensors = [(module, call, _first(result)) for module, call, result in ends]
        self.layer_ends = {(module, call) for module, call, x in tensors if x.numel() and _storage(x) in storages}

    def forward(self) -> Any:
        """Output of the model, with all representations and attention weights."""
        network: Any = self.model
        if network.config.is_encoder_decoder and "decoder_input_ids" not in self.inputs:
            network = network.get_encoder()
        return network(**self.inputs, output_hidden_states=True, output_attentions=True, return_dict=True)

    @staticmethod
    def attention(output: Any) -> list[Tensor]:
        """Attention weights of all layers, also those between decoder and encoder."""
        return [tensor for key, tensor in _tensors(output) if key.endswith("attentions")]

    @staticmethod
    def states(output: Any) -> list[Tensor]:
        """Representations of all layers."""
        return [tensor for key, tensor in _tensors(output) if key.endswith("hidden_states")]

    @staticmethod
    def embedding_states(output: Any) -> list[Tensor]:
        """Representations of layer 0, of an encoder and of a decoder."""
        return [output[key][0] for key in output if key.endswith("hidden_states") and output[key]]

    @staticmethod
    def results(output: Any) -> list[Tensor]:
        """What the model is asked for: logits, last representations, those of an encoder, a pooled vector."""
        return [value for value in output.values() if isinstance(value, Tensor) and value.is_floating_point()]

    @contextmanager
    def attention_replaced(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Within a ``with`` block the model computes with ``change`` of its attention weights."""
        calls = self.attention_calls
        with _Calls(self.model, lambda call, func, args, result: change(result) if call in calls else result):
            yield

    @contextmanager
    def layers_cut(self) -> Iterator[None]:
        """Within a ``with`` block each layer takes the layers below it for constant."""
        counts: dict[nn.Module, int] = {}

        def cut(module: nn.Module, args: Any, output: Any) -> Any:
            counts[module] = counts.get(module, 0) + 1
            if (module, counts[module]) not in self.layer_ends:
                return output
            return output.detach() if isinstance(output, Tensor) else (output[0].detach(), *output[1:])

        hooks = [module.register_forward_hook(cut) for module in {module for module, _ in self.layer_ends}]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _watched(self, ends: list[tuple[nn.Module, int, Any]]) -> Iterator[None]:
        """Within a ``with`` block: notes what each call of a module returns first, and the parameters of norms."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        counts: dict[nn.Module, int] = {}

        def watch(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            counts[module] = counts.get(module, 0) + 1
            ends.append((module, counts[module], output))
            own = list(module.parameters(recurse=False))
            if own and _normalises(module, own, args, kwargs, output):
                self.gains.update(names[parameter] for parameter in own)

        hooks = [module.register_forward_hook(watch, with_kwargs=True) for module in self.model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _tensors(output: Any) -> list[tuple[str, Tensor]]:
    """Tensors of the tuples of an output of ``transformers``, with the name of their tuple."""
    tuples = [(key, value) for key, value in output.items() if isinstance(value, tuple)]
    return [(key, tensor) for key, value in tuples for tensor in value if isinstance(tensor, Tensor)]


def _check_attention(kind: str, output: Any) -> None:
    """Raise ValueError if some layers return no attention weights, or others that are not weights."""
    for key, layers in output.items():
        if not key.endswith("attentions") or not layers:
            continue
        states = output.get(key.replace("attentions", "hidden_states"))
        given = [weights for weights in layers if weights is not None]
        if states and len(given) < len(states) - 1:
            raise ValueError(f"the parts of {kind} cannot be told: some layers return no attention weights")
        if not all(isinstance(weights, Tensor) and _are_weights(weights) for weights in given):
            raise ValueError(f"the parts of {kind} cannot be told: what it returns as attention are no weights")


def _are_weights(x: Tensor) -> bool:
    """Whether no entry is negative or above 1, up to rounding."""
    return bool(x.min() >= 0 and x.max() < 1.001 + 2 * torch.finfo(x.dtype).eps)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _normalises(module: nn.Module, own: Sequence[Tensor], args: Any, kwargs: Any, output: Any) -> bool:
    """Whether a module with one parameter for each feature of its first input x gives the same for x and 2x, large."""
    x = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(x, Tensor) or not x.is_floating_point() or _first(output).shape != x.shape:
        return False
    if any(parameter.shape != x.shape[x.ndim - parameter.ndim :] for parameter in own):
        return False
    large = x.detach() / x.detach().abs().amax().clamp(min=1e-30) * 2**20  # where eps no longer matters
    with torch.no_grad():
        once, twice = (
            _first(
                module.forward(y, *args[1:], **kwargs) if args else module.forward(**{**kwargs, next(iter(kwargs)): y})
            )
            for y in (large, 2 * large)
        )
    return torch.allclose(once, twice, rtol=1e-3, atol=1e-3 * float(once.abs().amax()))


def _first(output: Any) -> Tensor:
    """The tensor that a module returns, or that it returns first; an empty one if there is none."""
    value = output[0] if isinstance(output, tuple) and output else output
    return value if isinstance(value, Tensor) else torch.empty(0)


# ---- products ----


def products(run: Run, parameters: Mapping[str, Tensor]) -> list[tuple[Factor, Factor]]:
    """Products of two functions of a layer's input of which each depends on some parameters that the other does not.

    Attention weights and whatever lies below the layer are constant. A factor is linear in a parameter if its gradient
    in the parameter does not depend on it.
    """
    pairs: list[tuple[Factor, Factor]] = []
    needed = [(parameter, parameter.requires_grad) for parameter in run.parameters.values()]
    chosen = {id(parameter) for parameter in parameters.values()}

    def see(call: Call, func: Any, args: Sequence[Any], result: Tensor) -> Tensor:
        if getattr(func, "__name__", "") in PRODUCTS and _may_be_gated(args):
            left, right = _factors(args[0], args[1], parameters)
            if left.alone and right.alone:
                pairs.append((left, right))
        return result.detach() if call in run.attention_calls else result

    try:
        for parameter, _ in needed:
            parameter.requires_grad_(id(parameter) in chosen)
        with _Calls(run.model, see), run.layers_cut():
            run.forward()
    finally:
        for parameter, requires_grad in needed:
            parameter.requires_grad_(requires_grad)
    return pairs


def _may_be_gated(args: Sequence[Any]) -> bool:
    """Whether two tensors are multiplied that both depend on the chosen parameters and on the token."""
    if len(args) < 2 or not all(isinstance(x, Tensor) and x.requires_grad for x in args[:2]):
        return False
    return bool(args[0].shape[:-1] == args[1].shape[:-1])


def _factors(left: Tensor, right: Tensor, parameters: Mapping[str, Tensor]) -> tuple[Factor, Factor]:
    gradients = [_gradients([x], parameters, create_graph=True) for x in (left, right)]
    all_supports = [{name: Support(gradient.detach()) for name, gradient in by_name.items()} for by_name in gradients]
    supports_of = [{name: s for name, s in by_name.items() if not s.is_empty} for by_name in all_supports]
    alone = [
        {name for name in mine if name not in other or mine[name].is_apart_from(other[name])}
        for mine, other in (supports_of, supports_of[::-1])
    ]
    nonlinear = [
        any(_gradients([by_name[name]], {name: parameters[name]}, create_graph=False) for name in names)
        for by_name, names in zip(gradients, alone, strict=True)
    ]
    first, second = (Factor(*fields) for fields in zip(supports_of, alone, nonlinear, strict=True))
    return first, second
