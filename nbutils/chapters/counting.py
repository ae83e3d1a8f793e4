"""Counting with attention: a mean head built by hand, what a gap between its scores does, and trained counters.

Majority of a string of a and b is the smallest task that needs a mean over the sequence. Symbols as in
``nbutils.chapters.languages``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from nbutils import devices, models, optimizers, training
from nbutils.chapters import languages
from nbutils.models import Attention, SelfAttention
from nbutils.saturation.scaling import mode, scaled

FLAT = ("query", "key", "constant")
STRINGS = 1_000_000  # added to the seed of a network: its strings are drawn apart from its weights


class Classifier(models.Transformer):
    """Class logits read off the last position, for formal languages. Arguments as ``Transformer``; no mask by default.

    >>> Classifier(4, 16, depth=1, heads=2, length=8, classes=2)(torch.zeros(3, 8, dtype=torch.long)).shape
    torch.Size([3, 2])
    """

    def __init__(self, *sizes: int, classes: int, mask: str = "none", **options: Any) -> None:
        super().__init__(*sizes, outputs=classes, mask=mask, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, T)`` to logits ``(batch, classes)``."""
        return self.readout(self.hidden_states(tokens)[-1][..., -1, :])


class MeanHead(nn.Module):
    """One attention head that computes (number of b − number of a) / T, float64, nothing trained.

    Embeddings are (1, −1) for a and (1, 1) for b. The value is the second coordinate. Scores are equal in one of three
    ways, or differ by ``gap`` between b and a.

    Args:
        flat: ``query`` (Q = 0), ``key`` (K = 0) or ``constant`` (keys read the first coordinate alone).
        gap: score of b minus score of a at c = 1. Only with ``flat="constant"``, whose keys get it on top.
        fixed: the embedding is no parameter and is not scaled. Scores then have degree 2 in the parameters, else 4.

    Raises:
        ValueError: unknown ``flat``, or a gap where queries or keys are 0.

    >>> MeanHead()(torch.tensor([[3, 4, 4, 4]])).tolist()
    [0.5]
    """

    def __init__(self, flat: str = "constant", *, gap: float = 0.0, fixed: bool = False) -> None:
        super().__init__()
        if flat not in FLAT:
            raise ValueError(f"unknown way {flat!r} to equal scores: choose one of {', '.join(FLAT)}")
        if gap and flat != "constant":
            raise ValueError(f"with flat={flat!r} all scores are 0: a gap needs flat='constant'")
        self.score_degree = 2 if fixed else 4
        table = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
        if fixed:
            self.register_buffer("embedding", table)
        else:
            self.embedding = nn.Parameter(table)
        self.attention = SelfAttention(2, 1, mask="none", biases=False, uniform=False).double()
        weights = {
            "query": [[0.0, 0.0], [0.0, 0.0]] if flat == "query" else [[1.0, 0.0], [0.0, 0.0]],
            "key": [[0.0, 0.0], [0.0, 0.0]] if flat == "key" else [[1.0, gap / math.sqrt(2)], [0.0, 0.0]],
            "value": [[0.0, 1.0], [0.0, 0.0]],
            "output": [[1.0, 0.0], [0.0, 1.0]],
        }
        with torch.no_grad():
            for name, values in weights.items():
                getattr(self.attention, name).weight.copy_(torch.tensor(values, dtype=torch.float64))

    def hidden_states(self, tokens: Tensor, seen: list[Attention] | None = None) -> list[Tensor]:
        """Embedding and head output, ``(batch, T, 2)``."""
        x = self.embedding[tokens - languages.A]
        return [x, self.attention(x, seen)]

    def attentions(self, tokens: Tensor) -> list[Attention]:
        """Scores and weights of the one layer."""
        seen: list[Attention] = []
        self.hidden_states(tokens, seen)
        return seen

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, T)`` to ``(batch,)``: positive where b is the majority, 0 at a tie, negative where a is."""
        return self.hidden_states(tokens)[-1][:, -1, 0]


def biased_count_accuracy(gap: float, length: int) -> float:
    """Accuracy, over all strings without a tie, of "b is the majority iff n_b·e^gap > n_a".

    This is what a mean head decides when the scores of b are ``gap`` above those of a. All strings are right up to
    gap = log((T + 1)/(T − 1)), T odd; from gap = log(T − 1) on it says b wherever there is a b at all.

    >>> biased_count_accuracy(0.0, 11), biased_count_accuracy(30.0, 3)
    (1.0, 0.625)
    """
    right = total = 0
    for b in range(length + 1):
        if 2 * b != length:
            says_b = b > 0 and math.log(b) + gap > (math.log(length - b) if b < length else -math.inf)
            right += math.comb(length, b) * (says_b == (2 * b > length))
            total += math.comb(length, b)
    return right / total


# ---- trained ----


class Trained(NamedTuple):
    """A trained network with its test strings ``(n, T)`` and labels ``(n,)`` or ``(n, T)``."""

    model: nn.Module
    tokens: Tensor
    labels: Tensor


def draw(task: str, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Strings and labels of ``majority``, ``anbn``, ``first`` or ``previous`` (four letters).

    >>> tokens, labels = draw("majority", 400, 5, devices.generator(0, "cpu"))
    >>> int(labels.sum()), bool((labels == languages.is_majority(tokens)).all())
    (200, True)
    """
    match task:
        case "majority":
            return languages.majority(count, length, generator)
        case "anbn":
            return languages.anbn(count, length, generator)
        case "first":
            return languages.copy_first(count, length, generator)
        case "previous":
            return languages.copy_previous(count, length, generator, symbols=4)
    raise ValueError(f"unknown task {task!r}: choose one of majority, anbn, first, previous")


def trained(
    task: str,
    *,
    length: int,
    steps: int,
    seeds: Sequence[int],
    uniform: bool = False,
    device: str = "auto",
    width: int = 16,
    batch: int = 32,
    test: int = 200,
    lr: float = 5e-3,
) -> list[Trained]:
    """Train small post-norm transformers on one task with AdamW, one for each seed, all at once.

    One layer of two heads; two layers for aⁿbⁿ. No positions for majority, where order says nothing. Causal for aⁿbⁿ
    and for the previous letter. ``uniform`` takes away queries and keys. Each network has its own initial values and
    its own strings; test strings are drawn apart.

    >>> found = trained("majority", length=3, steps=50, seeds=(0, 1), device="cpu")
    >>> [accuracy(one) for one in found]  # over the eight strings of this length
    [1.0, 1.0]
    """
    place = devices.resolve(device)
    options: dict[str, Any] = {
        "placement": "post",
        "positions": task != "majority",
        "mask": "causal" if task in ("anbn", "previous") else "none",
        "uniform": uniform,
        "init_std": "standard",
    }
    depth = 2 if task == "anbn" else 1

    def network(seed: int) -> nn.Module:
        rng = devices.generator(seed, "cpu")
        if task == "previous":
            return models.CausalLM(7, width, depth, 2, length, tied=False, generator=rng, **options)
        return Classifier(5, width, depth, 2, length, classes=2, generator=rng, **options)

    nets = [network(seed).to(place) for seed in seeds]
    rngs = [devices.generator(seed + STRINGS, "cpu") for seed in seeds]  # not the seeds of the weights
    tests = [draw(task, test, length, rng) for rng in rngs]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            tokens, labels = zip(*(draw(task, batch, length, rng) for rng in rngs), strict=True)
            yield torch.stack(tokens), torch.stack(labels)

    train_together(nets, batches(), steps=steps, lr=lr)
    return [Trained(net, x.to(place), y.to(place)) for net, (x, y) in zip(nets, tests, strict=True)]


def train_together(
    nets: Sequence[nn.Module],
    batches: Iterable[training.Batch],
    *,
    steps: int,
    lr: float,
    noise: torch.Generator | None = None,
) -> Tensor:
    """Train networks of one shape in place by AdamW, all at once, each on its own batches; losses ``(steps, nets)``.

    A batch is what ``training.batch_loss`` takes, with one more dimension in front, of the networks. For small networks
    that saves the fixed cost of each operation (``ensemble`` does it for many settings on the same batches).

    Args:
        noise: the null model: pure noise from here in the place of all gradients. No batch is used; losses are NaN.

    Raises:
        ValueError: there are too few batches.

    >>> nets = [nn.Linear(1, 2, bias=False) for _ in range(2)]
    >>> with torch.no_grad():
    ...     _ = [net.weight.zero_() for net in nets]
    >>> x, y = torch.ones(2, 1, 1), torch.tensor([[0], [1]])  # one example each, of class 0 and of class 1
    >>> _ = train_together(nets, [(x, y)], steps=1, lr=0.5)  # AdamW's first step has length lr in each coordinate
    >>> [net.weight.detach().squeeze().round(decimals=3).tolist() for net in nets]
    [[0.5, -0.5], [-0.5, 0.5]]
    """
    first = nets[0]
    rows = {
        name: torch.stack([net.get_parameter(name).detach() for net in nets]).requires_grad_()
        for name, _ in first.named_parameters()
    }
    optimizer = optimizers.optimizer("adamw", list(rows.values()), lr)

    def one(parameters: dict[str, Tensor], batch: training.Batch) -> Tensor:
        return training.batch_loss(lambda inputs: functional_call(first, parameters, (inputs,)), batch)

    losses, source = torch.full((steps, len(nets)), torch.nan), training.endless(batches)
    for t in range(steps):
        optimizer.zero_grad()
        if noise is None:
            batch = training.to_device(training.next_batch(source, t, steps), next(first.parameters()).device)
            with sdpa_kernel(SDPBackend.MATH):  # the fast kernels have no batching rule
                loss = vmap(one)(rows, batch)
            loss.sum().backward()  # the networks are independent: each gets the gradient of its own loss
            losses[t] = loss.detach()
        for row in rows.values() if noise is not None else ():
            row.grad = torch.randn(row.shape, generator=noise, device=noise.device).to(row)
        optimizer.step()
    with torch.no_grad():
        for name, values in rows.items():
            for net, value in zip(nets, values, strict=True):
                net.get_parameter(name).copy_(value)
    return losses


def accuracy(found: Trained, c: float = 1.0, *, only_scores: bool = False) -> float:
    """Share of right answers with every parameter times ``c``, in float64; ``only_scores``: queries and keys alone.

    >>> (found,) = trained("majority", length=3, steps=0, seeds=(0,), device="cpu")
    >>> accuracy(found, 0.0)  # all logits are 0, which is one answer to two kinds of strings, as many of each
    0.5
    """
    model, tokens, labels = found
    # in float64 first: a part that is scaled in another precision than the rest cannot run
    with (
        mode(model),
        scaled(model, 1.0 if only_scores else c, dtype=torch.float64),
        scaled(query_and_key(model) if only_scores else nn.ModuleList(), c),
    ):
        guess = model(tokens).argmax(-1)
    counted = labels != languages.IGNORE
    return float((guess == labels)[counted].double().mean())


def query_and_key(model: nn.Module) -> nn.ModuleList:
    """The query and key maps of all layers; empty where attention is uniform.

    >>> len(query_and_key(Classifier(5, 8, 3, 2, 4, classes=2)))  # of three layers
    6
    """
    parts = [part for block in model.blocks for part in (block.attention.query, block.attention.key)]
    return nn.ModuleList(part for part in parts if part is not None)
