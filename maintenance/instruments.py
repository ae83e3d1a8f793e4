"""Every instrument on trained models and on fifteen small architectures: seconds, memory, and an independent number.

``python -m maintenance.instruments [model …]``. Each measurement is a process of its own. Beside it stands the largest
difference to a plain computation in this file, which shares no code with the instruments: the model in float64, one
sentence at a time, with every cast to float32 turned into one to float64.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from nbutils.experiments import packaged
from normgrowth import checkpoints, models, sentences

SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 50, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
T5 = {"vocab_size": 50, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_heads": 2, "num_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "gpt-neox": ("GPTNeoXConfig", SMALL),
    "opt": ("OPTConfig", {**GROUPED, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64}),
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 2}),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", {**GROUPED, **EXPERTS}),
    "olmo2": ("Olmo2Config", GROUPED),
    "gemma2": ("Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "phi3": ("Phi3Config", GROUPED),
    "gpt-oss": ("GptOssConfig", {**GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2}),
    "modernbert": ("ModernBertConfig", {**GROUPED, "local_attention": 8, "bos_token_id": 1, "eos_token_id": 2}),
    "bert": ("BertConfig", SMALL),
    "t5": ("T5Config", T5),
}
INSTRUMENTS = ("norms", "saturation", "heads", "degree", "ray")
SCALE = 1000.0
RAY = (1.0, 1.1, 2.0)


# ---- the models ----


def model_of(name: str) -> models.SavedModel:
    """A trained model with 24 sentences of English, or a small one with random sentences of four lengths."""
    if name in packaged.MODELS:
        return models.load(packaged.folder(name), sentences.first(24))
    import transformers

    class_name, options = CONFIGURATIONS[name]
    config = getattr(transformers, class_name)(**options)
    model = models.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 5  # the initial values are so small that scores are all alike
    tokens = [[5, *range(6, 6 + length)] for length in (3, 9, 14, 20)]
    return models.SavedModel(model, tokens, models.kind_of(config))


# ---- the instruments ----


def measured(instrument: str, saved: models.SavedModel, name: str) -> Any:
    """What an instrument says: numbers in the order in which the plain computation has them."""
    match instrument:
        case "norms":
            if name in packaged.MODELS:
                return [float(checkpoints.single(packaged.folder(name), by="total").table.norm.iloc[0])]
            from normgrowth import norms

            return [norms.norm(saved.model)]
        case "saturation":
            return models.similarity(saved, SCALE).raw.tolist()
        case "heads":
            return models.attention(saved, SCALE).positions.tolist()
        case "degree":
            return [float(models.degree(saved, SCALE).euler.iloc[-1])]
        case "ray":
            return models.ray(saved, RAY).agreement.tolist()
    raise ValueError(f"unknown instrument {instrument!r}: choose one of {', '.join(INSTRUMENTS)}")


# ---- the same by plain code ----


class _Float64Casts(TorchDispatchMode):
    """Turns each cast to float32 into one to float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def times(model: Any, c: float) -> Iterator[None]:
    """The parameters of a model times c, for a while."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(c)
    yield
    for parameter, values in zip(model.parameters(), before, strict=True):
        parameter.data.copy_(values)


def outputs(saved: models.SavedModel, c: float) -> list[Any]:
    """Outputs of a model in float64 for each sentence alone."""
    with torch.no_grad(), times(saved.model, c), _Float64Casts():
        results = []
        for sentence in saved.sentences:
            ids = {"input_ids": torch.tensor([sentence])}
            if saved.kind == models.ENCODER_DECODER:
                ids["decoder_input_ids"] = ids["input_ids"]
            results.append(saved.model(**ids, output_hidden_states=True, output_attentions=True))
    return results


def layers(output: Any, what: str) -> list[Tensor]:
    """Hidden states or attentions of an output; of an encoder–decoder those of the encoder first."""
    if hasattr(output, f"encoder_{what}"):
        return [*output[f"encoder_{what}"], *output[f"decoder_{what}"]]
    return list(output[what])


def plain(instrument: str, saved: models.SavedModel) -> list[float]:
    """The numbers of ``measured``, by other code. The model is in float64, its experts run one after the other."""
    match instrument:
        case "norms":
            squares = [float(np.square(p.detach().double().numpy()).sum()) for p in saved.model.parameters()]
            return [math.sqrt(math.fsum(squares))]
        case "saturation":
            pairs = zip(outputs(saved, 1.0), outputs(saved, SCALE), strict=True)
            cosines = [
                [float(torch.cosine_similarity(a, b, dim=-1).mean()) for a, b in zip(*map(_hidden, pair), strict=True)]
                for pair in pairs
            ]
            return np.mean(cosines, axis=0).tolist()
        case "heads":
            return _positions([layers(output, "attentions") for output in outputs(saved, SCALE)])
        case "degree":
            step = 1e-5
            small = _logits(saved._replace(sentences=saved.sentences[:1]), SCALE * math.exp(-step))
            large = _logits(saved._replace(sentences=saved.sentences[:1]), SCALE * math.exp(step))
            return [math.log(float(large[0].norm() / small[0].norm())) / (2 * step)]
        case "ray":
            return [_agreement(saved, c) for c in RAY]
    raise ValueError(instrument)


def _hidden(output: Any) -> list[Tensor]:
    return layers(output, "hidden_states")


def _logits(saved: models.SavedModel, c: float) -> list[Tensor]:
    return [
        output.logits[0] if hasattr(output, "logits") else output.last_hidden_state[0] for output in outputs(saved, c)
    ]


def _positions(attentions: list[list[Tensor]]) -> list[float]:
    """Mean number of positions with at least half of the largest weight, of each head, over all queries."""
    counts = []
    for layer in zip(*attentions, strict=True):
        of_queries = []
        for weights in layer:
            rest = 1 - weights.sum(-1, keepdim=True)
            with_sink = torch.cat([weights, rest.clamp(min=0)], -1)
            of_queries.append((with_sink >= 0.5 * with_sink.amax(-1, keepdim=True)).sum(-1)[0])
        counts.append(torch.cat(of_queries, -1).double().mean(-1))
    return torch.cat(counts).tolist()


def _agreement(saved: models.SavedModel, c: float) -> float:
    """Share of positions where the most likely token is that at scale 1, or of sentences with the same neighbour."""
    if saved.kind == models.ENCODER:
        return float((_neighbours(saved, 1.0) == _neighbours(saved, c)).double().mean())
    pairs = zip(_logits(saved, 1.0), _logits(saved, c), strict=True)
    return float(torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in pairs]).double().mean())


def _neighbours(saved: models.SavedModel, c: float) -> Tensor:
    """Number of the sentence that is nearest to each, by the cosine of mean last representations."""
    means = torch.stack([output.last_hidden_state[0].mean(0) for output in outputs(saved, c)])
    unit = means / means.norm(dim=1, keepdim=True)
    return (unit @ unit.T).fill_diagonal_(-2).argmax(1)


# ---- table ----


def row(instrument: str, name: str) -> dict[str, Any]:
    """A row of the table: seconds and peak memory with loading, then the difference to the plain computation."""
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    saved = model_of(name)
    loaded = time.perf_counter()
    values = measured(instrument, saved, name)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # kilobytes on Linux
    saved.model.double()
    if getattr(saved.model.config, "_experts_implementation", None) is not None:
        saved.model.set_experts_implementation("eager")
    gap = np.abs(np.subtract(values, plain(instrument, saved))).max()
    load = loaded - begin
    return {"model": name, "instrument": instrument, "s": seconds, "of it loading": load, "peak GB": peak, "gap": gap}


def in_process(run: Callable[..., Any], *arguments: str) -> dict[str, Any]:
    """A row made by a new process of this file, so that its peak of memory is its own."""
    command = [sys.executable, "-m", "maintenance.instruments", "--row", *arguments]
    finished = run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        reason = (finished.stderr.strip().splitlines() or [f"exit {finished.returncode}"])[-1]
        return {"model": arguments[1], "instrument": arguments[0], "error": reason}
    return json.loads(finished.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m maintenance.instruments", description=__doc__)
    parser.add_argument("models", nargs="*", help="all by default")
    parser.add_argument("--row", nargs=2, metavar=("INSTRUMENT", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.row:
        print(json.dumps(row(*options.row)))
        return 0
    names = options.models or [*packaged.MODELS, *CONFIGURATIONS]
    pairs = [(instrument, name) for name in names for instrument in INSTRUMENTS]
    table = pd.DataFrame([in_process(subprocess.run, *pair) for pair in tqdm(pairs, desc="measurements")])
    print(table.to_markdown(index=False, floatfmt=".3g"))
    failed = "error" in table and table.error.notna().any()
    return 1 if failed or (table.gap > 1e-6).any() else 0


if __name__ == "__main__":
    raise SystemExit(main())
