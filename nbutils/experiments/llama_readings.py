"""What is read from small models of Llama's and Qwen 3's classes, and the law of their norm when noise moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Generator, Tensor, nn

from nbutils.experiments import rays
from nbutils.experiments.ensemble_muon import MOMENTUM, RMS, orthogonalised
from nbutils.experiments.llamas import BETAS, Size, kind_of, network, schedule
from normgrowth import saturation

Array = NDArray[np.float64]

SCALES = (1.25, 1000.0)

# ---- what is measured ----


def scores(net: Any, tokens: Tensor) -> Tensor:
    """Scores q·k/√d of each layer, ``(layers, n, heads, T, T)``, future keys included, of tokens ``(n, T)``.

    Used in ``today``.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    attention = [layer.self_attn for layer in net.model.layers]
    suffix = "norm" if hasattr(attention[0], "q_norm") else "proj"  # the last module before rotation
    outputs: dict[str, list[Tensor]] = {"q": [], "k": []}

    def keep(letter: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        outputs[letter].append(output)

    hooks = [
        getattr(one, f"{letter}_{suffix}").register_forward_hook(partial(keep, letter))
        for one in attention
        for letter in outputs
    ]
    try:
        with saturation.mode(net):
            net(input_ids=tokens)
    finally:
        for hook in hooks:
            hook.remove()
    n, length = tokens.shape
    positions = torch.arange(length, device=tokens.device)[None]
    cos, sin = net.model.rotary_emb(outputs["q"][0], positions)
    layers = []
    for one, query, key in zip(attention, outputs["q"], outputs["k"], strict=True):
        q, k = (x.reshape(n, length, -1, one.head_dim).transpose(1, 2) for x in (query, key))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        k = k.repeat_interleave(one.num_key_value_groups, dim=1)
        layers.append(q @ k.mT * one.scaling)
    return torch.stack(layers).detach()


def caps(net: Any) -> Tensor:
    """The largest score that the gains of queries and keys allow, for each layer, ``(layers,)``; ∞ without QK-norm.

    A query divided by its root mean square has length √d, and a gain multiplies it by its largest magnitude at most. So
    a score is at most √d times the largest magnitudes of both gains, d the dimension of a head.

    Used in ``today``.
    """
    attention = [layer.self_attn for layer in net.model.layers]
    if not hasattr(attention[0], "q_norm"):
        return torch.full((len(attention),), torch.inf)
    largest = [one.q_norm.weight.abs().max() * one.k_norm.weight.abs().max() * one.head_dim**0.5 for one in attention]
    return torch.stack(largest).detach().cpu()


def measure(net: Any, windows: Tensor) -> dict[str, float]:
    """Measurements of a network on windows ``(n, T + 1)``.

    ``loss`` is of the next token; ``norm`` is of all parameters, ``matrices`` of the blocks' matrices, ``queries_keys``
    of W_q and W_k. ``score`` is the median over heads of their largest score in magnitude, ``cap`` the median over
    layers of ``caps``, and ``room`` the least that a layer's scores stay below its cap. ``positions`` is the median
    over heads of the effective positions, exp of the entropy.

    Used in ``today``.
    """
    inputs = windows[:, :-1]
    with saturation.mode(net):
        logits = net(input_ids=inputs).logits
        loss = nn.functional.cross_entropy(logits.mT, windows[:, 1:])
    of_layers = scores(net, inputs)
    past = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool, device=inputs.device).tril()
    largest = of_layers.abs().masked_fill(~past, 0).amax((1, 3, 4)).cpu()  # (layers, heads)
    weights = of_layers.masked_fill(~past, -torch.inf).softmax(-1)
    _, positions, _ = rays.attention_of(weights.flatten(0, 1))
    positions = positions.view(len(of_layers), -1, positions.shape[-1]).mean(1)  # (layers, heads)
    cap = caps(net)
    return {
        "loss": float(loss),
        "norm": norm(net.named_parameters()),
        "matrices": norm((name, p) for name, p in net.named_parameters() if kind_of(name) == "matrix"),
        "queries_keys": norm((name, p) for name, p in net.named_parameters() if _is_query_or_key(name)),
        "score": float(largest.median()),
        "cap": float(cap.median()),
        "room": float((cap - largest.amax(1)).min()),
        "positions": float(positions.median()),
    }


def norm(parameters: Iterable[tuple[str, Tensor]]) -> float:
    """Euclidean norm of named parameters.

    Used in ``today``.
    """
    return sum(float(p.detach().double().square().sum()) for _, p in parameters) ** 0.5


def _is_query_or_key(name: str) -> bool:
    return "q_proj" in name or "k_proj" in name


def reading_along(
    net: Any, tokens: Tensor, scales: Sequence[float] = SCALES, factor: Callable[[str], float] = lambda name: 1.0
) -> dict[str, float]:
    """What a network does with tokens ``(n, T)`` at 1 and at some multiples of all parameters, in float64.

    Args:
        factor: multiplies each parameter first, by its name.

    Returns:
        ``stay c`` is the share of predictions at c that are those at 1; ``raw``, ``centred`` and ``anisotropy`` compare
        the last representations at the largest c with those at 1; ``positions`` is as in ``measure``, at 1.

    Used in ``today``.
    """
    at_one = rays.read(net, tokens, factor)
    values = {"positions": float(at_one.positions.mean(0).median())}
    reading = at_one
    for c in scales:
        reading = rays.read(net, tokens, lambda name, c=c: c * factor(name))  # type: ignore[misc]
        values[f"stay {c:g}"] = float(rays.agreement(reading, at_one).mean())
    h, far = (x.states.flatten(0, 1) for x in (at_one, reading))
    values["raw"] = float(torch.cosine_similarity(h, far, dim=-1).mean())
    values["centred"] = float(torch.cosine_similarity(h - h.mean(0), far - far.mean(0), dim=-1).mean())
    unit = nn.functional.normalize(h, dim=-1)
    values["anisotropy"] = float((unit.sum(0).square().sum() - len(unit)) / (len(unit) * (len(unit) - 1)))
    return values


def to_norms_of(target: nn.Module, net: nn.Module, *kinds: str) -> Callable[[str], float]:
    """The factor of each tensor of a network that gives it the norm of its namesake in another.

    Args:
        target: has the norms.
        net: the network whose tensors are multiplied, as it is now.
        kinds: words in the names of the tensors that are; the others have the factor 1. All, if there are none.

    Used in ``today``.

    >>> one, two = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> factor = to_norms_of(one, two)
    >>> bool((factor("weight") * two.weight).abs().isclose(one.weight.abs()))
    True
    """
    wanted, norms = ({name: norm([(name, p)]) for name, p in one.named_parameters()} for one in (target, net))
    chosen = [name for name in norms if not kinds or any(kind in name for kind in kinds)]
    factors = {name: wanted[name] / norms[name] for name in chosen}
    return lambda name: factors.get(name, 1.0)


# ---- laws ----


def exponents(steps: ArrayLike, values: ArrayLike) -> Array:
    """Slope of ln(values) over ln(steps) between the first and the last, ``(steps, networks)`` to ``(networks,)``.

    Used in ``today``.

    >>> exponents([4, 16], [[2.0, 4.0], [4.0, 64.0]]).round(6).tolist()
    [0.5, 2.0]
    """
    of_time = np.log(np.asarray(steps, dtype=np.float64))
    of_values = np.log(np.asarray(values, dtype=np.float64))
    slope: Array = (of_values[-1] - of_values[0]) / (of_time[-1] - of_time[0])
    return slope


class Correlation(NamedTuple):
    """How a step of Muon that is fed normal matrices depends on them.

    Used in ``today``.
    """

    square: float  # mean square of the entries of the step, per unit rate
    linear: float  # share of it that is linear in the momentum; the rest is of odd powers, from the third on


def correlation(shape: Sequence[int], *, generator: Generator, draws: int = 200) -> Correlation:
    """``Correlation`` of Muon's steps for matrices of a shape ``(A, B)``, from draws.

    Used in ``today``.
    """
    momentum = torch.randn(draws, *shape, generator=generator)
    update = orthogonalised(momentum).double()
    square = float(update.square().mean())
    linear = float((update * momentum).mean()) ** 2 / square
    return Correlation(RMS**2 * max(shape) * square, linear)


class Walk(NamedTuple):
    """The null of ρ²: a share of the first ρ², and what steps add to each entry's square, after t = 0, 1, … steps.

    Used in ``today``.
    """

    kept: Array  # (steps + 1,)
    added: Array  # (steps + 1,)


def walk(of: Size, name: str, decay: float, *, square: float = 1.0, power: int = 1) -> Walk:
    """Expected ρ² of parameters that an optimizer moves by noise, with its momentum, decay and the schedule.

    AdamW divides by a constant, so its steps are means of the gradients before them. Steps of Muon have one length, and
    steps whose momenta have the correlation r are taken to have the correlation rᵏ.

    Used in ``today``.

    Args:
        square: mean square of the entries of Muon's steps, per unit rate.
        power: k.

    >>> from nbutils.experiments import llamas
    >>> growth = walk(llamas.size("book"), "adamw", decay=0.0).added
    >>> round(float((growth[130] - growth[80]) / (50 * llamas.RATE**2)), 3)  # η² at each step
    1.0
    """
    steps = np.arange(1, of.steps + 1)
    rates = np.array([schedule(of)(int(t)) for t in steps])
    age = steps[:, None] - steps  # of the gradient of step s at step t, (t, s)
    if name == "adamw":
        weights = np.where(age >= 0, BETAS[0] ** np.abs(age), 0.0)
        weights /= weights.sum(1, keepdims=True)
        covariance = weights @ weights.T
    else:
        weights = np.where(age >= 0, MOMENTUM ** (np.abs(age) + 1), 0.0) + np.eye(of.steps)
        weights /= np.linalg.norm(weights, axis=1, keepdims=True)
        covariance = square * (weights @ weights.T) ** power
    shares = np.cumprod(1 - rates * decay)
    reach = np.where(age >= 0, rates * shares[:, None] / shares, 0.0)  # what is left of step s after step t
    added = np.einsum("ts,su,tu->t", reach, covariance, reach, optimize=True)
    return Walk(np.concatenate([[1.0], shares**2]), np.concatenate([[0.0], added]))


def noise_squares(of: Size, name: str, decay: float, rho_squared: ArrayLike, *, generator: Generator) -> Array:
    """Expected ρ² of the blocks' matrices under noise, after t = 0, 1, … steps, ``(ends, steps + 1, networks)``.

    For AdamW both ends are one value. For Muon they are bounds: the covariance of an odd function of normal matrices of
    correlation r ≥ 0 is a sum of odd powers of r with weights that are not negative (Mehler), of which the first is
    known, and the others are between none and r³.

    Used in ``today``.

    Args:
        rho_squared: first ρ² of each network, ``(networks,)``.
    """
    start = np.asarray(rho_squared, dtype=np.float64)
    ends = np.zeros((2, of.steps + 1))
    kept = walk(of, name, decay).kept
    for parameter, p in network(of, qk_norm=False).named_parameters():
        if kind_of(parameter) != "matrix":
            continue
        if name == "adamw":
            ends += p.numel() * walk(of, name, decay).added
            continue
        step = correlation(p.shape, generator=generator)
        linear, cubic = (walk(of, name, decay, square=step.square, power=k).added for k in (1, 3))
        least = p.numel() * step.linear * linear
        ends += np.stack([least, least + p.numel() * (1 - step.linear) * cubic])
    return kept[:, None] * start + ends[..., None]
