"""Which parameters are queries and keys, values and outputs, gates and so on. The model is asked, not its names.

One sentence runs through the model a few times, and gradients say on what a value depends:

- Gains, with the biases of norms, are the parameters of modules whose output stays as it is when their input doubles.
- Embeddings are what the representations of layer 0 depend on: tables of tokens and positions, and a projection
  between them and the first layer. A head that is tied to a table is that table.
- Queries and keys act through attention weights alone: once the weights are held constant, the output does not depend
  on them. A relative position bias and the logits of attention sinks, which only scores see, are among them.
- Values and outputs act on the output, but no longer once all attention weights are 0.
- Gates are the nonlinear factor in a product of two functions of the same input, as silu(gate(x)) in
  silu(gate(x)) · up(x). The router of experts, which weighs what they give, is a gate too; one that weighs what they
  read, as Llama 4's, is not told from up and down. Without such products there are no gates.
- Up and down is the rest of the layers.
- The head is what lies behind the last layer: an output matrix of its own, or a pooler.
- Unused is what the forward pass does not read. Only an expert that no token was sent to goes with the other experts.

One tensor may belong to several parts, as the fused queries, keys and values of GPT-2 do. A row that serves keys and
values alike, as in DeepSeek's compressed attention, counts with the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normgrowth import precision
from normgrowth.saturation.probe import SEED, Run, products, supports
from normgrowth.saturation.scaling import advice, mode, scaled

QUERIES_KEYS = "queries and keys"
VALUES_OUTPUTS = "values and outputs"
GATES = "gates"
UP_DOWN = "up and down"
GAINS = "gains"
EMBEDDINGS = "embeddings"
HEAD = "head"
UNUSED = "unused"
PARTS = (QUERIES_KEYS, VALUES_OUTPUTS, GATES, UP_DOWN, GAINS, EMBEDDINGS, HEAD, UNUSED)
ABSENT = {  # why a model does not have a part
    GATES: "no layer multiplies two functions of its input, of which one is not linear",
    HEAD: "nothing behind the last layer has parameters of its own",
}
PROBE_TOKENS = 32
SMALL = 0.02  # standard deviation of what the probe has in the place of zeros

Shares = dict[str, Tensor]  # by name of a parameter, which of its entries, bool, broadcast to its shape


def split(model: nn.Module, sentence: Sequence[int], decoder: Sequence[int] | None = None) -> dict[str, Shares]:
    """The parts of a model of ``transformers``: each entry of each parameter is in exactly one of them.

    It is asked in float64 where the memory has room, with small random values in the place of zeros, which would hide
    what acts through them: an adapter begins with a matrix of zeros. The model itself stays as it is.

    Args:
        sentence: token ids that the model is asked with, as far as ``PROBE_TOKENS``.
        decoder: token ids that the decoder of an encoder–decoder reads.

    Returns:
        For each part that the model has, in the order of ``PARTS``, the parameters that belong to it, by name, and
        which of their entries, bool, of a shape that broadcasts to that of the parameter.

    Raises:
        ValueError: the parts cannot be told, since the model does not compute its attention from weights that it
            returns, or does not return the representations of its layers; or a module of it is compiled.
    """
    model = uncompiled(model)
    if not hasattr(model, "config"):
        raise ValueError(f"the parts of {type(model).__name__} cannot be told: it is not a model of transformers")
    inputs = {"input_ids": torch.tensor([list(sentence[:PROBE_TOKENS])])}
    if decoder is not None:
        inputs["decoder_input_ids"] = torch.tensor([list(decoder[:PROBE_TOKENS])])
    compiled = [name for name, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        place = f"its module {compiled[0]!r}" if compiled[0] else "it"
        raise ValueError(f"the parts of {type(model).__name__} cannot be told: {place} is compiled. Load it again")
    device = next(model.parameters()).device
    inputs = {name: ids.to(device) for name, ids in inputs.items()}
    with (
        mode(model),
        scaled(model, 1.0, dtype=precision.choose(model)[0]),  # whose copies of the parameters may be written to
        torch.enable_grad(),
        _all_need_gradients(model),
        _experts_one_by_one(model),
    ):
        _fill_zeros(model)
        try:
            run = Run(model, inputs)
            shares = _of_layers(model, run)
            _biases_with_their_weights(model, shares)
            for part in (VALUES_OUTPUTS, UP_DOWN):
                _separate_gates(run, shares, part)
        except RuntimeError as error:  # a function that has no gradient, or no second one
            reason = str(error).partition("\n")[0]
            raise ValueError(f"the parts of {type(model).__name__} cannot be told by gradients: {reason}") from error
    _unseen_with_their_like(model, shares)
    return {part: shares[part] for part in PARTS if shares[part]}


@contextmanager
def part_scaled(
    model: nn.Module, c: float, shares: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> Iterator[nn.Module]:
    """``scaled``, but only the entries of a part are multiplied by ``c``: see ``split``.

    Raises:
        OverflowError: a scaled parameter is not finite; see also ``scaled``.
    """
    model = uncompiled(model)
    with scaled(model, 1.0, dtype=dtype):  # whose copies of the parameters may be written to
        times_c = torch.tensor(c, dtype=torch.float64)
        for name, parameter in model.named_parameters():
            if name not in shares:
                continue
            values = parameter.data
            values.mul_(torch.where(shares[name], times_c.to(values.device), 1.0).to(values.dtype))
            if not values.isfinite().all():
                raise OverflowError(f"parameter {name!r} overflows {values.dtype} at c = {c:g}. {advice(values.dtype)}")
        yield model


# ---- who depends on what ----


def _of_layers(model: nn.Module, run: Run) -> dict[str, Shares]:
    """All parts but gates, which still count among values and outputs, or among up and down."""
    parameters = dict(model.named_parameters())
    with run.attention_replaced(Tensor.detach):
        output = run.forward()
        of_embedding = supports(run.embedding_states(output), parameters)
        of_states = supports(run.states(output), parameters)
        constant = supports(run.results(output), parameters)
    with run.attention_replaced(torch.zeros_like):
        without = supports(run.results(run.forward()), parameters)
    with run.layers_cut():
        of_attention = supports(run.attention(run.forward()), parameters)
    shares: dict[str, Shares] = {part: {} for part in PARTS}
    for name, parameter in parameters.items():
        rest = torch.ones([1] * parameter.ndim, dtype=torch.bool, device=parameter.device)  # all of the parameter
        if name in of_attention and name not in run.gains and name not in of_embedding:
            rows = constant[name].empty_rows() if name in constant else rest
            if rows.any():
                shares[QUERIES_KEYS][name] = rows
                rest = rest & ~rows
        if not rest.any():
            continue
        if name in run.gains:
            part = GAINS
        elif name in of_embedding:
            part = EMBEDDINGS
        elif name not in of_states:
            part = HEAD if name in constant else UNUSED
        elif not constant[name].is_empty and name in without and without[name].is_empty:
            part = VALUES_OUTPUTS
        else:
            part = UP_DOWN
        shares[part][name] = rest
    if not shares[QUERIES_KEYS] or not shares[VALUES_OUTPUTS]:
        raise ValueError(
            f"the parts of {type(model).__name__} cannot be told: the attention weights that it returns are not those "
            "that it multiplies the values by. Scale all parameters instead (parts=None)"
        )
    return shares


def _biases_with_their_weights(model: nn.Module, shares: dict[str, Shares]) -> None:
    """A bias of an output projection, which acts also where attention is 0, goes with the weight of its module."""
    for module_name, module in model.named_modules():
        names = {f"{module_name}.{name}".lstrip("."): p for name, p in module.named_parameters(recurse=False)}
        weights = [name for name, parameter in names.items() if parameter.ndim > 1]
        if not weights or any(name not in shares[VALUES_OUTPUTS] for name in weights):
            continue
        if any(name in shares[QUERIES_KEYS] for name in weights):
            continue
        for name in names:
            if name in shares[UP_DOWN]:
                shares[VALUES_OUTPUTS][name] = shares[UP_DOWN].pop(name)


def _separate_gates(run: Run, shares: dict[str, Shares], part: str) -> None:
    """Move to the gates what is, of the parameters of a part, the nonlinear factor of a product."""
    parameters = {name: run.parameters[name] for name in shares[part]}
    for left, right in products(run, parameters):
        gate, other = sorted((left, right), key=lambda factor: (not factor.is_nonlinear, len(factor.alone)))
        if not gate.is_nonlinear:
            continue
        for name in sorted(gate.alone & shares[part].keys()):
            rows = shares[part][name]
            if name in other.supports:
                rows = rows & gate.supports[name].rows_apart_from(other.supports[name])
            _move(name, rows, shares, part)


def _move(name: str, rows: Tensor, shares: dict[str, Shares], part: str) -> None:
    """Move some rows of a parameter from a part to the gates."""
    rest = shares[part].pop(name) & ~rows
    if rest.any():
        shares[part][name] = rest
    earlier = shares[GATES].get(name)
    shares[GATES][name] = rows if earlier is None else earlier | rows


def _unseen_with_their_like(model: nn.Module, shares: dict[str, Shares]) -> None:
    """An expert that no token was sent to is split as another one, whose parameters differ in numbers of their name."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def kind(name: str) -> tuple[str, torch.Size]:
        return re.sub(r"\d+", "#", name), shapes[name]

    used = [(part, name) for part in PARTS if part != UNUSED for name in shares[part]]
    like = {kind(name): name for _, name in used}
    for name in list(shares[UNUSED]):
        if kind(name) not in like:
            continue
        del shares[UNUSED][name]
        for part, other in used:
            if other == like[kind(name)]:
                shares[part][name] = shares[part][other]


# ---- the model as it is asked ----


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that ``torch.compile`` was given, with the same parameters; any other model as it is."""
    original = getattr(model, "_orig_mod", model)
    assert isinstance(original, nn.Module)
    return original


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wraps a module, or ``compile()`` changed it in place."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _fill_zeros(model: nn.Module) -> None:
    """Small random values in the place of all zeros of a model's parameters."""
    generator = torch.Generator().manual_seed(SEED)
    for parameter in model.parameters():
        zeros = parameter.data == 0
        if zeros.any():
            values = SMALL * torch.randn(int(zeros.sum()), generator=generator, dtype=torch.float64)
            parameter.data[zeros] = values.to(parameter.data)


@contextmanager
def _all_need_gradients(model: nn.Module) -> Iterator[None]:
    """Within a ``with`` block all parameters need gradients, which are nowhere stored."""
    needed = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.is_floating_point()]
    if frozen:
        raise TypeError(f"parameter {frozen[0]!r} is not floating point: its part cannot be told")
    try:
        for parameter, _ in needed:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, requires_grad in needed:
            parameter.requires_grad_(requires_grad)


@contextmanager
def _experts_one_by_one(model: nn.Module) -> Iterator[None]:
    """Within a ``with`` block mixtures of experts run one expert after the other, in operations that have gradients."""
    network: Any = model
    implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if implementation is None:
        yield
        return
    network.set_experts_implementation("eager")
    try:
        yield
    finally:
        network.set_experts_implementation(implementation)
