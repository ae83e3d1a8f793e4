"""Shared trainings of language models: nine networks each, in the recipe of the paper's small ones, of less width.

``lm-P-S`` has layer norm in place P (residual-post, the released code's pre-norm; post; pre) and gradients S: of text,
of shuffled tokens, or noise. All else is the recipe of the published appendix A and of the released code: twelve layers
whose ReLU layer is narrower than the stream, torch's initial values, a mask that multiplies scores, AdamW with a decay
of 0.01, no dropout. ``lm-usual-P`` learns text with the usual mask, scores of −∞.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from nbutils.profiles import choose

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from nbutils.models import CausalLM
    from nbutils.training import Run


@dataclass(frozen=True)
class Size:
    """Sizes of the shared language models in one profile."""

    vocab: int
    dim: int
    heads: int
    length: int  # tokens a window
    batch: int  # windows a step
    steps: int
    dev: int  # windows of the dev text on which is measured
    text: int  # bytes of text
    looks: int  # measurements, about, evenly spaced in log t
    depth: int = 12


PLACEMENTS, SOURCES = ("residual-post", "post", "pre"), ("text", "shuffled", "noise")
RATE = 0.768  # over the width: the 0.001 of AdamW's defaults at the paper's 768
DECAY = 0.01  # AdamW's default
DRAWS = 9  # networks of a population; other initial values, windows and noise
NOISE = 500_000  # added to the seed of the noise: the seed that drew the weights would draw noise parallel to them


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


def network(of: Size, placement: str, generator: Generator | None = None, *, mask: str = "multiplicative") -> CausalLM:
    """One of the shared language models, untrained.

    >>> net = network(size("smoke"), "post")
    >>> len(net.blocks), net.blocks[0].inner.out_features / net.blocks[0].inner.in_features  # 512 / 768
    (12, 0.6666666666666666)
    """
    from nbutils.models import CausalLM

    return CausalLM(
        of.vocab, of.dim, of.depth, of.heads, of.length, placement=placement, mask=mask, tied=False,
        hidden=2 * of.dim // 3, init_std="standard", generator=generator,
    )  # fmt: skip


def population(
    placement: str, source: str, mask: str = "multiplicative", *, profile: str, seed: int, device: str
) -> Run:
    """Train nine of the shared language models together.

    Networks of one draw start alike, wherever they are fed from, and read the same places of text and of shuffled text.
    ``measures``: what ``measured`` returns, a row a network at some steps evenly spaced in log t. Snapshots: the first
    and the last weights of all, each tensor ``(networks, …)``.

    >>> run = population("pre", "noise", profile="smoke", seed=0, device="cpu")
    >>> run.measures["network"].nunique(), sorted(run.snapshots), tuple(run.snapshots[60]["embedding.weight"].shape)
    (9, [0, 60], (9, 300, 24))
    """
    import pandas as pd
    import torch

    from nbutils import devices, ensembles, optimizers, text, training

    of, place = size(profile), devices.resolve(device)
    corpus = text.corpus(of.text)
    tokenizer = text.bpe(corpus, of.vocab)
    tokens, dev = (text.tokens(part, tokenizer) for part in (corpus.train, corpus.dev))
    held = next(text.random_windows(dev, of.dev, of.length + 1, devices.generator(0, "cpu"))).to(place)
    starts = [seed + 1_000_000 * draw for draw in range(DRAWS)]
    nets = [network(of, placement, devices.generator(start, "cpu"), mask=mask).to(place) for start in starts]
    theta, names = ensembles.stacked(nets), [name for name, _ in nets[0].named_parameters()]
    if source == "shuffled":
        tokens = tokens[torch.randperm(len(tokens), generator=devices.generator(seed, "cpu"))]
    windows = [text.random_windows(tokens, of.batch, of.length + 1, devices.generator(x, "cpu")) for x in starts]
    gradients = ensembles.loss_gradients(nets[0], map(torch.stack, zip(*windows, strict=True)))
    if source == "noise":
        gradients = partial(training.noise_gradients, generator=devices.generator(seed + NOISE, "cpu"))
    adamw = partial(optimizers.optimizer, "adamw", lr=RATE / of.dim, weight_decay=DECAY)
    rows: list[dict[str, float]] = []
    ends: dict[int, dict[str, Tensor]] = {}

    def look(step: int) -> None:
        ensembles.unstack(theta, nets)
        rows.extend({"step": step, "network": i, **measured(net, held)} for i, net in enumerate(nets))
        if step in (0, of.steps):
            ends[step] = {name: w.detach().cpu().clone() for name, w in zip(names, theta, strict=True)}

    look(0)
    kept = set(log_steps(of.steps, of.looks))
    for t, _ in enumerate(ensembles.train_together(theta, gradients, adamw, of.steps, name="training"), 1):
        if t in kept:
            look(t)
    settings = asdict(of) | {"placement": placement, "mask": mask, "gradients": source, "lr": RATE / of.dim}
    settings["parameters"] = sum(w[0].numel() for w in theta)
    return training.Run(snapshots=ends, measures=pd.DataFrame(rows), settings=settings)


def measured(model: CausalLM, windows: Tensor) -> dict[str, float]:
    """Of one network on windows ``(n, T + 1)``.

    ``loss`` and ``accuracy`` of the next token, ``answers`` (how many different tokens it predicts), ``norm`` and
    ``matrices`` (of all parameters, of the blocks' matrices), and of the last layer, against the network with all
    parameters times 1000, the ``raw`` and the ``centred`` similarity, beside its ``anisotropy``.
    """
    from nbutils import training
    from normgrowth import saturation

    inputs = windows[:, :-1]
    with saturation.mode(model):
        loss, answers = float(training.batch_loss(model, windows)), model(inputs).argmax(-1)
    squares = {name: float(p.detach().double().square().sum()) for name, p in model.named_parameters()}
    of_matrices = sum(x for name, x in squares.items() if part_of(name).startswith("block "))
    last = {name: float(x[-1]) for name, x in saturation.compare(model, [{"input_ids": inputs}])._asdict().items()}
    return {
        "loss": loss,
        "accuracy": float((answers == windows[:, 1:]).double().mean()),
        "answers": len(answers.unique()),
        "norm": sum(squares.values()) ** 0.5,
        "matrices": of_matrices**0.5,
        **{name: last[name] for name in ("raw", "centred", "anisotropy")},
    }


def part_of(name: str) -> str:
    """``embeddings``, ``vectors`` (gains, shifts and biases), or the block whose matrix it is.

    At small width the gains, which start at 1, and the embedding would hide how the matrices grow.

    >>> [part_of(f"{name}.weight") for name in ("embedding", "blocks.2.inner", "blocks.2.attention_norm", "norm")]
    ['embeddings', 'block 2', 'vectors', 'vectors']
    """
    from normgrowth.layers import layer_of

    layer = layer_of(name)
    return "vectors" if layer != "embeddings" and (name.endswith("bias") or "norm" in name) else layer


def log_steps(steps: int, count: int) -> list[int]:
    """0, and about ``count`` steps from 1 to ``steps``, evenly spaced in their logarithm.

    >>> log_steps(100, 3)
    [0, 1, 10, 100]
    """
    return sorted({0, *(round(steps ** (i / (count - 1))) for i in range(count))})


RECIPES: Mapping[str, Callable[..., Run]] = {
    f"lm-{placement}-{source}": partial(population, placement, source)
    for placement, source in itertools.product(PLACEMENTS, SOURCES)
    if (placement, source) != ("post", "shuffled")  # post-norm collapses on text as well
} | {
    f"lm-usual-{placement}": partial(population, placement, "text", "causal") for placement in ("residual-post", "pre")
}
