"""Shared trainings of language models: nine networks each, in the recipe of the paper's small models, but narrower.

``lm-P-S`` has layer norm in placement P (``residual-post``, the released code's pre-norm; ``post``; ``pre``) and
gradients from source S: of text, of shuffled tokens, or noise. All else is the recipe of the published appendix A and
of the released code: twelve layers whose ReLU layer is narrower than the residual stream, torch's initial values, a
mask that multiplies scores, AdamW with a decay of 0.01, no dropout. ``lm-usual-P`` is trained on text with the usual
mask, scores of −∞.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from nbutils.profiles import choose

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from nbutils.models import CausalLM
    from nbutils.training import TrainingRun


@dataclass(frozen=True)
class Size:
    """Sizes of the shared language models in one profile."""

    vocab: int
    dim: int
    heads: int
    length: int  # tokens in a window
    batch: int  # windows in a step
    steps: int
    dev: int  # windows of dev text for the measurements
    text: int  # bytes of text
    looks: int  # number of measurements, about; they are evenly spaced in log t
    depth: int = 12


LM_PLACEMENTS = ("residual-post", "post", "pre")
SOURCES = ("text", "shuffled", "noise")
RATE = 0.768  # learning rate times width: 0.001, the default of AdamW, at the paper's width of 768
DECAY = 0.01  # AdamW's default
DRAWS = 9  # networks in a population, each with its own initial values, windows and noise
NOISE_SEED = 500_000  # added to the seed for noise: the seed of the weights would draw noise parallel to them


def size(profile: str) -> Size:
    """Sizes of the shared language models.

    >>> size("gpu").depth, size("gpu").dim
    (12, 96)
    """
    return choose(
        profile,
        smoke=Size(300, 24, 4, 16, 8, steps=60, dev=16, text=150_000, looks=6),
        book=Size(512, 48, 4, 32, 8, steps=200, dev=12, text=400_000, looks=12),
        gpu=Size(1024, 96, 8, 64, 16, steps=300, dev=12, text=2_000_000, looks=12),
    )


def network(
    sizes: Size, placement: str, generator: Generator | None = None, *, mask: str = "multiplicative"
) -> CausalLM:
    """An untrained network of the shared language models.

    >>> net = network(size("smoke"), "post")
    >>> len(net.blocks), net.blocks[0].inner.out_features / net.blocks[0].inner.in_features  # 512 / 768
    (12, 0.6666666666666666)
    """
    from nbutils.models import CausalLM

    return CausalLM(
        sizes.vocab, sizes.dim, sizes.depth, sizes.heads, sizes.length, hidden=2 * sizes.dim // 3,
        placement=placement, mask=mask, tied=False, init_std="standard", generator=generator,
    )  # fmt: skip


def population(
    placement: str, source: str, mask: str = "multiplicative", *, profile: str, seed: int, device: str
) -> TrainingRun:
    """Train nine of the shared language models as an ensemble.

    Networks of the same draw start from the same weights, whatever the source, and read the same windows of text and
    of shuffled text.

    Returns:
        A run whose ``measures`` have a row of ``measure`` for every network, at steps evenly spaced in log t. Its
        snapshots are the first and the last weights of all networks, each tensor ``(networks, …)``.

    >>> run = population("pre", "noise", profile="smoke", seed=0, device="cpu")
    >>> run.measures["network"].nunique(), sorted(run.snapshots), tuple(run.snapshots[60]["embedding.weight"].shape)
    (9, [0, 60], (9, 300, 24))
    """
    import pandas as pd
    import torch

    from nbutils import devices, ensembles, optimizers, text, training

    sizes = size(profile)
    device = devices.resolve(device)
    corpus = text.corpus(sizes.text)
    tokenizer = text.bpe(corpus, sizes.vocab)
    tokens = text.tokens(corpus.train, tokenizer)
    dev_tokens = text.tokens(corpus.dev, tokenizer)
    window = sizes.length + 1  # the inputs and the token after them
    dev_windows = next(text.random_windows(dev_tokens, sizes.dev, window, devices.generator(0, "cpu"))).to(device)
    seeds = [seed + 1_000_000 * draw for draw in range(DRAWS)]
    nets = [network(sizes, placement, devices.generator(s, "cpu"), mask=mask).to(device) for s in seeds]
    theta = ensembles.stack(nets)
    names = [name for name, _ in nets[0].named_parameters()]
    if source == "shuffled":
        tokens = tokens[torch.randperm(len(tokens), generator=devices.generator(seed, "cpu"))]
    gradients: ensembles.GradientSource
    if source == "noise":
        gradients = partial(training.noise_gradients, generator=devices.generator(seed + NOISE_SEED, "cpu"))
    else:
        streams = [text.random_windows(tokens, sizes.batch, window, devices.generator(s, "cpu")) for s in seeds]
        gradients = ensembles.loss_gradients(nets[0], map(torch.stack, zip(*streams, strict=True)))
    rate = RATE / sizes.dim
    adamw = partial(optimizers.optimizer, "adamw", lr=rate, weight_decay=DECAY)
    rows: list[dict[str, float]] = []
    snapshots: dict[int, dict[str, Tensor]] = {}

    def record(step: int) -> None:
        ensembles.unstack(theta, nets)
        for number, net in enumerate(nets):
            rows.append({"step": step, "network": number, **measure(net, dev_windows)})
        if step in (0, sizes.steps):
            snapshots[step] = {name: w.detach().cpu().clone() for name, w in zip(names, theta, strict=True)}

    record(0)
    measured_steps = set(log_steps(sizes.steps, sizes.looks))
    for t, _ in enumerate(ensembles.train(theta, gradients, adamw, sizes.steps, name="training"), start=1):
        if t in measured_steps:
            record(t)
    settings = asdict(sizes) | {"placement": placement, "mask": mask, "gradients": source, "lr": rate}
    settings["parameters"] = sum(w[0].numel() for w in theta)
    return training.TrainingRun(snapshots=snapshots, measures=pd.DataFrame(rows), settings=settings)


def measure(model: CausalLM, windows: Tensor) -> dict[str, float]:
    """Measurements of a network on windows ``(n, T + 1)``.

    ``loss`` and ``accuracy`` are of the next token; ``answers`` is the number of different tokens that the network
    predicts; ``norm`` is of all parameters, ``matrices`` of the blocks' matrices. ``raw`` and ``centred`` are the
    similarities of the last layer to that of the network with all parameters times 1000, and ``anisotropy`` is that
    layer's.
    """
    from nbutils import training
    from normgrowth import saturation

    inputs = windows[:, :-1]
    targets = windows[:, 1:]
    with saturation.mode(model):
        loss = float(training.batch_loss(model, windows))
        predictions = model(inputs).argmax(-1)
    squares = {name: float(p.detach().double().square().sum()) for name, p in model.named_parameters()}
    matrix_squares = [square for name, square in squares.items() if parameter_group(name).startswith("block ")]
    similarity = saturation.compare(model, [{"input_ids": inputs}])
    return {
        "loss": loss,
        "accuracy": float((predictions == targets).double().mean()),
        "answers": len(predictions.unique()),
        "norm": sum(squares.values()) ** 0.5,
        "matrices": sum(matrix_squares) ** 0.5,
        "raw": float(similarity.raw[-1]),
        "centred": float(similarity.centred[-1]),
        "anisotropy": float(similarity.anisotropy[-1]),
    }


def parameter_group(name: str) -> str:
    """The group of a parameter: ``embeddings``, ``vectors`` (gains, shifts and biases), or the block of a matrix.

    At small width the gains, which start at 1, and the embedding would hide how the matrices grow.

    >>> names = ("embedding.weight", "blocks.2.inner.weight", "blocks.2.attention_norm.weight", "norm.weight")
    >>> [parameter_group(name) for name in names]
    ['embeddings', 'block 2', 'vectors', 'vectors']
    """
    from normgrowth.layers import layer_of

    layer = layer_of(name)
    is_vector = name.endswith("bias") or "norm" in name
    return "vectors" if is_vector and layer != "embeddings" else layer


def log_steps(steps: int, count: int) -> list[int]:
    """Step 0, and about ``count`` steps from 1 to ``steps``, evenly spaced in their logarithm.

    >>> log_steps(100, 3)
    [0, 1, 10, 100]
    """
    return sorted({0, *(round(steps ** (i / (count - 1))) for i in range(count))})


RECIPES: Mapping[str, Callable[..., TrainingRun]] = {
    f"lm-{placement}-{source}": partial(population, placement, source)
    for placement in LM_PLACEMENTS
    for source in SOURCES
    if (placement, source) != ("post", "shuffled")  # post-norm collapses on text as well
} | {
    f"lm-usual-{placement}": partial(population, placement, "text", "causal") for placement in ("residual-post", "pre")
}
