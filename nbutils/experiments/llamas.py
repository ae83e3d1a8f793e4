"""Small language models of today's form, Llama's and Qwen 3's, nine at a time, under AdamW and under Muon."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from nbutils import devices, ensembles, text, training
from nbutils.experiments import rays
from nbutils.optimizers import Schedule
from nbutils.profiles import choose
from nbutils.shared_runs.recipes_lm import NOISE_SEED, log_steps
from normgrowth import saturation

Array = NDArray[np.float64]

RATE = 0.01  # of AdamW, and by its scale of 0.2 of Muon
BETAS = (0.9, 0.95)
MOMENTUM = 0.95  # Muon's
MUON_RMS = 0.2  # root mean square of the entries of Muon's step, per unit rate
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a, b, c of a X + b (XXᵀ) X + c (XXᵀ)² X
ROUNDS = 5  # of Newton and Schulz
DECAYS: Mapping[str, float] = {"usual": 0.1, "long": 2.0}  # λ, times the rate at each step
START = 0.64  # standard deviation of a first entry, times the root of the width: 0.02 at the width 1,024
WARM, LEVEL, LEAST = 0.05, 0.7, 0.1  # ends of warm-up and of the constant rate, as shares; last rate over the first
SCALES = (1.25, 2.0, 1000.0)


@dataclass(frozen=True)
class Size:
    """Sizes of the networks and of their training in one profile.

    Used in ``today``.
    """

    vocab: int
    dim: int
    depth: int
    heads: int
    length: int  # tokens in a window
    batch: int  # windows in a step
    steps: int
    dev: int  # windows of dev text for the measurements
    text: int  # bytes of text
    draws: int  # networks in a population
    looks: int = 8  # measurements, about; they are evenly spaced in log t

    @property
    def warm(self) -> int:
        """The step at which warm-up ends."""
        return round(WARM * self.steps)

    @property
    def level(self) -> int:
        """The step at which the constant rate ends."""
        return round(LEVEL * self.steps)


def size(profile: str) -> Size:
    """Sizes of the networks.

    Used in ``today``.

    >>> of = size("book")
    >>> of.warm, of.level, of.steps
    (10, 140, 200)
    """
    return choose(
        profile,
        smoke=Size(300, 24, 2, 2, 16, 4, steps=40, dev=8, text=150_000, draws=9, looks=4),
        book=Size(384, 32, 3, 4, 24, 8, steps=200, dev=8, text=400_000, draws=9),
        gpu=Size(1024, 64, 4, 8, 48, 16, steps=600, dev=12, text=2_000_000, draws=12, looks=12),
    )


# ---- the networks ----


def network(of: Size, *, qk_norm: bool, generator: Generator | None = None) -> Any:
    """An untrained ``LlamaForCausalLM``, or with ``qk_norm`` a ``Qwen3ForCausalLM`` of the same sizes.

    The classes differ in one thing here: Qwen 3 divides each query and each key by its root mean square and multiplies
    it by a gain. First values have the law of ``transformers``, normal matrices and gains of 1, with the standard
    deviation of 0.02 of a model of width 1,024 carried to this width. With one generator both classes draw the same.

    Used in ``today``.

    >>> llama, qwen = (network(size("smoke"), qk_norm=is_normed, generator=Generator()) for is_normed in (False, True))
    >>> more = dict(qwen.named_parameters()).keys() - dict(llama.named_parameters()).keys()
    >>> sorted({name.split(".")[-2] for name in more}), torch.equal(llama.lm_head.weight, qwen.lm_head.weight)
    (['k_norm', 'q_norm'], True)
    """
    import transformers as tf

    settings: dict[str, Any] = {
        "vocab_size": of.vocab, "hidden_size": of.dim, "intermediate_size": 3 * of.dim, "num_hidden_layers": of.depth,
        "num_attention_heads": of.heads, "num_key_value_heads": of.heads // 2, "head_dim": of.dim // of.heads,
        "max_position_embeddings": of.length, "attn_implementation": "eager", "use_cache": False,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # transformers draws from torch's global generator
        net: Any = (
            tf.Qwen3ForCausalLM(tf.Qwen3Config(**settings))
            if qk_norm
            else tf.LlamaForCausalLM(tf.LlamaConfig(**settings))
        )
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, START / of.dim**0.5, generator=generator)
    return net.eval()


class _Logits(nn.Module):
    """A model of ``transformers`` that returns its logits alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def kind_of(name: str) -> str:
    """``matrix`` of a block, ``gain``, or ``embedding`` for the embedding and the head, from a parameter's name.

    Used in ``today``.

    >>> [kind_of(name) for name in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight")]
    ['matrix', 'gain', 'embedding']
    """
    if "norm" in name:
        return "gain"
    return "matrix" if "layers." in name else "embedding"


# ---- Muon, and a schedule ----


def orthogonalised(updates: Tensor) -> Tensor:
    """Matrices ``(…, A, B)`` with singular values near 1 in place of their own, in bfloat16, as ``torch.optim.Muon``.

    Used in ``today``.

    >>> values = torch.linalg.svdvals(orthogonalised(torch.diag(torch.tensor([1.0, 0.1]))).float())
    >>> bool(((values > 0.65) & (values < 1.2)).all())
    True
    """
    a, b, c = NEWTON_SCHULZ
    x = updates.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class EnsembleMuon(Optimizer):
    """Muon for an ensemble: ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, for many matrices at once.

    A step moves a matrix ``(A, B)`` by its rate times 0.2 √max(A, B) times the orthogonalised momentum of Nesterov, so
    the root mean square of the step's entries is about 0.2 times the rate, as AdamW's is (Liu et al. 2025).

    Used in ``today``.

    Args:
        params: tensors ``(networks, A, B)``.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, *, momentum: float = MOMENTUM) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Apply one update of Muon to every network."""
        for group in self.param_groups:
            of_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                of_shape[p.shape].append(p)
            for shape, matrices in of_shape.items():  # one operation for all matrices of a shape
                updates = orthogonalised(torch.stack([self._momentum(p, group["momentum"]) for p in matrices]))
                length = MUON_RMS * max(shape[-2:]) ** 0.5
                for p, update in zip(matrices, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * length)

    def _momentum(self, p: Tensor, momentum: float) -> Tensor:
        """Nesterov's momentum of the gradient of a parameter."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        return p.grad.lerp(state["momentum"].lerp_(p.grad, 1 - momentum), momentum)


class Together:
    """Optimizers that step together.

    Used in ``today``.

    >>> halves = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(2)]
    >>> len(Together(*halves).param_groups)
    2
    """

    def __init__(self, *optimizers: Optimizer):
        self.optimizers = optimizers
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def step(self) -> None:
        """Apply one update of each."""
        for one in self.optimizers:
            one.step()


def optimizer(name: str, theta: Sequence[Tensor], kinds: Sequence[str], *, rate: float, decay: float) -> Together:
    """AdamW for all parameters, or ``muon`` for the matrices of the blocks and AdamW for the others.

    Gains have no decay. At each step a parameter loses the share rate · decay, as in torch. The product is all that a
    training at one rate can tell: the decay of Loshchilov and Hutter (2019), λ' times the schedule, is that of torch
    with λ = λ'/rate.

    Used in ``today``.

    Args:
        theta: stacked parameters ``(networks, …)``.
        kinds: their kinds, as ``kind_of`` says.

    Raises:
        ValueError: unknown name.
    """
    if name not in ("adamw", "muon"):
        raise ValueError(f"unknown optimizer {name!r}: choose one of adamw, muon")
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for weights, kind in zip(theta, kinds, strict=True):
        parts[kind].append(weights)
    matrices = parts["matrix"]
    decayed = parts["embedding"] if name == "muon" else [*matrices, *parts["embedding"]]
    groups = [
        {"params": params, "weight_decay": of_group}
        for params, of_group in ((decayed, decay), (parts["gain"], 0.0))
        if params
    ]
    if name == "adamw":
        return Together(torch.optim.AdamW(groups, rate, BETAS))
    muon = EnsembleMuon(matrices, rate, decay)
    return Together(muon, torch.optim.AdamW(groups, rate, BETAS)) if groups else Together(muon)


def schedule(of: Size, rate: float = RATE) -> Schedule:
    """Warm-up, a constant rate, and a cosine down to a tenth, at step t = 1, 2, …: the form of DeepSeek-V3's.

    Used in ``today``.

    >>> rates = schedule(size("book"))
    >>> [round(rates(t), 4) for t in (5, 10, 140, 170, 200)]
    [0.005, 0.01, 0.01, 0.0055, 0.001]
    """

    def at(t: int) -> float:
        if t <= of.level:
            return rate * min(1.0, t / of.warm)
        half_turn = math.pi * (t - of.level) / (of.steps - of.level)
        return rate * (LEAST + (1 - LEAST) * (1 + math.cos(half_turn)) / 2)

    return at


# ---- trainings ----


@dataclass(frozen=True)
class Texts:
    """Tokens to train on, by source, and windows to measure on.

    Used in ``today``.
    """

    tokens: Mapping[str, Tensor]
    windows: Tensor  # (n, T + 1)


def texts(of: Size, *, seed: int) -> Texts:
    """Python's standard library, and the same tokens in random order.

    Used in ``today``.
    """
    corpus = text.corpus(of.text)
    tokenizer = text.bpe(corpus, of.vocab)
    train, dev = (text.tokens(part, tokenizer) for part in corpus)
    order = torch.randperm(len(train), generator=devices.generator(seed + 2, "cpu"))
    windows = next(text.random_windows(dev, of.dev, of.length + 1, devices.generator(0, "cpu")))
    return Texts({"text": train, "shuffled": train[order]}, windows)


def population(
    of: Size, read: Texts, *, qk_norm: bool, optimizer_name: str, source: str, decay: float, seed: int, device: str
) -> training.TrainingRun:
    """Train a population of networks, each from its own first values and on its own windows.

    Networks of one draw have the same first values and windows, whatever the class, optimizer, source and decay.

    Used in ``today``.

    Args:
        source: ``text``, ``shuffled``, or ``noise``: normal numbers in place of gradients.

    Returns:
        A run whose ``measures`` have a row of ``measure`` for each network at some steps: evenly spaced in log t, at
        the end of warm-up, and at a quarter of the constant rate and its end. Its snapshots are the first and the last
        weights, each tensor ``(networks, …)``, by name.
    """
    seeds = [seed + 1_000_000 * draw for draw in range(of.draws)]
    where = devices.resolve(device)
    nets = [network(of, qk_norm=qk_norm, generator=devices.generator(s, "cpu")).to(where) for s in seeds]
    names = [name for name, _ in nets[0].named_parameters()]
    kinds = [kind_of(name) for name in names]
    theta = ensembles.stack(nets)
    gradients: ensembles.GradientSource
    if source == "noise":
        gradients = partial(training.noise_gradients, generator=devices.generator(seed + NOISE_SEED, "cpu"))
    else:
        window = of.length + 1
        streams = [
            text.random_windows(read.tokens[source], of.batch, window, devices.generator(s, "cpu")) for s in seeds
        ]
        gradients = ensembles.loss_gradients(_Logits(nets[0]), map(torch.stack, zip(*streams, strict=True)))
    make = partial(_made, optimizer_name, kinds=kinds, decay=decay)
    rates = schedule(of)
    rows: list[dict[str, float]] = []
    snapshots: dict[int, dict[str, Tensor]] = {}
    path = torch.zeros(len(nets), dtype=torch.float64)  # sum of the squared steps of the matrices

    def record(t: int, step_rms: Tensor) -> None:
        ensembles.unstack(theta, nets)
        for number, net in enumerate(nets):
            of_step = {"path": float(path[number]), "step_rms": float(step_rms[number])}
            rows.append({"step": t, "network": number, **of_step, **measure(net, read.windows.to(where))})
        if t in (0, of.steps):
            snapshots[t] = {name: w.detach().cpu().clone() for name, w in zip(names, theta, strict=True)}

    record(0, torch.full((len(nets),), torch.nan))
    looks = marks(of)
    is_matrix = [kind == "matrix" for kind in kinds]
    count = sum(w[0].numel() for w, counts in zip(theta, is_matrix, strict=True) if counts)
    steps = ensembles.train(theta, gradients, make, of.steps, rate=rates, name=source)
    for t, step in enumerate(steps, start=1):
        squares = _squared_steps(step, is_matrix, 1 - rates(t) * decay)
        path += squares
        if t in looks:
            record(t, (squares / count).sqrt() / rates(t))
    settings = asdict(of) | {"qk_norm": qk_norm, "optimizer": optimizer_name, "gradients": source, "decay": decay}
    settings |= {"matrices": count, "parameters": sum(w[0].numel() for w in theta)}
    return training.TrainingRun(snapshots=snapshots, measures=pd.DataFrame(rows), settings=settings)


def _made(name: str, theta: Sequence[Tensor], *, kinds: Sequence[str], decay: float) -> Together:
    return optimizer(name, theta, kinds, rate=RATE, decay=decay)


def marks(of: Size) -> list[int]:
    """The steps at which networks are measured.

    Used in ``today``.
    """
    low, high = window(of)
    return sorted({*log_steps(of.steps, of.looks), of.warm, low, high})


def window(of: Size) -> tuple[int, int]:
    """First and last step of the last two doublings of the time since warm-up, at the constant rate.

    Used in ``today``.

    >>> window(size("book"))  # 32 and 130 steps after warm-up
    (42, 140)
    """
    return of.warm + (of.level - of.warm) // 4, of.level


def _squared_steps(step: ensembles.Step, is_matrix: Sequence[bool], kept: float) -> Tensor:
    """Squared length of the step of the matrices, decay aside, ``(networks,)``, float64, on the CPU."""
    squares = [
        (after - kept * before).double().square().flatten(1).sum(1)
        for before, after, counts in zip(step.before, step.after, is_matrix, strict=True)
        if counts
    ]
    return torch.stack(squares).sum(0).cpu()


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


def members(of: Size, run: training.TrainingRun, step: int) -> Iterator[Any]:
    """The networks of a population, in float64, with their weights after ``step`` steps, one after the other.

    Used in ``today``.
    """
    net = network(of, qk_norm=run.settings["qk_norm"]).double()
    stacked = run.snapshots[step]
    for number in range(of.draws):
        net.load_state_dict({name: weights[number] for name, weights in stacked.items()}, strict=True)
        yield net


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
    return Correlation(MUON_RMS**2 * max(shape) * square, linear)


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

    >>> of = size("book")
    >>> growth = walk(of, "adamw", decay=0.0).added
    >>> round(float((growth[130] - growth[80]) / (50 * RATE**2)), 3)  # η² at each step
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
