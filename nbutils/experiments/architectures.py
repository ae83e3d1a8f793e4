"""Architectures of today as the classes of ``transformers`` are, made small, and the values in them with a degree.

Sizes are small and parameters random. All else is as the configuration class has it: norms and their ε, rotations,
caps, sinks, routers, biases, and which layers share what.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nbutils.devices import generator
from normgrowth import homogeneity

VOCABULARY = 40
TOKENS = 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
HEADS: dict[str, Any] = {"head_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
MODERN: dict[str, Any] = {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2}
CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4),
    "Pythia": lambda: hf.GPTNeoXConfig(**SIZES),
    "OPT": lambda: hf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4,
    ),
    "T5": lambda: hf.T5Config(**T5),
    "Llama 3": lambda: hf.LlamaConfig(**GROUPED),
    "Mistral": lambda: hf.MistralConfig(**GROUPED),
    "Qwen 2": lambda: hf.Qwen2Config(**GROUPED),
    "Phi-3": lambda: hf.Phi3Config(**GROUPED),
    "ModernBERT": lambda: hf.ModernBertConfig(**SIZES, **MODERN),
    "Mixtral": lambda: hf.MixtralConfig(**GROUPED, **EXPERTS),
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(
        **SIZES, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=2,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        moe_intermediate_size=24, first_k_dense_replace=1,
    ),
    "gpt-oss": lambda: hf.GptOssConfig(**GROUPED, **HEADS, **EXPERTS),
    "OLMo 2": lambda: hf.Olmo2Config(**GROUPED),
    "Qwen 3": lambda: hf.Qwen3Config(**GROUPED, **HEADS),
    "Gemma 2": lambda: hf.Gemma2Config(**GROUPED, **HEADS),
    "Gemma 3": lambda: hf.Gemma3TextConfig(**GROUPED, **HEADS),
}  # fmt: skip
NAMES = tuple(CONFIGURATIONS)

# Where values stand: modules by name, and whether the value is their input, their output, or what their softmax reads.
# Experts have a gate each; theirs is the router, which chooses among them.
PLACES = {
    "scores": (r"(self_attn|\.attn|attention|SelfAttention)$", "softmax"),
    "router": (r"mlp\.(gate|router)$", "output"),
    "weights": (r"mlp\.(gate|router)$", "weights"),  # of the chosen experts
    "choice": (r"mlp\.(gate|router)$", "choice"),  # which experts are chosen
    "gate": (r"(h|layers|block)\.\d+\..*(act|act_fn|activation_fn)$", "input"),
    "MLP": (r"(mlp|fc2|DenseReluDense)$", "output"),
    "stream": (r"(ln_f|(gpt_neox|coder)\.final_layer_norm|model\.norm|model\.final_norm)$", "input"),
    "logits": (r"^$", "output"),
}
# Parameters of an attention module, by name. Fused matrices have the values in them, which scores do not read.
MATRICES = r"\.(c_attn|query_key_value|qkv_proj|Wqkv|[qk]_proj|[qk]|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj)\.\w+$"
GAINS = r"\.[qk]_norm\.weight$"


@cache
def model(name: str, seed: int) -> nn.Module:
    """A small model with random parameters: biases and gains, too, with gains positive and not 1.

    For the same arguments it is the same object: copy it before you change it.

    Matrices are normal with standard deviation 1/√rows, rows those of the larger side; biases, sinks and the gains that
    Gemma adds to 1 are normal with deviation 0.3; other gains are uniform between 0.5 and 1.5.

    Used in ``today``.

    >>> sum(parameter.numel() for parameter in model("Llama 3", 0).parameters())
    18080
    """
    configuration = CONFIGURATIONS[name]()
    kinds = (hf.AutoModelForSeq2SeqLM, hf.AutoModelForMaskedLM, hf.AutoModelForCausalLM)
    kind = next(kind for kind in kinds if type(configuration) in kind._model_mapping)  # T5 and BERT have one each
    configuration.use_cache = False
    built = kind.from_config(configuration, attn_implementation="eager").double().eval()
    if getattr(configuration, "_experts_implementation", None):
        built.set_experts_implementation("eager")  # one expert after the other, in float64
    rng = generator(seed, "cpu")
    with torch.no_grad():
        for buffer_name, buffer in built.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):  # of DeepSeek-V3's routers, which training sets
                buffer.uniform_(-0.3, 0.3, generator=rng)
        for parameter in built.parameters():
            is_gain = parameter.ndim == 1 and bool((parameter == 1).all())
            if is_gain:
                parameter.uniform_(0.5, 1.5, generator=rng)
            else:
                size = 0.3 if parameter.ndim == 1 else max(parameter.shape[-2:]) ** -0.5
                parameter.normal_(0, size, generator=rng)
    return built


def inputs(name: str, seed: int) -> dict[str, Tensor]:
    """Twelve different tokens, ``(1, 12)``; the decoder of an encoder–decoder reads as many others.

    Used in ``today``.
    """
    rng = generator(seed, "cpu")
    drawn = {"input_ids": 3 + torch.randperm(VOCABULARY - 3, generator=rng)[None, :TOKENS]}
    if CONFIGURATIONS[name]().is_encoder_decoder:
        drawn["decoder_input_ids"] = 3 + torch.randperm(VOCABULARY - 3, generator=rng)[None, :TOKENS]
    return drawn


OUTPUTS = ("output", "weights", "choice")  # the first, second and third of what a module returns


class Place(NamedTuple):
    """A value within a network: what a module reads or returns, or what its softmax reads for the last query.

    Used in ``today``.
    """

    module: str
    side: str  # "input", "softmax", or one of OUTPUTS


def places(network: nn.Module, quantity: str) -> list[Place]:
    """Where a quantity stands, in the order of layers; a gate is the router where there are experts.

    Used in ``today``.

    >>> places(model("GPT-2", 0), "scores")
    [Place(module='transformer.h.0.attn', side='softmax'), Place(module='transformer.h.1.attn', side='softmax')]
    """
    names = [name for name, _ in network.named_modules()]
    patterns = ("router", "gate") if quantity == "gate" else (quantity,)
    for pattern, side in (PLACES[key] for key in patterns):
        found = [Place(name, side) for name in names if re.search(pattern, name)]
        if found:
            return found
    raise ValueError(f"{type(network).__name__} has no {quantity}")


class _AtSoftmax(TorchFunctionMode):
    """Hands what a softmax reads to a function, for the last query, which sees all tokens."""

    def __init__(self, receive: Callable[[Tensor], None]):
        super().__init__()
        self.receive = receive

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.softmax:
            self.receive(args[0].select(-2, -1))
        return func(*args, **kwargs or {})


@contextmanager
def _watched(network: nn.Module, place: Place, receive: Callable[[Tensor], None]) -> Iterator[None]:
    """Hand the value at a place to ``receive`` whenever the network runs within the ``with`` block."""
    module = network.get_submodule(place.module)
    at_softmax = _AtSoftmax(receive)

    def before(_: nn.Module, args: Any) -> None:
        if place.side == "input":
            receive(args[0])
        elif place.side == "softmax":
            at_softmax.__enter__()

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if place.side == "softmax":
            at_softmax.__exit__(None, None, None)
        elif place.side in OUTPUTS and output is not None:  # as it is where the module was left
            outputs: Any = list(output.values()) if isinstance(output, dict) else output
            several = isinstance(outputs, list | tuple)
            receive(outputs[OUTPUTS.index(place.side)] if several else outputs)

    handles = [
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Reached(Exception):
    """The run has come to the place that was asked for."""


class Probe(nn.Module):
    """A network that stops at a place and returns the value there, so that an instrument sees it as the output.

    Used in ``today``.
    """

    def __init__(self, network: nn.Module, place: Place):
        super().__init__()
        self.network = network
        self.place = place

    @property
    def config(self) -> Any:
        return self.network.config

    def set_experts_implementation(self, name: str) -> None:
        self.network.set_experts_implementation(name)  # type: ignore[operator]

    def forward(self, **inputs: Any) -> Tensor:
        values: list[Tensor] = []

        def stop(value: Tensor) -> None:
            values.append(value)
            raise _Reached

        with _watched(self.network, self.place, stop), suppress(_Reached):
            self.network(**inputs)
        return values[0]


def value(network: nn.Module, inputs: dict[str, Tensor], place: Place) -> Tensor:
    """The value at a place in one run.

    Used in ``today``.
    """
    with torch.no_grad():
        return Probe(network, place)(**inputs)


def names_like(network: nn.Module, place: Place, pattern: str) -> frozenset[str]:
    """Names of the parameters of the module of a place that match a pattern.

    Used in ``today``.

    >>> llama = model("Llama 3", 0)
    >>> sorted(names_like(llama, places(llama, "scores")[0], MATRICES))
    ['model.layers.0.self_attn.k_proj.weight', 'model.layers.0.self_attn.q_proj.weight']
    """
    inside = re.compile(re.escape(place.module) + pattern)
    return frozenset(name for name, _ in network.named_parameters() if inside.match(name))


def without_epsilon(network: nn.Module) -> nn.Module:
    """A copy of the network, with the ε of all its norms set to 0.

    Used in ``today``.
    """
    copied = copy.deepcopy(network)
    for module in copied.modules():
        for attribute in ("eps", "variance_epsilon"):
            if hasattr(module, attribute):
                setattr(module, attribute, 0.0)
    return copied


def degree(
    network: nn.Module, inputs: dict[str, Tensor], place: Place, names: frozenset[str], *, exact: bool = False
) -> Any:
    """Degree of the value at a place in the named parameters, by the rules; None where they give none.

    ``clamp`` has a rule of its own: see ``gated_clamp``.

    Args:
        exact: for all c > 0, and not only in the limit of large c.

    Used in ``today``.
    """
    homogeneity.RULES["clamp"] = gated_clamp
    try:
        return homogeneity.degree(
            Probe(network, place), inputs, approximate=not exact, parameters=lambda name: name[8:] in names
        )  # the names of a probe begin with "network."
    except homogeneity.NotHomogeneous:
        return None
    finally:
        homogeneity.RULES["clamp"] = CLAMP


def gated_clamp(algebra: homogeneity.Algebra, x: Any, min: Any = None, max: Any = None) -> Any:
    """The rule of ``clamp`` where a bound above makes the gate x·σ(αx) bounded, as in gpt-oss.

    With x ≤ 7 the gate is 7σ(7α) where it opens, and exponentially small where it closes: its degree is 0. The rules
    go from operation to operation. They give x the degree of its side without a bound, which σ closes, and refuse the
    product. So its degree is said of x, which no other operation of gpt-oss reads.

    Used in ``today``.
    """
    if min is None and algebra.approximate:
        return algebra.saturating(x)
    return CLAMP(algebra, x, min, max)


CLAMP = homogeneity.RULES["clamp"]
