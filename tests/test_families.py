"""Heads, degree and saturation on families of models with windows, sinks, experts and decoders, made small."""

import math
import warnings

import pytest
import torch
import transformers as hf
from configurations import NAMES, fill, inputs_of, small_model

from normgrowth import heads, homogeneity, models, saturation

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
         "max_position_embeddings": 32, "attn_implementation": "eager"}  # fmt: skip
ROWS = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
NEO = {"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 4,
       "attention_types": [[["global", "local"], 1]], "attn_implementation": "eager"}  # fmt: skip
DEEP = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 8,
        "v_head_dim": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "moe_intermediate_size": 16}  # fmt: skip
FAMILIES = {  # and the windows of the layers
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **ROWS)), [None, None]),
    "mistral": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, **ROWS, sliding_window=4)), [4, 4]),
    "gemma2": (lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, **ROWS, sliding_window=4)), [4, None]),
    "gpt-neo": (lambda: hf.GPTNeoForCausalLM(hf.GPTNeoConfig(**NEO)), [None, 4]),
    "mixtral": (lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, **ROWS, num_local_experts=2)), [None, None]),
    "qwen2-moe": (lambda: hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(
        **SMALL, **ROWS, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)), [None, None]),
    "deepseek": (lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(
        **SMALL, num_key_value_heads=2, pad_token_id=0, **DEEP)), [None, None]),
    "gpt-oss": (lambda: hf.GptOssForCausalLM(hf.GptOssConfig(
        **SMALL, **ROWS, num_local_experts=2, num_experts_per_tok=2, sliding_window=4)), [4, None]),
    "bloom": (lambda: hf.BloomForCausalLM(hf.BloomConfig(
        vocab_size=40, hidden_size=16, n_layer=2, n_head=2, attn_implementation="eager")), [None, None]),
}  # fmt: skip
ROWS_ONLY = {"num_key_value_heads": 2, "pad_token_id": 0}
CONVERTED = {"vocab_size": 40, "d_model": 16, "decoder_start_token_id": 0}
FAMILIES |= {
    "qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL, **ROWS_ONLY)), [None, None]),
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2)), None),
    "bert": (lambda: hf.BertModel(hf.BertConfig(**SMALL)), None),
    "t5": (lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(**CONVERTED, d_kv=8, d_ff=24, num_layers=2, num_heads=2)), None),
    "bart": (lambda: hf.BartForConditionalGeneration(hf.BartConfig(
        **CONVERTED, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, pad_token_id=0)), None),
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4)),
        None),
    "mamba": (lambda: hf.MambaForCausalLM(hf.MambaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4)), None),
}  # fmt: skip
DECODER, VISION = {"t5", "bart"}, {"vit"}
WINDOWED = [name for name, (_, windows) in FAMILIES.items() if windows]
SENTENCES = [list(range(3, 15)), list(range(5, 17))]


def build(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().eval()


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_are_those_of_the_models_own_mask(family):
    """No weight on what is not allowed, and some on all that is: random heads attend everywhere that they may."""
    make, windows = FAMILIES[family]
    model, batch = build(make), saturation.batches_by_length(SENTENCES)[0]
    assert heads.windows(model) == windows
    for scores, window in zip(heads.attention_scores(model, batch), windows, strict=True):
        allowed = heads.allowed_positions(batch, causal=True, window=window)
        seen = scores[..., : allowed.shape[-1]] > -torch.inf
        assert torch.equal(seen, allowed.expand_as(seen))
        summary = heads.summarise(scores.softmax(-1), allowed)
        assert summary.masked_mass.max() == 0 and set(heads.classify(summary)) == {"mean-like"}


@pytest.mark.parametrize("family", WINDOWED)
def test_degree_by_numbers_is_that_of_the_outputs(family):
    """Euler's identity against the outputs themselves, whatever torch can differentiate."""
    model = build(FAMILIES[family][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = homogeneity.measure_degree(model, {"input_ids": torch.tensor(SENTENCES[:1])}, (3.0, 3.0 * 1.001))
    assert measured.euler[0] == pytest.approx(measured.log_ratio[0], abs=0.02)
    assert getattr(model.config, "_experts_implementation", None) == getattr(
        build(FAMILIES[family][0]).config, "_experts_implementation", None
    )


def test_sinks_take_their_weight_and_name_the_head():
    model, batch = build(FAMILIES["gpt-oss"][0]), saturation.batches_by_length(SENTENCES)[0]
    for layer in model.model.layers:
        layer.self_attn.sinks.data = torch.tensor([-1e4, 1e4])  # one head without a sink, one with nothing else
    full = heads.attention_scores(model, batch)[1]
    assert full.shape[-1] == batch["input_ids"].shape[1] + 1
    weights = full.softmax(-1)
    summary = heads.summarise(weights, heads.allowed_positions(batch, causal=True))
    torch.testing.assert_close(summary.sink, torch.tensor([0.0, 1.0]).double(), atol=1e-6, rtol=0)
    assert heads.classify(summary) == ["mean-like", "sink"]
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))


def test_layers_of_an_unknown_kind_are_refused():
    model = build(FAMILIES["mistral"][0])
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(ValueError, match="chunked_attention: which positions they see is not known here"):
        heads.windows(model)


def test_encoder_decoders_take_what_the_decoder_reads():
    model = build(FAMILIES["t5"][0])
    both = saturation.similarity(model, SENTENCES, decoder=SENTENCES)
    encoder = saturation.similarity(model, SENTENCES)
    assert len(both.raw) == 2 * len(encoder.raw)
    torch.testing.assert_close(both.raw[: len(encoder.raw)], encoder.raw, atol=1e-6, rtol=0)
    ids = torch.tensor(SENTENCES[:1])
    by_name = homogeneity.measure_degree(model, {"input_ids": ids, "decoder_input_ids": ids}, (1.0, 10.0))
    by_place = homogeneity.measure_degree(model, (ids, None, ids), (1.0, 10.0))
    assert by_name.equals(by_place)


@pytest.mark.parametrize("ask", [
    lambda model, ids: saturation.similarity(model, ids),
    lambda model, ids: heads.attention_scores(model, saturation.batches_by_length(ids)[0]),
    lambda model, ids: homogeneity.measure_degree(model, (torch.tensor(ids),), (1.0,)),
])  # fmt: skip
def test_a_tokenizer_larger_than_the_vocabulary_is_refused(ask):
    with pytest.raises(ValueError, match=r"(77 is beyond the 40 rows|no row in a table).*tokenizer"):
        ask(build(FAMILIES["llama"][0]), [[3, 77, 5]])


MADE_UP = {name: FAMILIES[name][0] for name in ("t5", "bert", "gpt2")}
MADE_UP["deberta"] = lambda: hf.DebertaV2Model(hf.DebertaV2Config(**SMALL))


@pytest.mark.parametrize("family", MADE_UP)
def test_made_up_tokenizers_are_found(tmp_path, family):
    """A folder without a tokenizer, for which `transformers` makes one up."""
    build(MADE_UP[family]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="this tokenizer knows no word"):
        models.check_knows_words(hf.AutoTokenizer.from_pretrained(tmp_path), ["The norm grows.", "And so on, and on."])


# --- All configurations of language models that are built in about a second -------------------------------------------

IN_EACH_RUN = {
    "albert", "apertus", "bart", "bert", "bloom", "cohere2_moe", "deepseek_v3", "doge", "ernie4_5_moe", "gemma",
    "gemma3_text", "gpt2", "gpt_oss", "llama", "llama4_text", "mamba", "mixtral", "mpnet", "olmoe", "qwen3_moe",
}  # fmt: skip
CONFIGURATIONS = [pytest.param(name, marks=[] if name in IN_EACH_RUN else pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("filled", [False, True], ids=["fresh", "filled"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_degree_by_the_rules_is_that_of_the_outputs_or_refused_in_a_line(name, filled):
    """Asymptotically, for fresh parameters, some of which are 0, and for parameters in general position."""
    try:
        model = small_model(name)
        inputs = inputs_of(model)
        with torch.no_grad():
            model(**inputs)
    except Exception as error:  # of a class that needs other settings or inputs
        pytest.skip(f"not built: {type(error).__name__}")
    if filled:
        fill(model)
    try:
        k = homogeneity.degree(model, inputs, approximate=True)
    except homogeneity.NotHomogeneous as refusal:
        assert "\n" not in str(refusal)
        return
    assert homogeneity.degree(model, inputs, approximate=True, check=True) == k
    with homogeneity.scalable(model, inputs, 0) as output, torch.no_grad():
        small, large = (output(c).norm() for c in (1e5, 1e6))
    assert math.log10(large / small) == pytest.approx(float(k), abs=0.01)


def test_a_fresh_gain_of_one_plus_zero_is_refused_until_it_is_trained():
    model = small_model("gemma")
    inputs = inputs_of(model)
    with pytest.raises(homogeneity.NotHomogeneous, match=r"'model\.layers\.0\.input_layernorm\.weight' is 0.*train it"):
        homogeneity.degree(model, inputs, approximate=True)
    assert homogeneity.measure_degree(model, inputs, [1e3]).euler[0] == pytest.approx(1, abs=0.01)
    assert homogeneity.degree(fill(model), inputs, approximate=True, check=True) == 2


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_rows_of_attention_that_are_masked_whole_are_finite(family):
    """Padding longer than the window: all positions that the first queries may see are masked."""
    model = fill(build(FAMILIES[family][0]))
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, :7] = 0
    inputs = {"input_ids": torch.tensor(SENTENCES[:1]), "attention_mask": mask}
    measured = homogeneity.measure_degree(model, inputs, [1e3, 1e4])
    expected = 0 if family == "gemma2" else 2  # the logits of Gemma 2 are bounded by a tanh
    assert measured.euler.to_numpy() == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "llama4_text"])
def test_experts_have_the_degree_of_their_outputs(name):
    """The rules follow the experts as one product, the outputs run one expert after the other."""
    model = fill(small_model(name))
    before = model.config._experts_implementation
    assert homogeneity.degree(model, inputs_of(model), approximate=True, check=True) == 2
    assert model.config._experts_implementation == before
