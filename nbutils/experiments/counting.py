"""Counting with attention: a head built by hand that takes means, and trained networks.

The majority of a string of a and b is the smallest task that needs a mean over the sequence. Symbols are those of
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
STRING_SEED = 1_000_000  # added to a network's seed, so that its strings are independent of its weights


class Classifier(models.Transformer):
    """A ``Transformer`` for formal languages that reads class logits from the last position, by default without mask.

    Used in ``counting``.
    """

    def __init__(self, *sizes: int, classes: int, mask: str = "none", **options: Any) -> None:
        super().__init__(*sizes, outputs=classes, mask=mask, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, T)`` to logits ``(batch, classes)``."""
        return self.read(self.hidden_states(tokens)[-1][..., -1, :])


class MeanHead(nn.Module):
    """An attention head, built by hand, that computes (number of b − number of a) / T, float64.

    Embeddings are (1, −1) for a and (1, 1) for b, and the value is the second coordinate. Without a ``gap`` all scores
    are equal, for the reason ``flat``, so attention takes the mean.

    Used in ``counting``.

    Args:
        flat: why scores are equal: ``query`` (Q = 0), ``key`` (K = 0) or ``constant`` (keys read only the first
            coordinate, which a and b share).
        gap: score of b minus score of a at c = 1; requires ``flat="constant"``.
        fixed: whether the embedding is a buffer, which is not scaled. Scores then have degree 2 in the parameters;
            otherwise they have degree 4.

    Raises:
        ValueError: unknown ``flat``, or a gap with ``flat="query"`` or ``flat="key"``.

    >>> MeanHead()(torch.tensor([[3, 4, 4, 4]])).tolist()
    [0.5]
    """

    def __init__(self, flat: str = "constant", *, gap: float = 0.0, fixed: bool = False) -> None:
        super().__init__()
        if flat not in FLAT or (gap and flat != "constant"):
            raise ValueError(f"flat={flat!r}, gap={gap}: choose one of {', '.join(FLAT)}; a gap needs constant")
        self.score_degree = 2 if fixed else 4
        embedding = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
        if fixed:
            self.register_buffer("embedding", embedding)
        else:
            self.embedding = nn.Parameter(embedding)
        query = [0.0, 0.0] if flat == "query" else [1.0, 0.0]
        key = [0.0, 0.0] if flat == "key" else [1.0, gap / math.sqrt(2)]  # scores are divided by √2
        weights = {
            "query": [query, [0.0, 0.0]],
            "key": [key, [0.0, 0.0]],
            "value": [[0.0, 1.0], [0.0, 0.0]],
            "output": [[1.0, 0.0], [0.0, 1.0]],
        }
        self.attention = models.SelfAttention(2, 1, mask="none", biases=False)
        for name, rows in weights.items():
            getattr(self.attention, name).weight = nn.Parameter(torch.tensor(rows, dtype=torch.float64))

    def hidden_states(self, tokens: Tensor, score_log: list[Tensor] | None = None) -> list[Tensor]:
        """Embedding and output of the head, both ``(batch, T, 2)``. Scores are appended to ``score_log``."""
        x = self.embedding[tokens - languages.A]
        return [x, self.attention(x, score_log)]

    def attentions(self, tokens: Tensor) -> list[Tensor]:
        """Scores, before the softmax, of the only layer: a list of one tensor ``(batch, 1, T, T)``."""
        return [self.attention.scores(self.hidden_states(tokens)[0])]

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, T)`` to ``(batch,)``: positive if b is the majority, negative if a is, 0 at a tie."""
        return self.hidden_states(tokens)[-1][:, -1, 0]


class TrainedNetwork(NamedTuple):
    """A trained network with its test strings and their labels.

    Used in ``counting``.
    """

    model: models.Transformer
    tokens: Tensor  # (n, T)
    labels: Tensor  # (n,), or (n, T) if there is a label at every position


class Task(NamedTuple):
    """A formal language as a task: how labelled strings are drawn, and which network is trained on them.

    Used in ``counting``.
    """

    draw: Callable[..., tuple[Tensor, Tensor]]  # from count, length and generator to tokens and labels
    depth: int = 1  # layers
    positions: bool = False  # whether the network has position embeddings
    every_position: bool = False  # a causal network labels every position; otherwise the last position labels a string


TASKS = {
    "majority": Task(languages.majority),
    "first": Task(languages.copy_first, positions=True),
    "previous": Task(languages.copy_previous, positions=True, every_position=True),
    "aⁿbⁿcⁿ": Task(languages.counter, depth=2, every_position=True),
    "Dyck-2": Task(languages.dyck2, depth=2, every_position=True),
}


def train_networks(
    task_name: str, *, length: int, steps: int, seeds: Sequence[int], sharpen: float = 1.0, device: str = "auto"
) -> list[TrainedNetwork]:
    """Train small post-norm transformers on one of ``TASKS`` with AdamW, a network for each seed, all at once.

    Networks have width 16 and two heads. Each starts from torch's initial values, with queries and keys times
    ``sharpen``, and draws its own strings, 32 in each step. The returned strings are 200 further ones for each network.

    Raises:
        KeyError: ``task_name`` is not in ``TASKS``.

    Used in ``counting``.

    >>> networks = train_networks("majority", length=3, steps=50, seeds=(0, 1), device="cpu")
    >>> [accuracy(network) for network in networks]  # over the eight strings of this length
    [1.0, 1.0]
    """
    task = TASKS[task_name]
    torch_device = devices.resolve(device)

    def untrained(seed: int) -> models.Transformer:
        options: dict[str, Any] = {"placement": "post", "positions": task.positions, "init_std": "standard"}
        options["generator"] = devices.generator(seed, "cpu")
        if task.every_position:
            return models.CausalLM(7, 16, task.depth, 2, length, tied=False, mask="causal", **options)
        return Classifier(5, 16, task.depth, 2, length, classes=2, **options)

    nets = [untrained(seed).to(torch_device) for seed in seeds]
    for net in nets:
        for weight in queries_and_keys(net).parameters():
            weight.data *= sharpen
    generators = [devices.generator(seed + STRING_SEED, "cpu") for seed in seeds]
    tests = [task.draw(200, length, generator) for generator in generators]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            batch = [task.draw(32, length, generator) for generator in generators]
            tokens = torch.stack([tokens for tokens, _ in batch])
            labels = torch.stack([labels for _, labels in batch])
            yield tokens, labels

    train_with_adamw(nets, ensembles.loss_gradients(nets[0], batches()), steps=steps, lr=5e-3)
    return [
        TrainedNetwork(net, tokens.to(torch_device), labels.to(torch_device))
        for net, (tokens, labels) in zip(nets, tests, strict=True)
    ]


def queries_and_keys(model: nn.Module) -> nn.ModuleList:
    """The linear maps to queries and keys, in all layers.

    Used in ``counting``.
    """
    return nn.ModuleList(module for name, module in model.named_modules() if name.endswith(("query", "key")))


def train_with_adamw(
    nets: Sequence[nn.Module], gradients: ensembles.GradientSource, *, steps: int, lr: float
) -> list[Tensor | None]:
    """Train networks of one shape in place with AdamW, all at once.

    Used in ``mask`` and ``counting``.

    Returns:
        The losses ``(nets,)`` before each step; ``None`` for noise.
    """
    theta = ensembles.stack(nets)
    adamw = partial(optimizers.optimizer, "adamw", lr=lr)
    losses = [step.losses for step in ensembles.train(theta, gradients, adamw, steps)]
    ensembles.unstack(theta, nets)
    return losses


def accuracy(network: TrainedNetwork, c: float = 1.0, *, per_string: bool = False) -> float:
    """Share of right answers with queries and keys times ``c``, computed in float64.

    With ``per_string``, the share of strings in which every answer is right.

    Used in ``counting``.

    >>> (network,) = train_networks("majority", length=3, steps=50, seeds=(0,), device="cpu")
    >>> accuracy(network, 0.0)  # all scores are equal: the head takes the mean
    1.0
    """
    model, tokens, labels = network
    # the whole model is converted to float64, since modules of different precisions cannot run together
    with mode(model), scaled(model, 1.0, dtype=torch.float64), scaled(queries_and_keys(model), c):
        predictions = model(tokens).argmax(-1)
    right = predictions == labels
    counted = labels != languages.IGNORE
    if per_string:
        return float((right | ~counted).all(-1).double().mean())
    return float(right[counted].double().mean())
