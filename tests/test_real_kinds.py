"""What trained models have and random ones lack: massive activations, windows with padding, experts, masked rows."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf

from normgrowth import heads, models, precision, saturation

SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
UNLIKE = [[5, *range(6, 6 + length)] for length in (3, 9, 14, 20)]
CONFIGURATIONS = {
    "llama": hf.LlamaConfig(**SMALL),
    "qwen3": hf.Qwen3Config(**SMALL, head_dim=8),
    "gemma": hf.GemmaConfig(**SMALL, head_dim=8),
    "olmo2": hf.Olmo2Config(**SMALL),
    "mistral": hf.MistralConfig(**SMALL, sliding_window=4),
    "gemma2": hf.Gemma2Config(**SMALL, head_dim=8, sliding_window=4),
    "gemma3": hf.Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "modernbert": hf.ModernBertConfig(**SMALL, local_attention=8, global_attn_every_n_layers=2),
    "gpt-neo": hf.GPTNeoConfig(
        vocab_size=50, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    "mixtral": hf.MixtralConfig(**SMALL, num_local_experts=2),
    "qwen3-moe": hf.Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    ),
    "gpt-oss": hf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=2, sliding_window=4),
    "gpt-neox": hf.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "phi3": hf.Phi3Config(**SMALL),
    "mpnet": hf.MPNetConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "t5": hf.T5Config(vocab_size=50, d_model=16, d_ff=24, d_kv=8, num_heads=2, num_layers=2),
    "t5gemma": hf.T5GemmaConfig(
        encoder=dict(**SMALL, head_dim=8, sliding_window=4), decoder=dict(**SMALL, head_dim=8, sliding_window=4),
        vocab_size=50,
    ),
}  # fmt: skip
WITH_FLOAT32_NORM = ("llama", "qwen3", "mistral", "mixtral", "qwen3-moe", "phi3", "gpt-oss")


def saved(name, sentences=UNLIKE):
    """A model of a configuration, with matrices five times as large as usual, so that its heads differ."""
    config = CONFIGURATIONS[name]
    model = models.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 5
    return models.SavedModel(model, sentences, models.kind_of(config))


def with_massive_activations(name):
    """A model that writes 5·10⁴ into one channel of the residual stream, as trained language models do."""
    model = saved(name)
    embedding = model.model.get_input_embeddings()
    embedding.weight.data[:, 3] = 5e4
    return model


@pytest.mark.parametrize("name", WITH_FLOAT32_NORM)
def test_massive_activations_are_measured_in_float64_throughout(name):
    """As scaling out says: one norm further on, c = 10⁹ changes as little as c = 10⁷ does."""
    model = with_massive_activations(name)
    far = models.similarity(model, 1e9)
    assert far.attrs["reason"] == ""
    torch.testing.assert_close(
        torch.tensor(far.raw.to_numpy()), torch.tensor(models.similarity(model, 1e7).raw.to_numpy()), atol=1e-3, rtol=0
    )
    assert set(models.attention(model, 1e9).kind) <= {"argmax-like", "sink"}


@pytest.mark.parametrize("name", WITH_FLOAT32_NORM)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_square_that_overflows_is_the_reason_given(name, dtype):
    """In float32 at 10¹⁷, in float64 at 10¹⁵²: the norm and its input are named, not a token without a direction."""
    model = with_massive_activations(name)
    c = 1e17 if dtype is None else 1e152
    kind = "torch.float32" if dtype is None else "torch.float64"
    with pytest.raises(OverflowError, match=rf"layers.0.*norm reads a vector whose .* is 5e\+\d+: its square .*{kind}"):
        saturation.similarity(model.model, UNLIKE, c, dtype=dtype)


def test_without_room_for_float64_the_largest_finite_scale_is_taken(monkeypatch):
    """The residual stream grows like c⁵, and is squared in float32: c is near 10⁴."""
    model = with_massive_activations("llama")
    monkeypatch.setattr(precision, "free_memory", lambda _: 0)
    for measure in (models.similarity, models.attention):
        attributes = measure(model, 1e17).attrs
        assert attributes["precision"] == "float32" and 1e3 < attributes["c"] < 1e5
        assert "GB are free" in attributes["reason"] and "its square overflows torch.float32" in attributes["reason"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_sentences_together_are_sentences_alone(name):
    """Padding, windows, rows masked whole and the division into batches change no number of any architecture."""
    together = saved(name)
    assert not models.similarity(together).drop(columns="centred").isna().any(axis=None)
    by_head = models.attention(together)
    assert by_head.masked_mass.max() == 0
    alone = [models.attention(together._replace(sentences=[sentence])) for sentence in UNLIKE]
    queries = torch.tensor([len(sentence) for sentence in UNLIKE], dtype=torch.float64)
    mean = sum(n * table.positions for n, table in zip(queries.tolist(), alone, strict=True)) / float(queries.sum())
    assert (mean - by_head.positions).abs().max() < 1e-9


@pytest.mark.parametrize("name", ["mistral", "modernbert", "gpt-neo", "t5gemma"])
def test_heads_do_not_depend_on_the_size_of_batches(name, monkeypatch):
    model = saved(name)
    whole = models.attention(model)
    monkeypatch.setattr(models, "ATTENTION_BYTES", 1)
    in_parts = models.attention(model)
    numbers = ["positions", "share", "normalised_entropy", "masked_mass", "sink"]
    assert (whole[numbers] - in_parts[numbers]).abs().max(axis=None) < 1e-12


def test_rows_masked_whole_count_no_query():
    weights = torch.full((1, 1, 4, 4), torch.nan)
    weights[0, 0, :2] = torch.tensor([1.0, 0, 0, 0])
    batch = {"input_ids": torch.ones(1, 4), "attention_mask": torch.tensor([[1, 1, 0, 0]])}
    summary = heads.summarise(weights, heads.allowed_positions(batch, causal=True))
    assert summary.positions.tolist() == [1.0] and summary.masked_mass.tolist() == [0.0]


@pytest.mark.parametrize("config", [
    hf.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4),
    hf.Mamba2Config(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=1),
    hf.RwkvConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2),
    hf.FNetConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, intermediate_size=16),
    hf.LongT5Config(vocab_size=50, d_model=16, d_ff=24, d_kv=8, num_heads=2, num_layers=2),
], ids=lambda config: config.model_type)  # fmt: skip
def test_models_without_attention_between_positions_are_refused_in_one_line(config):
    model = models.SavedModel(models.from_config(config), UNLIKE, models.kind_of(config))
    with pytest.raises(
        ValueError, match=r"there is no attention|no heads to measure|gives attention of shape"
    ) as error:
        models.attention(model)
    assert "\n" not in str(error.value)


def test_weights_that_are_packed_are_not_taken_for_scaled():
    quantised = torch.ao.quantization.quantize_dynamic(saved("llama").model, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(TypeError, match=r"q_proj is quantised \(Linear\): its weights cannot be scaled"):
        saturation.similarity(quantised, UNLIKE, 100.0)


def test_what_wraps_a_model_is_asked_itself():
    """LoRA of peft counts; a learned prompt, which the tokens do not show, is refused."""
    peft = pytest.importorskip("peft")
    alone = saturation.similarity(saved("llama").model, UNLIKE, 1.5).raw
    low_rank = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(saved("llama").model, low_rank)
    assert (saturation.similarity(adapted, UNLIKE, 1.5).raw - alone).abs().max() > 1e-6
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prompted = peft.get_peft_model(saved("llama").model, prompt)
    with pytest.raises(ValueError, match="gives 25 representations for sentences of 21 tokens"):
        saturation.similarity(prompted, UNLIKE, 1.5)


def test_padding_changes_nothing_where_the_model_lets_it():
    """FNet mixes all positions, whatever the mask says."""
    config = hf.FNetConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, intermediate_size=24)
    model = models.SavedModel(models.from_config(config), UNLIKE, "encoder")
    together = torch.tensor(models.similarity(model, 2.0).raw.to_numpy())
    alone = [models.similarity(model._replace(sentences=[sentence]), 2.0).raw.to_numpy() for sentence in UNLIKE]
    torch.testing.assert_close(together, torch.tensor(sum(alone)) / len(alone))


class Doubles(torch.nn.Module):
    """Its name has a norm in it, but it only doubles."""

    def forward(self, x):
        return 2 * x


class Root(torch.nn.Module):
    """A norm by another name, in float32 whatever it reads."""

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize(("module", "refused"), [
    (Doubles(), False), (torch.nn.BatchNorm1d(8).eval(), False), (torch.nn.SiLU(), False), (Root(), True),
    (torch.nn.LayerNorm(8), True), (torch.nn.RMSNorm(8), True), (torch.nn.GroupNorm(1, 8), True),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_a_norm_is_known_by_what_it_does(module, refused):
    network = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), module)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if refused:
            with (
                pytest.raises(OverflowError, match="at c = 1e\\+20 1 reads a vector"),
                saturation.scaled(network, 1e20),
            ):
                network(x)
        else:
            with saturation.scaled(network, 1e20):
                network(x)


def test_threads_and_inference_mode_keep_their_own_precision():
    with torch.inference_mode(), precision.float64_throughout():
        x = torch.ones(2, dtype=torch.float64)
        assert {x.float().dtype, x.softmax(0, dtype=torch.float32).dtype, torch.zeros(2).dtype} == {torch.float64}
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: torch.zeros(2).dtype).result() == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_sentences_are_cut_to_the_positions_behind_that_of_padding():
    config = hf.RobertaConfig(**{k: v for k, v in SMALL.items() if "key_value" not in k}, max_position_embeddings=66)
    assert models._positions(models.from_config(config)) == 65  # the row of padding is the first
