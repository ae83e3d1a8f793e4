"""Counting with attention: a mean head built by hand, what a gap between its scores does, and trained counters.

Majority of a string of a and b is the smallest task that needs a mean over the sequence. Symbols as in
``nbutils.experiments.languages``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nbutils import devices, ensembles, models, optimizers
from nbutils.experiments import languages
from normgrowth.saturation.scaling import mode, scaled

FLAT = ("query", "key", "constant")
STRINGS = 1_000_000  # added to the seed of a network: its strings are drawn apart from its weights


class Classifier(models.Transformer):
    """Class logits read off the last position, for formal languages: a ``Transformer``, by default without mask."""

    def __init__(self, *sizes: int, classes: int, mask: str = "none", **options: Any) -> None:
        super().__init__(*sizes, outputs=classes, mask=mask, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, T)`` to logits ``(batch, classes)``."""
        return self.read(self.hidden_states(tokens)[-1][..., -1, :])


class MeanHead(nn.Module):
    """One attention head that computes (number of b − number of a) / T, float64, nothing trained.

    Embeddings are (1, −1) for a and (1, 1) for b. The value is the second coordinate. Scores are equal in one of three
    ways, or differ by ``gap`` between b and a.

    Args:
        flat: ``query`` (Q = 0), ``key`` (K = 0) or ``constant`` (keys read the first coordinate alone).
        gap: score of b minus score of a at c = 1. Only with ``flat="constant"``, whose keys get it on top.
        fixed: the embedding is no parameter and is not scaled. Scores then have degree 2 in the parameters, else 4.

    Raises:
        ValueError: unknown ``flat``, or a gap where all scores are 0.

    >>> MeanHead()(torch.tensor([[3, 4, 4, 4]])).tolist()
    [0.5]
    """

    def __init__(self, flat: str = "constant", *, gap: float = 0.0, fixed: bool = False) -> None:
        super().__init__()
        if flat not in FLAT or (gap and flat != "constant"):
            raise ValueError(f"flat={flat!r}, gap={gap}: choose one of {', '.join(FLAT)}; a gap needs constant")
        self.score_degree = 2 if fixed else 4
        table = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
        if fixed:
            self.register_buffer("embedding", table)
        else:
            self.embedding = nn.Parameter(table)
        self.attention = models.SelfAttention(2, 1, mask="none", biases=False)
        weights = {
            "query": [[float(flat != "query"), 0.0], [0.0, 0.0]],
            "key": [[0.0, 0.0] if flat == "key" else [1.0, gap / math.sqrt(2)], [0.0, 0.0]],
            "value": [[0.0, 1.0], [0.0, 0.0]],
            "output": [[1.0, 0.0], [0.0, 1.0]],
        }
        for name, values in weights.items():
            getattr(self.attention, name).weight = nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def hidden_states(self, tokens: Tensor, seen: list[Tensor] | None = None) -> list[Tensor]:
        """Embedding and head output, ``(batch, T, 2)``."""
        x = self.embedding[tokens - languages.A]
        return [x, self.attention(x, seen)]

    def attentions(self, tokens: Tensor) -> list[Tensor]:
        """Scores of the one layer."""
        return [self.attention.scores(self.hidden_states(tokens)[0])]

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, T)`` to ``(batch,)``: positive where b is the majority, 0 at a tie, negative where a is."""
        return self.hidden_states(tokens)[-1][:, -1, 0]


class Trained(NamedTuple):
    """A trained network with its test strings ``(n, T)`` and labels ``(n,)`` or ``(n, T)``."""

    model: models.Transformer
    tokens: Tensor
    labels: Tensor


class Task(NamedTuple):
    """Strings with labels, and the network that learns them."""

    draw: Callable[..., tuple[Tensor, Tensor]]
    depth: int = 1
    positions: bool = False
    everywhere: bool = False  # a label at every place, which a causal network reads; else one, read at the last place


TASKS = {
    "majority": Task(languages.majority),
    "first": Task(languages.copy_first, positions=True),
    "previous": Task(languages.copy_previous, positions=True, everywhere=True),
    "aⁿbⁿcⁿ": Task(languages.counter, depth=2, everywhere=True),
    "Dyck-2": Task(languages.dyck2, depth=2, everywhere=True),
}


def trained(
    task: str, *, length: int, steps: int, seeds: Sequence[int], sharpen: float = 1.0, device: str = "auto"
) -> list[Trained]:
    """Train small post-norm transformers on one of ``TASKS`` with AdamW, one for each seed, all at once.

    Width 16, two heads. Each network has its own initial values, torch's, with queries and keys times ``sharpen``, and
    its own strings, 32 a step; 200 test strings are drawn apart.

    >>> found = trained("majority", length=3, steps=50, seeds=(0, 1), device="cpu")
    >>> [accuracy(one) for one in found]  # over the eight strings of this length
    [1.0, 1.0]
    """
    (draw, depth, positions, everywhere), place = TASKS[task], devices.resolve(device)
    options: dict[str, Any] = {"placement": "post", "positions": positions, "init_std": "standard"}

    def network(seed: int) -> models.Transformer:
        rng = devices.generator(seed, "cpu")
        if everywhere:
            return models.CausalLM(7, 16, depth, 2, length, tied=False, mask="causal", generator=rng, **options)
        return Classifier(5, 16, depth, 2, length, classes=2, generator=rng, **options)

    nets = [network(seed).to(place) for seed in seeds]
    for weight in (weight for net in nets for weight in scoring(net).parameters()):
        weight.data *= sharpen
    rngs = [devices.generator(seed + STRINGS, "cpu") for seed in seeds]  # not the seeds of the weights
    tests = [draw(200, length, rng) for rng in rngs]

    def batches() -> Iterator[tuple[Tensor, ...]]:
        while True:
            drawn = zip(*(draw(32, length, rng) for rng in rngs), strict=True)
            yield tuple(torch.stack(part) for part in drawn)

    train(nets, ensembles.loss_gradients(nets[0], batches()), steps=steps, lr=5e-3)
    return [Trained(net, x.to(place), y.to(place)) for net, (x, y) in zip(nets, tests, strict=True)]


def scoring(model: nn.Module) -> nn.ModuleList:
    """The linear maps that make queries and keys."""
    return nn.ModuleList(part for name, part in model.named_modules() if name.endswith(("query", "key")))


def train(nets: Sequence[nn.Module], gradients: ensembles.Gradients, *, steps: int, lr: float) -> list[Tensor | None]:
    """Train networks of one shape in place by AdamW, all at once; each step's losses ``(nets,)``, None of noise."""
    theta, adamw = ensembles.stacked(nets), partial(optimizers.optimizer, "adamw", lr=lr)
    losses = [step.losses for step in ensembles.train_together(theta, gradients, adamw, steps)]
    ensembles.unstack(theta, nets)
    return losses


def accuracy(found: Trained, c: float = 1.0, *, whole: bool = False) -> float:
    """Share of right answers with queries and keys times ``c``, in float64; ``whole``: of strings without a mistake.

    >>> (found,) = trained("majority", length=3, steps=50, seeds=(0,), device="cpu")
    >>> accuracy(found, 0.0)  # all scores are equal, which is a mean
    1.0
    """
    model, tokens, labels = found
    # in float64 first: a part that is scaled in another precision than the rest cannot run
    with mode(model), scaled(model, 1.0, dtype=torch.float64), scaled(scoring(model), c):
        guess = model(tokens).argmax(-1)
    right, counted = guess == labels, labels != languages.IGNORE
    return float((right | ~counted).all(-1).double().mean() if whole else right[counted].double().mean())
