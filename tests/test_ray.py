"""What survives of a model when its parameters, or those of a part, are scaled."""

import json
import math
from contextlib import ExitStack

import pandas as pd
import pytest
import torch
import transformers as hf
from configurations import TOKENS, fill, small_model
from scipy import optimize
from tiny import tiny

from nbutils.devices import generator
from nbutils.experiments import packaged
from nbutils.models import CausalLM
from normgrowth import __main__, models, saturation, sentences
from normgrowth.report import ray as report
from normgrowth.saturation import along_ray, half_scale, part_scaled, scaled, split
from normgrowth.saturation.temperature import gaps, loss_at_best

EAGER = {"attn_implementation": "eager"}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
         "max_position_embeddings": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **EAGER}  # fmt: skip
ROWS = {"num_key_value_heads": 1, "head_dim": 8}
OF_GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48, "bos_token_id": 1,
           "eos_token_id": 2, **EAGER}  # fmt: skip
OF_T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
         "decoder_start_token_id": 0, **EAGER}  # fmt: skip
OF_BART = {"vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 48,
           **EAGER}  # fmt: skip
OF_DEEPSEEK = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 8,
               "v_head_dim": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
               "moe_intermediate_size": 16, "first_k_dense_replace": 1}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
FULL = ["full_attention"] * 2

# The model, and of some parameters the part and the share of it that belongs there.
QK, VO, GATES, UP_DOWN = saturation.PARTS[:4]
GAINS, EMBEDDINGS, HEAD = saturation.PARTS[4:7]
SPLIT = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **ROWS)), {
        "layers.1.self_attn.k_proj.weight": (QK, 1), "layers.0.self_attn.o_proj.weight": (VO, 1),
        "layers.0.mlp.gate_proj.weight": (GATES, 1), "layers.1.mlp.up_proj.weight": (UP_DOWN, 1),
        "norm.weight": (GAINS, 1), "embed_tokens.weight": (EMBEDDINGS, 1), "lm_head.weight": (HEAD, 1)}),
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**OF_GPT2)), {
        "h.1.attn.c_attn.weight": (QK, 2 / 3), "h.1.attn.c_attn.bias": (VO, 1 / 3), "h.0.attn.c_proj.bias": (VO, 1),
        "h.1.mlp.c_fc.weight": (UP_DOWN, 1), "ln_f.bias": (GAINS, 1), "wpe.weight": (EMBEDDINGS, 1)}),
    "neox": (lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL)), {
        "layers.1.attention.query_key_value.weight": (QK, 2 / 3),
        "layers.1.attention.query_key_value.bias": (VO, 1 / 3), "layers.1.attention.dense.bias": (VO, 1)}),
    "bloom": (lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2, **EAGER)),
              {"h.0.self_attention.query_key_value.weight": (VO, 1 / 3)}),
    "falcon": (lambda: hf.FalconForCausalLM(hf.FalconConfig(**SMALL)), {
        "h.0.self_attention.query_key_value.weight": (VO, 1 / 4), "h.0.mlp.dense_h_to_4h.weight": (UP_DOWN, 1)}),
    "opt": (lambda: hf.OPTForCausalLM(hf.OPTConfig(
        vocab_size=40, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=48, word_embed_proj_dim=8, pad_token_id=0, **EAGER)), {
        "layers.1.fc1.weight": (UP_DOWN, 1), "layers.0.self_attn.out_proj.bias": (VO, 1)}),
    "bert": (lambda: hf.BertModel(hf.BertConfig(**SMALL)), {
        "layer.1.attention.self.key.bias": (QK, 1), "layer.1.attention.output.dense.bias": (VO, 1),
        "layer.0.intermediate.dense.weight": (UP_DOWN, 1), "layer.0.output.LayerNorm.bias": (GAINS, 1),
        "pooler.dense.weight": (HEAD, 1)}),
    "mpnet": (lambda: hf.MPNetModel(hf.MPNetConfig(**SMALL)), {
        "encoder.relative_attention_bias.weight": (QK, 1), "layer.0.attention.attn.o.weight": (VO, 1)}),
    "modernbert": (lambda: hf.ModernBertModel(hf.ModernBertConfig(**SMALL, cls_token_id=1, sep_token_id=2)), {
        "layers.0.attn.Wqkv.weight": (QK, 2 / 3), "layers.1.mlp.Wi.weight": (GATES, 1 / 2)}),
    "phi3": (lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL, num_key_value_heads=1)), {
        "layers.0.self_attn.qkv_proj.weight": (QK, 3 / 4), "layers.0.mlp.gate_up_proj.weight": (GATES, 1 / 2)}),
    "gemma3": (lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SMALL, **ROWS, sliding_window=4)), {
        "layers.0.self_attn.q_norm.weight": (GAINS, 1), "layers.0.mlp.gate_proj.weight": (GATES, 1)}),
    "t5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**OF_T5)), {
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (QK, 1),
        "decoder.block.1.layer.1.EncDecAttention.v.weight": (VO, 1),
        "decoder.block.1.layer.2.DenseReluDense.wi.weight": (UP_DOWN, 1)}),
    "t5 with relu gates": (lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(**OF_T5, feed_forward_proj="gated-relu")), {
        "decoder.block.1.layer.2.DenseReluDense.wi_0.weight": (GATES, 1),
        "decoder.block.1.layer.2.DenseReluDense.wi_1.weight": (UP_DOWN, 1)}),
    "bart": (lambda: hf.BartForConditionalGeneration(hf.BartConfig(**OF_BART)), {
        "decoder.layers.0.encoder_attn.out_proj.bias": (VO, 1), "encoder.layers.1.fc2.bias": (UP_DOWN, 1)}),
    "mixtral": (lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, **ROWS, num_local_experts=4)), {
        "layers.1.mlp.experts.gate_up_proj": (GATES, 1 / 2), "layers.1.mlp.gate.weight": (GATES, 1),
        "layers.1.mlp.experts.down_proj": (UP_DOWN, 1)}),
    "gpt-oss": (lambda: hf.GptOssForCausalLM(hf.GptOssConfig(
        **SMALL, **ROWS, num_local_experts=4, num_experts_per_tok=2, sliding_window=4)), {
        "layers.0.self_attn.sinks": (QK, 1), "layers.0.mlp.experts.gate_up_proj_bias": (GATES, 1 / 2)}),
    "deepseek": (lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(
        **SMALL, num_key_value_heads=2, **OF_DEEPSEEK)), {
        "layers.0.self_attn.kv_b_proj.weight": (QK, 1 / 3),
        "layers.1.mlp.shared_experts.gate_proj.weight": (GATES, 1)}),
    "qwen3-next": (lambda: hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**SMALL, **ROWS, **EXPERTS, layer_types=FULL)), {
        "layers.0.self_attn.q_proj.weight": (GATES, 1 / 2), "layers.0.self_attn.q_norm.weight": (GAINS, 1)}),
    "switch": (lambda: hf.SwitchTransformersForConditionalGeneration(hf.SwitchTransformersConfig(
        **OF_T5, num_decoder_layers=2, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)), {
        "decoder.block.1.layer.2.mlp.router.classifier.weight": (GATES, 1),
        "decoder.block.1.layer.2.mlp.experts.expert_3.wi.weight": (UP_DOWN, 1)}),
    "deberta": (lambda: hf.DebertaV2Model(hf.DebertaV2Config(
        **SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8, share_att_key=True)), {
        "rel_embeddings.weight": (QK, 1), "layer.0.attention.output.dense.bias": (VO, 1)}),
    "albert": (lambda: hf.AlbertModel(hf.AlbertConfig(**SMALL, embedding_size=8)), {
        "embedding_hidden_mapping_in.weight": (EMBEDDINGS, 1), "attention.dense.bias": (VO, 1)}),
    "xlnet": (lambda: tiny("xlnet"), {"layer.0.rel_attn.r": (QK, 1), "layer.0.ff.layer_1.weight": (UP_DOWN, 1)}),
}  # fmt: skip
DESCRIPTION = {"class": "Llama", "kind": "causal", "parameters": 9, "sentences": "6 sentences", "tokens": 72}
IDS = torch.randint(3, 40, (6, 12), generator=generator(1, "cpu")).tolist()


def build(make, seed=0):
    """In evaluation mode, with matrices large enough for heads and predictions to differ."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model


def decoder_of(model):
    return IDS if model.config.is_encoder_decoder else None


def shares_of(model):
    decoder = decoder_of(model)
    return split(model, IDS[0], None if decoder is None else decoder[0])


@pytest.mark.parametrize("family", SPLIT)
def test_each_entry_is_in_one_part_which_the_model_tells(family):
    make, expected = SPLIT[family]
    model = build(make)
    before = {name: (p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()}
    shares = shares_of(model)
    share_of = {}
    for name, parameter in model.named_parameters():
        entries = {part: rows[name].expand(parameter.shape) for part, rows in shares.items() if name in rows}
        assert (torch.stack(list(entries.values())).sum(0) == 1).all(), name
        share_of[name] = {part: float(rows.double().mean()) for part, rows in entries.items()}
    for ending, (part, share) in expected.items():
        measured = [of_parts.get(part, 0) for name, of_parts in share_of.items() if name.endswith(ending)]
        assert measured and measured == pytest.approx([share] * len(measured)), ending
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and parameter.requires_grad == before[name][0]
        assert torch.equal(parameter, before[name][1])


def parts_of(model):
    """For each part, the names of its parameters, and which entries."""
    return {part: {name: rows.tolist() for name, rows in shares.items()} for part, shares in shares_of(model).items()}


@pytest.mark.parametrize("ending", [
    "o_proj.weight", "v_proj.weight", "q_proj.weight", "up_proj.weight", "gate_proj.weight", "down_proj.weight",
    "lm_head.weight", "norm.weight",
])  # fmt: skip
def test_zeros_hide_no_part(ending):
    model = build(SPLIT["llama"][0])
    expected = parts_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ending):
                parameter.zero_()
    assert parts_of(model) == expected
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith(ending))


def test_a_fresh_adapter_is_split_as_what_it_adapts():
    peft = pytest.importorskip("peft")
    names = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=names)
    adapted = peft.get_peft_model(build(SPLIT["llama"][0]), config).eval()
    adapters = {
        part: {name.split(".")[-4] for name in shares if ".lora_" in name}
        for part, shares in shares_of(adapted).items()
    }
    assert {part: names for part, names in adapters.items() if names} == {
        QK: {"q_proj"}, VO: {"v_proj", "o_proj"}, GATES: {"gate_proj"}, UP_DOWN: {"up_proj"},
    }  # fmt: skip


@pytest.mark.parametrize(("dtype", "room"), [(torch.float16, True), (torch.bfloat16, True), (torch.bfloat16, False)])
def test_parts_are_the_same_in_low_precision(dtype, room, monkeypatch):
    model = build(SPLIT["llama"][0])
    expected = parts_of(model)
    if not room:
        monkeypatch.setattr("normgrowth.precision.choose", lambda model: (None, "no room"))
    assert parts_of(model.to(dtype)) == expected
    assert all(parameter.dtype == dtype for parameter in model.parameters())


def test_a_compiled_model_is_split_as_what_was_compiled():
    model = build(SPLIT["llama"][0])
    compiled = torch.compile(model)
    assert parts_of(compiled) == parts_of(model)
    tables = [along_ray(network, IDS, [1, 2], [QK, "all"]) for network in (model, compiled)]
    pd.testing.assert_frame_equal(*tables)
    model.model.layers[0].compile()
    with pytest.raises(ValueError, match=r"its module 'model\.layers\.0' is compiled"):
        parts_of(model)


def test_interleaved_heads_are_told_apart_by_rows():
    """NeoX has queries, keys and values of a head one after the other, GPT-2 those of all heads."""
    neox = shares_of(build(SPLIT["neox"][0]))[VO]["gpt_neox.layers.0.attention.query_key_value.weight"]
    gpt2 = shares_of(build(SPLIT["gpt2"][0]))[VO]["transformer.h.0.attn.c_attn.weight"]
    assert neox.squeeze(1).nonzero().squeeze(1).tolist() == [*range(16, 24), *range(40, 48)]
    assert gpt2.squeeze(0).nonzero().squeeze(1).tolist() == list(range(32, 48))


def test_what_has_no_attention_has_no_parts():
    model = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4))
    with pytest.raises(ValueError, match="MambaForCausalLM cannot be told: it returns no attention weights"):
        along_ray(model, IDS, [1, 2], [QK])
    assert along_ray(model, IDS, [1, 1.5]).agreement[0] == 1


@pytest.mark.parametrize(("name", "reason"), [
    ("squeezebert", "what it returns as attention are no weights"),  # but scores
    ("rwkv", "what it returns as attention are no weights"),
    ("granite_swa", "are not those that it multiplies the values by"),
    ("nemotron_h", "some layers return no attention weights"),
])  # fmt: skip
def test_parts_that_cannot_be_told_are_refused(name, reason):
    model = fill(small_model(name))
    with pytest.raises(ValueError, match=f"the parts of {type(model).__name__} cannot be told: .*{reason}"):
        split(model, TOKENS[0].tolist())


def test_units_that_are_dead_are_not_taken_for_queries():
    """FSMT has the layers' representations transposed, and ReLU, whose dead units act on nothing."""
    model = fill(small_model("fsmt"))
    shares = split(model, TOKENS[0].tolist(), TOKENS[0].tolist())
    assert {name.split(".")[-2] for name in shares[QK]} == {"q_proj", "k_proj"}
    assert {name.split(".")[-2] for name in shares[UP_DOWN]} == {"fc1", "fc2"}


@pytest.mark.parametrize("family", ["gpt2", "t5", "mixtral"])
def test_parts_scaled_one_after_the_other_are_the_whole_and_come_back(family):
    model = build(SPLIT[family][0])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with scaled(model, 3.0, dtype=torch.float64):
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    with ExitStack() as stack:
        for shares in shares_of(model).values():
            stack.enter_context(part_scaled(model, 3.0, shares, dtype=torch.float64))
        assert all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(OverflowError, match=r"overflows torch\.float32"), part_scaled(model, 1e39, shares):
        pass
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def fused(llama):
    """The same network as a Phi-3, whose queries, keys and values are one matrix, and so are gates and up."""
    phi = hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL, num_key_value_heads=1, rms_norm_eps=llama.config.rms_norm_eps))
    weights = dict(llama.state_dict())
    for layer in range(2):
        at = f"model.layers.{layer}"
        qkv = [weights.pop(f"{at}.self_attn.{x}_proj.weight") for x in "qkv"]
        weights[f"{at}.self_attn.qkv_proj.weight"] = torch.cat(qkv)
        gate_up = [weights.pop(f"{at}.mlp.{x}_proj.weight") for x in ("gate", "up")]
        weights[f"{at}.mlp.gate_up_proj.weight"] = torch.cat(gate_up)
    phi.load_state_dict(weights)
    return phi.eval()


def test_fused_matrices_give_the_rows_of_separate_ones():
    llama = build(SPLIT["llama"][0])
    tables = [along_ray(model, IDS, [0.8, 1, 2, 100], saturation.PARTS) for model in (llama, fused(llama))]
    pd.testing.assert_frame_equal(*tables, rtol=1e-9)
    assert list(tables[0].part.unique()) == [QK, VO, GATES, UP_DOWN, GAINS, EMBEDDINGS, HEAD]
    assert tables[0][tables[0].c == 2].agreement.nunique() > 2


def test_queries_and_keys_alone_become_arg_max_and_a_head_alone_is_a_temperature():
    model = build(SPLIT["llama"][0])
    table = along_ray(model, IDS, [1, 1e6], [QK, HEAD]).set_index(["part", "c"])
    assert table.effective_positions[QK, 1] > 1.5 and table.effective_positions[QK, 1e6] == pytest.approx(1, abs=1e-6)
    assert table.agreement[QK, 1e6] < 1
    pd.testing.assert_series_equal(table.loc[HEAD, 1], table.loc[HEAD, 1e6], check_names=False, rtol=1e-5)


def test_a_gateless_feed_forward_layer_has_no_row_of_gates_but_a_sentence():
    table = along_ray(build(SPLIT["gpt2"][0]), IDS, [1, 2], [GATES, QK])
    assert set(table.part) == {QK}
    assert table.attrs["reasons"][GATES].startswith("GPT2LMHeadModel has none: no layer multiplies two functions")
    with pytest.raises(ValueError, match="unknown part gate: choose among all, queries and keys"):
        along_ray(build(SPLIT["gpt2"][0]), IDS, [1, 2], ["gate"])


def by_hand(model, c, sentences):
    """Arg max of the logits and accuracy in float64, one sentence after the other."""
    best, right = [], []
    with scaled(model, c, dtype=torch.float64), torch.no_grad():
        for sentence in sentences:
            ids = torch.tensor([sentence])
            chosen = model(ids).logits[0].argmax(-1)
            best.append(chosen)
            right.append(chosen[:-1] == ids[0, 1:])
    return torch.cat(best), float(torch.cat(right).double().mean())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma3"])
def test_agreement_and_accuracy_are_those_of_a_plain_loop(family, monkeypatch):
    model = build(SPLIT[family][0])
    sentences = [sentence[: 12 - number] for number, sentence in enumerate(IDS)]
    table = along_ray(model, sentences, [1, 2]).set_index("c")
    at_1, accuracy = by_hand(model, 1.0, sentences)
    at_2, accuracy_at_2 = by_hand(model, 2.0, sentences)
    assert table.agreement[2] == pytest.approx(float((at_1 == at_2).double().mean()))
    assert list(table.accuracy) == pytest.approx([accuracy, accuracy_at_2])
    assert (table.loss <= math.log(40) + 1e-9).all() and table.agreement[1] == 1
    similarity = saturation.similarity(model, sentences, 2.0, dtype=torch.float64)
    last = [float(getattr(similarity, column)[-1]) for column in ("raw", "common", "centred")]
    assert table.loc[2, ["raw", "common", "centred"]].tolist() == pytest.approx(last)
    monkeypatch.setattr("normgrowth.saturation.function.LOGIT_BYTES", 1)  # a batch for each sentence
    pd.testing.assert_frame_equal(along_ray(model, sentences, [1, 2]).set_index("c"), table, rtol=1e-6)


@pytest.mark.parametrize("size", [1.0, 1e10])
def test_loss_at_the_best_temperature_is_the_minimum(size):
    logits = size * torch.randn(50, 30, generator=generator(0, "cpu"), dtype=torch.float64)
    target = torch.where(torch.arange(50) % 3 == 0, logits.argmax(-1), torch.arange(50) % 30)

    def cross_entropy(log_beta):
        return float(torch.nn.functional.cross_entropy(math.exp(log_beta) / size * logits, target))

    expected = optimize.minimize_scalar(cross_entropy, bounds=(-5, 5), method="bounded").fun
    first, unit = gaps(logits[:20], target[:20], None)
    second, _ = gaps(logits[20:], target[20:], unit)
    assert loss_at_best([first, second]) == pytest.approx(expected, abs=1e-5)
    worst = logits.argmin(-1)
    assert loss_at_best([gaps(logits, worst, None)[0]]) == pytest.approx(math.log(30))  # at β = 0
    assert loss_at_best([gaps(logits, logits.argmax(-1), None)[0]]) < 1e-4  # as β grows


def one_large(vocabulary, right, wrong):
    """The first token is favoured by 1 everywhere, and it is right in some positions."""
    logits = torch.zeros(right + wrong, vocabulary, dtype=torch.float64)
    logits[:, 0] = 1
    return logits, torch.tensor([0] * right + [1] * wrong)


def nearly_alike(vocabulary):
    """All other tokens fall short of the first by 1 ± 0.03, and it is right in 60 % of the positions."""
    logits = 0.03 * torch.randn(50, vocabulary, generator=generator(0, "cpu"), dtype=torch.float64)
    logits[:, 0] += 1
    target = torch.randint(1, vocabulary, (50,), generator=generator(1, "cpu"))
    target[:30] = 0
    return logits, target


def two_sizes():
    """Large gaps, where the first token is right, besides small ones, where it is right in three of four positions."""
    logits, target = one_large(40, 7, 1)
    logits[4:] *= 1e-8
    return logits, target


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e10])
@pytest.mark.parametrize("case", [
    lambda: one_large(50_000, 6, 4), lambda: one_large(50, 1, 999), lambda: one_large(50, 999, 1),
    lambda: one_large(30, 5, 0), lambda: nearly_alike(5000), two_sizes,
])  # fmt: skip
def test_loss_at_the_best_temperature_is_that_of_a_fine_grid(case, size, dtype):
    logits, target = case()
    of_target = logits.gather(-1, target[:, None])[:, 0]

    def cross_entropy(exponent):
        beta = 10.0**exponent
        return float((torch.logsumexp(beta * logits, -1) - beta * of_target).mean())

    best = min(torch.linspace(-4, 11, 76).tolist(), key=cross_entropy)
    least = min(map(cross_entropy, torch.linspace(best - 0.2, best + 0.2, 101).tolist()))
    loss = loss_at_best([gaps((size * logits).to(dtype), target, None)[0]])
    assert least - 0.001 < loss < least + 1e-5 and loss <= math.log(logits.shape[1]) + 1e-12


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_is_asked_for_the_nearest_sentence(kind):
    """Roberta has logits of masked words, which are not those of next tokens."""
    model = tiny(kind, "eager").eval()
    table = along_ray(model, IDS, [1, 3]).set_index("c")
    assert not table.attrs["next_token"] and table.attrs["chance"] == {"agreement": 1 / 5}
    assert table.accuracy.isna().all() and table.loss.isna().all() and table.agreement[1] == 1
    base = getattr(model, "base_model", model)
    nearest = []
    for c in (1.0, 3.0):
        with scaled(model, c, dtype=torch.float64), torch.no_grad():
            pooled = base(torch.tensor(IDS)).last_hidden_state.mean(1)
        cosines = torch.nn.functional.cosine_similarity(pooled[:, None], pooled[None], dim=-1)
        nearest.append(cosines.fill_diagonal_(-1).argmax(-1))
    assert table.agreement[3] == pytest.approx(float((nearest[0] == nearest[1]).double().mean()))


def test_an_encoder_decoder_predicts_what_its_decoder_reads_next():
    model = build(SPLIT["bart"][0])
    table = along_ray(model, IDS, [1, 1.5], decoder=IDS)
    assert table.attrs["next_token"] and table.agreement[0] == 1 and table.loss.notna().all()


def test_a_model_of_ones_own():
    model = CausalLM(40, 16, 2, 2, 12, init_std=0.3)
    table = along_ray(model, IDS, [1, 2]).set_index("c")
    assert table.attrs["next_token"] and table.agreement[1] == 1 and 1 <= table.effective_positions[2] <= 12
    with pytest.raises(ValueError, match="CausalLM cannot be told: it is not a model of transformers"):
        along_ray(model, IDS, [1, 2], [QK])


def test_a_loss_of_some_positions_says_so(monkeypatch):
    monkeypatch.setattr("normgrowth.saturation.function.KEPT_BYTES", 40 * 8 * 22)  # a third of 66 positions
    table = along_ray(build(SPLIT["llama"][0]), IDS, [1.0])
    assert table.attrs["reasons"] == {"loss": "at one of 3 positions, so that the logits fit into memory"}


def test_an_overflow_is_a_row_with_a_reason():
    table = along_ray(build(SPLIT["llama"][0]), IDS, [1, 1e39], dtype=None)
    assert table.agreement.notna().tolist() == [True, False]
    assert "overflows torch.float32" in table.attrs["reasons"]["all, c = 1e+39"]


def of_median(heads):
    """GPT-2 of one layer and some heads, and the effective positions of each in float64."""
    model = build(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**OF_GPT2 | {"n_layer": 1, "n_head": heads}))).double()
    with torch.no_grad():
        weights = model(torch.tensor(IDS[:1]), output_attentions=True).attentions[0][0]
    return model, torch.special.entr(weights).sum(-1).exp()[:, 4:].mean(-1)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_of_an_even_number_of_heads_the_median_is_between_the_middle_two(heads):
    model, positions = of_median(heads)
    measured = along_ray(model, IDS[:1], [1]).effective_positions[0]
    assert measured == pytest.approx(float(positions.quantile(0.5)))


def flat_bert(scale=1.0, dtype=torch.float32):
    """A masked language model whose initial values make later tokens matter little."""
    model = build(lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL | {"vocab_size": 400}, initializer_range=scale)))
    return model.to(dtype)


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: flat_bert(4e-4), "depend on later tokens"),
    (lambda: flat_bert(4e-4, torch.bfloat16), "depend on later tokens"),
    (lambda: hf.BertModel(hf.BertConfig(**SMALL)), "returns no logits"),
    (lambda: hf.LlamaForTokenClassification(hf.LlamaConfig(**SMALL, num_labels=12)), "12 columns, and the vocabulary"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_what_is_no_next_token_says_why(make, reason, dtype):
    table = along_ray(make().eval(), IDS, [1.0], dtype=dtype)
    assert not table.attrs["next_token"] and table.loss.isna().all()
    assert reason in table.attrs["reasons"]["accuracy, loss"]


def test_a_decoder_may_have_a_vocabulary_of_its_own():
    model = fill(small_model("fsmt"))
    sentences = TOKENS[:2].tolist()
    assert along_ray(model, sentences, [1], decoder=sentences).attrs["next_token"]


class LaterFromTheNinth(torch.nn.Module):
    """Causal on eight tokens; on more, all see the last."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(40, 16)
        self.head = torch.nn.Linear(16, 40)

    def hidden_states(self, tokens):
        x = self.table(tokens)
        return [x, x.cumsum(1) + (x[:, -1:] if tokens.shape[1] > 8 else 0)]

    def forward(self, tokens):
        return self.head(self.hidden_states(tokens)[-1])


def test_a_whole_sentence_is_tried():
    assert along_ray(LaterFromTheNinth(), [sentence[:8] for sentence in IDS], [1]).attrs["next_token"]
    assert not along_ray(LaterFromTheNinth(), IDS, [1]).attrs["next_token"]


@pytest.mark.parametrize(("bias", "missing"), [(0.0, "agreement, raw, common, centred"), (1.0, "centred")])
def test_representations_without_a_direction_have_a_reason(bias, missing):
    model = build(lambda: hf.BertModel(hf.BertConfig(**SMALL)))
    last = model.encoder.layer[1].output.LayerNorm
    with torch.no_grad():
        last.weight.zero_()
        last.bias.fill_(bias)
    table = along_ray(model, IDS, [1, 2])
    assert table[missing.split(", ")].isna().all(axis=None)
    assert all(table.attrs["reasons"][f"all, c = {c}"].startswith(f"no {missing}: ") for c in (1, 2))


def test_heads_that_read_few_tokens_do_not_count():
    model = build(SPLIT["t5"][0])
    table = along_ray(model, IDS, [1], decoder=[sentence[:3] for sentence in IDS])
    assert 1 <= table.effective_positions[0] <= 12
    assert table.attrs["reasons"]["effective_positions"].startswith("of some heads alone")
    short = along_ray(model, [sentence[:4] for sentence in IDS], [1], decoder=[sentence[:3] for sentence in IDS])
    assert short.effective_positions.isna().all()
    assert short.attrs["reasons"]["effective_positions"] == "no sentence has 5 tokens"


@pytest.mark.parametrize(("agreement", "half", "sentence"), [
    ([1, 0.9, math.nan], math.nan, "more than c = 1.1; the agreement is not known at 1000"),
    ([1, math.nan, math.nan], math.nan, "more than c = 1; the agreement is not known at 1.1"),
    ([1, 0.9, 0.8], math.inf, "more than c = 1000"),
    ([1, 0.5, math.nan], 1.1, "c = 1.1, between 1 and 1.1"),
])  # fmt: skip
def test_beyond_what_is_not_known_a_half_scale_is_not_known(agreement, half, sentence):
    table = pd.DataFrame({"part": "all", "c": [1.0, 1.1, 1000.0], "agreement": agreement})
    assert half_scale(table) == pytest.approx(half, nan_ok=True)
    table = table.assign(**dict.fromkeys(["accuracy", "loss", "effective_positions", "raw", "common", "centred"], 0.5))
    table.attrs.update(reasons={}, precision="float64", reason="", chance={"loss": 3.7}, next_token=True)
    assert f"agreement with all parameters scaled halves at {sentence}\n" in report.as_text(table, table, DESCRIPTION)
    document = json.loads(report.as_json(table, table, DESCRIPTION), parse_constant=pytest.fail)
    assert document["half_scale"]["trained"]["all"] == (pytest.approx(half) if math.isfinite(half) else None)


def test_half_scale():
    table = pd.DataFrame({"part": "all", "c": [0.8, 1.0, 1.1, 1.25], "agreement": [0.3, 1.0, 0.6, 0.4]})
    assert half_scale(table) == pytest.approx(math.sqrt(1.1 * 1.25))
    assert half_scale(table[table.c < 1.2]) == math.inf
    with pytest.raises(ValueError, match="no scale above 1"):
        half_scale(table[table.c <= 1])
    with pytest.raises(ValueError, match="positive"):
        along_ray(build(SPLIT["llama"][0]), IDS, [0.0])


@pytest.fixture
def saved(tmp_path):
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    vocabulary = {word: number for number, word in enumerate(["<unk>", *"abcdefgh"])}
    tokenizer = Tokenizer(kinds.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    build(SPLIT["llama"][0]).save_pretrained(tmp_path)
    (tmp_path / "text").write_text("a b c d e f\nb d f h a c\n")
    return tmp_path


def test_command(saved, capsys):
    arguments = ["ray", str(saved), "--text", str(saved / "text"), "--scales", "1,1.2,50", "--parts"]
    plot = saved / "ray.png"
    assert __main__.main([*arguments, "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "with all parameters scaled halves at c =" in printed and "effective_positions" in printed
    assert "an untrained model of the same configuration" in printed
    assert plot.stat().st_size > 10_000
    assert __main__.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = pd.DataFrame(document["table"]).query("of == 'trained'")
    assert {row["part"] for row in document["table"] if row["of"] == "untrained"} == {"all"}
    assert set(rows.part) == {"all", QK, VO, GATES, UP_DOWN, GAINS, EMBEDDINGS, HEAD}
    assert rows[rows.c == 1].agreement.eq(1).all() and set(document["half_scale"]["trained"]) == set(rows.part)
    with pytest.raises(SystemExit):
        __main__.main(["ray", str(saved), "--scales", "1,x"])
    assert "--scales: invalid list of positive numbers value: '1,x'" in capsys.readouterr().err


def test_a_trained_model_dies_when_its_parameters_grow_by_a_tenth():
    """SmolLM2-135M: accuracy, agreement and loss were computed by other code too, one sentence after the other."""
    try:
        folder = packaged.folder("smollm2")
    except packaged.ModelMissing as error:
        pytest.skip(str(error))
    model = models.load(folder, sentences.first(24))
    table = along_ray(model.model, model.sentences, [1, 1.1]).set_index("c")
    assert table.agreement[1.1] == pytest.approx(0.5238, abs=0.005)
    assert table.accuracy.tolist() == pytest.approx([0.2500, 0.1754], abs=0.005)
    assert table.loss.tolist() == pytest.approx([4.9213, 5.6106], abs=0.001)
    assert table.effective_positions.tolist() == pytest.approx([2.9, 2.3], abs=0.05)
