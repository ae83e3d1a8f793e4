"""Shared trainings of language models: small ones on the standard library's text.

=====================  =========================================================================================
``lm-P-O``             placement P (pre, post, residual-post), optimizer O (sgd, adamw, adafactor), init 0.02
``null-P-O``           the same shapes, optimizer and schedule fed noise of the size of the first gradient
``lm-pre-slow``        AdamW at a tenth of the learning rate
``again-R-D``          draw D (1 to 9) of recipe R (pre-adamw, pre-sgd, post-gentle): other initial values and batches;
                       in the profile ``gpu`` of the sizes of ``book``. ``post-gentle`` has a third of AdamW's rate
=====================  =========================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from nbutils import profiles
from nbutils.profiles import choose

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nbutils.training import Run


@dataclass(frozen=True)
class Size:
    """Sizes of the shared language models in one profile."""

    vocab: int
    dim: int
    depth: int
    heads: int
    length: int  # tokens a window
    batch: int  # windows a step
    steps: int
    warmup: int  # of Adafactor's schedule
    every: int  # steps between two rows of the history
    dev: int  # windows of the dev text on which is measured
    text: int  # bytes of text


@dataclass(frozen=True)
class Recipe:
    """How a shared language model is trained, apart from its size.

    >>> LANGUAGE_MODELS["lm-pre-adamw"] == Recipe()
    True
    """

    placement: str = "pre"
    optimizer: str = "adamw"
    lr: float = 3e-3
    gradients: str = "loss"


PLACEMENTS, OPTIMIZERS = ("pre", "post", "residual-post"), ("sgd", "adamw", "adafactor")
RATES = {"sgd": 0.3, "adamw": 3e-3, "adafactor": 1.0}  # Adafactor's is relative, over √max(t, warm-up)
GENTLE = 0.01  # of SGD in residual-post-norm, whose first gradients are large: the layer norm divides by a small f(x)
MOMENTUM = 0.9  # of SGD
NOISE = 1_000_000  # added to the seed of the noise: the seed that drew the weights would draw noise parallel to them
DRAWS = 9  # trainings of a population


def size(profile: str) -> Size:
    """Sizes of the shared language models; ``gpu`` has the paper's twelve layers of width 768.

    >>> size("gpu").depth, size("gpu").dim
    (12, 768)
    """
    return choose(
        profile,
        smoke=Size(300, 16, 2, 2, 16, 4, steps=80, warmup=20, every=2, dev=8, text=150_000),
        book=Size(512, 48, 4, 4, 32, 8, steps=800, warmup=100, every=4, dev=32, text=400_000),
        gpu=Size(8192, 768, 12, 12, 256, 16, steps=3000, warmup=375, every=10, dev=16, text=8_000_000),
    )


def language_model(recipe: Recipe, *, profile: str, seed: int, device: str) -> Run:
    """Train one of the shared language models, or its null model.

    The history is by ``part_of``. ``measures`` has, at about 12 steps evenly spaced in
    log t, over fixed windows of the dev text: loss and accuracy, and against the network scaled by 1000 the raw and
    the centred similarity and the anisotropy, each by layer (``raw 0`` is the embedding) and as a mean over the blocks.
    Snapshots: the first and the last weights.

    >>> run = language_model(Recipe(), profile="smoke", seed=0, device="cpu")
    >>> run.settings["parameters"], round(float(run.measures["loss"][0]), 1)  # 300 tokens: it starts near ln 300
    (11648, 5.7)
    """
    from nbutils import devices, models, optimizers, text, training

    of, place = size(profile), devices.resolve(device)
    corpus = text.corpus(of.text)
    tokenizer = text.bpe(corpus, of.vocab)
    train, dev = (text.tokens(part, tokenizer) for part in (corpus.train, corpus.dev))
    windows = text.random_windows(train, of.batch, of.length + 1, devices.generator(seed, "cpu"))
    held = next(text.random_windows(dev, of.dev, of.length + 1, devices.generator(0, "cpu"))).to(place)
    model = models.CausalLM(
        of.vocab, of.dim, of.depth, of.heads, of.length,
        placement=recipe.placement, init_std=0.02, generator=devices.generator(seed, "cpu"),
    ).to(place)  # fmt: skip
    gradients: str | dict[str, float] = "loss"
    if recipe.gradients == "noise":
        gradients = training.gradient_scales(model, next(windows).to(place))
    ends: dict[int, dict[str, Tensor]] = {}

    def on_snapshot(step: int, model: nn.Module) -> dict[str, float]:
        if step in (0, of.steps):
            ends[step] = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        return _measure(model, held)

    options = {"momentum": MOMENTUM} if recipe.optimizer == "sgd" else {}
    shape = "inverse-sqrt" if recipe.optimizer == "adafactor" else "constant"  # as T5's, and its steps are relative
    run = training.train(
        model,
        windows,
        steps=of.steps,
        optimizer=optimizers.optimizer(recipe.optimizer, list(model.parameters()), recipe.lr, **options),
        schedule=optimizers.schedule(shape, recipe.lr, warmup=of.warmup),
        gradients=gradients,
        record=training.Record(of.every, part_of, log_steps(of.steps), on_snapshot),
        device=place,
        precision="bf16" if place == "cuda" else "full",
        seed=seed + NOISE,
    )
    more = {"parameters": sum(p.numel() for p in model.parameters()), "source": corpus.source, "seed": seed}
    return replace(run, snapshots=ends, settings=run.settings | asdict(recipe) | asdict(of) | more)


def once_more(recipe: Recipe, draw: int, *, profile: str, seed: int, device: str) -> Run:
    """A further training of a recipe, for statements on a population: initial values, batches and noise of its own."""
    resolved = profiles.resolve(profile)  # "auto" is "gpu" where CUDA is: twenty-seven large models on Colab
    sized = "book" if resolved == "gpu" else resolved
    return language_model(recipe, profile=sized, seed=seed + 1_000_000 * draw, device=device)


def part_of(name: str) -> str:
    """``embeddings``, ``vectors`` (gains, shifts and biases), or the block whose matrix it is.

    At small width the gains, which start at 1, and the embedding would hide how the matrices grow.

    >>> [part_of(f"{name}.weight") for name in ("embedding", "blocks.2.inner", "blocks.2.attention_norm", "norm")]
    ['embeddings', 'block 2', 'vectors', 'vectors']
    """
    from nbutils.layers import layer_of

    layer = layer_of(name)
    return "vectors" if layer != "embeddings" and (name.endswith("bias") or "norm" in name) else layer


def _measure(model: nn.Module, windows: Tensor) -> dict[str, float]:
    """Dev loss and accuracy, and saturation by layer and over the blocks; ``windows`` ``(n, T + 1)``."""
    from nbutils import saturation, training

    inputs, loss = windows[:, :-1], float(training.batch_loss(model, windows))
    accuracy = float((model(inputs).argmax(-1) == windows[:, 1:]).double().mean())
    found = saturation.compare(model, [{"input_ids": inputs}])._asdict()
    by_layer = {f"{name} {i}": float(x) for name, values in found.items() for i, x in enumerate(values)}
    means = {name: float(values[1:].nanmean()) for name, values in found.items()}
    return {"loss": loss, "accuracy": accuracy, **means, **by_layer}


def log_steps(steps: int, count: int = 12) -> list[int]:
    """0, and about ``count`` steps from 1 to ``steps``, evenly spaced in their logarithm.

    >>> log_steps(100, 3)
    [0, 1, 10, 100]
    """
    return sorted({0, *(round(steps ** (i / (count - 1))) for i in range(count))})


_STEEP = ("residual-post", "sgd")
_NINE = {
    f"{placement}-{name}": Recipe(placement, name, GENTLE if (placement, name) == _STEEP else RATES[name])
    for placement, name in itertools.product(PLACEMENTS, OPTIMIZERS)
}
LANGUAGE_MODELS: Mapping[str, Recipe] = {
    **{f"lm-{name}": recipe for name, recipe in _NINE.items()},
    **{f"null-{name}": replace(of, gradients="noise") for name, of in _NINE.items()},
    "lm-pre-slow": Recipe("pre", lr=3e-4),
}
AGAIN: Mapping[str, Recipe] = {
    "pre-adamw": _NINE["pre-adamw"],
    "pre-sgd": _NINE["pre-sgd"],
    "post-gentle": Recipe("post", lr=1e-3),
}
RECIPES: Mapping[str, Callable[..., Run]] = {
    **{name: partial(language_model, recipe) for name, recipe in LANGUAGE_MODELS.items()},
    **{f"again-{k}-{d}": partial(once_more, recipe, d) for k, recipe in AGAIN.items() for d in range(1, DRAWS + 1)},
}
