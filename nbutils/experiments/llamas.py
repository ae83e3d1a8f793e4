"""Small language models of today's form, Llama's and Qwen 3's, and their training, nine at a time, by AdamW or Muon."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from nbutils import devices, ensembles, text, training
from nbutils.experiments.ensemble_muon import EnsembleMuon
from nbutils.optimizers import Schedule
from nbutils.profiles import choose
from nbutils.shared_runs import recipes_lm
from nbutils.shared_runs.recipes_lm import DRAWS, NOISE_SEED, log_steps

RATE = 0.01  # of AdamW, and by its scale of 0.2 of Muon
BETAS = (0.9, 0.95)
DECAYS: Mapping[str, float] = {"usual": 0.1, "long": 2.0}  # λ, times the rate at each step
START = 0.64  # standard deviation of a first entry, times the root of the width: 0.02 at the width 1,024
WARM, LEVEL, LEAST = 0.05, 0.7, 0.1  # ends of warm-up and of the constant rate, as shares; last rate over the first


@dataclass(frozen=True)
class Size(recipes_lm.Size):
    """Sizes of the networks and of their training in one profile.

    Used in ``today``.
    """

    draws: int = DRAWS  # networks in a population

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
        smoke=Size(300, 24, 2, 16, 4, steps=40, dev=8, text=150_000, looks=4, depth=2),
        book=Size(384, 32, 4, 24, 8, steps=200, dev=8, text=400_000, looks=8, depth=3),
        gpu=Size(1024, 64, 8, 48, 16, steps=600, dev=12, text=2_000_000, looks=12, depth=4, draws=12),
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


# ---- optimizers, and a schedule ----


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
    of: Size,
    read: Texts,
    measure: Callable[[Any, Tensor], Mapping[str, float]],
    *,
    qk_norm: bool,
    optimizer_name: str,
    source: str,
    decay: float,
    seed: int,
    device: str,
) -> training.TrainingRun:
    """Train a population of networks, each from its own first values and on its own windows.

    Networks of one draw have the same first values and windows, whatever the class, optimizer, source and decay.

    Used in ``today``.

    Args:
        measure: takes a network and the windows to measure on, ``(n, T + 1)``.
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


def members(of: Size, run: training.TrainingRun, step: int) -> Iterator[Any]:
    """The networks of a population, in float64, with their weights after ``step`` steps, one after the other.

    Used in ``today``.
    """
    net = network(of, qk_norm=run.settings["qk_norm"]).double()
    stacked = run.snapshots[step]
    for number in range(of.draws):
        net.load_state_dict({name: weights[number] for name, weights in stacked.items()}, strict=True)
        yield net
